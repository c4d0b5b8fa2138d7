"""RMSNorm of each head, times silu of a gate, or of the product."""

from typing import Any

import numpy as np

from ...formats import ITEM_SIZES
from ...rows.gated_norm import GATED_NORM
from ...target import LANES
from ..simd.memory import some_of
from ..simd.vectors import fma, function, multiply, silu, splat, total
from .row_kernel import each_row


@each_row(GATED_NORM)
def _gated_norm_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def gated_norm_row(args, row):
        size = args.size
        x = args.x + row * size * size_of
        out = args.out + row * size * size_of
        head = row % args.num_heads
        gate = args.gate + row // args.num_heads * args.gate_stride + head * size * size_of
        weight = args.weight + head * args.weight_stride
        if args.weight == 0:
            for i in range(0, size, LANES):
                at = i * size_of
                left = size - i
                store(out + at, multiply(load(x + at, left), silu(load(gate + at, left))), left)
            return
        squares = splat(np.float32(0.0))
        for i in range(0, size, LANES):
            number = load(x + i * size_of, size - i)
            if args.gate_first:
                number = multiply(number, silu(load(gate + i * size_of, size - i)))
            squares = fma(number, number, squares)
        mean = total(squares) / np.float32(size) + np.float32(args.eps)
        scale = splat(np.float32(1.0) / np.sqrt(mean))
        for i in range(0, size, LANES):
            at = i * size_of
            left = size - i
            gated = silu(load(gate + at, left))
            number = load(x + at, left)
            if args.gate_first:
                number = multiply(number, gated)
            normed = multiply(multiply(number, scale), load(weight + at, left))
            if not args.gate_first:
                normed = multiply(normed, gated)
            store(out + at, normed, left)

    return gated_norm_row
