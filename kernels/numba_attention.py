"""Paged attention for a CPU: K and V read through the block table, whatever the batch.

FlashAttention's online softmax (Dao 2023) over tiles of 64 keys, in float32, or where all is bfloat16 and the
CPU multiplies pairs of it, of those. A tile's keys come into scratch memory transposed, once for all query
heads that share them, so that scores and output are both products of the register tile of `numba_tiles`, or
of AMX's tiles (`numba_amx_attention`); a decode reads them in place (`numba_decode`), or by AMX K of bfloat16
alone. A unit of work is some query tokens of one sequence with some of its heads, over all their keys or
SPLIT of them.

Exact: tiles start at multiples of 64 tokens, each SPLIT tokens have a softmax of their own, merged in order,
and every sum of a row is a chain of its own. So the bits of a token's output depend on its own keys alone:
not on the batch, on how its prompt was cut into chunks, or on what was shared out over threads. (Where V is
infinite or NaN, tokens of the chunk shortly before it may be NaN too, as 0 times that is.)
"""

import numpy as np
from numba import carray

from .numba_amx import TILE_ROWS, configure_rows, release
from .numba_amx_attention import (
    KEYS,
    add_by_tiles,
    attend_in_place,
    clear_pairs,
    in_place_bytes,
    multiply_tiles,
    prepare_in_place,
    whole_keys,
)
from .numba_codes import PAIRS
from .numba_decode import add_values, reads_in_place, score_keys
from .numba_memory import (
    BFLOAT16,
    FLOAT8,
    FLOAT32,
    INT8,
    LINE,
    address_of,
    claim,
    get_float,
    get_int,
    get_long,
    item_size,
    load,
    set_float,
    store,
    transpose,
)
from .numba_pages import fill_addresses, fill_next, fill_scales
from .numba_rows import copy_pairs, copy_row, copy_rows, copy_words, pair_rows
from .numba_softmax import (
    TILE,
    TILE_BYTES,
    WORK_VECTORS,
    State,
    View,
    clear,
    finish,
    merge_softmax,
    padded,
    rows_from,
    weigh,
)
from .numba_threads import NEXT_THREAD, NEXT_UNIT, Task
from .numba_tiles import multiply_add, multiply_add_pairs
from .numba_vectors import HAS_DOT, LANES, VECTOR_BYTES, function

SPLIT = 1024  # tokens that one softmax is over
MAX_ROWS = 512  # query rows (tokens x heads that share K and V) of a unit for each KV head
BLOCK = 12  # of these, that go no further in a tile than the last of them sees
TILE_BLOCK = 2 * TILE_ROWS  # the same by tiles
BY_FLOATS, BY_PAIRS, BY_TILES = range(3)  # products of float32, of pairs of bfloat16, of tiles of these

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
_KINDS = ("query_kind", "cache_kind", "tiles")  # tiles: 1 where they may be used
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


def scratch_size(
    head_dim: int, value_dim: int, num_heads: int, max_rows: int, max_heads: int, tiles: bool
) -> int:
    """Bytes for a unit of so many rows, all its KV heads together, up to max_heads; tiles: for these too."""
    width: int = padded.py_func(value_dim)
    score_rows = max(TILE_BLOCK, max_rows) + TILE_ROWS
    words = TILE * (max_heads * (head_dim + width + 2) + 2 * 16 + head_dim + score_rows + 2 * 2)
    size: int = 4 * (words + 2 * LANES + WORK_VECTORS * LANES + max_rows * (head_dim + 2 * width + 4))
    return size + (in_place_bytes(min(max_rows, num_heads), head_dim) if tiles else 0)


@function
def _way(args):
    """What products are of. Pairs of bfloat16 are neighbours in a head, and then neighbouring tokens.

    Weights are rounded to bfloat16 for it, as they are where attention is in that dtype elsewhere; it holds
    all numbers of 8 bits.
    """
    if args.query_kind != BFLOAT16:
        return BY_FLOATS
    is_whole = args.head_dim % KEYS == 0 and args.value_dim % KEYS == 0
    if args.tiles and is_whole and args.cache_kind in (BFLOAT16, INT8, FLOAT8):
        return BY_TILES
    is_whole = args.head_dim % LANES == 0 and args.head_dim >= 2 * LANES and args.value_dim >= LANES
    return BY_PAIRS if HAS_DOT and is_whole and args.cache_kind == BFLOAT16 else BY_FLOATS


@function
def _transpose_keys(keys, tile_keys, stride, depth, count):
    """K of a tile's tokens as f32[depth, TILE]; of no whole vectors the last columns come twice."""
    for key in range(0, count, LANES):
        for column in range(0, depth, LANES):
            d = min(column, depth - LANES)
            transpose(keys + d * TILE_BYTES + 4 * key, TILE_BYTES, tile_keys + key * stride + 4 * d, stride)


@function
def _attend_block(
    args, view, state, way, queries, keys, values, value_stride, first, rows, tile, skip, count, hidden
):  # fmt: skip
    """Some rows of a unit, from the first on, with one head's first `count` keys of a tile."""
    vectors = state.num_vectors
    if way == BY_TILES:
        width, steps = whole_keys(count), args.head_dim // KEYS
        scores, q_stride, columns = state.scores, 2 * args.head_dim, width // LANES
        multiply_tiles(rows, columns, scores, TILE_BYTES, 1, queries, q_stride, keys, TILE_BYTES, steps)
        weigh(args, view, state, first, rows, tile, count, width, hidden, True)
        add_by_tiles(state.sums, vectors, scores, values, value_stride, rows, skip, count)
        return
    width, row_bytes = padded(count), vectors * VECTOR_BYTES
    if way == BY_PAIRS:
        multiply_add_pairs(
            True, state.scores, TILE_BYTES, queries, 2 * args.head_dim, keys, TILE_BYTES, rows,
            width // LANES, args.head_dim // 2,
        )  # fmt: skip
    else:
        multiply_add(
            True, state.scores, TILE_BYTES, queries, 4 * args.head_dim, keys, TILE_BYTES, rows,
            width // LANES, args.head_dim,
        )  # fmt: skip
    weigh(args, view, state, first, rows, tile, count, width, hidden, way == BY_PAIRS)
    if way == BY_PAIRS:
        pair, end = skip // 2, (count + 1) // 2
        multiply_add_pairs(
            False, state.sums, row_bytes, state.scores + 4 * pair, TILE_BYTES, values + pair * value_stride,
            value_stride, rows, vectors, end - pair,
        )  # fmt: skip
    else:
        multiply_add(
            False, state.sums, row_bytes, state.scores + 4 * skip, TILE_BYTES, values + skip * value_stride,
            value_stride, rows, vectors, count - skip,
        )  # fmt: skip


@function
def _bring_queries(args, to, in_pairs, first_token, num_tokens, first_head, end_head):
    """Q of a unit's rows: of its KV heads one after the other, each with its tokens, each with a group."""
    group = args.num_heads // args.num_kv_heads
    for key_head in range(first_head, end_head):
        for token in range(first_token, first_token + num_tokens):
            source = args.query + token * args.query_token_stride + key_head * group * args.query_head_stride
            for _ in range(group):
                if in_pairs:
                    copy_words(to, source, args.head_dim // 2)
                    to += 2 * args.head_dim
                else:
                    copy_row(FLOAT32, to, args.query_kind, source, args.head_dim, np.float32(args.scale))
                    to += 4 * args.head_dim
                source += args.query_head_stride


@function
def _deliver(args, state, first_token, num_tokens, first_head, end_head, part):
    """What a unit's rows come to, in the same order: to its place, or from `part` on to what is merged."""
    group, width = args.num_heads // args.num_kv_heads, state.num_vectors * LANES
    highest, weights, sums = state.highest, state.weights, state.sums
    out_size = args.value_dim * item_size(args.query_kind)
    for key_head in range(first_head, end_head):
        for token in range(first_token, first_token + num_tokens):
            for head in range(key_head * group, (key_head + 1) * group):
                score, weight = get_float(highest), get_float(weights)
                if part < 0:
                    out = args.out + (token * args.num_heads + head) * out_size
                    finish(score, weight, sums, out, args.query_kind, args.value_dim, args.sinks, head)
                else:
                    to = args.parts + part * 4 * (width + 2)
                    set_float(to, score)
                    set_float(to + 4, weight)
                    for v in range(0, 4 * width, VECTOR_BYTES):
                        store(to + 8 + v, load(sums + v))
                    part += 1
                highest, weights, sums = highest + 4, weights + 4, sums + 4 * width


@function
def _attend(args, unit, scratch):
    seq, first_token, end_token = get_long(unit), get_long(unit + 8), get_long(unit + 16)
    first_head, end_head = get_long(unit + 24), get_long(unit + 32)
    first_split, end_split, part = get_long(unit + 40), get_long(unit + 48), get_long(unit + 56)
    num_heads, num_tokens = end_head - first_head, end_token - first_token
    group = args.num_heads // args.num_kv_heads
    width = padded(args.value_dim)
    rows = num_tokens * group  # for each KV head
    num_rows = rows * num_heads
    way = _way(args)
    by_tiles, in_pairs = way == BY_TILES, way != BY_FLOATS
    kind, depth = (PAIRS, args.head_dim // 2) if in_pairs else (args.cache_kind, args.head_dim)
    in_place = num_tokens == 1 and reads_in_place(kind, rows, args.head_dim, args.value_dim)
    if by_tiles:
        in_place = num_tokens == 1 and rows <= TILE_ROWS
        in_place &= args.cache_kind != BFLOAT16 or args.block_size % TILE_ROWS == 0

    first_row = get_int(args.cu_seqlens_q + 4 * seq)
    seq_len = get_int(args.seq_lens + 4 * seq)
    new_position = seq_len - (get_int(args.cu_seqlens_q + 4 * seq + 4) - first_row)
    token, position = first_row + first_token, new_position + first_token
    view = View(first_head, rows, token, position, new_position)
    low, high, seen_by_all = 0, seq_len, seq_len
    if args.tree_mask:
        seen_by_all = new_position
    elif args.causal:
        high, seen_by_all = new_position + end_token, position + 1
    if args.window:
        low = max(0, position - args.window + 1)

    # Rows of a tile's K and V, a cache line apart so that they do not share its sets.
    key_stride, value_stride = 4 * num_heads * depth + LINE, 4 * num_heads * width + LINE
    tile_keys = scratch
    tile_values = tile_keys + TILE * key_stride
    keys = tile_values + TILE * value_stride  # transposed
    scores = keys + depth * TILE_BYTES
    addresses = scores + (max(TILE_BLOCK, num_rows) + TILE_ROWS) * TILE_BYTES
    others = addresses + 16 * TILE  # of what is fetched ahead, or of every 16th key
    queries = others + 8 * LANES
    sums = queries + num_rows * 4 * depth
    states = sums + 2 * num_rows * 4 * width
    work = states + 4 * num_rows * 4
    scales = work + WORK_VECTORS * VECTOR_BYTES
    settings = (scales + 2 * TILE_BYTES * num_heads) // LINE * LINE + LINE
    total = State(scores, states, states + 4 * num_rows, sums, width // LANES, scales, work)
    apart = State(
        scores, states + 8 * num_rows, states + 12 * num_rows, sums + num_rows * 4 * width, width // LANES,
        scales, work,
    )  # fmt: skip

    _bring_queries(args, queries, in_pairs, token, num_tokens, first_head, end_head)
    if by_tiles and in_place:
        prepare_in_place(settings, queries, num_heads, rows, args.head_dim)

    key_offset, value_offset = first_head * args.key_head_stride, first_head * args.value_head_stride
    configured = 0
    # One at least, though all of it may have fallen out of the window.
    first_split = min(max(first_split, low // SPLIT), end_split - 1)
    for split in range(first_split, end_split):
        state = total if split == first_split else apart
        clear(state, num_rows)
        for tile in range(max(split * SPLIT, low // TILE * TILE), min((split + 1) * SPLIT, high), TILE):
            skip, count = max(0, low - tile), min(TILE, high - tile)
            hidden = tile + TILE > seen_by_all or args.window > 0
            fill_addresses(args, seq, tile, skip, count, addresses)
            if args.key_scales:
                fill_scales(args, seq, tile, skip, count, first_head, end_head, scales)
            if in_place and by_tiles:
                attend_in_place(
                    args, view, state, settings, tile_keys, tile_values, addresses, others, num_heads, seq,
                    tile, skip, count, hidden,
                )  # fmt: skip
                continue
            if in_place:
                fill_next(args, seq, tile + TILE, high, others)
                score_keys(
                    kind, scores, TILE_BYTES, queries, 4 * depth, addresses, key_offset,
                    args.key_head_stride, skip, count, num_heads, rows, depth,
                    addresses + 8 * TILE, value_offset, args.value_head_stride,
                )  # fmt: skip
                weigh(args, view, state, 0, num_rows, tile, count, padded(count), hidden, in_pairs)
                even = skip // 2 * 2 if in_pairs else skip
                add_values(
                    kind, state.sums, 4 * width, scores, TILE_BYTES, addresses + 8 * TILE, value_offset,
                    args.value_head_stride, even, count, num_heads, rows, width // LANES,
                    others, key_offset, args.key_head_stride,
                )  # fmt: skip
                continue
            if in_pairs:
                copy_pairs(
                    args.cache_kind, tile_keys, key_stride, addresses, key_offset, skip, count, num_heads,
                    args.key_head_stride, args.head_dim,
                )  # fmt: skip
                pair_rows(
                    args.cache_kind, tile_values, value_stride, addresses + 8 * TILE, value_offset, skip,
                    count, num_heads, args.value_head_stride, args.value_dim, width,
                )  # fmt: skip
            else:
                copy_rows(
                    args.cache_kind, tile_keys, key_stride, addresses, key_offset, skip, count, num_heads,
                    args.key_head_stride, depth, depth,
                )  # fmt: skip
                copy_rows(
                    args.cache_kind, tile_values, value_stride, addresses + 8 * TILE, value_offset,
                    skip, count, num_heads, args.value_head_stride, args.value_dim, width,
                )  # fmt: skip
            if by_tiles:
                clear_pairs(tile_values, value_stride, skip, count, num_heads * width // LANES)
            for head in range(num_heads):
                _transpose_keys(keys, tile_keys + 4 * depth * head, key_stride, depth, count)
                step = TILE_BLOCK if by_tiles else BLOCK
                for block in range(0, rows, step):
                    some, seen = min(step, rows - block), count
                    if args.causal and not args.tree_mask:  # by the last row: weights behind that are 0
                        seen = min(count, position + (block + some - 1) // group + 1 - tile)
                    if seen <= skip:
                        continue
                    if by_tiles and some != configured:
                        configure_rows(settings, some)
                        configured = some
                    row = head * rows + block
                    _attend_block(
                        args, view, rows_from(state, row, scores), way, queries + row * 4 * depth, keys,
                        tile_values + 4 * width * head, value_stride, row, some, tile, skip, seen, hidden,
                    )  # fmt: skip
        if split > first_split:
            for row in range(num_rows):
                to, part_of = rows_from(total, row, scores), rows_from(apart, row, scores)
                score, weight = get_float(part_of.highest), get_float(part_of.weights)
                merge_softmax(to.highest, to.weights, to.sums, score, weight, part_of.sums, width // LANES)

    if by_tiles:
        release()
    _deliver(args, total, token, num_tokens, first_head, end_head, part)


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
            score, weight = get_float(part), get_float(part + 4)
            merge_softmax(state, state + 4, state + 8, score, weight, part + 8, width // LANES)
        head = (first_head + i // rows) * group + i % group
        token = first_token + i % rows // group
        out = args.out + (token * args.num_heads + head) * args.value_dim * item_size(args.query_kind)
        score, weight = get_float(state), get_float(state + 4)
        finish(score, weight, state + 8, out, args.query_kind, args.value_dim, args.sinks, head)


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
