"""Paged attention on a CPU: ragged batches of prompts and decodes over K and V behind a block table.

Online softmax over tiles of 64 keys, in float32, or in pairs of bfloat16 where queries and cache are bfloat16
and the CPU multiplies them. For prompts a key tile is copied into scratch memory, transposed, once for all
query heads that share it (`prompt`); decodes read it in the cache (`decode`, `amx_attention`). A unit of work
is some query tokens of one sequence with some of its heads, over all their keys or some splits of them
(`units`).
"""

import numpy as np

from ...attention.paged_attention import ATTEND, MAX_DECODE, MERGE, SPLIT_KEYS, TILE
from ...formats import FLOAT32
from ...target import LANES, VECTOR_BYTES
from ..kernels import each_unit
from ..products.amx import release
from ..simd.gather import copy_row, copy_words, fetch_rows
from ..simd.memory import get_float, get_long, item_size, load, set_float, store
from ..simd.vectors import function, padded
from . import amx_attention, decode
from .block_table import copy_scales, write_addresses
from .prompt import attend_in_scratch
from .softmax import KeyTile, Prefetch, merge_softmax, reset, rows_from, write_output
from .units import BY_FLOATS, BY_TILES, lay_out, read_unit


@function
def _load_queries(args, unit, to):
    """Copy Q of a unit's rows; of float32 it is multiplied by scale."""
    group = args.num_heads // args.num_kv_heads
    for key_head in range(unit.first_head, unit.first_head + unit.num_heads):
        for token in range(unit.first_token, unit.first_token + unit.num_tokens):
            source = args.query + token * args.query_token_stride + key_head * group * args.query_head_stride
            for _ in range(group):
                if unit.arithmetic != BY_FLOATS:
                    copy_words(to, source, args.head_dim // 2)
                    to += 2 * args.head_dim
                else:
                    copy_row(FLOAT32, to, args.query_kind, source, args.head_dim, np.float32(args.scale))
                    to += 4 * args.head_dim
                source += args.query_head_stride


@function
def _store_results(args, unit, state):
    """Store the outputs of a unit's rows, or their states where they are to be merged with other splits'."""
    group = args.num_heads // args.num_kv_heads
    width = state.num_vectors * LANES
    maxima = state.maxima
    normalizers = state.normalizers
    outputs = state.outputs
    out_size = args.value_dim * item_size(args.query_kind)
    part = unit.first_part
    for key_head in range(unit.first_head, unit.first_head + unit.num_heads):
        for token in range(unit.first_token, unit.first_token + unit.num_tokens):
            for head in range(key_head * group, (key_head + 1) * group):
                maximum = get_float(maxima)
                normalizer = get_float(normalizers)
                if part < 0:
                    out = args.out + (token * args.num_heads + head) * out_size
                    write_output(args, maximum, normalizer, outputs, out, head)
                else:
                    to = args.parts + part * 4 * (width + 2)
                    set_float(to, maximum)
                    set_float(to + 4, normalizer)
                    for v in range(0, 4 * width, VECTOR_BYTES):
                        store(to + 8 + v, load(outputs + v))
                    part += 1
                maxima = maxima + 4
                normalizers = normalizers + 4
                outputs = outputs + 4 * width


@function
def _next_tile(args, unit, start, addresses):
    """Write the addresses of the tile that starts there, and return how a unit prefetches it.

    Prompts prefetch nothing: their rows keep the CPU busy, not memory.
    """
    count = 0
    if unit.num_tokens <= MAX_DECODE:
        count = max(0, min(TILE, min(unit.end_key, unit.end_split * SPLIT_KEYS) - start))
    write_addresses(args, unit.seq, KeyTile(start, 0, count, False), addresses)
    share = (count + unit.num_rows - 1) // unit.num_rows
    size = unit.num_heads * item_size(args.cache_kind)
    keys = size * args.head_dim
    values = size * args.value_dim
    return Prefetch(addresses, count, share, unit.key_offset, keys, unit.value_offset, values)


@each_unit(ATTEND)
def _attend(args, number, scratch_memory):
    """Attend from a unit's rows to all its keys, tile by tile and split by split."""
    unit = read_unit(args, args.units + 64 * number)
    scratch, total, partial = lay_out(args, unit, scratch_memory)
    amx_in_place = unit.arithmetic == BY_TILES and unit.in_place
    if amx_in_place:
        start = max(unit.first_split * SPLIT_KEYS, unit.first_key // TILE * TILE)
        first = _next_tile(args, unit, start, scratch.next_addresses)
        fetch_rows(first.addresses, first.key_offset, first.key_bytes, 0, first.num_tokens)
        fetch_rows(first.addresses + 8 * TILE, first.value_offset, first.value_bytes, 0, first.num_tokens)
    _load_queries(args, unit, scratch.queries)
    if amx_in_place:
        amx_attention.prepare_in_place(args, unit, scratch)

    configured = 0
    # A unit has one split at least, even if a sliding window hides all its keys.
    first_split = min(max(unit.first_split, unit.first_key // SPLIT_KEYS), unit.end_split - 1)
    for split in range(first_split, unit.end_split):
        state = total if split == first_split else partial
        reset(state, unit.num_rows)
        first_tile = max(split * SPLIT_KEYS, unit.first_key // TILE * TILE)
        for start in range(first_tile, min((split + 1) * SPLIT_KEYS, unit.end_key), TILE):
            # All rows see the keys up to the first one's own position, unless there is a window.
            is_masked = start + TILE > unit.position + 1 or args.window > 0
            tile = KeyTile(start, max(0, unit.first_key - start), min(TILE, unit.end_key - start), is_masked)
            write_addresses(args, unit.seq, tile, scratch.addresses)
            if args.key_scales:
                copy_scales(args, unit, tile, state.scales)
            if unit.in_place and not amx_in_place:  # it prefetches by itself
                decode.attend_in_place(args, unit, scratch, state, tile)
                continue
            prefetch = _next_tile(args, unit, start + TILE, scratch.next_addresses)
            if amx_in_place:
                amx_attention.attend_in_place(args, unit, scratch, state, tile, prefetch)
            else:
                configured = attend_in_scratch(args, unit, scratch, state, tile, configured, prefetch)
        if split > first_split:
            for row in range(unit.num_rows):
                to = rows_from(total, row, scratch.scores)
                other = rows_from(partial, row, scratch.scores)
                score = get_float(other.maxima)
                weight = get_float(other.normalizers)
                vectors = total.num_vectors
                merge_softmax(to.maxima, to.normalizers, to.outputs, score, weight, other.outputs, vectors)

    if unit.arithmetic == BY_TILES:
        release()
    _store_results(args, unit, total)


@each_unit(MERGE)
def _merge_parts(args, number):
    """Merge the splits of some rows, in the order of their keys, and store the output."""
    record = args.merges + 64 * number
    first_part = get_long(record)
    num_parts = get_long(record + 8)
    rows = get_long(record + 16)
    num_rows = get_long(record + 24)
    first_token = get_long(record + 32)
    first_head = get_long(record + 40)
    group = get_long(record + 48)
    width = padded(args.value_dim)
    size = 4 * (width + 2)
    for i in range(num_rows):
        state = args.parts + (first_part + i) * size
        for split in range(1, num_parts):
            part = state + split * num_rows * size
            score = get_float(part)
            weight = get_float(part + 4)
            merge_softmax(state, state + 4, state + 8, score, weight, part + 8, width // LANES)
        head = (first_head + i // rows) * group + i % group
        token = first_token + i % rows // group
        out = args.out + (token * args.num_heads + head) * args.value_dim * item_size(args.query_kind)
        write_output(args, get_float(state), get_float(state + 4), state + 8, out, head)
