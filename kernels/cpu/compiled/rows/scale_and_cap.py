"""The multiplication of embeddings and logits by a number, and the softcap of logits."""

from typing import Any

import numpy as np

from ...formats import ITEM_SIZES
from ...rows.scales import SCALE_AND_CAP
from ...target import LANES
from ..kernels import each_unit
from ..simd.memory import some_of
from ..simd.vectors import function, gated_by, multiply, splat, subtract
from .row_kernel import by_kind, rows_of_unit


@by_kind
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


@each_unit(SCALE_AND_CAP)
def _scale_and_cap_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _scale_and_cap_row(args, row)
