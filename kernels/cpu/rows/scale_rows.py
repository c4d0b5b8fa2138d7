"""The multiplication of rows by a factor each: queries whose scale depends on their position."""

from typing import Any

from torch import Tensor

from ... import reference
from ...arguments import checked
from ..launch.tasks import Task
from ..simd.memory import get_float, some_of
from ..simd.numbers import ITEM_SIZES
from ..simd.vectors import LANES, function, multiply, splat
from .row_kernel import by_kind, has_regular_rows, rows_of_unit, run_on_rows

SCALE_ROWS = Task(("x", "factors"), ("kind", "num_rows", "size", "x_stride", "rows_per_unit"))


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


@SCALE_ROWS.each_unit
def _scale_rows_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _scale_row(args, row)


@checked
def scale_rows(x: Tensor, factors: Tensor) -> None:  # [num_rows, size], f32[num_rows]
    """Multiply each row of x by its factor, in place; see `reference.scale_rows`."""
    if has_regular_rows(x) and factors.is_contiguous():
        run_on_rows(SCALE_ROWS, (x,), others=(factors,))
    else:
        reference.scale_rows(x, factors)
