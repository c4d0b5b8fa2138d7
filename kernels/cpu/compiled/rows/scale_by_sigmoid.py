"""The multiplication by the sigmoid of a gate."""

from typing import Any

from ...formats import ITEM_SIZES
from ...rows.scales import SCALE_BY_SIGMOID
from ...target import LANES
from ..kernels import each_unit
from ..simd.memory import some_of
from ..simd.vectors import function, gated_by
from .row_kernel import by_kind, rows_of_unit


@by_kind
def _scale_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def scale_row(args, row):
        x = args.x + row * args.x_stride
        gate = args.gate + row * args.gate_stride
        for i in range(0, args.size, LANES):
            at = i * size_of
            left = args.size - i
            store(x + at, gated_by(load(x + at, left), load(gate + at, left)), left)

    return scale_row


@each_unit(SCALE_BY_SIGMOID)
def _scale_by_sigmoid_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _scale_row(args, row)
