"""Attention over a key tile in scratch memory: of prompts, and of decodes that cannot read it in place."""

from ...attention.paged_attention import AMX_BLOCK, TILE, TILE_BYTES
from ...target import CPU_HAS_TILES, LANES, VECTOR_BYTES
from ..products.amx import configure_rows
from ..products.tiles import multiply_add, multiply_add_pairs
from ..simd.gather import copy_pairs, copy_rows, pair_rows
from ..simd.memory import transpose
from ..simd.vectors import dispatch, function, padded
from .amx_attention import KEYS, add_values, clear_pairs, multiply_tiles, whole_keys
from .softmax import KeyTile, end_of_keys, rows_from, softmax_step
from .units import BY_FLOATS, BY_PAIRS, BY_TILES, HAS_FLOATS, HAS_PAIRS, HAS_WORDS

_ROW_BLOCK = 12  # query rows that go through a key tile together, up to the last key that one of them sees
_PRODUCTS = {BY_PAIRS: multiply_add_pairs, BY_FLOATS: multiply_add}
_HAS = {BY_PAIRS: HAS_PAIRS, BY_FLOATS: HAS_FLOATS}
# _multiply(arithmetic, *product)
_multiply = dispatch({kind: own for kind, own in _PRODUCTS.items() if _HAS[kind]})


@function
def _copy_tile(args, unit, scratch, tile):
    """Copy K and V of a tile's tokens, of all the unit's heads, into scratch memory."""
    key_addresses = scratch.addresses
    width = padded(args.value_dim)
    heads = unit.num_heads
    value_addresses = key_addresses + 8 * TILE
    if HAS_FLOATS and unit.arithmetic == BY_FLOATS:
        copy_rows(
            args.cache_kind, scratch.tile_keys, scratch.key_stride, key_addresses, unit.key_offset, tile.skip,
            tile.end, heads, args.key_head_stride, args.head_dim, args.head_dim,
        )  # fmt: skip
        copy_rows(
            args.cache_kind, scratch.tile_values, scratch.value_stride, value_addresses, unit.value_offset,
            tile.skip, tile.end, heads, args.value_head_stride, args.value_dim, width,
        )  # fmt: skip
        return
    if HAS_WORDS:
        copy_pairs(
            args.cache_kind, scratch.tile_keys, scratch.key_stride, key_addresses, unit.key_offset, tile.skip,
            tile.end, heads, args.key_head_stride, args.head_dim,
        )  # fmt: skip
        pair_rows(
            args.cache_kind, scratch.tile_values, scratch.value_stride, value_addresses, unit.value_offset,
            tile.skip, tile.end, heads, args.value_head_stride, args.value_dim, width,
        )  # fmt: skip
    if CPU_HAS_TILES and unit.arithmetic == BY_TILES:
        clear_pairs(scratch.tile_values, scratch.value_stride, tile, heads * width // LANES)


@function
def _transpose_keys(keys, tile_keys, stride, depth, count):
    """Transpose one head's K to [depth, TILE]. The last vectors of a row may overlap."""
    for key in range(0, count, LANES):
        for column in range(0, depth, LANES):
            d = min(column, depth - LANES)
            transpose(keys + d * TILE_BYTES + 4 * key, TILE_BYTES, tile_keys + key * stride + 4 * d, stride)


@function
def _attend_block(args, unit, state, queries, keys, values, value_stride, first, rows, tile, prefetch):
    """Attend from some rows of a unit, from `first` on, to one head's keys of a tile."""
    scores = state.scores
    vectors = state.num_vectors
    q_stride = 4 * unit.depth
    if CPU_HAS_TILES and unit.arithmetic == BY_TILES:
        width = whole_keys(tile.end)
        steps = args.head_dim // KEYS
        multiply_tiles(
            rows, width // LANES, scores, TILE_BYTES, 1, queries, q_stride, keys, TILE_BYTES, steps
        )  # fmt: skip
        softmax_step(args, unit, state, first, rows, tile, width, True, prefetch)
        add_values(state.outputs, vectors, scores, values, value_stride, rows, tile)
        return
    in_pairs = unit.arithmetic == BY_PAIRS
    width = padded(tile.end)
    row_bytes = vectors * VECTOR_BYTES
    product = True, scores, TILE_BYTES, queries, q_stride, keys, TILE_BYTES, rows, width // LANES, unit.depth
    _multiply(unit.arithmetic, *product)
    softmax_step(args, unit, state, first, rows, tile, width, in_pairs, prefetch)
    skip = tile.skip
    end = tile.end
    if in_pairs:
        skip = tile.skip // 2
        end = (tile.end + 1) // 2
    weights = scores + 4 * skip
    values = values + skip * value_stride
    product = (
        False, state.outputs, row_bytes, weights, TILE_BYTES, values, value_stride, rows, vectors, end - skip
    )  # fmt: skip
    _multiply(unit.arithmetic, *product)


@function
def attend_in_scratch(args, unit, scratch, state, tile, configured, prefetch):
    """Compute attention between a unit's rows and a key tile. Return the rows that AMX is configured for."""
    group = args.num_heads // args.num_kv_heads
    rows = unit.head_rows
    width = padded(args.value_dim)
    depth = unit.depth
    step = AMX_BLOCK if unit.arithmetic == BY_TILES else _ROW_BLOCK
    _copy_tile(args, unit, scratch, tile)
    for head in range(unit.num_heads):
        _transpose_keys(
            scratch.keys, scratch.tile_keys + 4 * depth * head, scratch.key_stride, depth, tile.end
        )
        for block in range(0, rows, step):
            some = min(step, rows - block)
            # Keys that none of the block's rows sees are left out.
            first = block // group
            end_key = end_of_keys(unit.last_keys, unit.position, first, (block + some - 1) // group + 1)
            seen = min(tile.end, end_key - tile.start)
            if seen <= tile.skip:
                continue
            if CPU_HAS_TILES and unit.arithmetic == BY_TILES and some != configured:
                configure_rows(scratch.tile_config, some)
                configured = some
            row = head * rows + block
            _attend_block(
                args, unit, rows_from(state, row, scratch.scores), scratch.queries + row * 4 * depth,
                scratch.keys, scratch.tile_values + 4 * width * head, scratch.value_stride, row, some,
                KeyTile(tile.start, tile.skip, seen, tile.is_masked), prefetch,
            )  # fmt: skip
    return configured
