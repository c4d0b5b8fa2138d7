"""The multiplication of embeddings and logits by a number, and the softcap of logits."""

from torch import Tensor

from ...checked import checked
from ..launch.tasks import Task
from .row_kernel import has_regular_rows, in_torch, run_on_rows

SCALE_AND_CAP = Task(
    "rows.scale_and_cap.scale_and_cap",
    ("x",),
    ("kind", "num_rows", "size", "x_stride", "rows_per_unit"),
    ("factor", "softcap"),
)


by_torch = in_torch("scale_and_cap")


@checked
def scale_and_cap(x: Tensor, factor: float, softcap: float | None = None) -> None:  # [num_rows, size]
    """Multiply x by a factor in place, and cap the product; see `reference.scale_and_cap`."""
    if has_regular_rows(x):
        run_on_rows(SCALE_AND_CAP, x=x, factor=factor, softcap=softcap or 0.0)
    else:
        by_torch(x, factor, softcap)
