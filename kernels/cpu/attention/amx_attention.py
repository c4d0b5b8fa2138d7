"""Attention's products by AMX, of bfloat16 (see `cpu.products.amx`).

Scores are Q Kᵀ, or where a few rows read K where it lies, K Qᵀ, which needs no transposed K: a product of two
numbers and the order of a sum are the same in both, and so are the bits. Weights times V is one product for
both.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ..products.amx import STEPS, TILE_ROWS, by_pairs, configure, emit_tile, write_settings
from ..simd import emit
from ..simd.emit import I64, INTS, int64, operation
from ..simd.gather import copy_pairs, pair_rows
from ..simd.memory import LINE, get_int, set_byte, set_int, set_long
from ..simd.numbers import BFLOAT16, FLOAT32
from ..simd.vectors import LANES, VECTOR_BYTES, function
from .pages import fill_blocks
from .softmax import TILE, TILE_BYTES, ZERO, fill, weigh

KEYS = 2 * LANES  # that a product of tiles goes over, and columns of scores: both are in whole ones
_KEY_SUMS, _QUERY, _KEY = (0, 1, 2, 3), 4, 5  # where scores are K Qᵀ


@function
def multiply_tiles(rows, vectors, c, c_stride, is_first, a, a_stride, b, b_stride, steps):
    """C += A B for up to two groups of rows, which tiles are configured for, and an even number of vectors.

    A [rows, steps times KEYS] and B are in pairs of bfloat16. is_first: C is nothing yet.
    """
    for v in range(0, vectors, 2):
        to, at = c + v * VECTOR_BYTES, b + v * VECTOR_BYTES
        by_pairs(rows, 1, to, c_stride, is_first, a, a_stride, at, b_stride, steps, 0, 0, 0, 0, 0, 0, 0, 0)


@operation(types.void, *[types.int64] * 7)
def _multiply_keys(
    builder: Any, to: Any, places: Any, offset: Any, k_stride: Any, query: Any, q_stride: Any, steps: Any
) -> None:
    """K Qᵀ for four times 16 keys of one head, each at an address of its own."""
    blocks = []
    for tile in _KEY_SUMS:
        emit_tile(builder, "tilezero", tile)
        blocks.append(builder.add(builder.load(emit.pointer(builder, I64, places, int64(8 * tile))), offset))
    q_step = builder.mul(q_stride, int64(STEPS))
    with cgutils.for_range(builder, steps) as loop:
        column = builder.mul(loop.index, int64(LINE))
        row = builder.add(query, builder.mul(loop.index, q_step))
        emit_tile(builder, "tileloadd64", _QUERY, emit.byte_pointer(builder, row), q_stride)
        for tile, block in zip(_KEY_SUMS, blocks, strict=True):
            emit_tile(
                builder, "tileloadd64", _KEY, emit.byte_pointer(builder, builder.add(block, column)), k_stride
            )
            emit_tile(builder, "tdpbf16ps", tile, _KEY, _QUERY)
    for tile in _KEY_SUMS:
        place = builder.add(to, builder.mul(q_stride, int64(TILE_ROWS * tile)))
        emit_tile(builder, "tilestored64", tile, emit.byte_pointer(builder, place), q_stride)


def _apart(builder: Any, vectors: list[Any]) -> list[Any]:
    """Vectors of every so-manieth number of some that lie one behind the other."""
    if len(vectors) == 1:
        return vectors
    found = []
    for first in range(2):
        lanes = ir.Constant(INTS, [2 * lane + first for lane in range(LANES)])
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        found.append(_apart(builder, [builder.shuffle_vector(*pair, lanes) for pair in pairs]))
    return [x for both in zip(*found, strict=True) for x in both]


def _turner(columns: int) -> Any:
    @operation(types.void, types.int64, types.int64, types.int64)
    def turn(builder: Any, to: Any, stride: Any, source: Any) -> None:
        places = [builder.add(source, int64(VECTOR_BYTES * c)) for c in range(columns)]
        rows = _apart(builder, [emit.load(builder, FLOAT32, place) for place in places])
        for r, row in enumerate(rows):
            emit.store(builder, FLOAT32, builder.add(to, builder.mul(stride, int64(r))), row)

    return turn


_turn_2, _turn_4, _turn_8, _turn_16 = map(_turner, (2, 4, 8, 16))


@function
def whole_keys(count):
    """So many keys rounded up to those that a product of tiles goes over."""
    return (count + KEYS - 1) // KEYS * KEYS


@function
def columns_for(rows):
    """1, 2, 4, 8 or 16, no less than rows."""
    columns = 1
    while columns < rows:
        columns *= 2
    return columns


@function
def _score_keys(
    scores, keys, offset, head_stride, key_stride, queries, columns, head_dim, heads, rows, turned
):
    """Scores of every head's rows with TILE keys; some rows behind the last head's are written too.

    keys: where four times 16 keys are. queries: Qᵀ of every head. turned: memory for scores the other way.
    """
    for head in range(heads):
        to, at = scores + head * rows * TILE_BYTES, offset + head * head_stride
        query, scored = queries + 2 * head * columns * head_dim, turned if columns > 1 else to
        _multiply_keys(scored, keys, at, key_stride, query, 4 * columns, head_dim // KEYS)
        if columns == 1:
            continue
        for block in range(len(_KEY_SUMS)):
            place, source = to + block * VECTOR_BYTES, turned + block * VECTOR_BYTES * columns
            if columns == 2:
                _turn_2(place, TILE_BYTES, source)
            elif columns == 4:
                _turn_4(place, TILE_BYTES, source)
            elif columns == 8:
                _turn_8(place, TILE_BYTES, source)
            else:
                _turn_16(place, TILE_BYTES, source)


@function
def clear_pairs(to, stride, skip, count, num_vectors):
    """Zeros for what is multiplied before the first and behind the last pair of V, whose weights are 0."""
    for pair in range(skip // KEYS * LANES, skip // 2):
        fill(to + pair * stride, num_vectors, ZERO)
    for pair in range((count + 1) // 2, whole_keys(count) // 2):
        fill(to + pair * stride, num_vectors, ZERO)


@function
def add_by_tiles(sums, num_vectors, weights, values, value_stride, rows, skip, count):
    """To sums of rows V of a tile's keys from `skip` to `count` by their weights."""
    first, c_stride = skip // KEYS, num_vectors * VECTOR_BYTES
    steps, at = whole_keys(count) // KEYS - first, values + LANES * first * value_stride
    multiply_tiles(
        rows, num_vectors, sums, c_stride, 0, weights + LINE * first, TILE_BYTES, at, value_stride, steps
    )


def in_place_bytes(num_rows: int, head_dim: int) -> int:
    """Memory for `attend_in_place` with so many rows, all heads together, or for `configure_rows`."""
    return 3 * LINE + TILE * LINE + 2 * num_rows * 2 * head_dim


@function
def prepare_in_place(memory, queries, heads, rows, head_dim):
    """How tiles are configured for either product, and Qᵀ, for a unit's tiles."""
    columns = columns_for(rows)
    write_settings(memory, TILE_ROWS, TILE_ROWS)
    for tile in (*_KEY_SUMS, _QUERY):
        set_byte(memory + 16 + 2 * tile, 4 * columns)
    write_settings(memory + LINE, rows, 1)
    to = memory + 2 * LINE + TILE * LINE
    for _ in range(heads):
        for row in range(rows):
            for word in range(head_dim // 2):
                set_int(to + 4 * (word * columns + row), get_int(queries + 4 * word))
            queries += 2 * head_dim
        to += 2 * head_dim * columns


@function
def attend_in_place(
    args, view, state, memory, keys, values, addresses, blocks, heads, seq, tile, skip, count, hidden,
    ahead,
):  # fmt: skip
    """A tile's keys with the rows of one token: K is read where it lies if it is bfloat16, else brought into
    memory, as V is head by head.

    memory: what is prepared. keys: room for all heads' K, values: for a head's V, blocks: for four addresses.
    addresses: where K and V of each of the tile's tokens are.
    """
    rows, vectors, turned = view.rows, state.num_vectors, memory + 2 * LINE
    offset = view.first_head * args.key_head_stride
    head_stride, stride = args.key_head_stride, args.key_token_stride
    if args.cache_kind == BFLOAT16:
        fill_blocks(args, seq, tile, skip, count, blocks)
    else:
        stride = 2 * heads * args.head_dim + LINE
        copy_pairs(
            args.cache_kind, keys, stride, addresses, offset, skip, count, heads, head_stride, args.head_dim
        )
        offset, head_stride = 0, 2 * args.head_dim
        for block in range(len(_KEY_SUMS)):
            set_long(blocks + 8 * block, keys + TILE_ROWS * block * stride)
    configure(memory)
    _score_keys(
        state.scores, blocks, offset, head_stride, stride, turned + TILE * LINE, columns_for(rows),
        args.head_dim, heads, rows, turned,
    )  # fmt: skip
    weigh(args, view, state, 0, heads * rows, tile, count, whole_keys(count), hidden, True, ahead)
    configure(memory + LINE)
    offset, stride = view.first_head * args.value_head_stride, vectors * VECTOR_BYTES + LINE
    for head in range(heads):
        pair_rows(
            args.cache_kind, values, stride, addresses + 8 * TILE, offset, skip, count, 1, 0, args.value_dim,
            args.value_dim,
        )  # fmt: skip
        clear_pairs(values, stride, skip, count, vectors)
        weights = state.scores + head * rows * TILE_BYTES
        sums = state.sums + head * rows * vectors * VECTOR_BYTES
        add_by_tiles(sums, vectors, weights, values, stride, rows, skip, count)
        offset += args.value_head_stride
