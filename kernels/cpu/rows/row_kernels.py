"""Kernels over rows: what their launchers share, and silu_and_mul, add and greedy."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...checked import checked
from ...checks import KERNEL_DTYPES
from ..formats import KINDS
from ..launch.tasks import Field, Task
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


def run_on_rows(task: Task, *, x: Tensor, **fields: Field) -> None:
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
    task: Task, num_units: int, x: Tensor, num_rows: int, size: int, per_unit: int, **fields: Field
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


def padded_rows(x: Tensor) -> Tensor:  # [num_rows, size]
    """Allocate the output of a norm of x. If many rows would start whole pages apart, they are padded."""
    num_rows, size = x.shape
    is_padded = num_rows > FEW_ROWS and size * x.itemsize % PAGE_BYTES == 0
    width = size + LINE // x.itemsize if is_padded else size
    return x.new_empty(num_rows, width)[:, :size]


SILU_AND_MUL = Task(
    "rows.activations.silu_and_mul", ("x", "out"), ("kind", "num_rows", "size", "x_stride", "rows_per_unit")
)


silu_and_mul_by_torch = in_torch("silu_and_mul")


@checked
def silu_and_mul(x: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    """Return silu(gate) * up, where x is gate and up side by side; see `reference.silu_and_mul`."""
    if not has_regular_rows(x):
        return silu_and_mul_by_torch(x)
    return run_on_halves(SILU_AND_MUL, x)


ADD = Task(
    "rows.scales.add", ("x", "out"), ("kind", "num_rows", "size", "x_stride", "out_stride", "rows_per_unit")
)


add_by_torch = in_torch("add")


@checked
def add(x: Tensor, out: Tensor) -> None:  # [num_rows, size], both
    """Add x to `out` in place."""
    if has_regular_rows(x, out):
        run_on_rows(ADD, x=x, out=out)
    else:
        add_by_torch(x, out)


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
