"""SwiGLU's product, silu(gate) * up."""

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_last_dim_contiguous
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable

_BLOCK = 2048  # in bfloat16 16 bytes a thread even for 256 threads: 4 warps on AMD


@triton.jit
def _silu_and_mul_kernel(
    x_ptr,
    out_ptr,
    stride_x: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    gate = tl.load(x_ptr + token * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * stride_x + SIZE + offs, mask=mask, other=0.0).to(tl.float32)
    decayed = tl.exp(-tl.abs(gate))  # never overflows
    sigmoid = tl.where(gate >= 0, 1.0, decayed) / (1.0 + decayed)
    out = gate * sigmoid * up
    tl.store(out_ptr + token * SIZE + offs, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(x: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    """Return silu(gate) * up, where x is gate and up side by side (Shazeer 2020, "GLU variants").

    Computed in float32 and rounded once to x's dtype. Raises ValueError for a shape, dtype or stride that
    does not fit.
    """
    launch, size = _launches.find(combination((x,)), x)
    out = x.new_empty(size)
    launch(x, out)
    return out


@checked_as("silu_and_mul")
def _bind(x: Tensor) -> tuple[BoundLaunch, tuple[int, int]]:
    """Check the arguments. Return the launch, and the size of the output."""
    check_last_dim_contiguous("x", x)
    check_launchable("x", x)
    num_tokens, size = x.shape[0], x.shape[1] // 2
    grid = (num_tokens, triton.cdiv(size, _BLOCK))
    launch = BoundLaunch(
        _silu_and_mul_kernel, grid, stride_x=x.stride(0), SIZE=size, BLOCK=_BLOCK, num_warps=4
    )
    return launch, (num_tokens, size)


_launches = Launches(_bind)
