"""Additions to rows, and multiplications of rows in place: by a factor each, by one factor, by a sigmoid."""

from typing import Any

import numpy as np

from ...formats import ITEM_SIZES
from ...rows.row_kernels import ADD
from ...rows.scales import SCALE_AND_CAP, SCALE_BY_SIGMOID, SCALE_ROWS
from ...target import LANES
from ..simd.memory import get_float, some_of
from ..simd.vectors import add, function, gated_by, multiply, splat, subtract
from .row_kernel import each_row


@each_row(ADD)
def _add_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def add_row(args, row):
        x = args.x + row * args.x_stride
        out = args.out + row * args.out_stride
        for i in range(0, args.size, LANES):
            at = i * size_of
            left = args.size - i
            store(out + at, add(load(out + at, left), load(x + at, left)), left)

    return add_row


@each_row(SCALE_ROWS)
def _scale_rows_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def scale_row(args, row):
        x = args.x + row * args.x_stride
        factor = splat(get_float(args.factors + 4 * row))
        for i in range(0, args.size, LANES):
            at = i * size_of
            left = args.size - i
            store(x + at, multiply(load(x + at, left), factor), left)

    return scale_row


@each_row(SCALE_AND_CAP)
def _scale_and_cap_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def scale_and_cap_row(args, row):
        x = args.x + row * args.x_stride
        factor = np.float32(args.factor)
        if not args.softcap:
            for i in range(0, args.size, LANES):
                at = i * size_of
                left = args.size - i
                store(x + at, multiply(load(x + at, left), splat(factor)), left)
            return
        # cap tanh(z) is 2 cap sigmoid(2 z) - cap.
        cap = np.float32(args.softcap)
        inner = splat(np.float32(2.0) * factor / cap)
        twice = splat(np.float32(2.0) * cap)
        for i in range(0, args.size, LANES):
            at = i * size_of
            left = args.size - i
            gate = multiply(load(x + at, left), inner)
            store(x + at, subtract(gated_by(twice, gate), splat(cap)), left)

    return scale_and_cap_row


@each_row(SCALE_BY_SIGMOID)
def _scale_by_sigmoid_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def scale_by_sigmoid_row(args, row):
        x = args.x + row * args.x_stride
        gate = args.gate + row * args.gate_stride
        for i in range(0, args.size, LANES):
            at = i * size_of
            left = args.size - i
            store(x + at, gated_by(load(x + at, left), load(gate + at, left)), left)

    return scale_by_sigmoid_row
