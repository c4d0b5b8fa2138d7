"""The gated activation silu(gate) * up."""

from typing import Any

from ...formats import ITEM_SIZES
from ...rows.row_kernels import SILU_AND_MUL
from ...target import LANES
from ..kernels import each_unit
from ..simd.memory import some_of
from ..simd.vectors import function, multiply, silu
from .row_kernel import by_kind, rows_of_unit


@by_kind
def _silu_and_mul_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def silu_and_mul_row(args, row):
        size = args.size
        gate = args.x + row * args.x_stride
        out = args.out + row * size * size_of
        for i in range(0, size, LANES):
            at = i * size_of
            left = size - i
            up = load(gate + size * size_of + at, left)
            store(out + at, multiply(silu(load(gate + at, left)), up), left)

    return silu_and_mul_row


@each_unit(SILU_AND_MUL)
def _silu_and_mul_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _silu_and_mul_row(args, row)
