"""x Wᵀ by AMX (`products.amx`), for weights in pairs of bfloat16.

x in float32 is split into three bfloat16, its thirds, which add up to it exactly: each product is exact and
the result as accurate as a sum in float32. Subnormal thirds count as 0, so x below 2^-102 and products
below that lose bits; an infinite weight times a finite x may be NaN.
"""

from typing import Any

from numba import carray, types

from ..launch.runs import take_run
from ..launch.tasks import Task, thread_scratch
from ..products.amx import (
    AHEAD_BYTES,
    HAS_TILES,
    INPUTS,
    ROW_BLOCK,
    STEPS,
    Block,
    Supply,
    configure_rows,
    multiply_block,
    release,
)
from ..products.factors import expand_factors, has_groups
from ..products.kinds import BFLOAT16_PAIRS, INT8_PAIRS, STEP_BYTES
from ..products.reader import PANEL
from ..products.unpack import unpack
from ..simd import emit
from ..simd.emit import INTS, VECTOR, int64, operation
from ..simd.memory import LINE, address_of, item_size, load, store_some_as
from ..simd.numbers import FLOAT32
from ..simd.vectors import LANES, VECTOR_BYTES, add, function, multiply, silu
from .units import count_units, find_expert, no_expert, weight_of

THIRDS = 3
_DEPTH = 128  # most steps of a panel at a time: 16 KiB
_FEW_ROWS = 64  # up to these take half as many: they leave little to do while panels come from memory
_FEW_UNPACKED = 112  # the same if panels are unpacked into the L1 cache
_TOGETHER = 2  # panels that rows are multiplied by while they are in the L1 cache
ROWS_BYTES = 2**20  # half of a core's L2 cache: about the most for a unit's rows in thirds
# of a unit, if x has as many
LEAST_UNIT_ROWS = 32
_MOST_ROWS = 256
_MOST_PANELS = 8  # of a unit: their accumulators and a part of the rows fit the L2 cache
_WIDTH = 4 * PANEL
# The least weights and inputs of a weight that is read from memory: smaller ones stay in the caches.
_LEAST_WEIGHTS = 2**19
_LEAST_INPUTS = 512

TILES = Task(
    ("x", "panels", "scales", "bias", "out", "offsets"),
    (
        "experts", "num_experts", "x_stride", "num_rows", "depth", "out_features", "out_stride", "num_panels",
        "weight_kind", "out_kind", "gated", "unit_rows", "unit_panels", "apart", "thirds", "thirds_stride",
        "expanded", "all_units", "num_threads",
    ),
    read_late=("offsets",),
)  # fmt: skip
_RECORD = TILES.record


def scratch_bytes(unit_rows: int, unit_panels: int, thirds: int, thirds_stride: int, expanded: int) -> int:
    """Return the scratch memory for units of this size: accumulators, unpacked panels, thirds and factors.

    expanded: bytes of a panel's factors as readers take them.
    """
    rows = unit_rows * thirds
    unpacked = _TOGETHER * (_DEPTH * _WIDTH + expanded)
    return LINE + unpacked + rows * (unit_panels * _WIDTH + thirds_stride)


def thirds_of(x_is_wide: bool, in_features: int) -> tuple[int, int]:
    """Return how many rows a row of x is split into, and the stride of these if they are stored.

    The stride is no power of two, with which a tile's rows would share few sets of the L1 cache.
    """
    return (THIRDS, 2 * in_features + LINE) if x_is_wide else (1, 0)


def rows_of_unit(num_rows: int, num_panels: int, in_features: int, thirds: int, num_threads: int) -> int:
    """Return the rows of x in a unit: as many as fit the L2 cache, and fewer if threads would lack units.

    Thirds are made once for all panels of a unit, and stored whole.
    """
    most = _MOST_ROWS
    if thirds > 1:
        most = max(LEAST_UNIT_ROWS, min(_MOST_ROWS, ROWS_BYTES // (2 * in_features * thirds)))
    while most > LEAST_UNIT_ROWS and -(-num_rows // most) * num_panels < 4 * num_threads:
        most = max(LEAST_UNIT_ROWS, most // 2)
    equal = -(-num_rows // max(1, -(-num_rows // most)))
    return max(1, min(num_rows, -(-equal // LEAST_UNIT_ROWS) * LEAST_UNIT_ROWS))


def panels_of_unit(
    num_rows: int, num_panels: int, in_features: int, unit_rows: int, thirds: int, kind: int, num_threads: int
) -> int:
    """Return the panels in a unit: two if they are read apart, one if few rows leave all time to unpacking.

    Else two, so that a part of the rows stays in the L1 cache between them; for many wide rows up to
    _MOST_PANELS, between which it stays in the L2. Fewer if the threads would finish later than with single
    panels.
    """
    if is_read_apart(num_rows, num_panels, in_features, thirds):
        return _TOGETHER
    if kind != BFLOAT16_PAIRS and unit_rows * thirds <= ROW_BLOCK:
        return 1
    blocks = -(-num_rows // unit_rows)

    def passes(number: int) -> int:
        units = -(-num_panels // number) * blocks
        # A thread claims its next unit before it begins one: the first may have two while others have none.
        return max(-(-units // num_threads), min(2, units)) * number

    are_many = num_rows > _FEW_ROWS and 2 * in_features * unit_rows >= ROWS_BYTES // 2
    number = _MOST_PANELS if are_many else _TOGETHER
    while passes(number) > 1.1 * passes(1):
        number //= 2
    return number


def is_read_apart(num_rows: int, num_panels: int, in_features: int, thirds: int) -> bool:
    """Return whether the two panels of a unit lie half a weight apart.

    With few rows a product takes as long as reading its weight, and memory is read faster at two places at
    once.
    """
    is_large = num_panels * PANEL * in_features >= _LEAST_WEIGHTS and in_features >= _LEAST_INPUTS
    return is_large and num_rows * thirds <= ROW_BLOCK // _TOGETHER


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

    unit: of those of its weight.
    """
    panel = _first_panel(args, unit)
    first = own.start + unit // _units_across(args) * args.unit_rows
    rows = min(args.unit_rows, own.end - first)
    panels = min(args.unit_panels, -(-(args.num_panels - panel) // args.apart))
    kind = own.kind
    stride = STEP_BYTES[own.kind]
    sums = scratch + LINE
    panel_sums = args.unit_rows * args.thirds * _WIDTH
    unpacked = sums + args.unit_panels * panel_sums
    size = args.depth * stride
    far = args.apart * size
    c_stride = int(_WIDTH)  # an int64, where numba would take the constant for a type of its own
    together = min(_TOGETHER, args.unit_panels)
    block = ROW_BLOCK // together
    num_blocks = -(-rows * args.thirds // block)
    pace = -(-stride * STEPS // num_blocks // LINE) * LINE
    # Equal parts of whole groups. A single block unpacks on the way instead.
    is_unpacked = kind != BFLOAT16_PAIRS and num_blocks > 1
    few = _FEW_UNPACKED if is_unpacked else _FEW_ROWS
    most = _DEPTH // 2 if together > 1 and rows <= few else _DEPTH
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
                factors = scratch + args.scratch_size - _TOGETHER * args.expanded
                for p in range(some):
                    number = panel + (near + p) * args.apart
                    to = factors + p * args.expanded
                    expand_factors(kind, own.scales, number, start, depth, INPUTS, to)
            b_kind = kind
            b_stride = stride
            b_far = far
            if is_unpacked:
                b_kind = BFLOAT16_PAIRS
                b_stride = _WIDTH
                b_far = _DEPTH * _WIDTH
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
                c = c + block * _WIDTH
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
    scale = own.scales + panel * _WIDTH
    bias = own.bias + panel * _WIDTH
    for row in range(rows):
        at = c + thirds * row * _WIDTH
        left = load(at)
        right = load(at + VECTOR_BYTES)
        if thirds > 1:
            left = add(left, add(load(at + _WIDTH), load(at + 2 * _WIDTH)))
            at += VECTOR_BYTES
            right = add(right, add(load(at + _WIDTH), load(at + 2 * _WIDTH)))
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

    @TILES.kernel
    def _tiles_kernel(record):
        args = carray(record, 1, _RECORD)[0]
        counters = address_of(record)
        scratch = thread_scratch(args, counters)
        sums = args.unit_panels * args.unit_rows * args.thirds
        thirds = scratch + LINE + (_TOGETHER * _DEPTH + sums) * _WIDTH
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
