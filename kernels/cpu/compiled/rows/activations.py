"""Activations: silu(gate) * up, GELU, ReLU², and the clamped SwiGLU of gpt-oss."""

from typing import Any

import numpy as np

from ...formats import ITEM_SIZES
from ...rows.activations import CLAMPED_SWIGLU, GELU, GELU_AND_MUL, RELU_SQUARED
from ...rows.row_kernels import SILU_AND_MUL
from ...target import LANES
from ..simd import vectors
from ..simd.memory import some_of
from ..simd.vectors import add, fma, function, gated_by, inlined, multiply, silu, splat, where_greater
from .row_kernel import each_row


@each_row(SILU_AND_MUL)
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


@inlined
def gelu_by_tanh(x):
    """Return x / 2 (1 + tanh z). (1 + tanh z) / 2 is the sigmoid of 2 z."""
    # 2 sqrt(2 / pi), and that times 0.044715.
    linear = splat(np.float32(1.5957691216057308))
    cubic = splat(np.float32(0.07135481627159256))
    return gated_by(x, multiply(x, fma(multiply(x, x), cubic, linear)))


@each_row(GELU_AND_MUL)
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


@each_row(GELU)
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


@each_row(RELU_SQUARED)
def _relu_squared_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def relu_squared_row(args, row):
        x = args.x + row * args.x_stride
        zero = splat(np.float32(0.0))
        for i in range(0, args.size, LANES):
            at = x + i * size_of
            left = args.size - i
            number = load(at, left)
            # A NaN is not less than 0, and stays.
            number = where_greater(zero, number, zero, number)
            store(at, multiply(number, number), left)

    return relu_squared_row


@each_row(CLAMPED_SWIGLU)
def _clamped_swiglu_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def clamped_swiglu_row(args, row):
        size = args.size
        gates = args.x + row * args.x_stride
        out = args.out + row * size * size_of
        most = splat(np.float32(args.limit))
        least = splat(np.float32(-args.limit))
        alpha = splat(np.float32(args.alpha))
        one = splat(np.float32(1.0))
        for i in range(0, size, LANES):
            at = i * size_of
            left = size - i
            gate = load(gates + at, left)
            up = load(gates + size * size_of + at, left)
            # A NaN is neither greater nor less, and stays.
            gate = where_greater(gate, most, most, gate)
            up = where_greater(up, most, most, up)
            up = where_greater(least, up, least, up)
            store(out + at, multiply(gated_by(gate, multiply(gate, alpha)), add(up, one)), left)

    return clamped_swiglu_row
