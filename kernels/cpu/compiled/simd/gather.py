"""Gather rows of K and V into scratch memory, and reduce LANES rows at a time."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from ...formats import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, INT8, ITEM_SIZES
from ...target import CPU_HAS_TILES, LANES, LINE
from ...variants import ATTENTION_KERNEL
from . import emit
from .emit import INTS, int64, operation
from .memory import LOADERS, get_long, item_size, load, load_as, store, store_as
from .vectors import dispatch, dispatch_for, function, multiply, splat, vector


def _copier(kind):
    """Make a function that copies rows of K or V of one kind, token by token with all heads of the unit.

    That is the order of memory. float32 is copied too: rows that are a power of two apart share few sets of
    the L1 cache, so every register tile would read them from further away.
    """
    load_vector, _ = LOADERS[kind]
    size = ITEM_SIZES[kind]

    @function
    def copy(to, stride, addresses, offset, skip, count, num_heads, head_stride, columns, width):
        whole = columns // LANES * LANES
        for place in range(skip, count):
            source = get_long(addresses + 8 * place) + offset
            at = to + place * stride
            for _ in range(num_heads):
                for d in range(0, whole, LANES):
                    store(at + 4 * d, load_vector(source + d * size))
                if whole < columns:  # the last columns are copied twice
                    store(at + 4 * (columns - LANES), load_vector(source + (columns - LANES) * size))
                source += head_stride
                at += 4 * width

    return copy


_copy_float = _copier(FLOAT32)
# copy_rows(kind, to, stride, addresses, offset, skip, count, num_heads, head_stride, columns, width) copies
# rows of K or V from `skip` to `count` as float32, every head in `width` numbers.
_COPIERS = {FLOAT32: _copy_float, **{kind: _copier(kind) for kind in (BFLOAT16, FLOAT16, INT8, FLOAT8)}}
copy_rows = dispatch_for(ATTENTION_KERNEL, _COPIERS)


@function
def copy_words(to, source, words):
    """Copy at least LANES words of 4 bytes. The last vector may overlap the one before it."""
    for column in range(0, words, LANES):
        d = 4 * min(column, words - LANES)
        store(to + d, load(source + d))


def _narrower(kind):
    """Make a function that copies rows of K in 8 bits, as `_copier`, to bfloat16: without loss."""

    @operation(vector, types.int64)
    def load_narrow(builder: Any, address: Any) -> Any:
        both = emit.read(builder, 16, address)
        bytes_ = ir.VectorType(ir.IntType(8), LANES)
        eight = ir.Constant(both.type, [8] * LANES)
        parts = (builder.trunc(x, bytes_) for x in (both, builder.lshr(both, eight)))
        return emit.pairs(builder, *(emit.to_float32(builder, kind, x) for x in parts))

    @function
    def narrow(to, stride, addresses, offset, skip, count, num_heads, head_stride, columns):
        for place in range(skip, count):
            source = get_long(addresses + 8 * place) + offset
            at = to + place * stride
            for _ in range(num_heads):
                for d in range(0, columns, 2 * LANES):
                    store(at + 2 * d, load_narrow(source + d))
                source += head_stride
                at += 2 * columns

    return narrow


@function
def _copy_bfloat(to, stride, addresses, offset, skip, count, num_heads, head_stride, columns):
    words = columns // 2
    _copy_float(to, stride, addresses, offset, skip, count, num_heads, head_stride, words, words)


# copy_pairs(kind, to, stride, addresses, offset, skip, count, num_heads, head_stride, columns) copies rows of
# K from `skip` to `count` as bfloat16; rows of 8 bits have whole pairs of vectors.
_IN_PAIRS = (BFLOAT16, INT8, FLOAT8) if CPU_HAS_TILES else (BFLOAT16,)  # the others are for AMX
copy_pairs = dispatch({BFLOAT16: _copy_bfloat, **{kind: _narrower(kind) for kind in _IN_PAIRS[1:]}})


def _pairer(kind):
    """Make a function that copies rows of V, as `_copier`, in pairs of two rows."""
    size = ITEM_SIZES[kind]

    @operation(vector, types.int64, types.int64)
    def load_side_by_side(builder: Any, first: Any, second: Any) -> Any:
        return emit.load_pairs(builder, kind, first, second)

    @function
    def pair(to, stride, addresses, offset, skip, count, num_heads, head_stride, columns, width):
        for pair in range(skip // 2, (count + 1) // 2):
            first = get_long(addresses + 16 * pair) + offset
            second = get_long(addresses + 16 * pair + 8) + offset
            at = to + pair * stride
            for _ in range(num_heads):
                for column in range(0, columns, LANES):
                    d = min(column, columns - LANES)
                    store(at + 4 * d, load_side_by_side(first + size * d, second + size * d))
                first += head_stride
                second += head_stride
                at += 4 * width

    return pair


# pair_rows(kind, to, stride, addresses, offset, skip, count, num_heads, head_stride, columns, width) copies
# rows of V from `skip` to `count` as bfloat16, two at a time: the first number of both, then the second,
# and so on. The addresses must have whole pairs: an even row in front of `skip`, an odd one behind the
# last.
pair_rows = dispatch({kind: _pairer(kind) for kind in _IN_PAIRS})


@function
def copy_row(to_kind, to, from_kind, source, columns, factor):
    """Store factor times a row of at least LANES numbers.

    If the length is not a multiple of LANES, the last vector overlaps the one before it.
    """
    times = splat(factor)
    for column in range(0, columns, LANES):
        d = min(column, columns - LANES)
        x = load_as(from_kind, source + d * item_size(from_kind))
        store_as(to_kind, to + d * item_size(to_kind), multiply(x, times))


def _of_rows(builder: Any, rows: list[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """Reduce each of LANES vectors by halves, as `total` does. Lane i of the result is vector i's."""
    width = LANES
    while width > 1:
        width //= 2
        half = len(rows) // 2
        # Blocks of 2 * width lanes alternate between both vectors: `low` has first halves, `high` second
        # ones.
        places = [
            lane // width % 2 * LANES + lane // (2 * width) * 2 * width + lane % width
            for lane in range(LANES)
        ]
        low, high = (ir.Constant(INTS, [place + first for place in places]) for first in (0, width))
        pairs = [*zip(rows[:half], rows[half:], strict=True)]
        rows = [
            combine(builder.shuffle_vector(*pair, low), builder.shuffle_vector(*pair, high)) for pair in pairs
        ]
    return rows[0]


def _rows_at(builder: Any, address: Any) -> list[Any]:
    places = [builder.add(address, int64(4 * LANES * row)) for row in range(LANES)]
    return [emit.load(builder, FLOAT32, place) for place in places]


@operation(vector, types.int64)
def highest_of_rows(builder: Any, address: Any) -> Any:
    """Return the greatest lane of each of LANES vectors. If a lane is NaN, the result may be NaN."""

    def greater(x: Any, y: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", x, y), x, y)

    return _of_rows(builder, _rows_at(builder, address), greater)


@operation(vector, types.int64)
def totals_of_rows(builder: Any, address: Any) -> Any:
    """Return the sum of the lanes of each of LANES vectors."""
    return _of_rows(builder, _rows_at(builder, address), builder.fadd)


@operation(types.void, types.int64)
def fetch_line(builder: Any, address: Any) -> None:
    """Prefetch a cache line."""
    emit.prefetch(builder, address)


@function
def fetch_rows(addresses, offset, size, first, end):
    """Prefetch `size` bytes of each row, in the order of memory."""
    for place in range(first, end):
        row = get_long(addresses + 8 * place) + offset
        for line in range(row, row + size, LINE):
            fetch_line(line)
