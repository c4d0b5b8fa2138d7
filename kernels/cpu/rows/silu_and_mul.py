"""The gated activation silu(gate) * up."""

from torch import Tensor

from ...checked import checked
from ..launch.tasks import Task
from .row_kernel import has_regular_rows, in_torch, run_on_halves

SILU_AND_MUL = Task(
    "rows.silu_and_mul.silu_and_mul", ("x", "out"), ("kind", "num_rows", "size", "x_stride", "rows_per_unit")
)


by_torch = in_torch("silu_and_mul")


@checked
def silu_and_mul(x: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    """Return silu(gate) * up, where x is gate and up side by side; see `reference.silu_and_mul`."""
    if not has_regular_rows(x):
        return by_torch(x)
    return run_on_halves(SILU_AND_MUL, x)
