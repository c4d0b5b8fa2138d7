"""The activation max(x, 0)² of MLPs without a gate."""

from typing import Any

import numpy as np

from ...formats import ITEM_SIZES
from ...rows.activations import RELU_SQUARED
from ...target import LANES
from ..kernels import each_unit
from ..simd.memory import some_of
from ..simd.vectors import function, multiply, splat, where_greater
from .row_kernel import by_kind, rows_of_unit


@by_kind
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


@each_unit(RELU_SQUARED)
def _relu_squared_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _relu_squared_row(args, row)
