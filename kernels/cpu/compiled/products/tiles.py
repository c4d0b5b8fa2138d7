"""Matrix products by register tiles: blocks of C whose accumulators stay in registers.

Every number of C is one chain of fused multiply-adds in the order of the depth, whatever the tile, so a row's
bits do not depend on the rows beside it. Addresses are int64, strides of rows are in bytes.
"""

from typing import Any, NamedTuple

from numba import types
from numba.core import cgutils

from ...formats import BFLOAT16, FLOAT16, FLOAT32, FORMATS, GATED, ITEM_SIZES
from ...target import HAS_DOT, LANES, LINE, VECTOR_BYTES
from ...variants import LINEAR_KERNEL
from ..simd import emit
from ..simd.emit import F32, fields_type, int64, operation
from ..simd.vectors import function, missing
from .kinds import for_kinds, step_bytes_of
from .reader import Reader


class _Tile:
    """Accumulators of A B for rows and vectors of C, float32, which LLVM keeps in registers."""

    def __init__(self, rows: int, vectors: int, *, pairs: bool = False) -> None:
        self.rows = rows
        self.vectors = vectors
        self.places = [(r, v) for r in range(rows) for v in range(vectors)]
        self.multiply_add = emit.dot if pairs else emit.fma

    def zeros(self, builder: Any) -> dict[tuple[int, int], Any]:
        """Make accumulators of 0."""
        return {place: cgutils.alloca_once_value(builder, emit.constant(0.0)) for place in self.places}

    def load(self, builder: Any, sums: Any, c: Any, stride: Any) -> None:
        """Load the values of C into the accumulators, so that the product is added to them."""
        for r, v in self.places:
            place = _place(builder, c, stride, r, v * VECTOR_BYTES)
            builder.store(emit.load(builder, FLOAT32, place), sums[r, v])

    def add(self, builder: Any, sums: Any, a: Any, a_stride: Any, index: Any, row: list[Any]) -> None:
        """Add the products of one step of the depth: a column of A and this row of B."""
        column = builder.add(a, builder.mul(index, int64(4)))
        multiply_add = self.multiply_add
        for r in range(self.rows):
            place = emit.pointer(builder, F32, _place(builder, column, a_stride, r))
            same = emit.splat(builder, builder.load(place, align=2))
            for v in range(self.vectors):
                now = builder.load(sums[r, v])
                builder.store(multiply_add(builder, same, row[v], now), sums[r, v])


def _place(builder: Any, address: Any, stride: Any, row: Any, offset: int = 0) -> Any:
    number = int64(row) if isinstance(row, int) else row
    place = builder.add(address, builder.mul(stride, number))
    return builder.add(place, int64(offset))


def _register_tile(rows: int, vectors: int, *, pairs: bool) -> Any:
    """Make C += A B for so many rows and vectors of C; C = A B where `at_first` is not 0."""
    tile = _Tile(rows, vectors, pairs=pairs)

    @operation(types.void, *[types.int64] * 8)
    def register_tile(
        builder: Any, at_first: Any, c: Any, c_stride: Any, a: Any, a_stride: Any, b: Any, b_stride: Any,
        depth: Any,
    ) -> None:  # fmt: skip
        sums = tile.zeros(builder)
        with builder.if_then(builder.not_(_differ(builder, at_first, 0))):
            tile.load(builder, sums, c, c_stride)
        with cgutils.for_range(builder, depth) as loop:
            places = [_place(builder, b, b_stride, loop.index, v * VECTOR_BYTES) for v in range(vectors)]
            row = [emit.load(builder, FLOAT32, place) for place in places]
            tile.add(builder, sums, a, a_stride, loop.index, row)
        for r, v in tile.places:
            to = _place(builder, c, c_stride, r, v * VECTOR_BYTES)
            emit.store(builder, FLOAT32, to, builder.load(sums[r, v]))

    return register_tile


class PanelArgs(NamedTuple):
    """The arguments that all register tiles of a panel's product share; see `_panel_tile`."""

    c_stride: int
    to_stride: int
    to_kind: int  # kind of the result, plus GATED
    scale: int  # address of a factor for each output, or of the factors of the weight's reader; 0: none
    bias: int  # address of a summand for each output; 0: none
    a_stride: int
    b: int
    b_stride: int
    depth: int  # steps
    pace: int  # bytes to prefetch with each step


def _panel_tile(rows: int, weight: Reader) -> Any:
    """Make to = scale (C + A B) + bias for so many rows and two vectors of C, which is float32.

    The epilogue of a gated product stores silu of the first vector times the second.

    Prefetches what it will write, and `pace` bytes from `ahead` on with each step: many lines at once would
    delay the loads of A.
    """
    tile = _Tile(rows, 2, pairs=weight.in_pairs)
    fetched = range(0, step_bytes_of(weight), LINE)

    def panel_tile(builder: Any, c: Any, to: Any, a: Any, ahead: Any, shared: Any) -> None:
        c_stride, to_stride, to_kind, scale, bias, a_stride, b, b_stride, depth, pace = cgutils.unpack_tuple(
            builder, shared
        )
        for r in range(rows):
            emit.prefetch(builder, _place(builder, to, to_stride, r), write=True)
        with builder.if_then(builder.not_(_differ(builder, to_kind, FLOAT32))):
            for r in range(rows):
                # Rows of narrower numbers end in the first line; the next is another panel's.
                for at in range(LINE, 2 * VECTOR_BYTES, LINE):
                    emit.prefetch(builder, _place(builder, to, to_stride, r, at), write=True)
        sums = tile.zeros(builder)
        tile.load(builder, sums, c, c_stride)

        def step(index: Any, factors: Any) -> None:
            for at in fetched:
                emit.prefetch(builder, _place(builder, ahead, pace, index, at))
            row = weight.read(builder, _place(builder, b, b_stride, index), factors)
            tile.add(builder, sums, a, a_stride, index, row)

        weight.each_step(builder, b, b_stride, scale, depth, step)
        ends = [(scale, builder.fmul)] if weight.has_scales else []
        for factors, combine in (*ends, (bias, builder.fadd)):
            with builder.if_then(_differ(builder, factors, 0)):
                for r, v in tile.places:
                    factor = emit.load(builder, FLOAT32, builder.add(factors, int64(v * VECTOR_BYTES)))
                    builder.store(combine(builder.load(sums[r, v]), factor), sums[r, v])
        gated = _differ(builder, builder.and_(to_kind, int64(GATED)), 0)
        with builder.if_then(gated):
            for r in range(rows):
                gate, up = (builder.load(sums[r, v]) for v in range(2))
                builder.store(builder.fmul(emit.silu(builder, gate), up), sums[r, 0])

        def write(own: int, v: int) -> None:
            for r in range(rows):
                place = _place(builder, to, to_stride, r, v * LANES * ITEM_SIZES[own])
                emit.store(builder, own, place, builder.load(sums[r, v]))

        number = builder.and_(to_kind, int64(GATED - 1))
        for own in (FLOAT32, FLOAT16, BFLOAT16):
            with builder.if_then(builder.not_(_differ(builder, number, own))):
                write(own, 0)
                with builder.if_then(builder.not_(gated)):
                    write(own, 1)

    return operation(types.void, *[types.int64] * 4, fields_type(PanelArgs))(panel_tile)


def _differ(builder: Any, x: Any, y: int) -> Any:
    return builder.icmp_signed("!=", x, int64(y))


def _product(*, pairs: bool) -> Any:
    """Make C += A B in float32: C [rows, vectors * LANES], A [rows, depth], B [depth, vectors * LANES].

    C = A B where `at_first` is not 0. pairs: A and B hold pairs of bfloat16, neighbours in the depth.
    """
    tile_12x1, tile_6x4, tile_6x3, tile_6x2, tile_6x1, tile_4x2, tile_4x1, tile_2x4, tile_2x1 = (
        _register_tile(*shape, pairs=pairs)
        for shape in ((12, 1), (6, 4), (6, 3), (6, 2), (6, 1), (4, 2), (4, 1), (2, 4), (2, 1))
    )
    tile_1x8, tile_1x2, tile_1x1 = (_register_tile(*shape, pairs=pairs) for shape in ((1, 8), (1, 2), (1, 1)))

    @function
    def multiply_add(at_first, c, c_stride, a, a_stride, b, b_stride, rows, vectors, depth):
        row = 0
        # Rows that are whole pages apart share few sets of the L1 cache: six of them and B would not fit.
        most = 12 if a_stride % 4096 else 4
        while row < rows:
            at_c = c + row * c_stride
            at_a = a + row * a_stride
            at_b = b
            left = vectors
            some = min(most, rows - row)
            # As many chains as hide the latency of a multiply-add, and as there are registers for.
            if LANES == 16 and some == 12 and vectors == 1:
                tile_12x1(at_first, at_c, c_stride, at_a, a_stride, at_b, b_stride, depth)
                row += 12
            elif LANES == 16 and some >= 6:
                while left >= 4:
                    tile_6x4(at_first, at_c, c_stride, at_a, a_stride, at_b, b_stride, depth)
                    at_c = at_c + 4 * VECTOR_BYTES
                    at_b = at_b + 4 * VECTOR_BYTES
                    left = left - 4
                if left == 3:
                    tile_6x3(at_first, at_c, c_stride, at_a, a_stride, at_b, b_stride, depth)
                elif left == 2:
                    tile_6x2(at_first, at_c, c_stride, at_a, a_stride, at_b, b_stride, depth)
                elif left:
                    tile_6x1(at_first, at_c, c_stride, at_a, a_stride, at_b, b_stride, depth)
                row += 6
            elif some >= 6 and vectors % 2 == 0:
                while left:
                    tile_6x2(at_first, at_c, c_stride, at_a, a_stride, at_b, b_stride, depth)
                    at_c = at_c + 2 * VECTOR_BYTES
                    at_b = at_b + 2 * VECTOR_BYTES
                    left = left - 2
                row += 6
            elif some >= 4:
                while left >= 2:
                    tile_4x2(at_first, at_c, c_stride, at_a, a_stride, at_b, b_stride, depth)
                    at_c = at_c + 2 * VECTOR_BYTES
                    at_b = at_b + 2 * VECTOR_BYTES
                    left = left - 2
                if left:
                    tile_4x1(at_first, at_c, c_stride, at_a, a_stride, at_b, b_stride, depth)
                row += 4
            elif some >= 2:
                while left >= 4:
                    tile_2x4(at_first, at_c, c_stride, at_a, a_stride, at_b, b_stride, depth)
                    at_c = at_c + 4 * VECTOR_BYTES
                    at_b = at_b + 4 * VECTOR_BYTES
                    left = left - 4
                while left:
                    tile_2x1(at_first, at_c, c_stride, at_a, a_stride, at_b, b_stride, depth)
                    at_c = at_c + VECTOR_BYTES
                    at_b = at_b + VECTOR_BYTES
                    left = left - 1
                row += 2
            else:
                while left >= 8:
                    tile_1x8(at_first, at_c, c_stride, at_a, a_stride, at_b, b_stride, depth)
                    at_c = at_c + 8 * VECTOR_BYTES
                    at_b = at_b + 8 * VECTOR_BYTES
                    left = left - 8
                while left >= 2:
                    tile_1x2(at_first, at_c, c_stride, at_a, a_stride, at_b, b_stride, depth)
                    at_c = at_c + 2 * VECTOR_BYTES
                    at_b = at_b + 2 * VECTOR_BYTES
                    left = left - 2
                if left:
                    tile_1x1(at_first, at_c, c_stride, at_a, a_stride, at_b, b_stride, depth)
                row += 1

    return multiply_add


MOST_TILE_ROWS = 6


def _panel_product(weight: Reader) -> Any:
    """Make the product of any number of rows: C [rows, 2 * LANES], A [rows, depth], B [depth, 2 * LANES].

    It prefetches from `ahead` on, pace * depth bytes for each register tile.
    """
    tile_6, tile_4, tile_3, tile_2, tile_1 = (_panel_tile(n, weight) for n in (MOST_TILE_ROWS, 4, 3, 2, 1))

    @function
    def multiply_panel(rows, c, to, a, ahead, same):
        while rows > 0:
            if rows >= 6:
                tile_6(c, to, a, ahead, same)
                step = 6
            elif rows >= 4:
                tile_4(c, to, a, ahead, same)
                step = 4
            elif rows == 3:
                tile_3(c, to, a, ahead, same)
                step = 3
            elif rows == 2:
                tile_2(c, to, a, ahead, same)
                step = 2
            else:
                tile_1(c, to, a, ahead, same)
                step = 1
            c = c + step * same.c_stride
            to = to + step * same.to_stride
            a = a + step * same.a_stride
            rows = rows - step
            ahead = ahead + same.pace * same.depth

    return multiply_panel


multiply_add = _product(pairs=False)
multiply_add_pairs = _product(pairs=True) if HAS_DOT else missing
# multiply_panel(kind, rows, c, to, a, ahead, same: PanelArgs) for a weight of any format.
multiply_panel = for_kinds(_panel_product, [*FORMATS], LINEAR_KERNEL)
