"""What LoRA adapters add to the output of a linear layer, each row by its own adapter."""

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import check_last_dim_contiguous
from ..launch import BoundLaunch, Launches, combination
from ..linear.coded_linear import dot_dtype
from ..target import check_launchable, current_target

_ROWS = 16  # the fewest of a product of tensor cores
_COLUMNS = 256
_INPUTS = 64
_NUMBERS = 512  # of B at a time, as registers hold them


@triton.jit(do_not_specialize=["num_tokens", "num_ranges"])
def _add_lora_kernel(
    x_ptr,
    out_ptr,
    a_ptr,
    b_ptr,
    ranks_ptr,
    columns_ptr,
    slots_ptr,
    num_tokens,
    num_ranges,
    stride_x: tl.constexpr,
    stride_out: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    STEP_COLUMNS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """One program takes BLOCK_ROWS tokens and BLOCK_COLUMNS columns, one adapter after another.

    Rows of other adapters count as 0, so what a row gets does not depend on them.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    slots = tl.load(slots_ptr + row, mask=row < num_tokens, other=-1)
    last_slot = tl.max(slots, axis=0)
    slot = tl.min(tl.where(slots < 0, last_slot + 1, slots), axis=0)
    offs_rank = tl.arange(0, BLOCK_RANK)
    first_column = tl.program_id(1) * BLOCK_COLUMNS
    offs_input = tl.arange(0, BLOCK_INPUTS)
    while slot <= last_slot:
        is_own = slots == slot
        for i in range(num_ranges):
            first = tl.load(columns_ptr + 3 * i)
            end = tl.load(columns_ptr + 3 * i + 1)
            part = slot.to(tl.int64) * NUM_PARTS + tl.load(columns_ptr + 3 * i + 2)
            rank = tl.load(ranks_ptr + part)
            if (first < first_column + BLOCK_COLUMNS) & (first_column < end) & (rank > 0):
                inner = tl.zeros([BLOCK_ROWS, BLOCK_RANK], dtype=tl.float32)
                for k in range(0, IN_FEATURES, BLOCK_INPUTS):
                    mask_input = k + offs_input < IN_FEATURES
                    x = tl.load(
                        x_ptr + row[:, None] * stride_x + k + offs_input[None, :],
                        mask=is_own[:, None] & mask_input[None, :],
                        other=0.0,
                    )
                    a = tl.load(
                        a_ptr
                        + (part * MAX_RANK + offs_rank)[None, :] * IN_FEATURES
                        + k
                        + offs_input[:, None],
                        mask=(offs_rank < rank)[None, :] & mask_input[:, None],
                        other=0.0,
                    )
                    inner = tl.dot(x.to(DOT_DTYPE), a.to(DOT_DTYPE), inner, input_precision="ieee")
                for step in range(0, BLOCK_COLUMNS, STEP_COLUMNS):
                    column = first_column + step + tl.arange(0, STEP_COLUMNS)
                    mask_step = (column >= first) & (column < end)
                    b = tl.load(
                        b_ptr + (slot.to(tl.int64) * MAX_RANK + offs_rank)[:, None] * SIZE + column[None, :],
                        mask=(offs_rank < rank)[:, None] & mask_step[None, :],
                        other=0.0,
                    )
                    added = tl.dot(inner, b.to(tl.float32), input_precision="ieee")
                    mask = is_own[:, None] & mask_step[None, :]
                    at = out_ptr + row[:, None] * stride_out + column[None, :]
                    total = tl.load(at, mask=mask, other=0.0).to(tl.float32) + added
                    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=mask)
        slot = tl.min(tl.where(slots <= slot, last_slot + 1, slots), axis=0)


def add_lora(
    x: Tensor,  # [num_tokens, in_features]
    out: Tensor,  # [num_tokens, size] like x or float32, changed in place
    a: Tensor,  # [num_slots, num_parts, max_rank, in_features], like x
    b: Tensor,  # [num_slots, max_rank, size], like x: transposed, and scaled
    ranks: Tensor,  # i32[num_slots, num_parts], at most max_rank; 0: the slot has no such part
    columns: Tensor,  # i32[num_ranges, 3]: first column of out, end, and the part that makes them
    slots: Tensor,  # i32[num_tokens]; -1: no adapter
) -> None:
    """Add x Aᵀ Bᵀ of each token's adapter to its row of `out`; see `reference.add_lora`.

    Raises ValueError for a shape, dtype, stride or value that does not fit.
    """
    tensors = x, out, a, b, ranks, columns, slots
    _launches.find(combination(tensors), *tensors)(*tensors)


@checked_as("add_lora")
def _bind(
    x: Tensor,
    out: Tensor,
    a: Tensor,
    b: Tensor,  # noqa: ARG001
    ranks: Tensor,  # noqa: ARG001
    columns: Tensor,
    slots: Tensor,  # noqa: ARG001
) -> BoundLaunch:
    """Check the arguments. Return the launch."""
    check_last_dim_contiguous("x", x)
    check_last_dim_contiguous("out", out)
    check_launchable("x", x)
    num_tokens, size = out.shape
    _, num_parts, max_rank, in_features = a.shape
    block_rank = max(16, triton.next_power_of_2(max_rank))
    return BoundLaunch(
        _add_lora_kernel,
        (triton.cdiv(num_tokens, _ROWS), triton.cdiv(size, _COLUMNS)),
        num_tokens=num_tokens,
        num_ranges=len(columns),
        stride_x=x.stride(0),
        stride_out=out.stride(0),
        IN_FEATURES=in_features,
        SIZE=size,
        NUM_PARTS=num_parts,
        MAX_RANK=max_rank,
        BLOCK_RANK=block_rank,
        BLOCK_ROWS=_ROWS,
        BLOCK_COLUMNS=_COLUMNS,
        STEP_COLUMNS=min(_COLUMNS, max(16, _NUMBERS // block_rank)),
        BLOCK_INPUTS=_INPUTS,
        DOT_DTYPE=dot_dtype(x.dtype, current_target()),
        num_warps=4,
    )


_launches = Launches(_bind)
