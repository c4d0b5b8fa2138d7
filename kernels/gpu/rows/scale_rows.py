"""The multiplication of rows by a factor each: queries whose scale depends on their position."""

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_contiguous, check_last_dim_contiguous
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable

_BLOCK = 2048


@triton.jit
def _scale_rows_kernel(
    x_ptr,
    factors_ptr,
    stride_x: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_ptr += row * stride_x + offs
    factor = tl.load(factors_ptr + row)
    x = tl.load(x_ptr, mask=offs < SIZE, other=0.0).to(tl.float32) * factor
    tl.store(x_ptr, x.to(x_ptr.dtype.element_ty), mask=offs < SIZE)


def scale_rows(x: Tensor, factors: Tensor) -> None:  # [num_rows, size], f32[num_rows]
    """Multiply each row of x by its factor, in place.

    The result is computed in float32 and rounded once. Raises ValueError for a shape, dtype, stride or device
    that does not fit.
    """
    launch = _launches.find(combination((x, factors)), x, factors)
    launch(x, factors)


@checked_as("scale_rows")
def _bind(x: Tensor, factors: Tensor) -> BoundLaunch:
    """Check the arguments. Return the launch."""
    check_last_dim_contiguous("x", x)
    check_contiguous("factors", factors)
    check_launchable("x", x)
    num_rows, size = x.shape
    return BoundLaunch(
        _scale_rows_kernel,
        (num_rows, triton.cdiv(size, _BLOCK)),
        stride_x=x.stride(0),
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
    )


_launches = Launches(_bind)
