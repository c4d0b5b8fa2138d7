"""The gated activation of gpt-oss: gate sigmoid(alpha gate) (up + 1), of clamped gates and ups."""

from typing import Any

import numpy as np

from ...formats import ITEM_SIZES
from ...rows.activations import CLAMPED_SWIGLU
from ...target import LANES
from ..kernels import each_unit
from ..simd.memory import some_of
from ..simd.vectors import add, function, gated_by, multiply, splat, where_greater
from .row_kernel import by_kind, rows_of_unit


@by_kind
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


@each_unit(CLAMPED_SWIGLU)
def _clamped_swiglu_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _clamped_swiglu_row(args, row)
