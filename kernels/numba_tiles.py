"""Products of matrices for numba: tiles of the result that stay in registers.

Every number of a result is one chain of fused multiply-adds in the order of the depth, whatever the tile: the
bits of a row do not depend on how many rows are beside it. Addresses are int64, strides of rows in bytes.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .numba_memory import _ITEM_SIZES, BFLOAT16, FLOAT32, INT8, _load, _prefetch, _store
from .numba_vectors import _F32, _I64, _VECTOR, LANES, VECTOR_BYTES, _at, _call, _operation, _splat, function


def _register_tile(rows: int, vectors: int, kind: int, *, fetches: bool = False) -> Any:
    """C += A B for so many rows of C and vectors of them: float32, but for B.

    fetches: it also has memory from `ahead` on on its way to the caches, `pace` bytes with each step of the
    depth: many lines at once would keep those waiting that A is read from.
    """
    places = [(r, v) for r in range(rows) for v in range(vectors)]

    @_operation(types.void, *[types.int64] * 9)
    def register_tile(
        builder: Any,
        c: Any,
        c_stride: Any,
        a: Any,
        a_stride: Any,
        b: Any,
        b_stride: Any,
        depth: Any,
        ahead: Any,
        pace: Any,
    ) -> None:
        def at(address: Any, stride: Any, row: Any, offset: int = 0) -> Any:
            place = builder.add(address, builder.mul(stride, row))
            return builder.add(place, ir.Constant(_I64, offset))

        where = {(r, v): at(c, c_stride, ir.Constant(_I64, r), v * VECTOR_BYTES) for r, v in places}
        # LLVM keeps these in registers.
        sums = {p: cgutils.alloca_once_value(builder, _load(builder, FLOAT32, where[p])) for p in places}
        with cgutils.for_range(builder, depth) as loop:
            if fetches:
                _prefetch(builder, at(ahead, pace, loop.index))
            size = LANES * _ITEM_SIZES[kind]
            row = [_load(builder, kind, at(b, b_stride, loop.index, v * size)) for v in range(vectors)]
            column = builder.add(a, builder.mul(loop.index, ir.Constant(_I64, 4)))
            for r in range(rows):
                scalar = builder.load(_at(builder, _F32, at(column, a_stride, ir.Constant(_I64, r))), align=4)
                same = _splat(builder, scalar)
                for v in range(vectors):
                    now = builder.load(sums[r, v])
                    builder.store(
                        _call(builder, f"llvm.fma.v{LANES}f32", _VECTOR, same, row[v], now), sums[r, v]
                    )
        for p in places:
            _store(builder, FLOAT32, where[p], builder.load(sums[p]))

    return register_tile


def _product() -> Any:
    """C += A B in float32: C [rows, vectors * LANES], A [rows, depth], B [depth, vectors * LANES]."""
    tile_6x2, tile_4x2, tile_4x1 = (_register_tile(*shape, FLOAT32) for shape in ((6, 2), (4, 2), (4, 1)))
    tile_2x4, tile_2x1 = _register_tile(2, 4, FLOAT32), _register_tile(2, 1, FLOAT32)
    tile_1x8, tile_1x2, tile_1x1 = (_register_tile(1, vectors, FLOAT32) for vectors in (8, 2, 1))

    @function
    def multiply_add(c, c_stride, a, a_stride, b, b_stride, rows, vectors, depth):
        row = 0
        while row < rows:
            at_c, at_a, at_b, left = c + row * c_stride, a + row * a_stride, b, vectors
            # As many chains at a time as hide how long one multiply-add takes, in 16 registers. Rows that are
            # whole pages apart share few sets of the first cache: six of them and B would not fit.
            if rows - row >= 6 and vectors % 2 == 0 and a_stride % 4096:
                while left:
                    tile_6x2(at_c, c_stride, at_a, a_stride, at_b, b_stride, depth, 0, 0)
                    at_c, at_b, left = at_c + 2 * VECTOR_BYTES, at_b + 2 * VECTOR_BYTES, left - 2
                row += 6
            elif rows - row >= 4:
                while left >= 2:
                    tile_4x2(at_c, c_stride, at_a, a_stride, at_b, b_stride, depth, 0, 0)
                    at_c, at_b, left = at_c + 2 * VECTOR_BYTES, at_b + 2 * VECTOR_BYTES, left - 2
                if left:
                    tile_4x1(at_c, c_stride, at_a, a_stride, at_b, b_stride, depth, 0, 0)
                row += 4
            elif rows - row >= 2:
                while left >= 4:
                    tile_2x4(at_c, c_stride, at_a, a_stride, at_b, b_stride, depth, 0, 0)
                    at_c, at_b, left = at_c + 4 * VECTOR_BYTES, at_b + 4 * VECTOR_BYTES, left - 4
                while left:
                    tile_2x1(at_c, c_stride, at_a, a_stride, at_b, b_stride, depth, 0, 0)
                    at_c, at_b, left = at_c + VECTOR_BYTES, at_b + VECTOR_BYTES, left - 1
                row += 2
            else:
                while left >= 8:
                    tile_1x8(at_c, c_stride, at_a, a_stride, at_b, b_stride, depth, 0, 0)
                    at_c, at_b, left = at_c + 8 * VECTOR_BYTES, at_b + 8 * VECTOR_BYTES, left - 8
                while left >= 2:
                    tile_1x2(at_c, c_stride, at_a, a_stride, at_b, b_stride, depth, 0, 0)
                    at_c, at_b, left = at_c + 2 * VECTOR_BYTES, at_b + 2 * VECTOR_BYTES, left - 2
                if left:
                    tile_1x1(at_c, c_stride, at_a, a_stride, at_b, b_stride, depth, 0, 0)
                row += 1

    return multiply_add


MOST_TILE_ROWS = 6


def _panel_product(kind: int) -> Any:
    """C += A B of two vectors: C [rows, 2 * LANES], A [rows, depth], B [depth, 2 * LANES] of `kind`.

    It fetches what lies `ahead`, pace * depth bytes for each MOST_TILE_ROWS of its rows.
    """
    tile_6, tile_4, tile_2, tile_1 = (
        _register_tile(rows, 2, kind, fetches=True) for rows in (MOST_TILE_ROWS, 4, 2, 1)
    )

    @function
    def multiply_panel(c, c_stride, a, a_stride, b, b_stride, rows, depth, ahead, pace):
        row = 0
        while row < rows:
            at_c, at_a, left = c + row * c_stride, a + row * a_stride, rows - row
            if left >= 6:
                tile_6(at_c, c_stride, at_a, a_stride, b, b_stride, depth, ahead, pace)
                row += 6
            elif left >= 4:
                tile_4(at_c, c_stride, at_a, a_stride, b, b_stride, depth, ahead, pace)
                row += 4
            elif left >= 2:
                tile_2(at_c, c_stride, at_a, a_stride, b, b_stride, depth, ahead, pace)
                row += 2
            else:
                tile_1(at_c, c_stride, at_a, a_stride, b, b_stride, depth, ahead, pace)
                row += 1
            ahead += pace * depth

    return multiply_panel


multiply_add = _product()
multiply_panel, multiply_panel_bfloat, multiply_panel_int8 = map(_panel_product, (FLOAT32, BFLOAT16, INT8))
