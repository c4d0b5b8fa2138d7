"""The sum of the products of a token's experts, times their weights."""

from typing import Any

import numpy as np

from ...formats import ITEM_SIZES
from ...rows.experts import SUM_EXPERTS
from ...target import LANES
from ..simd.memory import get_float, get_long, some_of
from ..simd.vectors import fma, function, gated_by, splat
from .row_kernel import each_row


@each_row(SUM_EXPERTS)
def _sum_experts_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load, store) = some_of(kind)

    @function
    def sum_experts_row(args, row):
        size = args.size
        places = args.places + 8 * row * args.num_chosen
        weights = args.weights + 4 * row * args.num_chosen
        shared = args.shared + row * args.shared_stride
        out = args.out + row * size * size_of
        share = splat(np.float32(1.0))
        if args.shared_gate:
            share = gated_by(share, splat(get_float(args.shared_gate + 4 * row)))
        for i in range(0, size, LANES):
            at = i * size_of
            left = size - i
            total = splat(np.float32(0.0))
            for j in range(args.num_chosen):
                x = args.x + get_long(places + 8 * j) * args.x_stride
                total = fma(load(x + at, left), splat(get_float(weights + 4 * j)), total)
            if args.shared:
                total = fma(load(shared + at, left), share, total)
            store(out + at, total, left)

    return sum_experts_row
