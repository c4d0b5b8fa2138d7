"""The multiplication of embeddings and logits by a number, and the softcap of logits."""

from typing import Any

import numpy as np
from torch import Tensor

from ... import reference
from ...arguments import checked
from ..launch.tasks import Task
from ..simd.memory import some_of
from ..simd.numbers import ITEM_SIZES
from ..simd.vectors import LANES, function, gated_by, multiply, splat, subtract
from .row_kernel import by_kind, has_regular_rows, rows_of_unit, run_on_rows

SCALE_AND_CAP = Task(("x",), ("kind", "num_rows", "size", "x_stride", "rows_per_unit"), ("factor", "softcap"))


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


@SCALE_AND_CAP.each_unit
def _scale_and_cap_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _scale_and_cap_row(args, row)


@checked
def scale_and_cap(x: Tensor, factor: float, softcap: float | None = None) -> None:  # [num_rows, size]
    """Multiply x by a factor in place, and cap the product; see `reference.scale_and_cap`."""
    if has_regular_rows(x):
        run_on_rows(SCALE_AND_CAP, (x,), factor, softcap or 0.0)
    else:
        reference.scale_and_cap(x, factor, softcap)
