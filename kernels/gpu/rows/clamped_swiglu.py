"""gpt-oss's gated activation, gate sigmoid(alpha gate) (up + 1) of numbers that are clamped."""

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_last_dim_contiguous
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable
from .gelu_and_mul import sigmoid

_BLOCK = 2048


@triton.jit
def _clamped_swiglu_kernel(
    x_ptr,
    out_ptr,
    limit,
    alpha,
    stride_x: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    gate = tl.load(x_ptr + token * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_x + SIZE + offs, mask=mask, other=0.0).to(tl.float32)
    # By comparisons, which leave NaN as it is.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    out = gate * sigmoid(alpha * gate) * (up + 1.0)
    tl.store(out_ptr + token * SIZE + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def clamped_swiglu(
    x: Tensor,  # [num_tokens, 2 * size]: gate and up side by side
    limit: float,
    alpha: float,
) -> Tensor:  # [num_tokens, size]
    """Return gate sigmoid(alpha gate) (up + 1), with gate at most `limit` and up within ± limit (gpt-oss).

    Computed in float32 and rounded once to x's dtype. Raises ValueError for a shape, dtype, stride or number
    that does not fit.
    """
    launch, size = _launches.find(combination((x,), limit, alpha), x, limit, alpha)
    out = x.new_empty(size)
    launch(x, out)
    return out


@checked_as("clamped_swiglu")
def _bind(x: Tensor, limit: float, alpha: float) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check the arguments. Return the launch, and the size of the output."""
    check_last_dim_contiguous("x", x)
    check_launchable("x", x)
    num_tokens = len(x)
    size = x.shape[1] // 2
    launch = BoundLaunch(
        _clamped_swiglu_kernel,
        (num_tokens, triton.cdiv(size, _BLOCK)),
        limit=float(limit),  # an int would be compiled for
        alpha=float(alpha),
        stride_x=x.stride(0),
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return launch, (num_tokens, size)


_launches = Launches(_bind)
