"""LayerNorm with a bias, with the addition to the residual stream before it."""

from typing import Any

import numpy as np
from torch import Tensor

from ...arguments import checked
from ...plain.rows.layer_norm import layer_norm as by_torch
from ..launch.tasks import Task, addresses, are_contiguous
from ..simd.memory import some_of
from ..simd.numbers import ITEM_SIZES, KINDS
from ..simd.vectors import (
    LANES,
    add,
    fma,
    function,
    lane_numbers,
    multiply,
    splat,
    subtract,
    total,
    where_from,
)
from .row_kernel import by_kind, has_regular_rows, padded_width, rows_of_unit, units_of_rows

LAYER_NORM = Task(
    ("x", "weight", "bias", "residual", "out"),
    ("kind", "num_rows", "size", "x_stride", "out_stride", "rows_per_unit"),
    ("eps",),
)  # fmt: skip


@by_kind
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


@LAYER_NORM.each_unit
def _layer_norm_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _layer_norm_row(args, row)


@checked
def layer_norm(
    x: Tensor,  # [num_rows, size]
    weight: Tensor,  # [size]
    bias: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
) -> Tensor:  # [num_rows, size]
    """Return the norm of x, after residual += x if given; see `reference.layer_norm`.

    Many rows of whole pages are padded, see `padded_width`: the result is not contiguous.
    """
    if not (has_regular_rows(x) and are_contiguous(weight, bias, residual)):
        return by_torch(x, weight, bias, eps, residual)
    num_rows, size = x.shape
    width = padded_width(num_rows, size, x.itemsize)
    out = x.new_empty(num_rows, width)[:, :size]
    num_units, per_unit = units_of_rows(num_rows, size)
    LAYER_NORM.run(
        num_units,
        *addresses(x, weight, bias, residual, out),
        KINDS[x.dtype],
        num_rows,
        size,
        x.stride(0) * x.itemsize,
        width * x.itemsize,
        per_unit,
        eps,
    )
    return out
