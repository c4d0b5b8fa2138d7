"""x Wᵀ + b on a CPU, batch-invariant: a row's result is bitwise equal in any batch.

A BLAS chooses the order of a sum by the number of rows. Here each number is one chain of fused
multiply-adds in the order of the inputs; for x in bfloat16 a chain of dot products of pairs, if the CPU has
those; with AMX a chain of tile products (`amx_linear`). A weight is packed into panels of PANEL outputs,
each read from end to end by one thread. It may be narrower than the accumulators, which are float32.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from ...checks import KERNEL_DTYPES, check_contiguous, check_device, check_dtype, check_shape, is_trusted
from ..launch.huge_pages import in_huge_pages
from ..launch.runs import num_runs, take_run
from ..launch.tasks import Task, addresses, thread_scratch
from ..products.amx import HAS_TILES, INPUTS
from ..products.factors import MOST_GROUP, expand_factors, expanded_bytes, group_steps, has_groups
from ..products.kinds import BF12, BF12_PAIRS, INT8_PAIRS, PART_STEPS, STEP_BYTES, UNPACKED
from ..products.reader import PANEL
from ..products.tiles import GATED, MOST_TILE_ROWS, PanelArgs, multiply_panel
from ..products.unpack import unpack
from ..simd.memory import address_of, get_byte, item_size, set_byte, store
from ..simd.numbers import FLOAT32, INT8
from ..simd.vectors import HAS_DOT, LANES, VECTOR_BYTES, function, splat
from .amx_linear import (
    LEAST_UNIT_ROWS,
    TILES,
    is_read_apart,
    panels_of_unit,
    rows_of_unit,
    scratch_bytes,
    thirds_of,
)
from .panels import (
    OUT_KINDS,
    Panels,
    check_bias,
    check_outputs,
    check_panels,
    check_result_dtype,
    check_weight,
    num_panels_of,
    to_parts,
)
from .units import count_units, find_expert, no_expert, weight_of

_DEPTH = 320  # most steps of a panel at a time: 20 to 40 KiB, in the L1 cache while all rows use them
UNPACKED_DEPTH = 128  # the same if they are unpacked first, to 4 bytes a number
ROWS = 64  # of a unit of work
_WIDTH = 4 * PANEL
# Parts of whole groups have up to _DEPTH steps and a group more, of two inputs each.
_EXPANDED = expanded_bytes(2 * (_DEPTH + MOST_GROUP))

LINEAR = Task(
    ("x", "panels", "scales", "bias", "out", "offsets"),
    (
        "experts", "num_experts", "x_stride", "num_rows", "depth", "out_features", "out_stride", "num_panels",
        "weight_kind", "out_kind", "gated", "all_units", "num_threads",
    ),
    read_late=("offsets",),
)  # fmt: skip
_RECORD = LINEAR.record
_PAIRS = {torch.bfloat16: torch.int32, torch.int8: torch.int16}  # dtypes that hold a pair of these


def can_pair(dtype: torch.dtype, in_features: int) -> bool:
    """Return whether this CPU multiplies x of that dtype and width by weights in pairs."""
    if dtype == torch.float32:
        return _fills_tiles(in_features)
    return HAS_DOT and dtype == torch.bfloat16 and in_features % 2 == 0


def _fills_tiles(in_features: int) -> bool:
    return HAS_TILES and in_features % INPUTS == 0


def pack(weight: Tensor, scales: Tensor | None = None, *, pairs: bool = False, gated: bool = False) -> Panels:
    """Pack a weight [out_features, in_features], times scales [out_features], into panels.

    pairs: for x of a dtype that `can_pair`. gated: see Panels; the first half are the gates. Raises
    ValueError unless the weight is float32, float16, bfloat16 or int8, in pairs one of the last two and not
    -128, has inputs, and has scales exactly if it is int8.
    """
    check_weight(weight, scales, pairs=pairs, gated=gated)
    out_features, in_features = weight.shape
    num_panels = num_panels_of(out_features, gated)
    shape = num_panels, in_features // (1 + pairs), PANEL, 1 + pairs
    panels = in_huge_pages(weight.new_empty(shape))
    by_halves = weight.dtype == torch.bfloat16 and not pairs
    by_parts = weight.dtype == torch.int8 and pairs
    # A step of an output is one element: only transposing a matrix is a fast copy in torch.
    step = _PAIRS[weight.dtype] if pairs else weight.dtype
    steps = panels.view(step).squeeze(3)
    for i, rows in enumerate(_rows_of_panels(weight, gated)):
        ordered = _alternate_halves(rows) if by_halves else rows
        steps[i, :, len(ordered) :] = 0
        steps[i, :, : len(ordered)] = ordered.contiguous().flatten().view(step).view(len(ordered), -1).t()
        if by_parts:
            panels[i] = to_parts(panels[i])
    factors = torch.ones(out_features, dtype=torch.float32) if scales is None else scales
    padded = pad(factors, gated=gated)
    return Panels(panels if pairs else panels.squeeze(3), padded, out_features, gated)


def pad(numbers: Tensor, *, gated: bool = False) -> Tensor:
    """Order a number for each output as the panels do: [out_features] -> f32[num_panels * PANEL]."""
    check_outputs("numbers", numbers, gated=gated)
    check_dtype("numbers", numbers)
    padded = torch.zeros(num_panels_of(len(numbers), gated), PANEL, dtype=torch.float32)
    for i, part in enumerate(_rows_of_panels(numbers, gated)):
        padded[i, : len(part)] = part
    return padded.flatten()


def _rows_of_panels(x: Tensor, gated: bool) -> Iterator[Tensor]:
    """Yield each panel's rows: up to PANEL, or of a gated weight LANES gates and as many others, padded."""
    if not gated:
        yield from torch.split(x, PANEL)
        return
    gates, others = x.chunk(2)
    for gate, other in zip(torch.split(gates, LANES), torch.split(others, LANES), strict=True):
        both = gate.new_zeros(2, LANES, *gate.shape[1:])
        both[0, : len(gate)] = gate
        both[1, : len(gate)] = other
        yield both.flatten(0, 1)


def _alternate_halves(rows: Tensor) -> Tensor:
    """Alternate outputs i and i + LANES: [n, in_features] -> [PANEL, in_features]."""
    halves = rows.new_zeros(2, LANES, rows.shape[1])
    halves.flatten(0, 1)[: len(rows)] = rows
    return halves.transpose(0, 1).flatten(0, 1)


def linear(
    x: Tensor,
    weight: Panels,
    bias: Tensor | None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply x [num_rows, in_features] by the weight: [num_rows, out_features], gated half as wide.

    bias: f32[num_panels * PANEL], as `pad` makes it. dtype: of the result, by default that of x;
    accumulators are float32. out: where to store the result, of that dtype; its rows may be apart. Raises
    ValueError if x has another width or dtype than the weight is packed for, or out another than the result.
    """
    if not is_trusted():
        check_panels(weight)
        check_bias(weight, bias)
        check_result_dtype(torch.float32 if dtype is None else dtype)
    return multiply(x, weight, bias, dtype, out)


class WeightsOfRows(NamedTuple):
    """Weights that rows are multiplied by, each by that of its expert. All are packed for the same x."""

    table: Tensor  # i64[num_experts, 4], see `units`
    offsets: Tensor  # i32[num_experts + 1]: the rows of expert e are offsets[e] to offsets[e + 1]
    has_groups: bool  # whether any is in codes with factors for groups of inputs


def multiply(
    x: Tensor,
    weight: Panels,
    bias: Tensor | None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    experts: WeightsOfRows | None = None,
) -> Tensor:
    """Multiply as `linear` does, whose checks of the weight are behind it.

    experts: multiply by their weights, which are of the shape of this one; their formats may differ.
    """
    check_shape("x", x, (None, weight.in_features))
    in_tiles = weight.in_pairs and _fills_tiles(weight.in_features)
    in_pairs = (torch.bfloat16, torch.float32) if in_tiles else (torch.bfloat16,)
    check_dtype("x", x, in_pairs if weight.in_pairs else KERNEL_DTYPES)
    check_device("x", x, weight.weight.device)
    num_rows = x.shape[0]
    num_panels = len(weight.weight)
    out_features = weight.out_features // (1 + weight.gated)
    if out is None:
        out = x.new_empty(num_rows, out_features, dtype=dtype or x.dtype)
    else:
        check_shape("out", out, (num_rows, out_features), dtype or x.dtype)
        check_device("out", out, x.device)
        check_contiguous("a row of out", out[:1])
    rows = x if weight.in_pairs else x.float()
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    offsets, table = (None, None) if experts is None else (experts.offsets, experts.table)
    num_experts = 0 if experts is None else len(experts.table)
    fields = (
        *addresses(rows, weight.weight, weight.scales, bias, out, offsets, table),
        num_experts,
        rows.stride(0) * rows.itemsize,
        num_rows,
        weight.depth,
        out_features,
        out.stride(0) * out.itemsize,
        num_panels,
        weight.kind,
        OUT_KINDS[out.dtype],
        GATED if weight.gated else 0,
    )
    num_threads = torch.get_num_threads()
    if in_tiles:
        depth = weight.in_features
        usual_rows = most_rows = num_rows
        num_used = 1
        if experts is not None:
            # Experts have as many rows on average; those with more have several units, or larger ones.
            num_used = max(1, min(num_rows, num_experts))
            usual_rows = -(-num_rows // num_used)
            most_rows = min(num_rows, max(2 * usual_rows, LEAST_UNIT_ROWS))
        thirds, stride = thirds_of(rows.dtype == torch.float32, depth)
        unit_rows = rows_of_unit(most_rows, num_panels * num_used, depth, thirds, num_threads)
        unit_panels = panels_of_unit(
            usual_rows,
            num_panels,
            depth,
            min(max(1, usual_rows), unit_rows),
            thirds,
            weight.kind,
            num_threads,
        )
        across = -(-num_panels // unit_panels)
        apart = across if is_read_apart(usual_rows, num_panels, depth, thirds) else 1
        num_units = across * -(-num_rows // unit_rows)
        has_groups = weight.has_groups if experts is None else experts.has_groups
        expanded = expanded_bytes(depth) if has_groups else 0
        size = scratch_bytes(unit_rows, unit_panels, thirds, stride, expanded)
        units = unit_rows, unit_panels, apart, thirds, stride, expanded, num_units, num_threads
        launched = num_threads if experts else num_runs(num_units, num_threads)
        TILES.run(launched, *fields, *units, scratch_size=size)
    else:
        size = (ROWS + 1 + _DEPTH) * _WIDTH + _EXPANDED
        num_units = num_panels * -(-num_rows // ROWS)
        launched = num_threads if experts else num_runs(num_units, num_threads)
        LINEAR.run(launched, *fields, num_units, num_threads, scratch_size=size)
    return out


@function
def _linear(args, unit, own, next_panel, scratch):
    """Multiply the rows of a unit by a panel. unit: of those of its weight."""
    panel = unit % args.num_panels
    first = own.start + unit // args.num_panels * ROWS
    width = LANES if args.gated else PANEL  # of a panel's results
    rows = min(ROWS, own.end - first)
    columns = min(width, args.out_features - panel * width)
    kind = own.kind
    size = item_size(args.out_kind)
    stride = STEP_BYTES[own.kind]
    x = args.x + first * args.x_stride
    weight = own.panels + panel * args.depth * stride
    out_stride = args.out_stride
    out = args.out + first * out_stride + panel * width * size
    zeros = scratch + ROWS * _WIDTH
    tile = scratch + (ROWS + 1) * _WIDTH
    expanded = scratch + (ROWS + 1 + _DEPTH) * _WIDTH
    pace = -(-stride // -(-rows // MOST_TILE_ROWS))
    # Unpacked once if several register tiles would each do so.
    is_unpacked = rows > MOST_TILE_ROWS and UNPACKED[kind] != kind
    most = UNPACKED_DEPTH if is_unpacked and kind != BF12 else _DEPTH
    # Equal parts of whole groups.
    whole = group_steps(kind, own.scales) if has_groups(kind) else PART_STEPS[kind]
    step = -(-args.depth // (-(-args.depth // most) * whole)) * whole
    for start in range(0, args.depth, step):
        depth = min(step, args.depth - start)
        b = weight + start * stride
        b_stride = stride
        b_kind = kind
        # While this part is in the L1 cache, the one that is read next is prefetched.
        c = zeros
        c_stride = 0
        ahead = b + depth * stride
        if start:
            c = scratch
            c_stride = _WIDTH
        to = scratch
        to_stride = _WIDTH
        to_kind = FLOAT32
        scale = 0
        bias = 0
        if kind in (BF12_PAIRS, BF12):
            scale = own.scales
        elif has_groups(kind):
            scale = expanded
            expand_factors(kind, own.scales, panel, start, depth, MOST_GROUP, expanded)
        if is_unpacked:
            unpack(kind, tile, b, stride, scale, depth)
            b = tile
            b_kind = UNPACKED[kind]
            scale = 0
            b_stride = STEP_BYTES[b_kind]
        if start + depth == args.depth:
            ahead = next_panel
            to_kind = args.out_kind + args.gated
            if columns == width:
                to = out
                to_stride = out_stride
            if kind in (INT8, INT8_PAIRS):
                scale = own.scales + panel * _WIDTH
            if own.bias:
                bias = own.bias + panel * _WIDTH
        same = PanelArgs(c_stride, to_stride, to_kind, scale, bias, args.x_stride, b, b_stride, depth, pace)
        multiply_panel(b_kind, rows, c, to, x + 4 * start, ahead, same)
    if columns < width:  # the last panel is padded
        for row in range(rows):
            for byte in range(columns * size):
                set_byte(out + row * out_stride + byte, get_byte(scratch + row * _WIDTH + byte))


@LINEAR.kernel
def _linear_kernel(record):
    args = carray(record, 1, _RECORD)[0]
    counters = address_of(record)
    scratch = thread_scratch(args, counters)
    all_units = count_units(args, ROWS, args.num_panels)
    unit, end = take_run(counters, all_units, args.num_threads)
    expert = no_expert()
    if unit < all_units:  # else the next kernel may use the scratch memory already
        for v in range(0, _WIDTH, VECTOR_BYTES):
            store(scratch + ROWS * _WIDTH + v, splat(np.float32(0.0)))
        expert = find_expert(args, unit, ROWS, args.num_panels, expert)
    while unit < all_units:
        next_unit = unit + 1
        if next_unit == end:
            next_unit, end = take_run(counters, all_units, args.num_threads)
        next_expert = expert
        if next_unit < all_units:
            next_expert = find_expert(args, next_unit, ROWS, args.num_panels, expert)
        own = weight_of(args, expert)
        coming = weight_of(args, next_expert)
        place = (next_unit - next_expert.first_unit) % args.num_panels * args.depth
        next_panel = coming.panels + place * STEP_BYTES[coming.kind]
        _linear(args, unit - expert.first_unit, own, next_panel, scratch)
        unit = next_unit
        expert = next_expert
