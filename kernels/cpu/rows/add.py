"""The addition to the residual of what no norm adds: outputs of attention that runs beside an MLP."""

from typing import Any

from torch import Tensor

from ...arguments import check_add
from ...checks import KERNEL_DTYPES, is_trusted
from ...plain import ops as torch_ops
from ..launch.tasks import Task, addresses
from ..simd import vectors
from ..simd.memory import some_of
from ..simd.numbers import ITEM_SIZES, KINDS
from ..simd.vectors import LANES, function
from .row_kernel import by_kind, rows_of_unit, units_of_rows

ADD = Task(("x", "out"), ("kind", "num_rows", "size", "x_stride", "out_stride", "rows_per_unit"))


@by_kind
def _add_row(kind: int) -> Any:
    size_of, (load, store) = ITEM_SIZES[kind], some_of(kind)

    @function
    def add_row(args, row):
        x, out = args.x + row * args.x_stride, args.out + row * args.out_stride
        for i in range(0, args.size, LANES):
            at, left = i * size_of, args.size - i
            store(out + at, vectors.add(load(out + at, left), load(x + at, left)), left)

    return add_row


@ADD.each_unit
def _add_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _add_row(args, row)


def add(x: Tensor, out: Tensor) -> None:  # [num_rows, size], both
    """Add x to `out` in place."""
    if not is_trusted():
        check_add(x, out)
    regular = x.is_cpu and x.stride(1) == out.stride(1) == 1 and x.dtype in KERNEL_DTYPES
    if not regular:
        torch_ops.add(x, out)
        return
    num_rows, size = x.shape
    num_units, per_unit = units_of_rows(num_rows, size)
    ADD.run(
        num_units,
        *addresses(x, out),
        KINDS[x.dtype],
        num_rows,
        size,
        x.stride(0) * x.itemsize,
        out.stride(0) * out.itemsize,
        per_unit,
    )
