"""LayerNorm with a bias, with the addition to the residual stream before it."""

from typing import Any

import numpy as np

from ...formats import ITEM_SIZES
from ...rows.layer_norm import LAYER_NORM
from ...target import LANES
from ..simd.memory import some_of
from ..simd.vectors import add, fma, function, lane_numbers, multiply, splat, subtract, total, where_from
from .row_kernel import each_row


@each_row(LAYER_NORM)
def _layer_norm_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def layer_norm_row(args, row):
        """Write weight * (x - mean) / sqrt(var + eps) + bias. A residual gets x added, and stands for it."""
        size = args.size
        zero = splat(np.float32(0.0))
        x = args.x + row * args.x_stride
        out = args.out + row * args.out_stride
        residual = args.residual + row * size * size_of if args.residual else 0
        source = residual if residual else x
        sums = zero
        squares = zero
        for i in range(0, size, LANES):
            at = i * size_of
            left = size - i
            if residual:
                store(residual + at, add(load(residual + at, left), load(x + at, left)), left)
            sums = add(sums, load(source + at, left))
        mean = splat(total(sums) / np.float32(size))
        for i in range(0, size, LANES):
            left = size - i
            centred = subtract(load(source + i * size_of, left), mean)
            if left < LANES:  # lanes beyond the row are loaded as 0
                centred = where_from(lane_numbers(), splat(np.float32(left)), zero, centred)
            squares = fma(centred, centred, squares)
        variance = total(squares) / np.float32(size) + np.float32(args.eps)
        scale = splat(np.float32(1.0) / np.sqrt(variance))
        for i in range(0, size, LANES):
            at = i * size_of
            left = size - i
            normed = multiply(subtract(load(source + at, left), mean), scale)
            weight = load(args.weight + at, left)
            bias = load(args.bias + at, left)
            store(out + at, fma(normed, weight, bias), left)

    return layer_norm_row
