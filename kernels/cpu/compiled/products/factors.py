"""How factors of quantised weights reach the readers; `kernels.cpu.factors` has how they are stored."""

from typing import Any

import numpy as np

from ...factor_heads import FACTORS_AT, TABLE_AT, FactorHead
from ...formats import (
    BFLOAT16,
    CODES4,
    CODES4_PAIRS,
    E4M3,
    E4M3_PAIRS,
    E4M3_UNIT,
    EXPANDED_HEAD_BYTES,
    FLOAT8,
    FLOAT16,
    FLOAT32,
    GROUP_BYTES,
    GROUP_SHIFT_AT,
    INT8,
    ITEM_SIZES,
    NONE,
    PANEL,
    TABLE_SIZE,
)
from ...target import LANES, LINE, VECTOR_BYTES
from ..simd.gather import fetch_line
from ..simd.memory import LOADERS, get_long, item_size, load, set_long, store
from ..simd.vectors import dispatch, fma, function, multiply, splat

WRITE, MULTIPLY, ADD = range(3)  # what is done with factors: see _expander


@function
def has_groups(kind):
    """Return whether weights of this format have factors per group of inputs."""
    return kind >= CODES4


@function
def group_steps(kind, factors):
    """Return the number of steps in a group. Parts of a panel consist of whole groups."""
    return get_long(factors) // inputs_of_step(kind)


@function
def inputs_of_step(kind):
    """Return how many inputs a step covers, for a format with groups."""
    return 2 if kind >= CODES4_PAIRS else 1


@function
def _load_head(address):
    return FactorHead(
        get_long(address),
        get_long(address + 8),
        get_long(address + 16),
        get_long(address + 24),
        get_long(address + 32),
        get_long(address + 40),
        get_long(address + 48),
        get_long(address + 56),
        get_long(address + 64),
        get_long(address + 72),
        get_long(address + 80),
    )


def _expander(kind: int) -> Any:
    """Make a function that writes numbers of one kind as float32, or multiplies those at `to` by them.

    mode: WRITE, MULTIPLY, or ADD, which multiplies, and adds the summands.

    The PANEL numbers of each of `count` groups go to the first two vectors at `to`. `left` groups have those
    at the source, the next `repeat` the ones that are `stride` bytes further, and so on.
    """
    load_numbers, _ = LOADERS[kind]
    half = LANES * ITEM_SIZES[kind]

    @function
    def expand(source, stride, left, repeat, to, count, mode):
        while count > 0:
            low = load_numbers(source)
            high = load_numbers(source + half)
            for _ in range(min(left, count)):
                if mode == ADD:
                    summand = to + 2 * VECTOR_BYTES
                    store(to, fma(low, load(to), load(summand)))
                    store(to + VECTOR_BYTES, fma(high, load(to + VECTOR_BYTES), load(summand + VECTOR_BYTES)))
                elif mode == MULTIPLY:
                    store(to, multiply(low, load(to)))
                    store(to + VECTOR_BYTES, multiply(high, load(to + VECTOR_BYTES)))
                else:
                    store(to, low)
                    store(to + VECTOR_BYTES, high)
                to += GROUP_BYTES
            count -= left
            source += stride
            left = repeat

    return expand


# _expand(kind, source, stride, left, repeat, to, count, mode)
_expand = dispatch({kind: _expander(kind) for kind in (FLOAT16, FLOAT32, BFLOAT16, INT8, FLOAT8)})


@function
def _fill(to, count, x):
    """Write a number for each output and group."""
    both = splat(np.float32(x))
    for _ in range(count):
        store(to, both)
        store(to + VECTOR_BYTES, both)
        to += GROUP_BYTES


@function
def _multiply(to, count, by, factor):
    """Multiply what is at `to` by a factor and by what is `by` bytes further."""
    for _ in range(count):
        for half in range(0, 2 * VECTOR_BYTES, VECTOR_BYTES):
            product = multiply(load(to + half), splat(np.float32(factor)))
            store(to + half, multiply(product, load(to + half + by)) if by else product)
        to += GROUP_BYTES


@function
def _fetch_behind(address, size):
    """Prefetch as many bytes as lie at an address from those behind them."""
    for line in range(address + size, address + 2 * size, LINE):
        fetch_line(line)


@function
def _size(kind):
    return 0 if kind == NONE else PANEL * item_size(kind)


@function
def expand_factors(kind, factors, panel, start, steps, most, to):
    """Expand the factors of some steps of a panel for readers; see `products.codes`.

    most: maximum number of inputs of a group; larger groups are divided.
    """
    head = _load_head(factors)
    group = min(head.group, most)
    per_step = inputs_of_step(kind)
    for at in range(0, 4 * TABLE_SIZE, VECTOR_BYTES):
        store(to + at, load(factors + TABLE_AT + at))
    shift = 0
    while per_step << shift < group:
        shift += 1
    set_long(to + GROUP_SHIFT_AT, shift)
    to += EXPANDED_HEAD_BYTES
    summands = to + 2 * VECTOR_BYTES
    count = steps >> shift
    # Groups from the first one on, and of these the ones that have its factors and its unit.
    first = start >> shift
    repeat = head.stored_group // group
    left = repeat - first % repeat
    unit_repeat = repeat * head.unit_groups
    unit_left = unit_repeat - first % unit_repeat
    summand = head.zero if head.zero != NONE else head.offset
    stride = _size(head.scale) + _size(summand)
    unit_stride = _size(head.scale_unit) + _size(head.offset_unit) + _size(head.low_unit)
    panel_at = factors + FACTORS_AT + panel * head.panel_bytes
    own = panel_at + first // repeat * stride
    unit = panel_at + head.units_at + first // unit_repeat * unit_stride
    _expand(head.scale, own, stride, left, repeat, to, count, WRITE)
    if head.low_unit != NONE:
        low_unit = unit + _size(head.scale_unit) + _size(head.offset_unit)
        _expand(head.scale, own, stride, left, repeat, summands, count, WRITE)
        _expand(head.low_unit, low_unit, unit_stride, unit_left, unit_repeat, summands, count, MULTIPLY)
    if head.scale_unit != NONE:
        mode = MULTIPLY if head.low_unit == NONE else ADD
        _expand(head.scale_unit, unit, unit_stride, unit_left, unit_repeat, to, count, mode)
    if summand == NONE:
        _fill(summands, count, -0.0)  # leaves all numbers as they are
    else:
        _expand(summand, own + _size(head.scale), stride, left, repeat, summands, count, WRITE)
    if head.offset_unit != NONE:
        offset_unit = unit + _size(head.scale_unit)
        _expand(head.offset_unit, offset_unit, unit_stride, unit_left, unit_repeat, summands, count, MULTIPLY)
    if head.zero != NONE:
        _multiply(summands, count, to - summands, -1.0)
    # Meanwhile bring those of the next part, which the hardware would not foresee.
    _fetch_behind(own, -(-count // repeat) * stride)
    _fetch_behind(unit, -(-count // unit_repeat) * unit_stride)
    if kind in (E4M3, E4M3_PAIRS):
        _multiply(to, count, 0, 1.0 / E4M3_UNIT)
