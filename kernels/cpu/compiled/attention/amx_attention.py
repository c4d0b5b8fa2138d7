"""Attention's products by AMX, of bfloat16; `products/amx.py` says what AMX is.

Scores are Q Kᵀ. A decode computes K Qᵀ instead, which needs no transposed K; products and the order of each
sum are the same, and so are the bits.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ...attention.paged_attention import TILE, TILE_BYTES
from ...formats import BFLOAT16, FLOAT32
from ...target import LANES, LINE, STEPS, TILE_ROWS, VECTOR_BYTES
from ..products.amx import NO_SUPPLY, Block, configure, emit_tile, multiply_pairs, write_settings
from ..simd import emit
from ..simd.emit import I64, INTS, int64, operation
from ..simd.gather import copy_pairs, pair_rows
from ..simd.memory import get_int, set_byte, set_int, set_long
from ..simd.vectors import function
from .block_table import write_block_addresses
from .softmax import ZERO, fill, softmax_step

KEYS = 2 * LANES  # products go over whole multiples of so many keys, and of so many numbers of a head
# AMX tiles of K Qᵀ: sums for four groups of 16 keys, then Qᵀ and K.
_KEY_SUMS = (0, 1, 2, 3)
_QUERY = 4
_KEY = 5


@function
def multiply_tiles(rows, vectors, c, c_stride, is_first, a, a_stride, b, b_stride, steps):
    """Compute C += A B with AMX tiles, where B has an even number of column vectors.

    The tiles must be configured for `rows` rows. A [rows, steps * KEYS] and B hold pairs of bfloat16. If
    is_first, compute C = A B instead.
    """
    for v in range(0, vectors, 2):
        to = c + v * VECTOR_BYTES
        at = b + v * VECTOR_BYTES
        block = Block(to, c_stride, int(is_first), a, a_stride, at, b_stride, steps)
        multiply_pairs(rows, 1, block, NO_SUPPLY)


@operation(types.void, *[types.int64] * 7)
def _multiply_keys(
    builder: Any, to: Any, places: Any, offset: Any, k_stride: Any, query: Any, q_stride: Any, steps: Any
) -> None:
    """Compute K Qᵀ for four groups of 16 keys of one head, each group at an address of its own."""
    groups = []
    for tile in _KEY_SUMS:
        emit_tile(builder, "tilezero", tile)
        groups.append(builder.add(builder.load(emit.pointer(builder, I64, places, int64(8 * tile))), offset))
    q_step = builder.mul(q_stride, int64(STEPS))
    with cgutils.for_range(builder, steps) as loop:
        column = builder.mul(loop.index, int64(LINE))
        row = builder.add(query, builder.mul(loop.index, q_step))
        emit_tile(builder, "tileloadd64", _QUERY, emit.byte_pointer(builder, row), q_stride)
        for tile, group in zip(_KEY_SUMS, groups, strict=True):
            emit_tile(
                builder, "tileloadd64", _KEY, emit.byte_pointer(builder, builder.add(group, column)), k_stride
            )
            emit_tile(builder, "tdpbf16ps", tile, _KEY, _QUERY)
    for tile in _KEY_SUMS:
        place = builder.add(to, builder.mul(q_stride, int64(TILE_ROWS * tile)))
        emit_tile(builder, "tilestored64", tile, emit.byte_pointer(builder, place), q_stride)


def _deinterleave(builder: Any, vectors: list[Any]) -> list[Any]:
    """Split n vectors that hold n columns in row-major order into these columns; n is a power of two."""
    if len(vectors) == 1:
        return vectors
    found = []
    for first in range(2):
        lanes = ir.Constant(INTS, [2 * lane + first for lane in range(LANES)])
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        found.append(_deinterleave(builder, [builder.shuffle_vector(*pair, lanes) for pair in pairs]))
    return [x for both in zip(*found, strict=True) for x in both]


def _transposer(columns: int) -> Any:
    """Make a function that transposes [LANES, columns] at `source` into rows of a stride."""

    @operation(types.void, types.int64, types.int64, types.int64)
    def transpose(builder: Any, to: Any, stride: Any, source: Any) -> None:
        places = [builder.add(source, int64(VECTOR_BYTES * c)) for c in range(columns)]
        rows = _deinterleave(builder, [emit.load(builder, FLOAT32, place) for place in places])
        for r, row in enumerate(rows):
            emit.store(builder, FLOAT32, builder.add(to, builder.mul(stride, int64(r))), row)

    return transpose


_transpose_2, _transpose_4, _transpose_8, _transpose_16 = map(_transposer, (2, 4, 8, 16))


@function
def whole_keys(count):
    """Round a count up to a multiple of KEYS."""
    return (count + KEYS - 1) // KEYS * KEYS


@function
def _query_columns(rows):
    """Round up to 1, 2, 4, 8 or 16: the columns of Qᵀ."""
    columns = 1
    while columns < rows:
        columns *= 2
    return columns


@function
def _score_keys(scores, places, offset, head_stride, key_stride, queries, columns, head_dim, heads, rows, kq):
    """Compute the scores of every head's rows with TILE keys; rows behind the last head's may be written too.

    places: addresses of four groups of 16 keys. queries: Qᵀ of every head. kq: memory for K Qᵀ.
    """
    for head in range(heads):
        to = scores + head * rows * TILE_BYTES
        at = offset + head * head_stride
        query = queries + 2 * head * columns * head_dim
        product = kq if columns > 1 else to
        _multiply_keys(product, places, at, key_stride, query, 4 * columns, head_dim // KEYS)
        if columns == 1:
            continue
        for group in range(len(_KEY_SUMS)):
            place = to + group * VECTOR_BYTES
            source = kq + group * VECTOR_BYTES * columns
            if columns == 2:
                _transpose_2(place, TILE_BYTES, source)
            elif columns == 4:
                _transpose_4(place, TILE_BYTES, source)
            elif columns == 8:
                _transpose_8(place, TILE_BYTES, source)
            else:
                _transpose_16(place, TILE_BYTES, source)


@function
def clear_pairs(to, stride, tile, num_vectors):
    """Zero rows of V outside a tile's range of keys: products read rows in pairs; these get weight 0."""
    for pair in range(tile.skip // KEYS * LANES, tile.skip // 2):
        fill(to + pair * stride, num_vectors, ZERO)
    for pair in range((tile.end + 1) // 2, whole_keys(tile.end) // 2):
        fill(to + pair * stride, num_vectors, ZERO)


@function
def add_values(outputs, num_vectors, weights, values, value_stride, rows, tile):
    """Add V of a key tile, multiplied by the weights, to the outputs of some rows."""
    first = tile.skip // KEYS
    c_stride = num_vectors * VECTOR_BYTES
    steps = whole_keys(tile.end) // KEYS - first
    at = values + LANES * first * value_stride
    multiply_tiles(
        rows, num_vectors, outputs, c_stride, 0, weights + LINE * first, TILE_BYTES, at, value_stride, steps
    )


@function
def prepare_in_place(args, unit, scratch):
    """Before a unit's first key tile, write tile configurations for both products, and Qᵀ of every head.

    They are written at scratch.tile_config: the configurations, one cache line each; TILE lines of room for K
    Qᵀ; Qᵀ.
    """
    config = scratch.tile_config
    query = scratch.queries
    columns = _query_columns(unit.head_rows)
    write_settings(config, TILE_ROWS, TILE_ROWS)
    for tile in (*_KEY_SUMS, _QUERY):
        set_byte(config + 16 + 2 * tile, 4 * columns)
    write_settings(config + LINE, unit.head_rows, 1)
    to = config + 2 * LINE + TILE * LINE
    for _ in range(unit.num_heads):
        for row in range(unit.head_rows):
            for word in range(args.head_dim // 2):
                set_int(to + 4 * (word * columns + row), get_int(query + 4 * word))
            query += 2 * args.head_dim
        to += 2 * args.head_dim * columns


@function
def attend_in_place(args, unit, scratch, state, tile, prefetch):
    """Compute attention between the rows of one query token and a key tile.

    K in bfloat16 is read directly from the cache; 8-bit K is first widened into scratch memory. V is copied
    into scratch memory, one head at a time.
    """
    rows = unit.head_rows
    vectors = state.num_vectors
    kq = scratch.tile_config + 2 * LINE
    places = scratch.more_addresses
    offset = unit.key_offset
    head_stride = args.key_head_stride
    stride = args.key_token_stride
    if args.cache_kind == BFLOAT16:
        write_block_addresses(args, unit.seq, tile, places)
    else:
        stride = 2 * unit.num_heads * args.head_dim + LINE
        copy_pairs(
            args.cache_kind, scratch.tile_keys, stride, scratch.addresses, offset, tile.skip, tile.end,
            unit.num_heads, head_stride, args.head_dim,
        )  # fmt: skip
        offset = 0
        head_stride = 2 * args.head_dim
        for group in range(len(_KEY_SUMS)):
            set_long(places + 8 * group, scratch.tile_keys + TILE_ROWS * group * stride)
    configure(scratch.tile_config)
    _score_keys(
        state.scores, places, offset, head_stride, stride, kq + TILE * LINE, _query_columns(rows),
        args.head_dim, unit.num_heads, rows, kq,
    )  # fmt: skip
    softmax_step(args, unit, state, 0, unit.num_rows, tile, whole_keys(tile.end), True, prefetch)
    configure(scratch.tile_config + LINE)
    values = scratch.tile_values
    stride = vectors * VECTOR_BYTES + LINE
    for head in range(unit.num_heads):
        offset = unit.value_offset + head * args.value_head_stride
        pair_rows(
            args.cache_kind, values, stride, scratch.addresses + 8 * TILE, offset, tile.skip, tile.end, 1, 0,
            args.value_dim, args.value_dim,
        )  # fmt: skip
        clear_pairs(values, stride, tile, vectors)
        weights = state.scores + head * rows * TILE_BYTES
        outputs = state.outputs + head * rows * vectors * VECTOR_BYTES
        add_values(outputs, vectors, weights, values, stride, rows, tile)
