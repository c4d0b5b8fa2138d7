"""The multiplication of rows by a factor each: queries whose scale depends on their position."""

from torch import Tensor

from ...checked import checked
from ..launch.tasks import Task
from .row_kernel import has_regular_rows, in_torch, run_on_rows

SCALE_ROWS = Task(
    "rows.scale_rows.scale_rows", ("x", "factors"), ("kind", "num_rows", "size", "x_stride", "rows_per_unit")
)


by_torch = in_torch("scale_rows")


@checked
def scale_rows(x: Tensor, factors: Tensor) -> None:  # [num_rows, size], f32[num_rows]
    """Multiply each row of x by its factor, in place; see `reference.scale_rows`."""
    if has_regular_rows(x) and factors.is_contiguous():
        run_on_rows(SCALE_ROWS, x=x, factors=factors)
    else:
        by_torch(x, factors)
