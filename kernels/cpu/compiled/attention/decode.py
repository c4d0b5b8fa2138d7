"""Attention of a decode over a key tile that it reads in the cache.

A decode reads every number of K and V once, for one query token. To copy them into scratch memory first, as
prompts do, where many rows share them, would take as long as to read them.
"""

from ...attention.paged_attention import TILE, TILE_BYTES
from ...formats import BFLOAT16, BFLOAT16_PAIRS, FLOAT32, INT8
from ...target import LANES
from ...variants import ATTENTION_KERNEL
from ..simd.memory import get_long, set_long
from ..simd.vectors import dispatch_for, function, padded
from .block_table import write_next_addresses
from .decode_tiles import (
    add_bfloat,
    add_float,
    add_int8,
    add_pairs,
    score_bfloat,
    score_float,
    score_int8,
    score_pairs,
)
from .softmax import softmax_step
from .units import BY_FLOATS

_SCORES = {
    FLOAT32: score_float, BFLOAT16_PAIRS: score_pairs, BFLOAT16: score_bfloat, INT8: score_int8
}  # fmt: skip
_SUMS = {FLOAT32: add_float, BFLOAT16_PAIRS: add_pairs, BFLOAT16: add_bfloat, INT8: add_int8}
# _score(kind, ...) and _add(kind, ...) of products of that kind; other kinds are copied first.
_score, _add = (dispatch_for(ATTENTION_KERNEL, own) for own in (_SCORES, _SUMS))

_BLOCK = 8  # keys whose V is added for all heads before the next keys' V: it lies in few pages of memory


@function
def _score_keys(args, unit, scratch, tile, kind):
    """Compute the scores of every head's rows with its keys of a tile, and of padding to whole vectors.

    Padding gets the address of a neighbour. After the last of K, V of the tile is prefetched.
    """
    keys = scratch.addresses
    rows = unit.head_rows
    q_stride = 4 * unit.depth
    first = tile.skip // LANES * LANES
    end = (tile.end + LANES - 1) // LANES * LANES
    for place in range(first, tile.skip):
        set_long(keys + 8 * place, get_long(keys + 8 * tile.skip))
    for place in range(tile.end, end):
        set_long(keys + 8 * place, get_long(keys + 8 * (tile.end - 1)))
    for block in range(first, end, LANES):
        for head in range(unit.num_heads):
            out = scratch.scores + head * rows * TILE_BYTES + 4 * block
            query = scratch.queries + head * rows * q_stride
            where = keys + 8 * block
            offset = unit.key_offset + head * args.key_head_stride
            ahead = where + 8 * LANES
            ahead_offset = offset
            if block + LANES >= end:
                ahead = keys + 8 * (TILE + tile.skip)
                ahead_offset = unit.value_offset + head * args.value_head_stride
            same = out, TILE_BYTES, query, q_stride, where, offset, unit.depth, rows, ahead, ahead_offset
            _score(kind, *same)


@function
def _add_values(args, unit, scratch, state, tile, kind):
    """Add V of a tile's keys, times the weights, to the outputs of every head's rows.

    After the last of V, K of the next tile is prefetched. In pairs, the range is widened to whole pairs of
    keys: the neighbour of an odd one has weight 0.
    """
    rows = unit.head_rows
    vectors = state.num_vectors
    values = scratch.addresses + 8 * TILE
    stride = padded(args.value_dim) * 4
    skip = tile.skip // 2 * 2 if kind == BFLOAT16_PAIRS else tile.skip
    for block in range(skip, tile.end, _BLOCK):
        size = min(_BLOCK, tile.end - block)
        weight_bytes = 4
        if kind == BFLOAT16_PAIRS:
            size = (size + 1) // 2
            weight_bytes = 2
        for head in range(unit.num_heads):
            out = state.outputs + head * rows * stride
            weight = scratch.scores + head * rows * TILE_BYTES + weight_bytes * block
            where = values + 8 * block
            offset = unit.value_offset + head * args.value_head_stride
            ahead = where + 8 * _BLOCK
            ahead_offset = offset
            if block + _BLOCK >= tile.end:
                ahead = scratch.more_addresses
                ahead_offset = unit.key_offset + head * args.key_head_stride
            same = out, stride, weight, TILE_BYTES, where, offset, size, rows, vectors, ahead, ahead_offset
            _add(kind, *same)


@function
def attend_in_place(args, unit, scratch, state, tile):
    """Compute attention between the rows of one query token and a key tile."""
    in_pairs = unit.arithmetic != BY_FLOATS
    kind = BFLOAT16_PAIRS if in_pairs else args.cache_kind
    write_next_addresses(args, unit.seq, tile.start + TILE, unit.end_key, scratch.more_addresses)
    _score_keys(args, unit, scratch, tile, kind)
    softmax_step(args, unit, state, 0, unit.num_rows, tile, padded(tile.end), in_pairs, None)
    _add_values(args, unit, scratch, state, tile, kind)
