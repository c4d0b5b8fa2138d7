"""The gated activation silu(gate) * up."""

from typing import Any

from torch import Tensor

from ...arguments import checked
from ...plain.rows.silu_and_mul import silu_and_mul as by_torch
from ..launch.tasks import Task
from ..simd.memory import some_of
from ..simd.numbers import ITEM_SIZES
from ..simd.vectors import LANES, function, multiply, silu
from .row_kernel import by_kind, has_regular_rows, rows_of_unit, run_on_halves

SILU_AND_MUL = Task(("x", "out"), ("kind", "num_rows", "size", "x_stride", "rows_per_unit"))


@by_kind
def _silu_and_mul_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def silu_and_mul_row(args, row):
        size = args.size
        gate = args.x + row * args.x_stride
        out = args.out + row * size * size_of
        for i in range(0, size, LANES):
            at = i * size_of
            left = size - i
            up = load(gate + size * size_of + at, left)
            store(out + at, multiply(silu(load(gate + at, left)), up), left)

    return silu_and_mul_row


@SILU_AND_MUL.each_unit
def _silu_and_mul_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _silu_and_mul_row(args, row)


@checked
def silu_and_mul(x: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    """Return silu(gate) * up, where x is gate and up side by side; see `reference.silu_and_mul`."""
    if not has_regular_rows(x):
        return by_torch(x)
    return run_on_halves(SILU_AND_MUL, x)
