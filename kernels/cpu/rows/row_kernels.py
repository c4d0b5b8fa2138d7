"""Kernels over rows: what their launchers share, activations, additions and scales, and the highest logit."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...checked import checked
from ...checks import KERNEL_DTYPES
from ..formats import KINDS
from ..launch.tasks import Task
from ..target import LINE, VECTOR_BYTES

UNIT_NUMBERS = 16384  # of a unit: work for a few microseconds
# Rows that start whole pages apart share few sets of the L1 cache, where a product reads many of them
# together: if there are more than FEW_ROWS of them, they are padded by a cache line.
PAGE_BYTES = 4096
FEW_ROWS = 64


def in_torch(operation: str, module: str = "plain.backend") -> Callable[..., Any]:
    """Return the operation of plain torch, for unusual layouts. The first call imports its module."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(f"...{module}", __package__), operation)(*args, **kwargs)

    return call


def units_of_rows(num_rows: int, size: int) -> tuple[int, int]:
    """Divide rows of `size` numbers into work units. Return the number of units, and the rows in each."""
    rows = max(1, UNIT_NUMBERS // max(1, size))
    return -(-num_rows // rows), rows


def has_regular_rows(*tensors: Tensor) -> bool:
    """Return whether the kernels can read these tensors [num_rows, size]. If not, torch must be used."""
    return all(x.is_cpu and x.stride(1) == 1 and x.dtype in KERNEL_DTYPES for x in tensors)


def run_on_rows(task: Task, *, x: Tensor, **fields: Tensor | float) -> None:
    """Launch a kernel over the rows of x [num_rows, size], and of `out` if it is given.

    fields: the other fields of the kernel's record, besides kind, num_rows, size, rows_per_unit and strides.
    """
    num_rows, size = x.shape
    num_units, per_unit = units_of_rows(num_rows, size)
    out = fields.get("out")
    if isinstance(out, Tensor):
        fields["out_stride"] = out.stride(0) * out.itemsize
    _run(task, num_units, x, num_rows, size, per_unit, **fields)


def run_on_halves(task: Task, x: Tensor, **options: float) -> Tensor:  # [n, 2 * size] -> [n, size]
    """Launch a kernel over rows that hold gates and ups side by side. Return its output."""
    num_rows = x.shape[0]
    size = x.shape[1] // 2
    out = x.new_empty(num_rows, size)
    num_units, per_unit = units_of_rows(num_rows, 2 * size)
    _run(task, num_units, x, num_rows, size, per_unit, out=out, **options)
    return out


def _run(
    task: Task, num_units: int, x: Tensor, num_rows: int, size: int, per_unit: int, **fields: Tensor | float
) -> None:
    task.run(
        num_units,
        x=x,
        kind=KINDS[x.dtype],
        num_rows=num_rows,
        size=size,
        x_stride=x.stride(0) * x.itemsize,
        rows_per_unit=per_unit,
        scratch_size=0,
        **fields,
    )


def padded_width(num_rows: int, size: int, itemsize: int) -> int:
    """Return the stride between the rows of a norm's output, in numbers."""
    is_padded = num_rows > FEW_ROWS and size * itemsize % PAGE_BYTES == 0
    return size + LINE // itemsize if is_padded else size


SILU_AND_MUL = Task(
    "rows.silu_and_mul.silu_and_mul", ("x", "out"), ("kind", "num_rows", "size", "x_stride", "rows_per_unit")
)


silu_and_mul_by_torch = in_torch("silu_and_mul")


@checked
def silu_and_mul(x: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    """Return silu(gate) * up, where x is gate and up side by side; see `reference.silu_and_mul`."""
    if not has_regular_rows(x):
        return silu_and_mul_by_torch(x)
    return run_on_halves(SILU_AND_MUL, x)


GELU_AND_MUL = Task(
    "rows.gelu_and_mul.gelu_and_mul",
    ("x", "up", "out"),
    ("kind", "num_rows", "size", "x_stride", "up_stride", "rows_per_unit"),
)
GELU = Task(
    "rows.gelu_and_mul.gelu", ("x",), ("kind", "num_rows", "size", "x_stride", "rows_per_unit", "tanh")
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
    "rows.relu_squared.relu_squared", ("x",), ("kind", "num_rows", "size", "x_stride", "rows_per_unit")
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
    "rows.clamped_swiglu.clamped_swiglu",
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


ADD = Task(
    "rows.add.add", ("x", "out"), ("kind", "num_rows", "size", "x_stride", "out_stride", "rows_per_unit")
)


add_by_torch = in_torch("add")


@checked
def add(x: Tensor, out: Tensor) -> None:  # [num_rows, size], both
    """Add x to `out` in place."""
    if has_regular_rows(x, out):
        run_on_rows(ADD, x=x, out=out)
    else:
        add_by_torch(x, out)


SCALE_ROWS = Task(
    "rows.scale_rows.scale_rows", ("x", "factors"), ("kind", "num_rows", "size", "x_stride", "rows_per_unit")
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
    "rows.scale_and_cap.scale_and_cap",
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


GREEDY = Task("rows.greedy.greedy", ("logits", "tokens", "highest"), ("size", "stride"))


greedy_by_torch = in_torch("greedy")


@checked
def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's first argmax, i64[n], and maximum, f32[n]; see `reference.greedy`."""
    if not has_regular_rows(logits):
        return greedy_by_torch(logits)
    num_rows, size = logits.shape
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    highest = logits.new_empty(num_rows)
    GREEDY.run(
        num_rows,
        logits=logits,
        tokens=tokens,
        highest=highest,
        size=size,
        stride=logits.stride(0) * 4,
        scratch_size=2 * VECTOR_BYTES,
    )
    return tokens, highest
