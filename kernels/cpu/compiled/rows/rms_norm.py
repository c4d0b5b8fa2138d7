"""RMSNorm, with the addition to the residual stream before it."""

from typing import Any

import numpy as np

from ...formats import FLOAT32, ITEM_SIZES
from ...rows.norms import RMS_NORM
from ...target import LANES
from ..simd.memory import some_of
from ..simd.vectors import add, fma, function, multiply, splat, total
from .row_kernel import each_row


def make_normalize(kind: int) -> Any:
    """Compile normalize(...) for one kind (dtype)."""
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def normalize(x, residual, weight, unit_offset, adds, out, size, eps):
        """Write weight * x / sqrt(mean(x²) + eps), after residual += x if there is one; then it stands for x.

        The quotient is rounded to the kind, then multiplied by weight. unit_offset: it is multiplied by
        1 + weight first. adds: the product is added to `out`, and only the sum is rounded.
        """
        squares = splat(np.float32(0.0))
        one = splat(np.float32(1.0))
        source = residual if residual else x
        for i in range(0, size, LANES):
            at = i * size_of
            left = size - i
            if residual:
                store(residual + at, add(load(residual + at, left), load(x + at, left)), left)
            number = load(source + at, left)
            squares = fma(number, number, squares)
        mean = total(squares) / np.float32(size) + np.float32(eps)
        scale = splat(np.float32(1.0) / np.sqrt(mean))
        for i in range(0, size, LANES):
            at = i * size_of
            left = size - i
            own = load(weight + at, left)
            number = multiply(load(source + at, left), scale)
            if unit_offset:
                own = add(one, own)
            elif kind != FLOAT32 and not adds:
                store(out + at, number, left)
                number = load(out + at, left)
            result = multiply(number, own)
            store(out + at, add(load(out + at, left), result) if adds else result, left)

    return normalize


@each_row(RMS_NORM)
def _rms_norm_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    normalize = make_normalize(kind)

    @function
    def rms_norm_row(args, row):
        token = row // args.num_heads
        head = row % args.num_heads
        x = args.x + token * args.x_stride + head * args.x_head_stride
        residual = args.residual + row * args.size * size_of if args.residual else 0
        out = args.out + token * args.out_stride + head * args.out_head_stride
        normalize(x, residual, args.weight, args.unit_offset, args.adds, out, args.size, args.eps)

    return rms_norm_row
