"""The gated activation of gpt-oss: gate sigmoid(alpha gate) (up + 1), of clamped gates and ups."""

from torch import Tensor

from ...checked import checked
from ..launch.tasks import Task
from .row_kernel import has_regular_rows, in_torch, run_on_halves

CLAMPED_SWIGLU = Task(
    "rows.clamped_swiglu.clamped_swiglu",
    ("x", "out"),
    ("kind", "num_rows", "size", "x_stride", "rows_per_unit"),
    ("limit", "alpha"),
)


by_torch = in_torch("clamped_swiglu")


@checked
def clamped_swiglu(x: Tensor, limit: float, alpha: float) -> Tensor:  # [n, 2 * size] -> [n, size]
    """Return gate sigmoid(alpha gate) (up + 1); see `reference.clamped_swiglu`."""
    if not has_regular_rows(x):
        return by_torch(x, limit, alpha)
    return run_on_halves(CLAMPED_SWIGLU, x, limit=float(limit), alpha=float(alpha))
