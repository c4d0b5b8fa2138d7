"""x Wᵀ + b on a CPU, batch-invariant: a row's result is bitwise equal in any batch.

A BLAS chooses the order of a sum by the number of rows. Here each number is one chain of fused
multiply-adds in the order of the inputs; for x in bfloat16 a chain of dot products of pairs, if the CPU has
those; with AMX a chain of tile products (`amx_linear`). A weight is packed into panels of PANEL outputs,
each read from end to end by one thread. It may be narrower than the accumulators, which are float32.
"""

import numpy as np
from numba import carray

from ...formats import (
    BF12,
    BF12_PAIRS,
    CODES4,
    CODES4_PAIRS,
    CODES8,
    CODES8_PAIRS,
    E4M3,
    E4M3_PAIRS,
    FLOAT32,
    INT8,
    INT8_PAIRS,
    MOST_GROUP,
    PANEL,
    PANEL_WIDTH,
    PART_STEPS,
    STEP_BYTES,
    UNPACKED,
)
from ...linear.linear import DEPTH, LINEAR, ROWS
from ...target import LANES, VECTOR_BYTES
from ...variants import compiles
from ..kernels import kernel, thread_scratch
from ..launch.runs import take_run
from ..products.factors import expand_factors, group_steps, has_groups
from ..products.tiles import MOST_TILE_ROWS, PanelArgs, multiply_panel
from ..products.unpack import unpack_for_linear
from ..simd.memory import address_of, get_byte, item_size, set_byte, store
from ..simd.vectors import function, splat
from .units import count_units, find_expert, no_expert, weight_of

UNPACKED_DEPTH = 128  # the same if they are unpacked first, to 4 bytes a number

_RECORD = LINEAR.record
_HAS_GROUPS = compiles(LINEAR.name, CODES4, CODES4_PAIRS, CODES8, CODES8_PAIRS, E4M3, E4M3_PAIRS)


@function
def _linear(args, unit, own, next_panel, scratch):
    """Multiply the rows of a unit by a panel. unit: its number in the weight."""
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
    zeros = scratch + ROWS * PANEL_WIDTH
    tile = scratch + (ROWS + 1) * PANEL_WIDTH
    expanded = scratch + (ROWS + 1 + DEPTH) * PANEL_WIDTH
    pace = -(-stride // -(-rows // MOST_TILE_ROWS))
    # Unpacked once if several register tiles would each do so.
    is_unpacked = rows > MOST_TILE_ROWS and UNPACKED[kind] != kind
    most = UNPACKED_DEPTH if is_unpacked and kind != BF12 else DEPTH
    # Equal parts of whole groups.
    whole = PART_STEPS[kind]
    if _HAS_GROUPS and has_groups(kind):
        whole = group_steps(kind, own.scales)
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
            c_stride = PANEL_WIDTH
        to = scratch
        to_stride = PANEL_WIDTH
        to_kind = FLOAT32
        scale = 0
        bias = 0
        if kind in (BF12_PAIRS, BF12):
            scale = own.scales
        elif _HAS_GROUPS and has_groups(kind):
            scale = expanded
            expand_factors(kind, own.scales, panel, start, depth, MOST_GROUP, expanded)
        if is_unpacked:
            unpack_for_linear(kind, tile, b, stride, scale, depth)
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
                scale = own.scales + panel * PANEL_WIDTH
            if own.bias:
                bias = own.bias + panel * PANEL_WIDTH
        same = PanelArgs(c_stride, to_stride, to_kind, scale, bias, args.x_stride, b, b_stride, depth, pace)
        multiply_panel(b_kind, rows, c, to, x + 4 * start, ahead, same)
    if columns < width:  # the last panel is padded
        for row in range(rows):
            for byte in range(columns * size):
                set_byte(out + row * out_stride + byte, get_byte(scratch + row * PANEL_WIDTH + byte))


@kernel(LINEAR.name)
def _linear_kernel(record):
    args = carray(record, 1, _RECORD)[0]
    counters = address_of(record)
    scratch = thread_scratch(args, counters)
    all_units = count_units(args, ROWS, args.num_panels)
    unit, end = take_run(counters, all_units, args.num_threads)
    expert = no_expert()
    if unit < all_units:  # else the next kernel may use the scratch memory already
        for v in range(0, PANEL_WIDTH, VECTOR_BYTES):
            store(scratch + ROWS * PANEL_WIDTH + v, splat(np.float32(0.0)))
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
