"""x Wᵀ by AMX (`products.amx`), for weights in pairs of bfloat16.

x in float32 is split into three bfloat16, its thirds, which add up to it exactly: each product is exact and
the result as accurate as a sum in float32. Subnormal thirds count as 0, so x below 2^-102 and products
below that lose bits; an infinite weight times a finite x may be NaN.
"""

from typing import Any

from numba import carray, types

from ...formats import BFLOAT16_PAIRS, FLOAT32, INT8_PAIRS, PANEL, PANEL_WIDTH, STEP_BYTES
from ...linear.amx_linear import FEW_TILED_ROWS, THIRDS, TILED_DEPTH, TILES, TOGETHER
from ...target import HAS_TILES, INPUTS, LANES, LINE, ROW_BLOCK, STEPS, VECTOR_BYTES
from ..kernels import kernel, thread_scratch
from ..launch.runs import take_run
from ..products.amx import AHEAD_BYTES, Block, Supply, configure_rows, multiply_block, release
from ..products.factors import expand_factors, has_groups
from ..products.unpack import unpack
from ..simd import emit
from ..simd.emit import INTS, VECTOR, int64, operation
from ..simd.memory import address_of, item_size, load, store_some_as
from ..simd.vectors import add, function, multiply, silu
from .units import count_units, find_expert, no_expert, weight_of

_FEW_UNPACKED = 112  # the same if panels are unpacked into the L1 cache

_RECORD = TILES.record


@operation(types.void, *[types.int64] * 4)
def _split_float32(builder: Any, source: Any, first: Any, second: Any, third: Any) -> None:
    """Split INPUTS float32 into the upper, middle and lower 8 bits of their significands, as bfloat16.

    Infinity and NaN are the same in all three.
    """
    halves = [emit.load(builder, FLOAT32, builder.add(source, int64(VECTOR_BYTES * v))) for v in range(2)]
    for to in (first, second, third):
        parts = []
        for v, x in enumerate(halves):
            bits = builder.bitcast(x, INTS)
            exponent = emit.constant(0x7F800000, INTS)
            is_finite = builder.icmp_signed("!=", builder.and_(bits, exponent), exponent)
            upper = builder.bitcast(builder.and_(bits, emit.constant(0xFFFF0000, INTS)), VECTOR)
            parts.append(builder.select(is_finite, upper, x))
            halves[v] = builder.select(is_finite, builder.fsub(x, upper), x)
        emit.store(builder, FLOAT32, to, emit.narrow(builder, *parts))


@function
def _bring_thirds(args, first, rows, to, stride):
    """Split rows of x into thirds, each stored as three rows of bfloat16."""
    for row in range(rows):
        x = args.x + (first + row) * args.x_stride
        at = to + THIRDS * row * stride
        for k in range(args.depth // STEPS):
            place = at + LINE * k
            _split_float32(x + 2 * LINE * k, place, place + stride, place + 2 * stride)


@function
def _units_across(args):
    return -(-args.num_panels // args.unit_panels)


@function
def _first_panel(args, unit):
    """Return the first panel of a unit; the others are `apart` panels from one to the next."""
    return unit % _units_across(args) * (args.unit_panels if args.apart == 1 else 1)


@function
def _multiply(args, unit, own, next_panel, scratch, a, a_stride, configured):
    """Multiply a unit's rows, in bfloat16, by its panels. Return what the tiles are configured for.

    unit: the number of the unit among the units of its weight.
    """
    panel = _first_panel(args, unit)
    first = own.start + unit // _units_across(args) * args.unit_rows
    rows = min(args.unit_rows, own.end - first)
    panels = min(args.unit_panels, -(-(args.num_panels - panel) // args.apart))
    kind = own.kind
    stride = STEP_BYTES[own.kind]
    sums = scratch + LINE
    panel_sums = args.unit_rows * args.thirds * PANEL_WIDTH
    unpacked = sums + args.unit_panels * panel_sums
    size = args.depth * stride
    far = args.apart * size
    c_stride = int(PANEL_WIDTH)  # an int64, where numba would take the constant for a type of its own
    together = min(TOGETHER, args.unit_panels)
    block = ROW_BLOCK // together
    num_blocks = -(-rows * args.thirds // block)
    pace = -(-stride * STEPS // num_blocks // LINE) * LINE
    # Equal parts of whole groups. A single block unpacks on the way instead.
    is_unpacked = kind != BFLOAT16_PAIRS and num_blocks > 1
    few = _FEW_UNPACKED if is_unpacked else FEW_TILED_ROWS
    most = TILED_DEPTH // 2 if together > 1 and rows <= few else TILED_DEPTH
    step = -(-args.depth // (-(-args.depth // most) * STEPS)) * STEPS
    is_whole = num_blocks == 1 and (kind != BFLOAT16_PAIRS or args.apart > 1)
    if is_whole:
        step = args.depth
    for start in range(0, args.depth, step):
        depth = min(step, args.depth - start)
        for near in range(0, panels, together):
            some = min(together, panels - near)
            b = own.panels + panel * size + near * far + start * stride
            # Prefetch what is multiplied next: the next panels, the next part of the first ones, or the
            # next unit.
            ahead = b + together * far
            if near + some == panels:
                ahead = own.panels + panel * size + (start + depth) * stride
                if start + depth == args.depth:
                    ahead = next_panel
            if is_whole and kind == BFLOAT16_PAIRS:  # unpacking on the way adds the distance itself
                ahead = b + AHEAD_BYTES // some
            factors = own.scales
            if has_groups(kind):
                factors = scratch + args.scratch_size - TOGETHER * args.expanded
                for p in range(some):
                    number = panel + (near + p) * args.apart
                    to = factors + p * args.expanded
                    expand_factors(kind, own.scales, number, start, depth, INPUTS, to)
            b_kind = kind
            b_stride = stride
            b_far = far
            if is_unpacked:
                b_kind = BFLOAT16_PAIRS
                b_stride = PANEL_WIDTH
                b_far = TILED_DEPTH * PANEL_WIDTH
                for p in range(some):
                    own_factors = factors + p * args.expanded
                    unpack(kind, unpacked + p * b_far, b + p * far, stride, own_factors, depth)
                b = unpacked
            c = sums + near * panel_sums
            x = a + 4 * start
            for row in range(0, rows * args.thirds, block):
                left = min(rows * args.thirds - row, block)
                if left + some * ROW_BLOCK != configured:
                    configure_rows(scratch, left, some)
                    configured = left + some * ROW_BLOCK
                product = Block(c, c_stride, int(start == 0), x, a_stride, b, b_stride, depth // STEPS)
                supply = Supply(ahead, pace, unpacked, factors, args.expanded, panel_sums, b_far, far)
                multiply_block(b_kind, left, some, product, supply)
                c = c + block * PANEL_WIDTH
                x = x + block * a_stride
                ahead += pace * (depth // STEPS)
    for p in range(panels):
        _store_results(args, own, first, rows, panel + p * args.apart, sums + p * panel_sums)
    return configured


@function
def _store_results(args, own, first, rows, panel, c):
    """Apply the epilogue to a panel's accumulators: add up thirds, scale, bias, gates; store the result."""
    width = LANES if args.gated else PANEL
    size = item_size(args.out_kind)
    thirds = args.thirds
    columns = min(width, args.out_features - panel * width)
    to = args.out + first * args.out_stride + panel * width * size
    scale = own.scales + panel * PANEL_WIDTH
    bias = own.bias + panel * PANEL_WIDTH
    for row in range(rows):
        at = c + thirds * row * PANEL_WIDTH
        left = load(at)
        right = load(at + VECTOR_BYTES)
        if thirds > 1:
            left = add(left, add(load(at + PANEL_WIDTH), load(at + 2 * PANEL_WIDTH)))
            at += VECTOR_BYTES
            right = add(right, add(load(at + PANEL_WIDTH), load(at + 2 * PANEL_WIDTH)))
        if own.kind == INT8_PAIRS:
            left = multiply(left, load(scale))
            right = multiply(right, load(scale + VECTOR_BYTES))
        if own.bias:
            left = add(left, load(bias))
            right = add(right, load(bias + VECTOR_BYTES))
        if args.gated:
            left = multiply(silu(left), right)
        store_some_as(args.out_kind, to, left, columns)
        if columns > LANES:
            store_some_as(args.out_kind, to + LANES * size, right, columns - LANES)
        to += args.out_stride


if HAS_TILES:

    @kernel(TILES.name)
    def _tiles_kernel(record):
        args = carray(record, 1, _RECORD)[0]
        counters = address_of(record)
        scratch = thread_scratch(args, counters)
        sums = args.unit_panels * args.unit_rows * args.thirds
        thirds = scratch + LINE + (TOGETHER * TILED_DEPTH + sums) * PANEL_WIDTH
        brought = -1
        configured = 0
        across = _units_across(args)
        all_units = count_units(args, args.unit_rows, across)
        unit, end = take_run(counters, all_units, args.num_threads)
        expert = no_expert()
        if unit < all_units:
            expert = find_expert(args, unit, args.unit_rows, across, expert)
        while unit < all_units:
            next_unit = unit + 1
            if next_unit == end:
                next_unit, end = take_run(counters, all_units, args.num_threads)
            next_expert = expert
            if next_unit < all_units:
                next_expert = find_expert(args, next_unit, args.unit_rows, across, expert)
            own = weight_of(args, expert)
            coming = weight_of(args, next_expert)
            place = _first_panel(args, next_unit - next_expert.first_unit) * args.depth
            next_panel = coming.panels + place * STEP_BYTES[coming.kind]
            number = unit - expert.first_unit
            first = own.start + number // across * args.unit_rows
            a = args.x + first * args.x_stride
            a_stride = args.x_stride
            if args.thirds > 1:
                a = thirds
                a_stride = args.thirds_stride
                if first != brought:  # once for all panels that this thread multiplies them by
                    _bring_thirds(args, first, min(args.unit_rows, own.end - first), a, a_stride)
                    brought = first
            configured = _multiply(args, number, own, next_panel, scratch, a, a_stride, configured)
            unit = next_unit
            expert = next_expert
        if configured:
            release()
