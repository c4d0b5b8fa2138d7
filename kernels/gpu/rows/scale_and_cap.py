"""The multiplication of embeddings and logits by a number, and the softcap of logits."""

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_last_dim_contiguous
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable
from .activations import sigmoid

_BLOCK = 2048


@triton.jit
def _scale_and_cap_kernel(
    x_ptr,
    factor,
    softcap,
    stride_x: tl.constexpr,
    CAPPED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_ptr += tl.program_id(0).to(tl.int64) * stride_x + offs
    x = tl.load(x_ptr, mask=offs < SIZE, other=0.0).to(tl.float32) * factor
    if CAPPED:  # tanh z is 2 sigmoid(2 z) - 1
        x = softcap * (2.0 * sigmoid(2.0 * x / softcap) - 1.0)
    tl.store(x_ptr, x.to(x_ptr.dtype.element_ty), mask=offs < SIZE)


def scale_and_cap(x: Tensor, factor: float, softcap: float | None = None) -> None:  # [num_rows, size]
    """Multiply x by a factor in place. With a softcap, turn the product p into softcap tanh(p / softcap).

    The result is computed in float32 and rounded once. Raises ValueError for a shape, dtype, stride or number
    that does not fit.
    """
    launch = _launches.find(combination((x,), factor, softcap), x, factor, softcap)
    launch(x)


@checked_as("scale_and_cap")
def _bind(x: Tensor, factor: float, softcap: float | None) -> BoundLaunch:
    """Check the arguments. Return the launch."""
    check_last_dim_contiguous("x", x)
    check_launchable("x", x)
    num_rows, size = x.shape
    return BoundLaunch(
        _scale_and_cap_kernel,
        (num_rows, triton.cdiv(size, _BLOCK)),
        factor=float(factor),  # an int would be another specialisation
        softcap=float(softcap or 0.0),
        stride_x=x.stride(0),
        CAPPED=softcap is not None,
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
    )


_launches = Launches(_bind)
