"""Lookups of rows by index: in a plain table, and in a weight that is packed in panels."""

import numpy as np

from ...factor_heads import TABLE_AT
from ...formats import (
    BF12,
    BF12_PAIRS,
    BFLOAT16,
    BFLOAT16_PAIRS,
    CODES4,
    CODES4_PAIRS,
    CODES8,
    CODES8_PAIRS,
    E4M3_PAIRS,
    EXPANDED_HEAD_BYTES,
    FLOAT32,
    GROUP_BYTES,
    GROUP_SHIFT_AT,
    INT8_PAIRS,
    MOST_GROUP,
    PANEL,
    STEP_BYTES,
    UNPACKED,
)
from ...rows.take_rows import TAKE_PANEL_ROWS, TAKE_ROWS
from ...target import LANES, VECTOR_BYTES
from ..kernels import each_unit
from ..products.factors import expand_factors, has_groups, inputs_of_step
from ..products.unpack import unpack
from ..simd.gather import copy_row
from ..simd.memory import (
    get_byte,
    get_float,
    get_int,
    get_long,
    item_size,
    load,
    load_as,
    load_some_as,
    set_byte,
    set_float,
    set_int,
    store,
    store_some_as,
)
from ..simd.vectors import float_of_half, fma, function, splat


@function
def _widen_row(kind, source, to, columns):
    """Convert a row of 16-bit numbers to float32."""
    for column in range(0, columns, LANES):
        left = columns - column
        store_some_as(FLOAT32, to + 4 * column, load_some_as(kind, source + 2 * column, left), left)


@each_unit(TAKE_ROWS)
def _take_row(args, i):
    """Copy or widen the row of the i-th index."""
    source = args.table + get_long(args.indices + 8 * i) * args.stride_bytes
    to = args.out + i * args.row_bytes
    if args.kind != FLOAT32:
        _widen_row(args.kind, source, args.out + 2 * i * args.row_bytes, args.row_bytes // 2)
        return
    whole = args.row_bytes // VECTOR_BYTES * VECTOR_BYTES
    for at in range(0, whole, VECTOR_BYTES):
        store(to + at, load(source + at))
    for at in range(whole, args.row_bytes):
        set_byte(to + at, get_byte(source + at))


@function
def _code_place(kind, place, k):
    """Return the byte of a panel that has the code of an output and input."""
    if kind == CODES4:
        return k * LANES + place % LANES
    if kind == CODES4_PAIRS:
        step = k % 16 // 2
        return k // 16 * 16 * LANES + 8 * place + k % 2 * 4 + step % 2 * 2 + step // 4
    if kind in (CODES8_PAIRS, E4M3_PAIRS):
        return k // 2 * 2 * PANEL + 2 * place + k % 2
    return k * PANEL + place


@function
def _take_codes(args, panel, place, numbers):
    """Write the numbers that an output's codes stand for, in the unit of their readers."""
    kind = args.weight_kind
    panel_bytes = args.in_features * (LANES if kind in (CODES4, CODES4_PAIRS) else PANEL)
    codes = args.panels + panel * panel_bytes
    for k in range(args.in_features):
        code = get_byte(codes + _code_place(kind, place, k))
        to = numbers + 4 * k
        if kind == CODES4:
            code = code >> 4 * (place // LANES) & 15
            set_int(to, get_int(args.scales + TABLE_AT + 4 * code))
        elif kind == CODES4_PAIRS:
            code = code >> 4 * (k // 4 % 2) & 15
            set_int(to, get_int(args.scales + TABLE_AT + 4 * code))
        elif kind in (CODES8, CODES8_PAIRS):
            set_float(to, np.float32(code))
        else:
            set_float(to, float_of_half(code << 7 & 0xBFFF))


@function
def _take_coded_row(args, panel, place, numbers, expanded):
    """Write the weights of one output, in float32."""
    kind = args.weight_kind
    _take_codes(args, panel, place, numbers)
    steps = args.in_features // inputs_of_step(kind)
    expand_factors(kind, args.scales, panel, 0, steps, MOST_GROUP, expanded)
    group = inputs_of_step(kind) << get_long(expanded + GROUP_SHIFT_AT)
    own = expanded + EXPANDED_HEAD_BYTES + 4 * place
    for start in range(0, args.in_features, group):
        scale = splat(get_float(own))
        summand = splat(get_float(own + GROUP_BYTES // 2))
        for k in range(start, start + group, LANES):
            store(numbers + 4 * k, fma(load(numbers + 4 * k), scale, summand))
        own += GROUP_BYTES


@each_unit(TAKE_PANEL_ROWS)
def _take_panel_row(args, i, scratch):
    """Collect the weights of one output, which are PANEL numbers apart in a panel, in pairs two at a time."""
    index = get_long(args.indices + 8 * i)
    panel = index // PANEL
    place = index % PANEL
    out_size = item_size(args.out_kind)
    to = args.out + i * args.in_features * out_size
    numbers = scratch + VECTOR_BYTES
    kind = args.weight_kind
    if has_groups(kind):
        _take_coded_row(args, panel, place, numbers, numbers + 4 * args.in_features)
        copy_row(args.out_kind, to, FLOAT32, numbers, args.in_features, np.float32(1.0))
        return
    first = args.panels + panel * args.in_features * 2 * PANEL
    is_bf12 = kind in (BF12_PAIRS, BF12)
    if is_bf12:
        depth = args.in_features // 2 if kind == BF12_PAIRS else args.in_features
        stride = STEP_BYTES[kind]
        first = numbers + 4 * args.in_features
        unpack(kind, first, args.panels + panel * depth * stride, stride, args.scales, depth)
        kind = UNPACKED[kind]
    weight = first + 4 * place
    if kind == BFLOAT16_PAIRS and args.out_kind == BFLOAT16:
        for k in range(args.in_features // 2):
            set_int(to + 4 * k, get_int(weight + k * 4 * PANEL))
        return
    if kind == BFLOAT16_PAIRS:
        for k in range(0, args.in_features, 2):
            both = get_int(weight + k * 2 * PANEL)
            set_int(numbers + 4 * k, both << 16)
            set_int(numbers + 4 * k + 4, both >> 16 << 16)
    elif kind == INT8_PAIRS:
        # The place of the first of a row's two numbers in a step; see `reader.INT8_ORDER`.
        first = 2 * place
        at = first % PANEL // 8 * 16 + first // PANEL * 8 + first % 8
        weight = args.panels + panel * args.in_features * PANEL + at
        for k in range(args.in_features):
            byte = get_byte(weight + k // 2 * 2 * PANEL + k % 2)
            number = np.float32(byte & 127)
            set_float(numbers + 4 * k, -number if byte < 0 else number)
    elif kind == BFLOAT16:
        weight = first + 4 * (place % LANES)
        for k in range(args.in_features):
            both = get_int(weight + k * 2 * PANEL)
            set_int(numbers + 4 * k, both << 16 if place < LANES else both >> 16 << 16)
    else:
        size = item_size(kind)
        lane = place % LANES
        weight = args.panels + panel * args.in_features * PANEL * size + (place - lane) * size
        for k in range(args.in_features):
            store(scratch, load_as(kind, weight + k * PANEL * size))
            set_float(numbers + 4 * k, get_float(scratch + 4 * lane))
    scale = np.float32(1.0) if is_bf12 else get_float(args.scales + 4 * index)
    copy_row(args.out_kind, to, FLOAT32, numbers, args.in_features, scale)
