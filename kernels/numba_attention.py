"""Paged attention for a CPU: K and V read through the block table, whatever the batch.

FlashAttention's online softmax (Dao 2023) over tiles of 64 keys, in float32, or where all is bfloat16 and the
CPU multiplies pairs of it, of those. A tile's keys come into scratch memory transposed, once for all query
heads that share them, so that scores and output are both products of the register tile of `numba_tiles`; a
decode reads them in place (`numba_decode`). A unit of work is some query tokens of one sequence with some of
its heads, over all their keys or SPLIT of them.

Exact: tiles start at multiples of 64 tokens, each SPLIT tokens have a softmax of their own, merged in order,
and every sum of a row is a chain of its own. So the bits of a token's output depend on its own keys alone:
not on the batch, on how its prompt was cut into chunks, or on what was shared out over threads.
"""

import numpy as np
from numba import carray

from .numba_codes import PAIRS
from .numba_decode import add_values, reads_in_place, score_keys
from .numba_memory import (
    BFLOAT16,
    FLOAT32,
    address_of,
    claim,
    get_float,
    get_int,
    get_long,
    item_size,
    load,
    set_float,
    set_long,
    store,
    transpose,
)
from .numba_rows import copy_row, copy_rows, copy_words, pair_rows
from .numba_softmax import NOTHING, TILE, TILE_BYTES, ZERO, fill, finish, merge_softmax, padded, weigh
from .numba_threads import NEXT_THREAD, NEXT_UNIT, Task
from .numba_tiles import multiply_add, multiply_add_pairs
from .numba_vectors import HAS_DOT, LANES, VECTOR_BYTES, function

SPLIT = 1024  # tokens that one softmax is over
MAX_ROWS = 128  # query rows (tokens x heads that share K and V) of a unit for each KV head, or one token's
BLOCK = 12  # of these, that go no further in a tile than the last of them sees

_ADDRESSES = (
    "units",  # i64[num_units, 8]: seq, first and end token, KV head and split, and the number of its part
    "query",
    "key_cache",
    "value_cache",
    "block_tables",
    "seq_lens",
    "cu_seqlens_q",
    "out",
    "parts",  # f32[num_parts, num_heads of the unit's rows, padded value_dim + 2]
    "sinks",  # this and those below: 0 where not asked for
    "alibi_slopes",
    "tree_mask",
    "key_scales",
    "value_scales",
)
_SIZES = ("num_heads", "num_kv_heads", "head_dim", "value_dim", "block_size", "window", "causal")
_KINDS = ("query_kind", "cache_kind")
_STRIDES = (  # bytes
    "table_stride",
    "query_token_stride",
    "query_head_stride",
    "key_block_stride",
    "key_token_stride",
    "key_head_stride",
    "value_block_stride",
    "value_token_stride",
    "value_head_stride",
)
ATTEND = Task((*_ADDRESSES, *_SIZES, *_KINDS, *_STRIDES), ("scale", "softcap"))
MERGE = Task(("merges", "parts", "out", "num_heads", "value_dim", "query_kind", "sinks"))
_ATTEND_RECORD, _MERGE_RECORD = ATTEND.record, MERGE.record


def scratch_size(head_dim: int, value_dim: int, group: int, max_rows: int, max_heads: int) -> int:
    """Bytes for a unit of so many rows, all its heads together; group: heads that share K and V."""
    width: int = padded.py_func(value_dim)
    score_rows = max(MAX_ROWS, group, max_rows)
    tiles = TILE * (max_heads * (head_dim + width) + 2 * 16 + head_dim + score_rows + 2 * 2 + 2)
    return 4 * (tiles + 2 * LANES + max_rows * (head_dim + 2 * width + 4))


@function
def _in_pairs(args):
    """Whether products are of pairs of bfloat16: of neighbours in a head, and then of neighbouring tokens.

    Weights are rounded to bfloat16 for it, as they are where attention is in that dtype elsewhere.
    """
    both = args.query_kind == BFLOAT16 and args.cache_kind == BFLOAT16
    whole = args.head_dim % LANES == 0 and args.head_dim >= 2 * LANES and args.value_dim >= LANES
    return HAS_DOT and both and whole


@function
def _fill_addresses(args, seq, tile, skip, count, to):
    """Where K and V of the tile's tokens from `skip` to `count` are; neighbours that make pairs even get
    the same.
    """
    table = args.block_tables + seq * args.table_stride
    for place in range(skip, count):
        offset = (tile + place) % args.block_size
        if place == skip or offset == 0:
            number = get_int(table + 4 * ((tile + place) // args.block_size))
            key = args.key_cache + number * args.key_block_stride
            value = args.value_cache + number * args.value_block_stride
        set_long(to + 8 * place, key + offset * args.key_token_stride)
        set_long(to + 8 * (TILE + place), value + offset * args.value_token_stride)
    if skip % 2:
        set_long(to + 8 * (TILE + skip - 1), get_long(to + 8 * (TILE + skip)))
    if count % 2:
        set_long(to + 8 * (TILE + count), get_long(to + 8 * (TILE + count - 1)))


@function
def _fill_next(args, seq, first, end, to):
    """Where K of the tokens from `first` on is, or of the last one before `end`: what is fetched ahead."""
    for place in range(LANES):
        token = min(first + place, end - 1)
        number = get_int(args.block_tables + seq * args.table_stride + 4 * (token // args.block_size))
        key = args.key_cache + number * args.key_block_stride
        set_long(to + 8 * place, key + token % args.block_size * args.key_token_stride)


@function
def _transpose_keys(keys, tile_keys, stride, depth, count):
    """K of a tile's tokens as f32[depth, TILE]; of no whole vectors the last columns come twice."""
    for key in range(0, count, LANES):
        for column in range(0, depth, LANES):
            d = min(column, depth - LANES)
            transpose(keys + d * TILE_BYTES + 4 * key, TILE_BYTES, tile_keys + key * stride + 4 * d, stride)


@function
def _fill_scales(args, seq, tile, skip, count, key_head, to):
    """The scales of one head's K in the tile's tokens from `skip` to `count`, and behind them those of V."""
    table = args.block_tables + seq * args.table_stride
    for place in range(skip, count):
        offset = (tile + place) % args.block_size
        if place == skip or offset == 0:
            number = get_int(table + 4 * ((tile + place) // args.block_size))
            first = 4 * (number * args.num_kv_heads + key_head) * args.block_size
        set_float(to + 4 * place, get_float(args.key_scales + first + 4 * offset))
        set_float(to + 4 * (TILE + place), get_float(args.value_scales + first + 4 * offset))


@function
def _attend_block(
    args, scores, queries, keys, values, value_stride, sums, states, scales,
    head, block, end, tile, skip, count, token, position, new_position, hidden, in_pairs,
):  # fmt: skip
    """Some rows of a unit with one head's first `count` keys of a tile."""
    rows, row_bytes = end - block, 4 * padded(args.value_dim)
    fill(scores, rows * (TILE // LANES), ZERO)
    if in_pairs:
        multiply_add_pairs(
            scores, TILE_BYTES, queries, 2 * args.head_dim, keys,
            TILE_BYTES, rows, padded(count) // LANES, args.head_dim // 2,
        )  # fmt: skip
    else:
        multiply_add(
            scores, TILE_BYTES, queries, 4 * args.head_dim, keys,
            TILE_BYTES, rows, padded(count) // LANES, args.head_dim,
        )  # fmt: skip
    weigh(
        args, scores, states, sums, row_bytes // VECTOR_BYTES, scales, head, block, rows, tile, count,
        token, position, new_position, hidden, in_pairs,
    )  # fmt: skip
    if in_pairs:
        first, end = skip // 2, (count + 1) // 2
        multiply_add_pairs(
            sums, row_bytes, scores + 4 * first, TILE_BYTES, values + first * value_stride, value_stride,
            rows, row_bytes // VECTOR_BYTES, end - first,
        )  # fmt: skip
    else:
        multiply_add(
            sums, row_bytes, scores + 4 * skip, TILE_BYTES, values + skip * value_stride, value_stride,
            rows, row_bytes // VECTOR_BYTES, count - skip,
        )  # fmt: skip


@function
def _attend(args, unit, scratch):
    seq, first_token, end_token = get_long(unit), get_long(unit + 8), get_long(unit + 16)
    first_head, end_head = get_long(unit + 24), get_long(unit + 32)
    first_split, end_split, part = get_long(unit + 40), get_long(unit + 48), get_long(unit + 56)
    group = args.num_heads // args.num_kv_heads
    width = padded(args.value_dim)
    num_vectors = width // LANES
    rows = (end_token - first_token) * group  # for each KV head
    num_rows = rows * (end_head - first_head)
    in_pairs = _in_pairs(args)
    kind, depth = (PAIRS, args.head_dim // 2) if in_pairs else (args.cache_kind, args.head_dim)
    in_place = end_token - first_token == 1 and reads_in_place(kind, rows, args.head_dim, args.value_dim)

    start = get_int(args.cu_seqlens_q + 4 * seq)
    seq_len = get_int(args.seq_lens + 4 * seq)
    new_position = seq_len - (get_int(args.cu_seqlens_q + 4 * seq + 4) - start)
    position = new_position + first_token
    low, high, seen_by_all = 0, seq_len, seq_len
    if args.tree_mask:
        seen_by_all = new_position
    elif args.causal:
        high, seen_by_all = new_position + end_token, position + 1
    if args.window:
        low = max(0, position - args.window + 1)

    # Rows of a tile's K and V, a cache line apart so that they do not share its sets.
    key_stride = 4 * (end_head - first_head) * args.head_dim + 64
    value_stride = 4 * (end_head - first_head) * width + 64
    tile_keys = scratch
    tile_values = tile_keys + TILE * key_stride
    keys = tile_values + TILE * value_stride  # transposed
    scores = keys + args.head_dim * TILE_BYTES
    addresses = scores + max(MAX_ROWS, num_rows) * TILE_BYTES
    queries = addresses + 8 * (2 * TILE + LANES)
    totals = queries + num_rows * 4 * args.head_dim
    total_states = totals + 2 * num_rows * 4 * width  # each row's highest score and sum of weights, twice
    scales = total_states + 2 * num_rows * 8  # of K, and then of V, of a tile's tokens in one head

    for i in range(num_rows):
        head = (first_head + i // rows) * group + i % group
        token = start + first_token + i % rows // group
        source = args.query + token * args.query_token_stride + head * args.query_head_stride
        to = queries + i * 4 * depth
        if in_pairs:
            copy_words(to, source, depth)
        else:
            copy_row(FLOAT32, to, args.query_kind, source, args.head_dim, np.float32(args.scale))

    # One at least, though all of it may have fallen out of the window.
    first_split = min(max(first_split, low // SPLIT), end_split - 1)
    for split in range(first_split, end_split):
        sums, states = totals, total_states  # of the split at hand
        if split > first_split:
            sums, states = totals + num_rows * 4 * width, total_states + 8 * num_rows
        fill(sums, num_rows * num_vectors, ZERO)
        for i in range(num_rows):
            set_float(states + 8 * i, NOTHING)
            set_float(states + 8 * i + 4, ZERO)
        for tile in range(max(split * SPLIT, low // TILE * TILE), min((split + 1) * SPLIT, high), TILE):
            skip, count = max(0, low - tile), min(TILE, high - tile)
            _fill_addresses(args, seq, tile, skip, count, addresses)
            if in_place:
                _fill_next(args, seq, tile + TILE, high, addresses + 16 * TILE)
            hidden = tile + TILE > seen_by_all or args.window > 0
            if in_place:
                score_keys(
                    kind, scores, TILE_BYTES, queries, 4 * depth, addresses,
                    first_head * args.key_head_stride, args.key_head_stride, skip, count,
                    end_head - first_head, rows, depth,
                    addresses + 8 * TILE, first_head * args.value_head_stride, args.value_head_stride,
                )  # fmt: skip
                for head in range(first_head, end_head):
                    row = (head - first_head) * rows
                    if args.key_scales:
                        _fill_scales(args, seq, tile, skip, count, head, scales)
                    weigh(
                        args, scores + row * TILE_BYTES, states + 8 * row, sums + row * 4 * width,
                        num_vectors, scales, head, 0, rows, tile, count, start + first_token,
                        position, new_position, hidden, in_pairs,
                    )  # fmt: skip
                even = skip // 2 * 2 if in_pairs else skip
                add_values(
                    kind, sums, 4 * width, scores, TILE_BYTES, addresses + 8 * TILE,
                    first_head * args.value_head_stride, args.value_head_stride, even, count,
                    end_head - first_head, rows, num_vectors,
                    addresses + 16 * TILE, first_head * args.key_head_stride, args.key_head_stride,
                )  # fmt: skip
                continue
            copy_rows(
                FLOAT32 if in_pairs else args.cache_kind, tile_keys, key_stride, addresses,
                first_head * args.key_head_stride, skip, count,
                end_head - first_head, args.key_head_stride, depth, depth,
            )  # fmt: skip
            if in_pairs:
                pair_rows(
                    tile_values, value_stride, addresses + 8 * TILE,
                    first_head * args.value_head_stride, skip, count,
                    end_head - first_head, args.value_head_stride, args.value_dim, width,
                )  # fmt: skip
            else:
                copy_rows(
                    args.cache_kind, tile_values, value_stride, addresses + 8 * TILE,
                    first_head * args.value_head_stride, skip, count,
                    end_head - first_head, args.value_head_stride, args.value_dim, width,
                )  # fmt: skip
            for head in range(first_head, end_head):
                row = (head - first_head) * rows
                _transpose_keys(keys, tile_keys + 4 * depth * (head - first_head), key_stride, depth, count)
                if args.key_scales:
                    _fill_scales(args, seq, tile, skip, count, head, scales)
                for block in range(0, rows, BLOCK):
                    end = min(block + BLOCK, rows)
                    seen = count  # by the last row of the block: weights behind that are 0
                    if args.causal and not args.tree_mask:
                        seen = min(count, position + (end - 1) // group + 1 - tile)
                    if seen > skip:
                        _attend_block(
                            args, scores, queries + (row + block) * 4 * depth, keys,
                            tile_values + 4 * width * (head - first_head), value_stride,
                            sums + (row + block) * 4 * width, states + 8 * (row + block), scales,
                            head, block, end, tile, skip, seen, start + first_token, position, new_position,
                            hidden, in_pairs,
                        )  # fmt: skip
        if split > first_split:
            for i in range(num_rows):
                merge_softmax(
                    total_states + 8 * i,
                    totals + i * 4 * width,
                    states + 8 * i,
                    sums + i * 4 * width,
                    num_vectors,
                )

    for i in range(num_rows):
        head = (first_head + i // rows) * group + i % group
        token = start + first_token + i % rows // group
        if part < 0:
            out = args.out + (token * args.num_heads + head) * args.value_dim * item_size(args.query_kind)
            finish(
                total_states + 8 * i,
                totals + i * 4 * width,
                out,
                args.query_kind,
                args.value_dim,
                args.sinks,
                head,
            )
        else:
            to = args.parts + (part + i) * 4 * (width + 2)
            set_float(to, get_float(total_states + 8 * i))
            set_float(to + 4, get_float(total_states + 8 * i + 4))
            for v in range(num_vectors):
                store(to + 8 + v * VECTOR_BYTES, load(totals + i * 4 * width + v * VECTOR_BYTES))


@function
def _merge_parts(args, unit):
    first_part, num_parts, rows = get_long(unit), get_long(unit + 8), get_long(unit + 16)
    num_rows, first_token, first_head = get_long(unit + 24), get_long(unit + 32), get_long(unit + 40)
    group = get_long(unit + 48)
    width = padded(args.value_dim)
    size = 4 * (width + 2)
    for i in range(num_rows):
        state = args.parts + (first_part + i) * size
        for number in range(1, num_parts):
            part = state + number * num_rows * size
            merge_softmax(state, state + 8, part, part + 8, width // LANES)
        head = (first_head + i // rows) * group + i % group
        token = first_token + i % rows // group
        out = args.out + (token * args.num_heads + head) * args.value_dim * item_size(args.query_kind)
        finish(state, state + 8, out, args.query_kind, args.value_dim, args.sinks, head)


@ATTEND.kernel
def _attend_kernel(record):
    """All threads: `_attend` for each unit."""
    args, counters = carray(record, 1, _ATTEND_RECORD)[0], address_of(record)
    scratch = args.scratch + claim(counters + NEXT_THREAD) * args.scratch_size
    unit = claim(counters + NEXT_UNIT)
    while unit < args.num_units:
        _attend(args, args.units + 64 * unit, scratch)
        unit = claim(counters + NEXT_UNIT)


@MERGE.kernel
def _merge_kernel(record):
    """All threads: `_merge_parts` for each unit."""
    args, counters = carray(record, 1, _MERGE_RECORD)[0], address_of(record)
    unit = claim(counters + NEXT_UNIT)
    while unit < args.num_units:
        _merge_parts(args, args.merges + 64 * unit)
        unit = claim(counters + NEXT_UNIT)
