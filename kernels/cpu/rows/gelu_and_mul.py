"""GELU, and the gated activation gelu(gate) * up with its tanh approximation."""

from torch import Tensor

from ...checked import checked
from ..launch.tasks import Task
from ..numbers import KINDS
from .row_kernel import has_regular_rows, in_torch, run_on_rows, units_of_rows

GELU_AND_MUL = Task(
    "rows.gelu_and_mul.gelu_and_mul",
    ("x", "up", "out"),
    ("kind", "num_rows", "size", "x_stride", "up_stride", "rows_per_unit"),
)
GELU = Task(
    "rows.gelu_and_mul.gelu", ("x",), ("kind", "num_rows", "size", "x_stride", "rows_per_unit", "tanh")
)


by_torch = in_torch("gelu_and_mul")
gelu_by_torch = in_torch("gelu")


@checked
def gelu_and_mul(x: Tensor, up: Tensor | None = None) -> Tensor:  # -> [num_tokens, size]
    """Return gelu(gate) * up, of x or of x and `up`; see `reference.gelu_and_mul`."""
    if up is None:
        x, up = x.chunk(2, dim=1)
    if not has_regular_rows(x, up):
        return by_torch(x, up)
    num_rows, size = x.shape
    out = x.new_empty(num_rows, size)
    num_units, per_unit = units_of_rows(num_rows, 2 * size)
    GELU_AND_MUL.run(
        num_units,
        x=x,
        up=up,
        out=out,
        kind=KINDS[x.dtype],
        num_rows=num_rows,
        size=size,
        x_stride=x.stride(0) * x.itemsize,
        up_stride=up.stride(0) * x.itemsize,
        rows_per_unit=per_unit,
    )
    return out


@checked
def gelu(x: Tensor, *, tanh: bool) -> None:  # [num_rows, size]
    """Apply GELU to x in place; see `reference.gelu`."""
    if has_regular_rows(x):
        run_on_rows(GELU, x=x, tanh=tanh)
    else:
        gelu_by_torch(x, tanh=tanh)
