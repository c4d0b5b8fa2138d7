"""A step's tokens, positions, slots and block tables, made from one upload and from what the device keeps.

What the device keeps has a row for each seat, which a running request has until it stops running: its last
token and its block tables; and one row more, the scratch seat, of which nothing is read. A step uploads only
what is new: where each request stands, tokens of prompts, and the entries by which block tables have grown.

Rows say what each request does in the step; `steps` names their columns. A row beyond those of the step is of
a request that computes nothing in it, and of which the device must be told all the same.

A step may be written into tensors of more rows and tokens, as those of a CUDA graph: the rows that the step
lacks have no tokens to attend from, and the tokens that it lacks have slots of no block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import check_contiguous, check_device, check_last_dim_contiguous, check_shape
from ..seats import NO_SLOT, NUM_COLUMNS, NUM_TOKEN_COLUMNS, StepTensors
from .launch import BoundLaunch, Launches, combination
from .target import check_launchable

_BLOCK = 256  # tokens, and entries of a block table, of one program
_NO_SLOT = tl.constexpr(NO_SLOT)


@triton.jit
def _store_padding(
    by_token_ptr,
    tables_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    row,
    first_place,
    pad_q,
    num_tokens,
    num_out_rows,
    num_out_tokens,
    width,
    stride_column,
    stride_group,
    offs,
    with_rope_lens: tl.constexpr,
    SCRATCH: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Write a row that the step lacks, if there is one: no query of attention. Write up to pad_q tokens that
    are not stored.
    """
    if (row < num_out_rows) & (tl.program_id(1) == 0):
        tl.store(seq_lens_ptr + row, 0)
        tl.store(cu_seqlens_q_ptr + row + 1, num_tokens)
    zero = (offs * 0).to(tl.int64)
    mask = (offs < pad_q) & (first_place + offs < num_out_tokens)
    by_token_ptr += first_place.to(tl.int64) + offs
    tl.store(by_token_ptr, zero, mask=mask)
    tl.store(by_token_ptr + stride_column, zero, mask=mask)
    tl.store(by_token_ptr + 2 * stride_column, zero + SCRATCH, mask=mask)
    tl.store(by_token_ptr + 3 * stride_column, zero, mask=mask)
    for group in tl.static_range(GROUPS):
        tl.store(by_token_ptr + (4 + group) * stride_column, zero + _NO_SLOT, mask=mask)
        out_ptr = tables_ptr + group * stride_group + row.to(tl.int64) * width
        tl.store(out_ptr + offs, offs * 0, mask=(offs < width) & (row + offs * 0 < num_out_rows))
    if with_rope_lens:
        tl.store(by_token_ptr + (4 + GROUPS) * stride_column, zero + 1, mask=mask)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_step_rows",
        "num_out_rows",
        "num_more",
        "num_tokens",
        "num_out_tokens",
        "pad_q",
        "num_entries",
        "width",
        "stride_column",
        "stride_group",
    ],
    do_not_specialize_on_alignment=["by_token_ptr", "tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr"],
)
def _unpack_kernel(
    rows_ptr,  # i32[num_rows, NUM_COLUMNS]
    starts_ptr,  # i32[num_step_rows + 1]
    tokens_ptr,  # i32[num_prompt_tokens]
    entries_ptr,  # i32[GROUPS, num_entries]
    last_tokens_ptr,  # i64[NUM_SEATS]
    seat_tables_ptr,  # i32[GROUPS, NUM_SEATS, max_blocks]
    sources_ptr,  # i32[num_more]
    rope_lens_ptr,  # i32[num_step_rows], or None
    by_token_ptr,  # i64[4 + GROUPS, num_out_tokens], one more if there are rope_lens
    tables_ptr,  # i32[GROUPS, num_out_rows + num_more, width]
    seq_lens_ptr,  # i32[num_out_rows]
    cu_seqlens_q_ptr,  # i32[num_out_rows + 1]
    num_rows,
    num_step_rows,
    num_out_rows,
    num_more,
    num_tokens,
    num_out_tokens,
    pad_q,
    num_entries,
    width,
    stride_column,
    stride_group,
    NUM_SEATS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write BLOCK tokens of one row and BLOCK entries of its block tables, or entries of one more table."""
    item = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = item - num_rows - num_more
    if number >= 0:
        _store_padding(
            by_token_ptr, tables_ptr, seq_lens_ptr, cu_seqlens_q_ptr, num_step_rows + number,
            num_tokens + number * pad_q, pad_q, num_tokens, num_out_rows, num_out_tokens, width,
            stride_column, stride_group, offs, rope_lens_ptr is not None, NUM_SEATS - 1, GROUPS,
        )  # fmt: skip
        return
    items = item + offs * 0  # masks are vectors
    is_row = items < num_rows
    row, table = item, item
    if item >= num_rows:
        row, table = tl.load(sources_ptr + item - num_rows), item - num_rows + num_out_rows
    words = rows_ptr + row * COLUMNS
    seat, start = tl.load(words).to(tl.int64), tl.load(words + 1)
    first_token, last_token = tl.load(words + 2), tl.load(words + 3)
    first, entries, count = tl.load(words + 4), tl.load(words + 5), tl.load(words + 6)
    in_step = row < num_step_rows
    begin = tl.load(starts_ptr + row, mask=in_step, other=0)
    num_new = tl.load(starts_ptr + row + 1, mask=in_step, other=0) - begin
    if (item < num_step_rows) & (tl.program_id(1) == 0):
        tl.store(seq_lens_ptr + item, start + num_new)
        tl.store(cu_seqlens_q_ptr + item + 1, begin + num_new)
        if item == 0:
            tl.store(cu_seqlens_q_ptr, 0)

    # The block tables: old entries from the seat, new ones from the upload. The seat gets the new ones; no
    # other program reads those there.
    is_new = (offs >= first) & (offs < first + count)
    is_used = offs < (start + num_new + BLOCK_SIZE - 1) // BLOCK_SIZE
    for group in tl.static_range(GROUPS):
        kept_ptr = seat_tables_ptr + (group * NUM_SEATS + seat) * MAX_BLOCKS
        new = tl.load(entries_ptr + group * num_entries + entries + offs - first, mask=is_new, other=0)
        tl.store(kept_ptr + offs, new, mask=is_new & is_row)
        old = tl.load(kept_ptr + offs, mask=is_used & (offs < first), other=0)
        out_ptr = tables_ptr + group * stride_group + table.to(tl.int64) * width
        value = tl.where(is_used, tl.where(offs < first, old, new), 0)
        tl.store(out_ptr + offs, value, mask=(offs < width) & ((items < num_step_rows) | (items >= num_rows)))

    # The tokens
    if (item < num_rows) & (last_token >= 0):
        tl.store(last_tokens_ptr + seat, last_token.to(tl.int64))
    mask = (offs < num_new) & is_row
    position = start + offs
    if first_token < 0:
        token = tl.load(last_tokens_ptr + seat + offs * 0, mask=mask, other=0)
    else:
        token = tl.load(tokens_ptr + first_token + offs, mask=mask, other=0).to(tl.int64)
    by_token_ptr += begin.to(tl.int64) + offs
    tl.store(by_token_ptr, token, mask=mask)
    tl.store(by_token_ptr + stride_column, position.to(tl.int64), mask=mask)
    tl.store(by_token_ptr + 2 * stride_column, seat + (offs * 0).to(tl.int64), mask=mask)
    tl.store(by_token_ptr + 3 * stride_column, (position + 1).to(tl.int64), mask=mask)
    index = position // BLOCK_SIZE
    for group in tl.static_range(GROUPS):
        kept_ptr = seat_tables_ptr + (group * NUM_SEATS + seat) * MAX_BLOCKS
        new_ptr = entries_ptr + group * num_entries + entries - first
        old = tl.load(kept_ptr + index, mask=mask & (index < first), other=0)
        new = tl.load(new_ptr + index, mask=mask & (index >= first), other=0)
        slot = tl.where(index < first, old, new).to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(by_token_ptr + (4 + group) * stride_column, slot, mask=mask)
    if rope_lens_ptr is not None:
        rope_len = tl.maximum(tl.load(rope_lens_ptr + row, mask=in_step, other=0), position + 1)
        tl.store(by_token_ptr + (4 + GROUPS) * stride_column, rope_len.to(tl.int64), mask=mask)


def unpack_step(
    rows: Tensor,  # i32[num_rows, NUM_COLUMNS], those of the step first
    cu_seqlens_q: Tensor,  # i32[num_step_rows + 1], exclusive prefix sum of the new tokens
    tokens: Tensor,  # i32[n], of the rows that do not take theirs from the seat; there may be more
    entries: Tensor,  # i32[num_groups, num_entries], the new ones of all rows, one after another; likewise
    last_tokens: Tensor,  # i64[num_seats + 1], updated in place
    seat_tables: Tensor,  # i32[num_groups, num_seats + 1, max_blocks], updated in place
    sources: Tensor | None,  # i32[num_more], the rows whose block tables are needed once more
    rope_lens: Tensor | None,  # i32[num_step_rows], the least length for dynamic rope
    out: StepTensors,
    *,
    num_tokens: int,
    longest: int,
    block_size: int,
) -> None:
    """Write token ids, positions, seats, the slots of each group and the block tables of a step.

    Each row is (SEAT, START, FIRST_TOKEN, LAST_TOKEN, FIRST_ENTRY, ENTRIES, NUM_ENTRIES). It computes tokens
    from position START on: the entries of `tokens` from FIRST_TOKEN on, or the seat's last token if
    FIRST_TOKEN is FROM_SEAT. Unless LAST_TOKEN is FROM_SEAT, it becomes the seat's last token. A row's block
    tables are the seat's up to FIRST_ENTRY, which the seat must have, followed by NUM_ENTRIES new entries.
    These come from `entries` from ENTRIES on, and are stored in the seat too. A row after the step's own rows
    computes nothing.

    out: see `StepTensors`. Its block tables belong to the step's rows and then to `sources`; entries behind a
        row's last block are zero. `out` may have more rows and more tokens than the step. The additional
        tokens come last. They are in the scratch seat, at position 0 and in slot NO_SLOT, and attention
        ignores them.

    num_tokens: the number of tokens of the step.
    longest: maximum number of new tokens of a row, and of entries of a seat that gets new ones.

    Raises ValueError for a shape, dtype or device that does not fit.
    """
    tensors = rows, cu_seqlens_q, tokens, entries, last_tokens, seat_tables, sources, rope_lens
    # Not the exact length, for which most steps would be of another combination.
    longest = max(longest, out.tables.shape[2], out.by_token.shape[1] - num_tokens)
    sizes = num_tokens, triton.cdiv(longest, _BLOCK), block_size
    launch = _launches.find(combination((*tensors, *out), *sizes), *tensors, out, sizes)
    more = rows if sources is None else sources  # then it is not read
    launch(rows, cu_seqlens_q, tokens, entries, last_tokens, seat_tables, more, rope_lens, *out)


def _bind(
    rows: Tensor,
    cu_seqlens_q: Tensor,
    tokens: Tensor,
    entries: Tensor,
    last_tokens: Tensor,
    seat_tables: Tensor,
    sources: Tensor | None,
    rope_lens: Tensor | None,
    out: StepTensors,
    sizes: tuple[int, int, int],
) -> BoundLaunch:
    """Check the arguments. sizes: num_tokens, programs of a row, and block_size."""
    num_tokens, num_programs, block_size = sizes
    num_step_rows = len(cu_seqlens_q) - 1
    num_groups = len(seat_tables)
    num_more = 0 if sources is None else len(sources)
    num_out_rows = len(out.seq_lens)
    num_columns = NUM_TOKEN_COLUMNS + num_groups + (rope_lens is not None)
    for name, tensor, shape, dtype in (
        ("rows", rows, (None, NUM_COLUMNS), torch.int32),
        ("cu_seqlens_q", cu_seqlens_q, (None,), torch.int32),
        ("tokens", tokens, (None,), torch.int32),
        ("entries", entries, (num_groups, None), torch.int32),
        ("seat_tables", seat_tables, (None, None, None), torch.int32),
        ("last_tokens", last_tokens, seat_tables.shape[1:2], torch.int64),
        ("sources", sources, (None,), torch.int32),
        ("rope_lens", rope_lens, (num_step_rows,), torch.int32),
        ("out.by_token", out.by_token, (num_columns, None), torch.int64),
        ("out.tables", out.tables, (num_groups, num_out_rows + num_more, None), torch.int32),
        ("out.seq_lens", out.seq_lens, (None,), torch.int32),
        ("out.cu_seqlens_q", out.cu_seqlens_q, (num_out_rows + 1,), torch.int32),
    ):
        if tensor is not None:
            check_shape(name, tensor, shape, dtype)
            check_device(name, tensor, rows.device)
            if name.startswith("out."):
                check_last_dim_contiguous(name, tensor)
            else:
                check_contiguous(name, tensor)
            check_launchable(name, tensor)
    if out.tables.stride(1) != out.tables.shape[2]:
        raise ValueError(f"out.tables must have contiguous rows, got strides {out.tables.stride()}")
    num_rows = len(rows)
    if not 1 <= num_step_rows <= num_rows:
        raise ValueError(f"cu_seqlens_q must be of 1 to {num_rows} rows, got {num_step_rows}")
    num_padded = num_out_rows - num_step_rows
    num_out_tokens = out.by_token.shape[1]
    if num_padded < 0 or num_out_tokens < num_tokens:
        raise ValueError(
            f"out must have room for {num_step_rows} rows of {num_tokens} tokens, got {num_out_rows} rows of "
            f"{num_out_tokens}"
        )
    # Programs that pad divide the further tokens.
    num_pads = max(num_padded, min(1, num_out_tokens - num_tokens))
    pad_q = triton.cdiv(num_out_tokens - num_tokens, max(1, num_pads))
    return BoundLaunch(
        _unpack_kernel,
        (num_rows + num_more + num_pads, num_programs),
        num_rows=num_rows,
        num_step_rows=num_step_rows,
        num_out_rows=num_out_rows,
        num_more=num_more,
        num_tokens=num_tokens,
        num_out_tokens=num_out_tokens,
        pad_q=pad_q,
        num_entries=entries.shape[1],
        width=out.tables.shape[2],
        stride_column=out.by_token.stride(0),
        stride_group=out.tables.stride(0),
        NUM_SEATS=seat_tables.shape[1],
        MAX_BLOCKS=seat_tables.shape[2],
        BLOCK_SIZE=block_size,
        GROUPS=num_groups,
        COLUMNS=NUM_COLUMNS,
        BLOCK=_BLOCK,
        num_warps=4,
    )


_launches = Launches(_bind)
