"""The addition to the residual of what no norm adds: outputs of attention that runs beside an MLP."""

from typing import Any

from torch import Tensor

from ... import reference
from ...arguments import checked
from ..launch.tasks import Task
from ..simd import vectors
from ..simd.memory import some_of
from ..simd.numbers import ITEM_SIZES
from ..simd.vectors import LANES, function
from .row_kernel import by_kind, has_regular_rows, rows_of_unit, run_on_rows

ADD = Task(("x", "out"), ("kind", "num_rows", "size", "x_stride", "out_stride", "rows_per_unit"))


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


@ADD.each_unit
def _add_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _add_row(args, row)


@checked
def add(x: Tensor, out: Tensor) -> None:  # [num_rows, size], both
    """Add x to `out` in place."""
    if has_regular_rows(x, out):
        run_on_rows(ADD, (x, out))
    else:
        reference.add(x, out)
