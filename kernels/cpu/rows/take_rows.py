"""Lookups of rows by index: in a plain table, and in a weight that is packed in panels."""

import numpy as np
import torch
from torch import Tensor

from ...arguments import check_call, checked
from ...checks import check_contiguous, check_device, check_dtype, check_indices, check_shape, is_trusted
from ..launch.tasks import Task, addresses
from ..linear.panels import Panels, check_panels, check_result_dtype, from_parts
from ..products.codes import EXPANDED_HEAD_BYTES, GROUP_BYTES, GROUP_SHIFT_AT
from ..products.factors import (
    MOST_GROUP,
    TABLE_AT,
    expand_factors,
    expanded_bytes,
    has_groups,
    inputs_of_step,
)
from ..products.kinds import (
    BF12,
    BF12_PAIRS,
    BFLOAT16_PAIRS,
    CODES4,
    CODES4_PAIRS,
    CODES8,
    CODES8_PAIRS,
    E4M3_PAIRS,
    INT8_PAIRS,
    STEP_BYTES,
    UNPACKED,
)
from ..products.reader import PANEL
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
from ..simd.numbers import BFLOAT16, FLOAT32, KINDS
from ..simd.vectors import LANES, VECTOR_BYTES, float_of_half, fma, function, splat

_CPU = torch.device("cpu")
# kind: of numbers to widen to float32, or FLOAT32 to copy rows as they are.
TAKE_ROWS = Task(("table", "indices", "out"), ("stride_bytes", "row_bytes", "kind"))
TAKE_PANEL_ROWS = Task(("panels", "scales", "indices", "out"), ("in_features", "weight_kind", "out_kind"))


@function
def _widen_row(kind, source, to, columns):
    """Convert a row of 16-bit numbers to float32."""
    for column in range(0, columns, LANES):
        left = columns - column
        store_some_as(FLOAT32, to + 4 * column, load_some_as(kind, source + 2 * column, left), left)


@TAKE_ROWS.each_unit
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


@TAKE_PANEL_ROWS.each_unit
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


@checked
def take_rows(table: Tensor, indices: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the rows of [n, size] with indices i64[m]: [m, size]; see `reference.take_rows`."""
    if not table.is_cpu:
        raise ValueError(f"table must be on cpu, got {table.device}")
    if table.stride(1) != 1:
        table = table.contiguous()
    if out is None:
        out = table.new_empty(len(indices), table.shape[1])
    check_contiguous("out", out)
    return _take_rows(table, indices.contiguous(), out, FLOAT32)


def widen_rows(table: Tensor, indices: Tensor) -> Tensor:
    """Return rows of a contiguous 16-bit [n, size] with indices i64[m] as f32[m, size]."""
    if not is_trusted():
        check_call("take_rows", {"table": table, "indices": indices})
    check_dtype("table", table, (torch.float16, torch.bfloat16))
    check_device("table", table, _CPU)
    check_contiguous("table", table)
    out = table.new_empty(len(indices), table.shape[1], dtype=torch.float32)
    return _take_rows(table, indices.contiguous(), out, KINDS[table.dtype])


def _take_rows(table: Tensor, indices: Tensor, out: Tensor, kind: int) -> Tensor:
    stride_bytes = table.stride(0) * table.itemsize
    row_bytes = table.shape[1] * table.itemsize
    TAKE_ROWS.run(len(indices), *addresses(table, indices, out), stride_bytes, row_bytes, kind)
    return out


def take_panel_rows(panels: Panels, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of a packed weight with indices i64[m]: [m, in_features].

    dtype: holds the weight's numbers.
    """
    if not is_trusted():
        check_panels(panels)
        check_result_dtype(dtype)
        check_shape("indices", indices, (None,), torch.int64)
        check_device("indices", indices, _CPU)
        check_indices("indices", indices, "the weight's rows", panels.out_features)
    weight = panels.weight
    size = panels.in_features
    if size < LANES:
        if panels.kind == INT8_PAIRS:
            weight = from_parts(weight)
        places = indices % PANEL
        if panels.kind == BFLOAT16:
            places = places % LANES * 2 + places // LANES
        rows = weight[indices // PANEL, :, places].flatten(1)
        return (rows * panels.scales[indices, None]).to(dtype)
    indices = indices.contiguous()  # bound to a name: its memory must outlive the launch
    out = torch.empty(len(indices), size, dtype=dtype)
    is_bf12 = panels.kind in (BF12_PAIRS, BF12)
    if panels.kind in (BFLOAT16_PAIRS, BF12_PAIRS):
        check_dtype("rows", out, (torch.bfloat16, torch.float32))
    number_bytes = 4 + 2 * PANEL * is_bf12
    expanded = expanded_bytes(size) if panels.has_groups else 0
    TAKE_PANEL_ROWS.run(
        len(indices),
        *addresses(weight, panels.scales, indices, out),
        size,
        panels.kind,
        KINDS[dtype],
        scratch_size=VECTOR_BYTES + number_bytes * size + expanded,
    )
    return out
