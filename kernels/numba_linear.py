"""x Wᵀ + b for a CPU, with the bits of a row the same whatever is beside it.

A library's product picks its way of summing up by the number of rows. Here each number is one chain of fused
multiply-adds in the order of the inputs. The weight lies in panels of PANEL outputs, each of which is read from
end to end, by one thread; it may be narrower than the product, which is float32.
"""

import numpy as np
import torch
from numba import carray, cfunc
from torch import Tensor

from .numba_threads import NEXT_THREAD, NEXT_UNIT, SOURCES, Task
from .numba_vectors import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    LANES,
    VECTOR_BYTES,
    address_of,
    claim,
    fma,
    function,
    get_byte,
    item_size,
    load,
    multiply_add,
    multiply_add_bfloat,
    multiply_add_int8,
    set_byte,
    splat,
    store,
    store_as,
)

PANEL = 2 * LANES  # outputs
DEPTH = 256  # inputs that a panel is gone through at a time: 16 to 32 KiB of it
ROWS = 64  # of a unit
KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16, torch.int8: INT8}
_WIDTH = 4 * PANEL

LINEAR = Task(
    (
        "x", "panels", "scales", "bias", "out", "x_stride", "num_rows", "in_features", "out_features", "num_panels",
        "weight_kind", "out_kind",
    )
)  # fmt: skip
_RECORD = LINEAR.record


class Panels:
    """A weight [out_features, in_features] as this product reads it: [num_panels, in_features, PANEL]."""

    def __init__(self, weight: Tensor, scales: Tensor | None = None) -> None:
        """scales: f32[out_features], what each output's weights are multiplied by."""
        self.out_features, self.in_features = weight.shape
        num_panels = -(-self.out_features // PANEL)
        self.panels = weight.new_zeros(num_panels, self.in_features, PANEL)
        for i, rows in enumerate(weight.split(PANEL)):
            self.panels[i, :, : len(rows)] = rows.T
        self.scales = torch.ones(num_panels * PANEL)
        if scales is not None:
            self.scales[: self.out_features] = scales


def linear(x: Tensor, weight: Panels, bias: Tensor | None) -> Tensor:
    """[num_rows, in_features] -> [num_rows, out_features], in the dtype of x; the sums are float32."""
    num_rows, num_panels = x.shape[0], len(weight.panels)
    out = x.new_empty(num_rows, weight.out_features)
    rows = x.float()
    padded_bias = torch.zeros_like(weight.scales)
    if bias is not None:
        padded_bias[: weight.out_features] = bias
    LINEAR.run(
        num_panels * -(-num_rows // ROWS),
        rows.data_ptr(),
        weight.panels.data_ptr(),
        weight.scales.data_ptr(),
        padded_bias.data_ptr(),
        out.data_ptr(),
        rows.stride(0) * 4,
        num_rows,
        weight.in_features,
        weight.out_features,
        num_panels,
        KINDS[weight.panels.dtype],
        KINDS[x.dtype],
        scratch_size=ROWS * _WIDTH + 64,
    )
    return out


@function
def _linear(args, unit, scratch):
    panel, first = unit % args.num_panels, unit // args.num_panels * ROWS
    rows = min(ROWS, args.num_rows - first)
    size = item_size(args.weight_kind)
    x = args.x + first * args.x_stride
    weights = args.panels + panel * args.in_features * PANEL * size
    for i in range(rows):
        for v in range(0, _WIDTH, VECTOR_BYTES):
            store(scratch + i * _WIDTH + v, splat(np.float32(0.0)))
    for start in range(0, args.in_features, DEPTH):
        depth = min(DEPTH, args.in_features - start)
        a, b, stride = x + 4 * start, weights + start * PANEL * size, PANEL * size
        if args.weight_kind == FLOAT32:
            multiply_add(scratch, _WIDTH, a, args.x_stride, b, stride, rows, 2, depth)
        elif args.weight_kind == BFLOAT16:
            multiply_add_bfloat(scratch, _WIDTH, a, args.x_stride, b, stride, rows, 2, depth)
        else:
            multiply_add_int8(scratch, _WIDTH, a, args.x_stride, b, stride, rows, 2, depth)
    columns = min(PANEL, args.out_features - panel * PANEL)
    end = scratch + ROWS * _WIDTH
    for i in range(rows):
        out = args.out + ((first + i) * args.out_features + panel * PANEL) * item_size(args.out_kind)
        for v in range(0, PANEL, LANES):
            at = panel * PANEL + v
            y = fma(load(scratch + i * _WIDTH + 4 * v), load(args.scales + 4 * at), load(args.bias + 4 * at))
            if v + LANES <= columns:
                store_as(args.out_kind, out + v * item_size(args.out_kind), y)
            elif v < columns:  # a row may end within the vector
                store_as(args.out_kind, end, y)
                for byte in range((columns - v) * item_size(args.out_kind)):
                    set_byte(out + v * item_size(args.out_kind) + byte, get_byte(end + byte))


def _compile(sources: int):  # numba's cache of compiled code goes by this too
    @cfunc("void(voidptr)", cache=True)
    def linear_kernel(record):
        _ = sources
        args, counters = carray(record, 1, _RECORD)[0], address_of(record)
        scratch = args.scratch + claim(counters + NEXT_THREAD) * args.scratch_size
        unit = claim(counters + NEXT_UNIT)
        while unit < args.num_units:
            _linear(args, unit, scratch)
            unit = claim(counters + NEXT_UNIT)

    return linear_kernel


LINEAR.use(_compile(SOURCES))
