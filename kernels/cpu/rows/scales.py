"""Multiplications of rows in place: by a factor each, by one factor, by the sigmoid of a gate."""

from torch import Tensor

from ...checked import checked
from ..launch.tasks import Task
from .row_kernels import has_regular_rows, in_torch, run_on_rows

SCALE_ROWS = Task(
    "rows.scales.scale_rows", ("x", "factors"), ("kind", "num_rows", "size", "x_stride", "rows_per_unit")
)


scale_rows_by_torch = in_torch("scale_rows")


@checked
def scale_rows(x: Tensor, factors: Tensor) -> None:  # [num_rows, size], f32[num_rows]
    """Multiply each row of x by its factor, in place; see `reference.scale_rows`."""
    if has_regular_rows(x) and factors.is_contiguous():
        run_on_rows(SCALE_ROWS, x=x, factors=factors)
    else:
        scale_rows_by_torch(x, factors)


SCALE_AND_CAP = Task(
    "rows.scales.scale_and_cap",
    ("x",),
    ("kind", "num_rows", "size", "x_stride", "rows_per_unit"),
    ("factor", "softcap"),
)


scale_and_cap_by_torch = in_torch("scale_and_cap")


@checked
def scale_and_cap(x: Tensor, factor: float, softcap: float | None = None) -> None:  # [num_rows, size]
    """Multiply x by a factor in place, and cap the product; see `reference.scale_and_cap`."""
    if has_regular_rows(x):
        run_on_rows(SCALE_AND_CAP, x=x, factor=factor, softcap=softcap or 0.0)
    else:
        scale_and_cap_by_torch(x, factor, softcap)


SCALE_BY_SIGMOID = Task(
    "rows.scales.scale_by_sigmoid",
    ("x", "gate"),
    ("kind", "num_rows", "size", "x_stride", "gate_stride", "rows_per_unit"),
)


scale_by_sigmoid_by_torch = in_torch("scale_by_sigmoid")


@checked
def scale_by_sigmoid(x: Tensor, gate: Tensor) -> None:  # [num_rows, size], both
    """Multiply x by the sigmoid of the gate, in place; see `reference.scale_by_sigmoid`."""
    if has_regular_rows(x, gate):
        run_on_rows(SCALE_BY_SIGMOID, x=x, gate=gate, gate_stride=gate.stride(0) * gate.itemsize)
    else:
        scale_by_sigmoid_by_torch(x, gate)
