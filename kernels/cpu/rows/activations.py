"""Activations other than silu_and_mul: GELU, ReLU², and the clamped SwiGLU of gpt-oss."""

from torch import Tensor

from ...checked import checked
from ..formats import KINDS
from ..launch.tasks import Task
from .row_kernels import has_regular_rows, in_torch, run_on_halves, run_on_rows, units_of_rows

GELU_AND_MUL = Task(
    "rows.activations.gelu_and_mul",
    ("x", "up", "out"),
    ("kind", "num_rows", "size", "x_stride", "up_stride", "rows_per_unit"),
)
GELU = Task(
    "rows.activations.gelu", ("x",), ("kind", "num_rows", "size", "x_stride", "rows_per_unit", "tanh")
)


gelu_and_mul_by_torch = in_torch("gelu_and_mul")
gelu_by_torch = in_torch("gelu")


@checked
def gelu_and_mul(x: Tensor, up: Tensor | None = None) -> Tensor:  # -> [num_tokens, size]
    """Return gelu(gate) * up. x holds both side by side, or `up` is given; see `reference.gelu_and_mul`."""
    if up is None:
        x, up = x.chunk(2, dim=1)
    if not has_regular_rows(x, up):
        return gelu_and_mul_by_torch(x, up)
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


RELU_SQUARED = Task(
    "rows.activations.relu_squared", ("x",), ("kind", "num_rows", "size", "x_stride", "rows_per_unit")
)


relu_squared_by_torch = in_torch("relu_squared")


@checked
def relu_squared(x: Tensor) -> None:  # [num_rows, size]
    """Replace x by max(x, 0)², in place; see `reference.relu_squared`."""
    if has_regular_rows(x):
        run_on_rows(RELU_SQUARED, x=x)
    else:
        relu_squared_by_torch(x)


CLAMPED_SWIGLU = Task(
    "rows.activations.clamped_swiglu",
    ("x", "out"),
    ("kind", "num_rows", "size", "x_stride", "rows_per_unit"),
    ("limit", "alpha"),
)


clamped_swiglu_by_torch = in_torch("clamped_swiglu")


@checked
def clamped_swiglu(x: Tensor, limit: float, alpha: float) -> Tensor:  # [n, 2 * size] -> [n, size]
    """Return gate sigmoid(alpha gate) (up + 1), clamped; see `reference.clamped_swiglu`."""
    if not has_regular_rows(x):
        return clamped_swiglu_by_torch(x, limit, alpha)
    return run_on_halves(CLAMPED_SWIGLU, x, limit=float(limit), alpha=float(alpha))
