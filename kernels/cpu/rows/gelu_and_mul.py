"""GELU, and the gated activation gelu(gate) * up with its tanh approximation."""

from typing import Any

import numpy as np
from torch import Tensor

from ... import reference
from ...arguments import checked
from ...plain.rows.gelu_and_mul import gelu_and_mul as by_torch
from ..launch.tasks import Task, addresses
from ..simd import vectors
from ..simd.memory import some_of
from ..simd.numbers import ITEM_SIZES, KINDS
from ..simd.vectors import LANES, fma, function, gated_by, inlined, multiply, splat
from .row_kernel import by_kind, has_regular_rows, rows_of_unit, run_on_rows, units_of_rows

GELU_AND_MUL = Task(
    ("x", "up", "out"), ("kind", "num_rows", "size", "x_stride", "up_stride", "rows_per_unit")
)
GELU = Task(("x",), ("kind", "num_rows", "size", "x_stride", "rows_per_unit", "tanh"))


@inlined
def gelu_by_tanh(x):
    """Return x / 2 (1 + tanh z): (1 + tanh z) / 2 is the sigmoid of 2 z."""
    # 2 sqrt(2 / pi), and that times 0.044715.
    linear = splat(np.float32(1.5957691216057308))
    cubic = splat(np.float32(0.07135481627159256))
    return gated_by(x, multiply(x, fma(multiply(x, x), cubic, linear)))


@by_kind
def _gelu_and_mul_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def gelu_and_mul_row(args, row):
        size = args.size
        gate = args.x + row * args.x_stride
        ups = args.up + row * args.up_stride
        out = args.out + row * size * size_of
        for i in range(0, size, LANES):
            at = i * size_of
            left = size - i
            x = load(gate + at, left)
            up = load(ups + at, left)
            store(out + at, multiply(gelu_by_tanh(x), up), left)

    return gelu_and_mul_row


@GELU_AND_MUL.each_unit
def _gelu_and_mul_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _gelu_and_mul_row(args, row)


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
        *addresses(x, up, out),
        KINDS[x.dtype],
        num_rows,
        size,
        x.stride(0) * x.itemsize,
        up.stride(0) * x.itemsize,
        per_unit,
    )
    return out


@by_kind
def _gelu_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def gelu_row(args, row):
        x = args.x + row * args.x_stride
        size = args.size
        if args.tanh:
            for i in range(0, size, LANES):
                at = i * size_of
                left = size - i
                store(x + at, gelu_by_tanh(load(x + at, left)), left)
        else:
            for i in range(0, size, LANES):
                at = i * size_of
                left = size - i
                store(x + at, vectors.gelu(load(x + at, left)), left)

    return gelu_row


@GELU.each_unit
def _gelu_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _gelu_row(args, row)


@checked
def gelu(x: Tensor, *, tanh: bool) -> None:  # [num_rows, size]
    """Apply GELU to x in place; see `reference.gelu`."""
    if has_regular_rows(x):
        run_on_rows(GELU, (x,), tanh)
    else:
        reference.gelu(x, tanh=tanh)
