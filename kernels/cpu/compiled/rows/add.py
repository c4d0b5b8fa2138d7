"""The addition to the residual of what no norm adds: outputs of attention that runs beside an MLP."""

from typing import Any

from ...formats import ITEM_SIZES
from ...rows.row_kernels import ADD
from ...target import LANES
from ..kernels import each_unit
from ..simd import vectors
from ..simd.memory import some_of
from ..simd.vectors import function
from .row_kernel import by_kind, rows_of_unit


@by_kind
def _add_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def add_row(args, row):
        x = args.x + row * args.x_stride
        out = args.out + row * args.out_stride
        for i in range(0, args.size, LANES):
            at = i * size_of
            left = args.size - i
            store(out + at, vectors.add(load(out + at, left), load(x + at, left)), left)

    return add_row


@each_unit(ADD)
def _add_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _add_row(args, row)
