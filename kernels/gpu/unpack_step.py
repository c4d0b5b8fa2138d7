"""A step's tokens, positions, slots and block tables, made from one upload and from what the device keeps.

What the device keeps has a row for each seat, which a running request has until it stops running: its last
token and its block tables. A step uploads only what is new: where each request stands, the tokens of prompts,
and the entries by which block tables have grown.

Rows say what each request does in the step; `steps` names their columns. A row beyond those of the step is of
a request that computes nothing in it, and of which the device must be told all the same.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checks import check_contiguous, check_device, check_shape
from ..steps import NUM_COLUMNS
from .launch import BoundLaunch, Launches, combination
from .target import check_launchable

_BLOCK = 256  # tokens, and entries of a block table, of one program


@triton.jit(
    do_not_specialize=["num_rows", "num_step_rows", "num_tokens", "num_tables", "num_entries", "width"]
)
def _unpack_kernel(
    rows_ptr,  # i32[num_rows, NUM_COLUMNS]
    starts_ptr,  # i32[num_step_rows + 1]
    tokens_ptr,  # i32[num_prompt_tokens]
    entries_ptr,  # i32[GROUPS, num_entries]
    last_tokens_ptr,  # i64[num_seats]
    seat_tables_ptr,  # i32[GROUPS, num_seats, max_blocks]
    sources_ptr,  # i32[num_tables - num_step_rows]
    rope_lens_ptr,  # i32[num_step_rows], or None
    by_token_ptr,  # i64[2 + GROUPS, num_tokens], one more if there are rope_lens
    tables_ptr,  # i32[GROUPS, num_tables, width]
    num_rows,
    num_step_rows,
    num_tokens,
    num_tables,
    num_entries,
    width,
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
    items = item + offs * 0  # masks are vectors
    is_row = items < num_rows
    row, table = item, item
    if item >= num_rows:
        row, table = tl.load(sources_ptr + item - num_rows), item - num_rows + num_step_rows
    words = rows_ptr + row * COLUMNS
    seat, start = tl.load(words).to(tl.int64), tl.load(words + 1)
    first_token, last_token = tl.load(words + 2), tl.load(words + 3)
    first, entries, count = tl.load(words + 4), tl.load(words + 5), tl.load(words + 6)
    in_step = row < num_step_rows
    begin = tl.load(starts_ptr + row, mask=in_step, other=0)
    num_new = tl.load(starts_ptr + row + 1, mask=in_step, other=0) - begin

    # The block tables: old entries from the seat, new ones from the upload. The seat gets the new ones; no
    # other program reads those there.
    is_new = (offs >= first) & (offs < first + count)
    is_used = offs < (start + num_new + BLOCK_SIZE - 1) // BLOCK_SIZE
    for group in tl.static_range(GROUPS):
        kept_ptr = seat_tables_ptr + (group * NUM_SEATS + seat) * MAX_BLOCKS
        new = tl.load(entries_ptr + group * num_entries + entries + offs - first, mask=is_new, other=0)
        tl.store(kept_ptr + offs, new, mask=is_new & is_row)
        old = tl.load(kept_ptr + offs, mask=is_used & (offs < first), other=0)
        out_ptr = tables_ptr + (group * num_tables + table).to(tl.int64) * width
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
    place = begin.to(tl.int64) + offs
    tl.store(by_token_ptr + place, token, mask=mask)
    tl.store(by_token_ptr + num_tokens + place, position.to(tl.int64), mask=mask)
    index = position // BLOCK_SIZE
    for group in tl.static_range(GROUPS):
        kept_ptr = seat_tables_ptr + (group * NUM_SEATS + seat) * MAX_BLOCKS
        new_ptr = entries_ptr + group * num_entries + entries - first
        old = tl.load(kept_ptr + index, mask=mask & (index < first), other=0)
        new = tl.load(new_ptr + index, mask=mask & (index >= first), other=0)
        slot = tl.where(index < first, old, new).to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(by_token_ptr + (2 + group) * num_tokens + place, slot, mask=mask)
    if rope_lens_ptr is not None:
        rope_len = tl.maximum(tl.load(rope_lens_ptr + row, mask=in_step, other=0), position + 1)
        tl.store(by_token_ptr + (2 + GROUPS) * num_tokens + place, rope_len.to(tl.int64), mask=mask)


def unpack_step(
    rows: Tensor,  # i32[num_rows, NUM_COLUMNS], those of the step first
    cu_seqlens_q: Tensor,  # i32[num_step_rows + 1], exclusive prefix sum of the new tokens
    tokens: Tensor,  # i32[n], of the rows that do not take theirs from the seat; there may be more
    entries: Tensor,  # i32[num_groups, num_entries], the new ones of all rows, one after another; likewise
    last_tokens: Tensor,  # i64[num_seats], updated in place
    seat_tables: Tensor,  # i32[num_groups, num_seats, max_blocks], updated in place
    sources: Tensor | None,  # i32[num_more], the rows whose block tables are needed once more
    rope_lens: Tensor | None,  # i32[num_step_rows], the least length for dynamic rope
    *,
    num_tokens: int,
    max_seq_len: int,
    longest: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:  # i64[2 + num_groups (+ 1), num_tokens], i32[num_groups, num_tables, width]
    """Return token ids, positions and the slots of each group (and lengths for rope), and the block tables.

    Each row is (SEAT, START, FIRST_TOKEN, LAST_TOKEN, FIRST_ENTRY, ENTRIES, NUM_ENTRIES). It computes the
    tokens from position START on: `tokens` from FIRST_TOKEN on, or the seat's last token if that is
    FROM_SEAT. LAST_TOKEN becomes the seat's last token, unless it is FROM_SEAT. The block tables are the
    seat's up to FIRST_ENTRY, and from there on NUM_ENTRIES new ones, which `entries` has from ENTRIES on and
    which the seat gets; it must have those before. A row beyond those of the step computes nothing.

    The tables are those of the step's rows and then of `sources`, as wide as max_seq_len needs, zero behind a
    row's last block. num_tokens and max_seq_len are those of the step; no row has more than `longest` new
    tokens, and no seat that gets entries has more than so many. Raises ValueError for a shape, dtype or
    device that does not fit.
    """
    tensors = rows, cu_seqlens_q, tokens, entries, last_tokens, seat_tables, sources, rope_lens
    width = triton.cdiv(max_seq_len, block_size)
    # Not the exact lengths, for which most steps would be of another combination.
    sizes = num_tokens, width, triton.cdiv(max(longest, width), _BLOCK), block_size
    bound = _launches.find(combination(tensors, *sizes), *tensors, sizes)
    by_token = torch.empty(bound.by_token, dtype=torch.int64, device=rows.device)
    tables = torch.empty(bound.tables, dtype=torch.int32, device=rows.device)
    more = rows if sources is None else sources  # then it is not read
    bound.launch(
        rows, cu_seqlens_q, tokens, entries, last_tokens, seat_tables, more, rope_lens, by_token, tables
    )
    return by_token, tables


class _Bound(NamedTuple):
    """The launch, and the sizes of its results."""

    launch: BoundLaunch
    by_token: tuple[int, int]
    tables: tuple[int, int, int]


def _bind(
    rows: Tensor,
    cu_seqlens_q: Tensor,
    tokens: Tensor,
    entries: Tensor,
    last_tokens: Tensor,
    seat_tables: Tensor,
    sources: Tensor | None,
    rope_lens: Tensor | None,
    sizes: tuple[int, int, int, int],
) -> _Bound:
    """Check the arguments. sizes: num_tokens, the width of tables, programs of a row, and block_size."""
    num_tokens, width, num_programs, block_size = sizes
    num_step_rows = len(cu_seqlens_q) - 1
    num_groups = len(seat_tables)
    for name, tensor, shape, dtype in (
        ("rows", rows, (None, NUM_COLUMNS), torch.int32),
        ("cu_seqlens_q", cu_seqlens_q, (None,), torch.int32),
        ("tokens", tokens, (None,), torch.int32),
        ("entries", entries, (num_groups, None), torch.int32),
        ("seat_tables", seat_tables, (None, None, None), torch.int32),
        ("last_tokens", last_tokens, seat_tables.shape[1:2], torch.int64),
        ("sources", sources, (None,), torch.int32),
        ("rope_lens", rope_lens, (num_step_rows,), torch.int32),
    ):
        if tensor is not None:
            check_shape(name, tensor, shape, dtype)
            check_device(name, tensor, rows.device)
            check_contiguous(name, tensor)
            check_launchable(name, tensor)
    num_rows = len(rows)
    num_more = 0 if sources is None else len(sources)
    if not 1 <= num_step_rows <= num_rows:
        raise ValueError(f"cu_seqlens_q must be of 1 to {num_rows} rows, got {num_step_rows}")
    launch = BoundLaunch(
        _unpack_kernel,
        (num_rows + num_more, num_programs),
        num_rows=num_rows,
        num_step_rows=num_step_rows,
        num_tokens=num_tokens,
        num_tables=num_step_rows + num_more,
        num_entries=entries.shape[1],
        width=width,
        NUM_SEATS=seat_tables.shape[1],
        MAX_BLOCKS=seat_tables.shape[2],
        BLOCK_SIZE=block_size,
        GROUPS=num_groups,
        COLUMNS=NUM_COLUMNS,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    by_token = 2 + num_groups + (rope_lens is not None), num_tokens
    return _Bound(launch, by_token, (num_groups, num_step_rows + num_more, width))


_launches = Launches(_bind)
