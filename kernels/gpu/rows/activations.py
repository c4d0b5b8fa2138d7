"""Activations, and gated ones, activation(gate) * up: one kernel."""

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_last_dim_contiguous
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable

_BLOCK = 2048  # in bfloat16 16 bytes a thread even for 256 threads: 4 warps on AMD


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + e^-x), computed without overflow."""
    decayed = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, decayed) / (1.0 + decayed)


@triton.jit
def _activation_kernel(
    x_ptr,
    up_ptr,  # None: behind the gate in x
    out_ptr,  # of a gated activation; None: x is activated in place
    limit,  # of "clamped_swiglu", as alpha
    alpha,
    stride_x: tl.constexpr,
    stride_up: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    x_ptr += row * stride_x + offs
    x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    if out_ptr is not None:
        up_ptr = x_ptr + SIZE if up_ptr is None else up_ptr + row * stride_up + offs
        up = tl.load(up_ptr, mask=mask, other=0.0).to(tl.float32)
        x_ptr = out_ptr + row * SIZE + offs
    if ACTIVATION == "silu":
        share = sigmoid(x)
    elif ACTIVATION == "relu_squared":
        share = tl.where(x < 0.0, 0.0, x)  # leaves NaN as it is
    elif ACTIVATION == "gelu":
        share = 0.5 + 0.5 * tl.erf(0.7071067811865476 * x)
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh z) / 2 is the sigmoid of 2 z, and 2 sqrt(2 / pi) is 1.5957691216.
        share = sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    else:  # "clamped_swiglu", by comparisons, which leave NaN as it is
        x = tl.where(x > limit, limit, x)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        share = sigmoid(alpha * x)
    activated = x * share
    if out_ptr is not None:
        activated *= up
    tl.store(x_ptr, activated.to(x_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    """Return silu(gate) * up, where x is gate and up side by side (Shazeer 2020, "GLU variants").

    The result is computed in float32 and rounded once to x's dtype. Raises ValueError for a shape, dtype or
    stride that does not fit.
    """
    launch, size = _silu_and_muls.find(combination((x,)), x)
    out = x.new_empty(size)
    launch(x, None, out)
    return out


def gelu_and_mul(x: Tensor, up: Tensor | None = None) -> Tensor:  # -> [num_tokens, size]
    """Return gelu(gate) * up, with GELU's tanh approximation.

    x: gate and up side by side, [num_tokens, 2 * size], or only the gate if `up` is given.

    The result is computed in float32 and rounded once to x's dtype. Raises ValueError for a shape, dtype or
    stride that does not fit.
    """
    launch, size = _gelu_and_muls.find(combination((x, up)), x, up)
    out = x.new_empty(size)
    launch(x, up, out)
    return out


def clamped_swiglu(
    x: Tensor,  # [num_tokens, 2 * size]: gate and up side by side
    limit: float,
    alpha: float,
) -> Tensor:  # [num_tokens, size]
    """Return gate sigmoid(alpha gate) (up + 1), with gate at most `limit` and up within ± limit (gpt-oss).

    The result is computed in float32 and rounded once to x's dtype. Raises ValueError for a shape, dtype,
    stride or number that does not fit.
    """
    launch, size = _clamped_swiglus.find(combination((x,), limit, alpha), x, limit, alpha)
    out = x.new_empty(size)
    launch(x, None, out)
    return out


def gelu(x: Tensor, *, tanh: bool) -> None:  # [num_rows, size]
    """Apply GELU to x in place: x Φ(x), or its tanh approximation.

    The result is computed in float32 and rounded once to x's dtype. Raises ValueError for a shape, dtype,
    stride or flag that does not fit.
    """
    launch, _ = _gelus.find(combination((x,), tanh), x, tanh)
    launch(x, None, None)


def relu_squared(x: Tensor) -> None:  # [num_rows, size]
    """Replace x by max(x, 0)², in place (So et al., Primer, 2021).

    The result is computed in float32 and rounded once to x's dtype. Raises ValueError for a shape, dtype or
    stride that does not fit.
    """
    launch, _ = _relu_squareds.find(combination((x,)), x)
    launch(x, None, None)


@checked_as("silu_and_mul")
def _bind_silu_and_mul(x: Tensor) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check the arguments. Return the launch, and the size of the output."""
    return _bind("silu", x)


@checked_as("gelu_and_mul")
def _bind_gelu_and_mul(x: Tensor, up: Tensor | None) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check the arguments. Return the launch, and the size of the output."""
    return _bind("gelu_tanh", x, up)


@checked_as("clamped_swiglu")
def _bind_clamped_swiglu(x: Tensor, limit: float, alpha: float) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check the arguments. Return the launch, and the size of the output."""
    return _bind("clamped_swiglu", x, numbers=(float(limit), float(alpha)))  # ints would be compiled for


@checked_as("gelu")
def _bind_gelu(x: Tensor, tanh: bool) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check the arguments. Return the launch, and the size of the output."""
    return _bind("gelu_tanh" if tanh else "gelu", x, gated=False)


@checked_as("relu_squared")
def _bind_relu_squared(x: Tensor) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check the arguments. Return the launch, and the size of the output."""
    return _bind("relu_squared", x, gated=False)


def _bind(
    activation: Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu", "relu_squared"],
    x: Tensor,
    up: Tensor | None = None,
    *,
    gated: bool = True,  # into a contiguous output; False: in place
    numbers: tuple[float | None, float | None] = (None, None),  # limit and alpha
) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check that the kernel can address the tensors. Return the launch, and the size of the output."""
    check_last_dim_contiguous("x", x)
    check_launchable("x", x)
    num_rows, size = x.shape
    if up is not None:
        check_last_dim_contiguous("up", up)
    elif gated:
        size //= 2
    limit, alpha = numbers
    launch = BoundLaunch(
        _activation_kernel,
        (num_rows, triton.cdiv(size, _BLOCK)),
        limit=limit,
        alpha=alpha,
        stride_x=x.stride(0),
        stride_up=0 if up is None else up.stride(0),
        ACTIVATION=activation,
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return launch, (num_rows, size)


_silu_and_muls = Launches(_bind_silu_and_mul)
_gelu_and_muls = Launches(_bind_gelu_and_mul)
_clamped_swiglus = Launches(_bind_clamped_swiglu)
_gelus = Launches(_bind_gelu)
_relu_squareds = Launches(_bind_relu_squared)
