"""x Wᵀ + b for a CPU, with the bits of a row the same whatever is beside it.

A library's product picks its way of summing up by the number of rows. Here each number is one chain of fused
multiply-adds in the order of the inputs. The weight lies in panels of PANEL outputs, each read from end to
end by one thread; it may be narrower than the product, which is float32.
"""

from typing import NamedTuple

import numpy as np
import torch
from numba import carray, cfunc
from torch import Tensor

from .checks import check_dtype, check_shape
from .numba_memory import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    LINE,
    address_of,
    claim,
    get_byte,
    item_size,
    load,
    load_bfloat,
    load_high,
    load_low,
    set_byte,
    store,
    store_as,
    will_write,
)
from .numba_threads import NEXT_THREAD, NEXT_UNIT, SOURCES, Task
from .numba_tiles import MOST_TILE_ROWS, multiply_panel, multiply_panel_bfloat, multiply_panel_int8
from .numba_vectors import LANES, VECTOR_BYTES, add, fma, function, multiply, splat

PANEL = 2 * LANES  # outputs
DEPTH = 320  # inputs that a panel is gone through at a time, at most: 20 to 40 KiB of it
ROWS = 64  # of a unit
GROUP = 32  # inputs that share a scale and a zero in int4
INT4 = 5  # after the kinds that can be loaded as they are
OUT_KINDS = {torch.float32: FLOAT32, torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}
WEIGHT_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.int8: INT8, torch.uint8: INT4}
_WIDTH = 4 * PANEL

LINEAR = Task(
    (
        "x", "panels", "scales", "bias", "out", "x_stride", "num_rows", "in_features", "out_features",
        "num_panels", "weight_kind", "out_kind",
    )
)  # fmt: skip
_RECORD = LINEAR.record


class Panels(NamedTuple):
    """A weight [out_features, in_features] as this product reads it, and what multiplies and shifts it."""

    weight: Tensor  # [num_panels, in_features, PANEL], for int4 uint8[num_panels, in_features, LANES]
    scales: Tensor  # f32[num_panels * PANEL], for int4 bf16[num_panels, num_groups, 2, PANEL]: and zeros
    out_features: int

    @property
    def in_features(self) -> int:
        """Numbers of a row of x."""
        return self.weight.shape[1]


def pack(weight: Tensor, scales: Tensor | None = None) -> Panels:
    """The panels of a weight [out_features, in_features], whose rows scales f32[out_features] multiply.

    Raises ValueError unless the weight is float32, bfloat16 or int8.
    """
    check_dtype("weight", weight, (torch.float32, torch.bfloat16, torch.int8))
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    panels = weight.new_zeros(num_panels, in_features, PANEL)
    for i, rows in enumerate(weight.split(PANEL)):
        panels[i, :, : len(rows)] = rows.T
    padded_scales = torch.ones(num_panels * PANEL, dtype=torch.float32)
    if scales is not None:
        padded_scales[:out_features] = scales
    return Panels(panels, padded_scales, out_features)


def pack_int4(codes: Tensor, scales: Tensor, zeros: Tensor) -> Panels:
    """The panels of scale * (code - 8) + zero.

    codes: uint8[out_features, in_features], 0 to 15. scales, zeros: bf16[out_features, in_features // GROUP].
    """
    out_features, in_features = codes.shape
    num_panels, num_groups = -(-out_features // PANEL), in_features // GROUP
    panels = codes.new_zeros(num_panels, in_features, LANES)
    factors = scales.new_zeros(num_panels, num_groups, 2, PANEL)
    tiles = zip(codes.split(PANEL), scales.split(PANEL), zeros.split(PANEL), strict=True)
    for i, (rows, scale, zero) in enumerate(tiles):
        halves = codes.new_zeros(PANEL, in_features)
        halves[: len(rows)] = rows
        panels[i] = (halves[:LANES] | halves[LANES:] << 4).T
        factors[i, :, 0, : len(rows)], factors[i, :, 1, : len(rows)] = scale.T, zero.T
    return Panels(panels, factors, out_features)


def linear(x: Tensor, weight: Panels, bias: Tensor | None) -> Tensor:
    """[num_rows, in_features] -> [num_rows, out_features], in the dtype of x; the sums are float32.

    bias: f32[num_panels * PANEL], or None. Raises ValueError where x has another width or dtype.
    """
    check_shape("x", x, (None, weight.in_features))
    check_dtype("x", x)
    num_rows, num_panels = x.shape[0], len(weight.weight)
    out = x.new_empty(num_rows, weight.out_features)
    rows = x.float() if x.stride(1) == 1 else x.float().contiguous()
    LINEAR.run(
        num_panels * -(-num_rows // ROWS),
        rows.data_ptr(),
        weight.weight.data_ptr(),
        weight.scales.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows.stride(0) * 4,
        num_rows,
        weight.in_features,
        weight.out_features,
        num_panels,
        WEIGHT_KINDS[weight.weight.dtype],
        OUT_KINDS[x.dtype],
        scratch_size=(ROWS + DEPTH) * _WIDTH,
    )
    return out


@function
def _unpack_int4(to, codes, factors, first, depth):
    """scale * (code - 8) + zero of so many inputs of a panel, from the first on: whole groups."""
    middle = splat(np.float32(-8.0))
    for group in range(first // GROUP, (first + depth) // GROUP):
        at = factors + group * 2 * 2 * PANEL
        scale_low, scale_high = load_bfloat(at), load_bfloat(at + 2 * LANES)
        zero_low, zero_high = load_bfloat(at + 2 * PANEL), load_bfloat(at + 2 * PANEL + 2 * LANES)
        least_low, least_high = fma(middle, scale_low, zero_low), fma(middle, scale_high, zero_high)
        for k in range(group * GROUP, (group + 1) * GROUP):
            row = to + (k - first) * _WIDTH
            store(row, fma(load_low(codes + k * LANES), scale_low, least_low))
            store(row + VECTOR_BYTES, fma(load_high(codes + k * LANES), scale_high, least_high))


@function
def _finish(args, sums, row, panel):
    """Scale and bias of a row of a panel's sums, and into its place."""
    size = item_size(args.out_kind)
    columns = min(PANEL, args.out_features - panel * PANEL)
    out = args.out + (row * args.out_features + panel * PANEL) * size
    for v in range(0, columns, LANES):
        at = 4 * (panel * PANEL + v)
        y = load(sums + 4 * v)
        if args.weight_kind != INT4:
            y = multiply(y, load(args.scales + at))
        if args.bias:
            y = add(y, load(args.bias + at))
        if v + LANES <= columns:
            store_as(args.out_kind, out + v * size, y)
        else:  # the row ends within the vector
            store_as(args.out_kind, sums, y)
            for byte in range((columns - v) * size):
                set_byte(out + v * size + byte, get_byte(sums + byte))


@function
def _linear(args, unit, next_unit, scratch):
    panel, first = unit % args.num_panels, unit // args.num_panels * ROWS
    rows = min(ROWS, args.num_rows - first)
    _start(args, rows, first, panel, scratch)
    stride = LANES if args.weight_kind == INT4 else PANEL * item_size(args.weight_kind)
    panel_bytes = args.in_features * stride
    weight, tile = args.panels + panel * panel_bytes, scratch + ROWS * _WIDTH
    pace = -(-stride // -(-rows // MOST_TILE_ROWS))
    # In equal parts, of whole groups.
    step = -(-args.in_features // (-(-args.in_features // DEPTH) * GROUP)) * GROUP
    for start in range(0, args.in_features, step):
        depth = min(step, args.in_features - start)
        a, b, x_stride = args.x + first * args.x_stride + 4 * start, weight + start * stride, args.x_stride
        # While this part is in the first cache, the one that is read next comes from memory.
        ahead = b + depth * stride
        if start + depth == args.in_features:
            ahead = args.panels + next_unit % args.num_panels * panel_bytes
        if args.weight_kind == FLOAT32:
            multiply_panel(scratch, _WIDTH, a, x_stride, b, stride, rows, depth, ahead, pace)
        elif args.weight_kind == BFLOAT16:
            multiply_panel_bfloat(scratch, _WIDTH, a, x_stride, b, stride, rows, depth, ahead, pace)
        elif args.weight_kind == INT8:
            multiply_panel_int8(scratch, _WIDTH, a, x_stride, b, stride, rows, depth, ahead, pace)
        else:
            factors = args.scales + panel * (args.in_features // GROUP) * 2 * 2 * PANEL
            _unpack_int4(tile, weight, factors, start, depth)
            multiply_panel(scratch, _WIDTH, a, x_stride, tile, _WIDTH, rows, depth, ahead, pace)
    for i in range(rows):
        _finish(args, scratch + i * _WIDTH, first + i, panel)


@function
def _start(args, rows, first, panel, sums):
    """Sums of nothing, and their places in the output on the way to the cache."""
    size = item_size(args.out_kind)
    for i in range(rows):
        out = args.out + ((first + i) * args.out_features + panel * PANEL) * size
        for at in range(0, PANEL * size, LINE):
            will_write(out + at)
        for v in range(0, _WIDTH, VECTOR_BYTES):
            store(sums + i * _WIDTH + v, splat(np.float32(0.0)))


def _compile(sources: int):  # numba's cache of compiled code goes by this too
    @cfunc("void(voidptr)", cache=True)
    def linear_kernel(record):
        _ = sources
        args, counters = carray(record, 1, _RECORD)[0], address_of(record)
        scratch = args.scratch + claim(counters + NEXT_THREAD) * args.scratch_size
        unit = claim(counters + NEXT_UNIT)
        while unit < args.num_units:
            next_unit = claim(counters + NEXT_UNIT)
            _linear(args, unit, next_unit, scratch)
            unit = next_unit

    return linear_kernel


LINEAR.use(_compile(SOURCES))
