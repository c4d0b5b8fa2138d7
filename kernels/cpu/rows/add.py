"""The addition to the residual of what no norm adds: outputs of attention that runs beside an MLP."""

from torch import Tensor

from ...checked import checked
from ..launch.tasks import Task
from .row_kernel import has_regular_rows, in_torch, run_on_rows

ADD = Task(
    "rows.add.add", ("x", "out"), ("kind", "num_rows", "size", "x_stride", "out_stride", "rows_per_unit")
)


by_torch = in_torch("add")


@checked
def add(x: Tensor, out: Tensor) -> None:  # [num_rows, size], both
    """Add x to `out` in place."""
    if has_regular_rows(x, out):
        run_on_rows(ADD, x=x, out=out)
    else:
        by_torch(x, out)
