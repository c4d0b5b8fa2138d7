"""GELU, and Gemma's gated activation gelu(gate) * up."""

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_last_dim_contiguous
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable

_BLOCK = 2048


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x), by an exponential that never overflows."""
    decayed = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, decayed) / (1.0 + decayed)


@triton.jit
def _gelu_and_mul_kernel(
    x_ptr,
    up_ptr,  # None: behind the gate in x
    out_ptr,
    stride_x: tl.constexpr,
    stride_up: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    gate = tl.load(x_ptr + token * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    if up_ptr is None:
        up = tl.load(x_ptr + token * stride_x + SIZE + offs, mask=mask, other=0.0).to(tl.float32)
    else:
        up = tl.load(up_ptr + token * stride_up + offs, mask=mask, other=0.0).to(tl.float32)
    # (1 + tanh z) / 2 is the sigmoid of 2 z, and 2 sqrt(2 / pi) is 1.5957691216.
    out = gate * sigmoid(1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)) * up
    tl.store(out_ptr + token * SIZE + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def gelu_and_mul(x: Tensor, up: Tensor | None = None) -> Tensor:  # -> [num_tokens, size]
    """Return gelu(gate) * up, with GELU's tanh approximation.

    x: gate and up side by side, [num_tokens, 2 * size], or the gate alone where `up` is given.

    Computed in float32 and rounded once to x's dtype. Raises ValueError for a shape, dtype or stride that
    does not fit.
    """
    launch, size = _launches.find(combination((x, up)), x, up)
    out = x.new_empty(size)
    launch(x, up, out)
    return out


@checked_as("gelu_and_mul")
def _bind(x: Tensor, up: Tensor | None) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check the arguments. Return the launch, and the size of the output."""
    check_last_dim_contiguous("x", x)
    check_launchable("x", x)
    num_tokens, size = x.shape
    if up is None:
        size //= 2
    else:
        check_last_dim_contiguous("up", up)
    launch = BoundLaunch(
        _gelu_and_mul_kernel,
        (num_tokens, triton.cdiv(size, _BLOCK)),
        stride_x=x.stride(0),
        stride_up=0 if up is None else up.stride(0),
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return launch, (num_tokens, size)


_launches = Launches(_bind)


@triton.jit
def _gelu_kernel(
    x_ptr,
    stride_x: tl.constexpr,
    TANH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    x_ptr += tl.program_id(0).to(tl.int64) * stride_x + offs
    x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    if TANH:
        share = sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    else:
        share = 0.5 + 0.5 * tl.erf(0.7071067811865476 * x)
    tl.store(x_ptr, (x * share).to(x_ptr.dtype.element_ty), mask=mask)


def gelu(x: Tensor, *, tanh: bool) -> None:  # [num_rows, size]
    """Apply GELU to x in place: x Φ(x), or its tanh approximation.

    Computed in float32 and rounded once to x's dtype. Raises ValueError for a shape, dtype, stride or flag
    that does not fit.
    """
    _gelu_launches.find(combination((x,), tanh), x, tanh)(x)


@checked_as("gelu")
def _bind_gelu(x: Tensor, tanh: bool) -> BoundLaunch:
    """Check the arguments. Return the launch."""
    check_last_dim_contiguous("x", x)
    check_launchable("x", x)
    num_rows, size = x.shape
    grid = (num_rows, triton.cdiv(size, _BLOCK))
    return BoundLaunch(
        _gelu_kernel, grid, stride_x=x.stride(0), TANH=tanh, SIZE=size, BLOCK=_BLOCK, num_warps=4
    )


_gelu_launches = Launches(_bind_gelu)
