"""RMS norm into a tensor that is there: norms of Q and K in place, and norms before a residual addition."""

import math

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_last_dim_contiguous
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable
from .rms_norm import weighted

_TILE = 2048  # values that one program normalises, or one row if that is longer


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_into_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,  # or x_ptr
    num_rows,
    eps,
    stride_x: tl.constexpr,
    stride_x_head: tl.constexpr,
    stride_out: tl.constexpr,
    stride_out_head: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    ADD: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    offs = tl.arange(0, BLOCK_SIZE)
    mask = (row < num_rows) & (offs < SIZE)[None, :]
    if NUM_HEADS > 1:
        token, head = row // NUM_HEADS, row % NUM_HEADS
        x_ptr += token * stride_x + head * stride_x_head + offs[None, :]
        out_ptr += token * stride_out + head * stride_out_head + offs[None, :]
    else:
        x_ptr += row * stride_x + offs[None, :]
        out_ptr += row * stride_out + offs[None, :]
    # [BLOCK_ROWS, BLOCK_SIZE]
    x = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
    # Loaded here: after the sum they would be a second wait for memory. And for every row, 16 bytes a thread.
    weight = tl.load(weight_ptr + offs[None, :], mask=mask, other=0.0)
    dtype = out_ptr.dtype.element_ty
    if ADD:
        before = tl.load(out_ptr, mask=mask, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None]
    if ADD:
        result = before + weighted(normed, weight, tl.float32, UNIT_OFFSET)
    else:
        result = weighted(normed, weight, dtype, UNIT_OFFSET)
    tl.store(out_ptr, result.to(dtype), mask=mask)


def rms_norm_into(
    x: Tensor,  # [num_tokens, size] or [num_tokens, num_heads, size]
    weight: Tensor,  # [size]
    eps: float,
    out: Tensor,  # like x, or x itself; written in place
    *,
    unit_offset: bool = False,
    add: bool = False,
) -> None:
    """Write the norm of x, see `rms_norm`, into `out`; add: add it to `out`, and round only the sum.

    Raises ValueError for a shape, dtype, stride or value that does not fit.
    """
    key = combination((x, weight, out), eps, unit_offset, add, pair=(x, out))
    launch = _launches.find(key, x, weight, eps, out, unit_offset, add)
    launch(x, weight, out)


@checked_as("rms_norm_into")
def _bind(x: Tensor, weight: Tensor, eps: float, out: Tensor, unit_offset: bool, add: bool) -> BoundLaunch:
    """Check the arguments. Return the launch."""
    check_launchable("x", x)
    for name, tensor in {"x": x, "weight": weight, "out": out}.items():
        check_last_dim_contiguous(name, tensor)
    num_tokens, *heads, size = x.shape
    num_heads = math.prod(heads)
    num_rows = num_tokens * num_heads
    block_size = triton.next_power_of_2(size)
    block_rows = max(1, _TILE // block_size)
    return BoundLaunch(
        _rms_norm_into_kernel,
        (triton.cdiv(num_rows, block_rows),),
        num_rows=num_rows,
        eps=float(eps),
        stride_x=x.stride(0),
        stride_x_head=x.stride(-2),
        stride_out=out.stride(0),
        stride_out_head=out.stride(-2),
        NUM_HEADS=num_heads,
        UNIT_OFFSET=unit_offset,
        ADD=add,
        SIZE=size,
        BLOCK_ROWS=block_rows,
        BLOCK_SIZE=block_size,
        num_warps=min(16, max(4, block_size // 1024)),
    )


_launches = Launches(_bind)
