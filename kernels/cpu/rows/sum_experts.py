"""The sum of the products of a token's experts, times their weights."""

from typing import Any

import numpy as np
from torch import Tensor

from ... import reference
from ...arguments import checked
from ..launch.tasks import Task, addresses
from ..simd.memory import get_float, get_long, some_of
from ..simd.numbers import ITEM_SIZES, KINDS
from ..simd.vectors import LANES, fma, function, gated_by, splat
from .row_kernel import by_kind, has_regular_rows, rows_of_unit, units_of_rows

SUM_EXPERTS = Task(
    ("x", "places", "weights", "shared", "shared_gate", "out"),
    ("kind", "num_rows", "size", "num_chosen", "x_stride", "shared_stride", "rows_per_unit"),
)


@by_kind
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


@SUM_EXPERTS.each_unit
def _sum_experts_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _sum_experts_row(args, row)


@checked
def sum_experts(
    x: Tensor,  # [num_rows, size], sorted by expert
    places: Tensor,  # i64[num_tokens, num_chosen]
    weights: Tensor,  # f32[num_tokens, num_chosen]
    shared: Tensor | None = None,  # [num_tokens, size]
    shared_gate: Tensor | None = None,  # f32[num_tokens, 1]
) -> Tensor:  # [num_tokens, size]
    """Return each token's products times their weights, added up; see `reference.sum_experts`."""
    rows = (x,) if shared is None else (x, shared)
    others = [y for y in (places, weights, shared_gate) if y is not None]
    if not (has_regular_rows(*rows) and all(y.is_contiguous() for y in others)):
        return reference.sum_experts(x, places, weights, shared, shared_gate)
    num_tokens, num_chosen = places.shape
    size = x.shape[1]
    out = x.new_empty(num_tokens, size)
    num_units, per_unit = units_of_rows(num_tokens, (num_chosen + 1) * size)
    SUM_EXPERTS.run(
        num_units,
        *addresses(x, places, weights, shared, shared_gate, out),
        KINDS[x.dtype],
        num_tokens,
        size,
        num_chosen,
        x.stride(0) * x.itemsize,
        0 if shared is None else shared.stride(0) * x.itemsize,
        per_unit,
    )
    return out
