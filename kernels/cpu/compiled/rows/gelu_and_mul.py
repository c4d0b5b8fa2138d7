"""GELU, and the gated activation gelu(gate) * up with its tanh approximation."""

from typing import Any

import numpy as np

from ...formats import ITEM_SIZES
from ...rows.activations import GELU, GELU_AND_MUL
from ...target import LANES
from ..kernels import each_unit
from ..simd import vectors
from ..simd.memory import some_of
from ..simd.vectors import fma, function, gated_by, inlined, multiply, splat
from .row_kernel import by_kind, rows_of_unit


@inlined
def gelu_by_tanh(x):
    """Return x / 2 (1 + tanh z). (1 + tanh z) / 2 is the sigmoid of 2 z."""
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


@each_unit(GELU_AND_MUL)
def _gelu_and_mul_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _gelu_and_mul_row(args, row)


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


@each_unit(GELU)
def _gelu_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _gelu_row(args, row)
