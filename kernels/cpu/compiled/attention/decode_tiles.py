"""Register tiles of a decode: products of a few query rows with K and V where they lie in the cache.

Each sum is the same chain as in scratch memory: a score's in the order of the columns, an output's in the
order of the keys. Meanwhile the memory that is read next is prefetched: the cache's blocks are scattered, so
that the CPU does not guess where it is.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ...formats import BFLOAT16, BFLOAT16_PAIRS, FLOAT32, INT8, ITEM_SIZES
from ...target import HAS_DOT, LANES, LINE, VECTOR_BYTES
from ..simd import emit
from ..simd.emit import F32, I64, int64, operation
from ..simd.vectors import function, missing

_MANY_REGISTERS = LANES == 16  # AVX-512 has twice as many


def _key_tile(rows: int, kind: int) -> Any:
    """Make a function that computes the scores of so many rows with LANES keys.

    keys: where the keys' addresses lie side by side; ahead: LANES addresses of which the same columns are
    prefetched, a few cache lines with each step. A step is LANES columns, transposed in registers.
    BFLOAT16_PAIRS: a column is a pair of bfloat16, and the last step may have half as many.
    """
    stored, multiply_add = (FLOAT32, emit.dot) if kind == BFLOAT16_PAIRS else (kind, emit.fma)
    step_bytes = LANES * ITEM_SIZES[stored]
    num_fetched = max(1, LANES * step_bytes // LINE)  # lines of each step

    @operation(types.void, *[types.int64] * 9)
    def key_tile(
        builder: Any, scores: Any, stride: Any, queries: Any, q_stride: Any, keys: Any, offset: Any,
        depth: Any, ahead: Any, ahead_offset: Any,
    ) -> None:  # fmt: skip
        longs = [builder.load(emit.pointer(builder, I64, keys, int64(8 * lane))) for lane in range(LANES)]
        places = [builder.add(address, offset) for address in longs]
        sums = [cgutils.alloca_once_value(builder, emit.constant(0.0)) for _ in range(rows)]

        def fetch(first: Any, count: int, step: Any) -> None:
            for lane in range(count):
                other = builder.load(emit.pointer(builder, I64, ahead, first, int64(8 * lane)))
                emit.prefetch(builder, builder.add(builder.add(other, ahead_offset), step))

        def add_columns(step: Any, query_step: Any, first: int) -> None:
            columns = emit.transpose(
                builder, [emit.load(builder, stored, builder.add(p, step)) for p in places]
            )
            query = builder.add(queries, query_step)
            for lane, column in [*enumerate(columns)][first:]:
                for r, total in enumerate(sums):
                    at = builder.add(query, builder.mul(q_stride, int64(r)))
                    number = builder.load(emit.pointer(builder, F32, at, int64(4 * lane)), align=4)
                    now = builder.load(total)
                    builder.store(multiply_add(builder, emit.splat(builder, number), column, now), total)

        with cgutils.for_range(builder, builder.udiv(depth, int64(LANES))) as loop:
            step = builder.mul(loop.index, int64(step_bytes))
            first = builder.mul(builder.urem(loop.index, int64(LANES // num_fetched)), int64(8 * num_fetched))
            fetch(first, num_fetched, step)
            add_columns(step, builder.mul(loop.index, int64(VECTOR_BYTES)), 0)
        if kind == BFLOAT16_PAIRS:
            with builder.if_then(builder.trunc(builder.udiv(depth, int64(LANES // 2)), ir.IntType(1))):
                step = builder.mul(builder.sub(depth, int64(LANES)), int64(4))
                fetch(int64(0), LANES, builder.add(step, int64(step_bytes // 2)))
                add_columns(step, step, LANES // 2)
        for r, total in enumerate(sums):
            at = builder.add(scores, builder.mul(stride, int64(r)))
            emit.store(builder, FLOAT32, at, builder.load(total))

    return key_tile


def _value_tile(rows: int, vectors: int, kind: int) -> Any:
    """Make a function that adds V, times the weights, to so many vectors of the outputs of so many rows.

    values: where the keys' addresses lie side by side; ahead: as many addresses, of which the same vectors
    are prefetched. BFLOAT16_PAIRS: a step is two keys, whose weights are bfloat16.
    """
    where = [(r, v) for r in range(rows) for v in range(vectors)]
    keys_per_step, multiply_add = (2, emit.dot) if kind == BFLOAT16_PAIRS else (1, emit.fma)
    size = LANES * ITEM_SIZES[BFLOAT16 if kind == BFLOAT16_PAIRS else kind]

    def read(builder: Any, places: list[Any]) -> list[Any]:
        """Read the vectors of a key, or the interleaved ones of two keys."""
        if kind != BFLOAT16_PAIRS:
            return [emit.load(builder, kind, builder.add(places[0], int64(v * size))) for v in range(vectors)]
        return [
            emit.load_pairs(builder, BFLOAT16, *(builder.add(place, int64(v * size)) for place in places))
            for v in range(vectors)
        ]

    @operation(types.void, *[types.int64] * 9)
    def value_tile(
        builder: Any, out: Any, stride: Any, weights: Any, w_stride: Any, values: Any, offset: Any,
        count: Any, ahead: Any, ahead_offset: Any,
    ) -> None:  # fmt: skip
        def place(r: int, v: int) -> Any:
            return builder.add(builder.add(out, builder.mul(stride, int64(r))), int64(v * VECTOR_BYTES))

        sums = {p: cgutils.alloca_once_value(builder, emit.load(builder, FLOAT32, place(*p))) for p in where}
        with cgutils.for_range(builder, count) as loop:
            keys = [
                builder.add(builder.mul(loop.index, int64(8 * keys_per_step)), int64(8 * i))
                for i in range(keys_per_step)
            ]
            places = [
                builder.add(builder.load(emit.pointer(builder, I64, values, key)), offset) for key in keys
            ]
            for key in keys:
                other = builder.add(builder.load(emit.pointer(builder, I64, ahead, key)), ahead_offset)
                for byte in range(0, vectors * size, LINE):
                    emit.prefetch(builder, builder.add(other, int64(byte)))
            parts = read(builder, places)
            for r in range(rows):
                at = builder.add(weights, builder.mul(w_stride, int64(r)))
                number = builder.load(
                    emit.pointer(builder, F32, at, builder.mul(loop.index, int64(4))), align=4
                )
                same = emit.splat(builder, number)
                for v, part in enumerate(parts):
                    builder.store(multiply_add(builder, same, part, builder.load(sums[r, v])), sums[r, v])
        for p in where:
            emit.store(builder, FLOAT32, place(*p), builder.load(sums[p]))

    return value_tile


def _of_kind(kind: int) -> tuple[Any, Any]:
    """Make score(...) and add(...), which compute `_key_tile` and `_value_tile` for any number of rows."""
    key_8, key_4, key_2, key_1 = (_key_tile(rows, kind) for rows in (8, 4, 2, 1))
    value_8x2, value_4x2, value_4x1 = (_value_tile(*tile, kind) for tile in ((8, 2), (4, 2), (4, 1)))
    value_2x4 = _value_tile(2, 4, kind)
    value_2x1 = _value_tile(2, 1, kind)
    value_1x8, value_1x6, value_1x3, value_1x1 = (_value_tile(1, vectors, kind) for vectors in (8, 6, 3, 1))
    size = LANES * ITEM_SIZES[BFLOAT16 if kind == BFLOAT16_PAIRS else kind]

    @function
    def score(scores, stride, queries, q_stride, keys, offset, depth, rows, ahead, ahead_offset):
        row = 0
        while row < rows:
            to = scores + row * stride
            own = queries + row * q_stride
            left = rows - row
            if left >= 8 and _MANY_REGISTERS:
                key_8(to, stride, own, q_stride, keys, offset, depth, ahead, ahead_offset)
                row += 8
            elif left >= 4:
                key_4(to, stride, own, q_stride, keys, offset, depth, ahead, ahead_offset)
                row += 4
            elif left >= 2:
                key_2(to, stride, own, q_stride, keys, offset, depth, ahead, ahead_offset)
                row += 2
            else:
                key_1(to, stride, own, q_stride, keys, offset, depth, ahead, ahead_offset)
                row += 1

    @function
    def add(sums, stride, weights, w_stride, values, offset, count, rows, vectors, ahead, ahead_offset):
        row = 0
        while row < rows:
            to = sums + row * stride
            own = weights + row * w_stride
            at = offset
            left = vectors
            moved = ahead_offset - offset
            if rows - row >= 8 and left % 2 == 0 and _MANY_REGISTERS:
                while left:
                    value_8x2(to, stride, own, w_stride, values, at, count, ahead, at + moved)
                    to = to + 2 * VECTOR_BYTES
                    at = at + 2 * size
                    left = left - 2
                row += 8
            elif rows - row >= 4:
                while left >= 2:
                    value_4x2(to, stride, own, w_stride, values, at, count, ahead, at + moved)
                    to = to + 2 * VECTOR_BYTES
                    at = at + 2 * size
                    left = left - 2
                if left:
                    value_4x1(to, stride, own, w_stride, values, at, count, ahead, at + moved)
                row += 4
            elif rows - row >= 2:
                while left >= 4:
                    value_2x4(to, stride, own, w_stride, values, at, count, ahead, at + moved)
                    to = to + 4 * VECTOR_BYTES
                    at = at + 4 * size
                    left = left - 4
                while left:
                    value_2x1(to, stride, own, w_stride, values, at, count, ahead, at + moved)
                    to = to + VECTOR_BYTES
                    at = at + size
                    left = left - 1
                row += 2
            else:
                while left >= 8:
                    value_1x8(to, stride, own, w_stride, values, at, count, ahead, at + moved)
                    to = to + 8 * VECTOR_BYTES
                    at = at + 8 * size
                    left = left - 8
                while left >= 6:
                    value_1x6(to, stride, own, w_stride, values, at, count, ahead, at + moved)
                    to = to + 6 * VECTOR_BYTES
                    at = at + 6 * size
                    left = left - 6
                while left >= 3:
                    value_1x3(to, stride, own, w_stride, values, at, count, ahead, at + moved)
                    to = to + 3 * VECTOR_BYTES
                    at = at + 3 * size
                    left = left - 3
                while left:
                    value_1x1(to, stride, own, w_stride, values, at, count, ahead, at + moved)
                    to = to + VECTOR_BYTES
                    at = at + size
                    left = left - 1
                row += 1

    return score, add


score_float, add_float = _of_kind(FLOAT32)
score_bfloat, add_bfloat = _of_kind(BFLOAT16)
score_int8, add_int8 = _of_kind(INT8)
score_pairs, add_pairs = _of_kind(BFLOAT16_PAIRS) if HAS_DOT else (missing, missing)
