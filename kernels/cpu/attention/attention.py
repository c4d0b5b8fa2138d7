"""Paged attention for a CPU: K and V read through the block table, whatever the batch.

FlashAttention's online softmax (Dao 2023) over tiles of 64 keys, in float32, or where all is bfloat16 and the
CPU multiplies pairs of it, of those. A tile's keys come into scratch memory transposed, once for all query
heads that share them, so that scores and output are both products of the register tile of
`cpu.products.tiles`, or of AMX's tiles (`cpu.attention.amx_attention`); a decode reads them in place
(`cpu.attention.decode`), or by AMX K of bfloat16 alone. A unit of work is some query tokens of one sequence
with some of its heads, over all their keys or SPLIT of them.
"""

import numpy as np

from ..launch.tasks import Task
from ..products.amx import configure_rows, release
from ..products.codes import PAIRS
from ..products.tiles import multiply_add, multiply_add_pairs
from ..simd.gather import copy_pairs, copy_row, copy_rows, copy_words, fetch_rows, pair_rows
from ..simd.memory import get_float, get_long, item_size, load, set_float, store, transpose
from ..simd.numbers import FLOAT32
from ..simd.vectors import LANES, VECTOR_BYTES, function
from .amx_attention import (
    KEYS,
    add_by_tiles,
    attend_in_place,
    clear_pairs,
    multiply_tiles,
    prepare_in_place,
    whole_keys,
)
from .decode import add_values, score_keys
from .pages import fill_addresses, fill_next, fill_scales
from .softmax import (
    TILE,
    TILE_BYTES,
    Ahead,
    clear,
    finish,
    merge_softmax,
    padded,
    rows_from,
    weigh,
)
from .units import (
    BY_FLOATS,
    BY_PAIRS,
    BY_TILES,
    SPLIT,
    TILE_BLOCK,
    memory_of,
    row_words,
    unit_of,
)

MAX_ROWS = 512  # query rows (tokens x heads that share K and V) of a unit for each KV head
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
        weigh(args, view, state, first, rows, tile, count, width, hidden, True, None)
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
    weigh(args, view, state, first, rows, tile, count, width, hidden, way == BY_PAIRS, None)
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
def _bring_queries(args, unit, to):
    """Q of a unit's rows: of its KV heads one after the other, each with its tokens, each with a group."""
    group = args.num_heads // args.num_kv_heads
    for key_head in range(unit.first_head, unit.first_head + unit.num_heads):
        for token in range(unit.token, unit.token + unit.num_tokens):
            source = args.query + token * args.query_token_stride + key_head * group * args.query_head_stride
            for _ in range(group):
                if unit.way != BY_FLOATS:
                    copy_words(to, source, args.head_dim // 2)
                    to += 2 * args.head_dim
                else:
                    copy_row(FLOAT32, to, args.query_kind, source, args.head_dim, np.float32(args.scale))
                    to += 4 * args.head_dim
                source += args.query_head_stride


@function
def _deliver(args, unit, state):
    """What a unit's rows come to, in the same order: to its place, or to what is merged."""
    group, width = args.num_heads // args.num_kv_heads, state.num_vectors * LANES
    highest, weights, sums = state.highest, state.weights, state.sums
    out_size = args.value_dim * item_size(args.query_kind)
    part = unit.part
    for key_head in range(unit.first_head, unit.first_head + unit.num_heads):
        for token in range(unit.token, unit.token + unit.num_tokens):
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
def _bring_tile(args, unit, memory, skip, count):
    """K and V of a tile's tokens from `skip` to `count`, of all the unit's heads."""
    values, width, heads = memory.addresses + 8 * TILE, padded(args.value_dim), unit.num_heads
    if unit.way == BY_FLOATS:
        copy_rows(
            args.cache_kind, memory.tile_keys, memory.key_stride, memory.addresses, unit.key_offset, skip,
            count, heads, args.key_head_stride, args.head_dim, args.head_dim,
        )  # fmt: skip
        copy_rows(
            args.cache_kind, memory.tile_values, memory.value_stride, values, unit.value_offset, skip, count,
            heads, args.value_head_stride, args.value_dim, width,
        )  # fmt: skip
        return
    copy_pairs(
        args.cache_kind, memory.tile_keys, memory.key_stride, memory.addresses, unit.key_offset, skip, count,
        heads, args.key_head_stride, args.head_dim,
    )  # fmt: skip
    pair_rows(
        args.cache_kind, memory.tile_values, memory.value_stride, values, unit.value_offset, skip, count,
        heads, args.value_head_stride, args.value_dim, width,
    )  # fmt: skip
    if unit.way == BY_TILES:
        clear_pairs(memory.tile_values, memory.value_stride, skip, count, heads * width // LANES)


@function
def _attend_tile(args, unit, view, memory, state, tile, skip, count, hidden, configured):
    """A unit's rows with a tile's keys. Returns how many rows AMX's tiles are configured for now."""
    group, rows = args.num_heads // args.num_kv_heads, view.rows
    width, depth = padded(args.value_dim), row_words(args, unit.way)
    step = TILE_BLOCK if unit.way == BY_TILES else BLOCK
    _bring_tile(args, unit, memory, skip, count)
    for head in range(unit.num_heads):
        _transpose_keys(memory.keys, memory.tile_keys + 4 * depth * head, memory.key_stride, depth, count)
        for block in range(0, rows, step):
            some, seen = min(step, rows - block), count
            if args.causal and not args.tree_mask:  # by the last row: weights behind that are 0
                seen = min(count, view.position + (block + some - 1) // group + 1 - tile)
            if seen <= skip:
                continue
            if unit.way == BY_TILES and some != configured:
                configure_rows(memory.settings, some)
                configured = some
            row = head * rows + block
            _attend_block(
                args, view, rows_from(state, row, memory.scores), unit.way, memory.queries + row * 4 * depth,
                memory.keys, memory.tile_values + 4 * width * head, memory.value_stride, row, some, tile,
                skip, seen, hidden,
            )  # fmt: skip
    return configured


@function
def _attend_in_place(args, unit, view, memory, state, tile, skip, count, hidden):
    """The rows of one token with a tile's keys."""
    in_pairs, width, depth = unit.way != BY_FLOATS, padded(args.value_dim), row_words(args, unit.way)
    kind, values = PAIRS if in_pairs else args.cache_kind, memory.addresses + 8 * TILE
    fill_next(args, unit.seq, tile + TILE, unit.high, memory.others)
    score_keys(
        kind, memory.scores, TILE_BYTES, memory.queries, 4 * depth, memory.addresses, unit.key_offset,
        args.key_head_stride, skip, count, unit.num_heads, view.rows, depth, values, unit.value_offset,
        args.value_head_stride,
    )  # fmt: skip
    weigh(
        args, view, state, 0, unit.num_rows, tile, count, padded(count), hidden, in_pairs, None
    )  # fmt: skip
    even = skip // 2 * 2 if in_pairs else skip
    add_values(
        kind, state.sums, 4 * width, memory.scores, TILE_BYTES, values, unit.value_offset,
        args.value_head_stride, even, count, unit.num_heads, view.rows, width // LANES, memory.others,
        unit.key_offset, args.key_head_stride,
    )  # fmt: skip


@function
def _ahead(args, unit, tile, addresses):
    """What a unit reads of a tile, whose tokens' addresses are written down: its heads are neighbours."""
    count = max(0, min(TILE, min(unit.high, unit.end_split * SPLIT) - tile))
    fill_addresses(args, unit.seq, tile, 0, count, addresses)
    share, size = (count + unit.num_rows - 1) // unit.num_rows, unit.num_heads * item_size(args.cache_kind)
    keys, values = size * args.head_dim, size * args.value_dim
    return Ahead(addresses, count, share, unit.key_offset, keys, unit.value_offset, values)


@function
def _attend(args, address, scratch):
    """All of a unit, whose record is at the address."""
    unit, view = unit_of(args, address)
    memory, total, apart = memory_of(args, unit, scratch)
    by_tiles, num_heads, vectors = unit.way == BY_TILES, unit.num_heads, total.num_vectors
    if by_tiles and unit.in_place:
        first = _ahead(args, unit, max(unit.first_split * SPLIT, unit.low // TILE * TILE), memory.keys)
        fetch_rows(first.addresses, first.key_offset, first.key_bytes, 0, first.num_tokens)
        fetch_rows(first.addresses + 8 * TILE, first.value_offset, first.value_bytes, 0, first.num_tokens)
    _bring_queries(args, unit, memory.queries)
    if by_tiles and unit.in_place:
        prepare_in_place(memory.settings, memory.queries, num_heads, view.rows, args.head_dim)

    configured = 0
    # One at least, though all of it may have fallen out of the window.
    first_split = min(max(unit.first_split, unit.low // SPLIT), unit.end_split - 1)
    for split in range(first_split, unit.end_split):
        state = total if split == first_split else apart
        clear(state, unit.num_rows)
        first_tile = max(split * SPLIT, unit.low // TILE * TILE)
        for tile in range(first_tile, min((split + 1) * SPLIT, unit.high), TILE):
            skip, count = max(0, unit.low - tile), min(TILE, unit.high - tile)
            hidden = tile + TILE > unit.seen_by_all or args.window > 0
            fill_addresses(args, unit.seq, tile, skip, count, memory.addresses)
            if args.key_scales:
                end_head = unit.first_head + num_heads
                fill_scales(args, unit.seq, tile, skip, count, unit.first_head, end_head, state.scales)
            if not unit.in_place:
                configured = _attend_tile(
                    args, unit, view, memory, state, tile, skip, count, hidden, configured
                )
            elif by_tiles:
                ahead = _ahead(args, unit, tile + TILE, memory.keys)
                attend_in_place(
                    args, view, state, memory.settings, memory.tile_keys, memory.tile_values,
                    memory.addresses, memory.others, num_heads, unit.seq, tile, skip, count, hidden, ahead,
                )  # fmt: skip
            else:
                _attend_in_place(args, unit, view, memory, state, tile, skip, count, hidden)
        if split > first_split:
            for row in range(unit.num_rows):
                to, other = rows_from(total, row, memory.scores), rows_from(apart, row, memory.scores)
                score, weight = get_float(other.highest), get_float(other.weights)
                merge_softmax(to.highest, to.weights, to.sums, score, weight, other.sums, vectors)

    if by_tiles:
        release()
    _deliver(args, unit, total)


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


@ATTEND.each_unit
def _attend_unit(args, unit, scratch):
    _attend(args, args.units + 64 * unit, scratch)


@MERGE.each_unit
def _merge_unit(args, unit):
    _merge_parts(args, args.merges + 64 * unit)
