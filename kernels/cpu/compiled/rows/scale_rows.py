"""The multiplication of rows by a factor each: queries whose scale depends on their position."""

from typing import Any

from ...formats import ITEM_SIZES
from ...rows.scales import SCALE_ROWS
from ...target import LANES
from ..kernels import each_unit
from ..simd.memory import get_float, some_of
from ..simd.vectors import function, multiply, splat
from .row_kernel import by_kind, rows_of_unit


@by_kind
def _scale_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def scale_row(args, row):
        x = args.x + row * args.x_stride
        factor = splat(get_float(args.factors + 4 * row))
        for i in range(0, args.size, LANES):
            at = i * size_of
            left = args.size - i
            store(x + at, multiply(load(x + at, left), factor), left)

    return scale_row


@each_unit(SCALE_ROWS)
def _scale_rows_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _scale_row(args, row)
