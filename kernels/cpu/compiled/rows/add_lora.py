"""What LoRA adapters add to the output of a linear layer. A unit is a row, or some columns of one.

Each number of x Aᵀ is one chain in each lane, and the sum of the lanes; each number of its product with Bᵀ
is one chain over the ranks. So a row has the same bits in any company, and however its columns are divided.
"""

from typing import Any

import numpy as np

from ...formats import FLOAT32, ITEM_SIZES
from ...rows.add_lora import ADD_LORA, AT_ONCE
from ...target import LANES
from ..kernels import each_unit
from ..simd.memory import LOADERS, STORERS, get_float, get_int, set_float, some_of
from ..simd.vectors import add, fma, function, splat, total
from .row_kernel import by_kind_with


def _expand(kind: int, out_kind: int) -> Any:
    """Make the function that multiplies by Bᵀ of one kind and adds to an output of another."""
    size_of = ITEM_SIZES[kind]
    out_size = ITEM_SIZES[out_kind]
    load_some, _ = some_of(kind)
    load_some_out, store_some_out = some_of(out_kind)
    load = LOADERS[kind][0]
    load_out = LOADERS[out_kind][0]
    store_out = STORERS[out_kind][0]

    @function
    def expand(b, row_bytes, rank, inner, out, count):
        """Add `inner` times Bᵀ to `count` columns of a row."""
        step = LANES * size_of
        out_step = LANES * out_size
        c = 0
        while c + AT_ONCE * LANES <= count:
            s0 = s1 = s2 = s3 = splat(np.float32(0.0))
            at = b + c * size_of
            for r in range(rank):
                factor = splat(get_float(inner + 4 * r))
                s0 = fma(load(at), factor, s0)
                s1 = fma(load(at + step), factor, s1)
                s2 = fma(load(at + 2 * step), factor, s2)
                s3 = fma(load(at + 3 * step), factor, s3)
                at += row_bytes
            to = out + c * out_size
            store_out(to, add(load_out(to), s0))
            store_out(to + out_step, add(load_out(to + out_step), s1))
            store_out(to + 2 * out_step, add(load_out(to + 2 * out_step), s2))
            store_out(to + 3 * out_step, add(load_out(to + 3 * out_step), s3))
            c += AT_ONCE * LANES
        while c < count:
            left = count - c
            s0 = splat(np.float32(0.0))
            at = b + c * size_of
            for r in range(rank):
                s0 = fma(load_some(at, left), splat(get_float(inner + 4 * r)), s0)
                at += row_bytes
            to = out + c * out_size
            store_some_out(to, add(load_some_out(to, left), s0), left)
            c += LANES

    return expand


@by_kind_with
def _add_lora(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    load_some, _ = some_of(kind)
    load = LOADERS[kind][0]

    @function
    def shrink(x, a, size, rank, inner):
        """Write x Aᵀ to `inner`, four ranks at a time."""
        row_bytes = size * size_of
        whole = size // LANES * LANES
        for r in range(0, rank, AT_ONCE):
            # Beyond the last rank the last one is computed again.
            a0 = a + r * row_bytes
            a1 = a + min(r + 1, rank - 1) * row_bytes
            a2 = a + min(r + 2, rank - 1) * row_bytes
            a3 = a + min(r + 3, rank - 1) * row_bytes
            s0 = s1 = s2 = s3 = splat(np.float32(0.0))
            for k in range(0, whole * size_of, LANES * size_of):
                number = load(x + k)
                s0 = fma(load(a0 + k), number, s0)
                s1 = fma(load(a1 + k), number, s1)
                s2 = fma(load(a2 + k), number, s2)
                s3 = fma(load(a3 + k), number, s3)
            if whole < size:
                k = whole * size_of
                left = size - whole
                number = load_some(x + k, left)
                s0 = fma(load_some(a0 + k, left), number, s0)
                s1 = fma(load_some(a1 + k, left), number, s1)
                s2 = fma(load_some(a2 + k, left), number, s2)
                s3 = fma(load_some(a3 + k, left), number, s3)
            set_float(inner + 4 * r, total(s0))
            set_float(inner + 4 * r + 4, total(s1))
            set_float(inner + 4 * r + 8, total(s2))
            set_float(inner + 4 * r + 12, total(s3))

    expand = _expand(kind, kind)
    expand_to_floats = _expand(kind, FLOAT32)

    @function
    def add_to_row(args, unit, inner):
        row = unit // args.units_per_row
        slot = np.int64(get_int(args.slots + 4 * row))
        if slot < 0:
            return
        # Whole vectors of columns, so that none is written by two threads.
        share = -(-args.size // (args.units_per_row * LANES)) * LANES
        own_first = unit % args.units_per_row * share
        own_end = min(own_first + share, args.size)
        row_bytes = args.size * size_of
        b = args.b + slot * args.max_rank * row_bytes
        x = args.x + row * args.x_stride
        out = args.out + row * args.out_stride
        made = np.int64(-1)  # the part whose x Aᵀ is in `inner`
        for i in range(args.num_ranges):
            at = args.columns + 12 * i
            first = max(np.int64(get_int(at)), own_first)
            end = min(np.int64(get_int(at + 4)), own_end)
            part = slot * args.num_parts + np.int64(get_int(at + 8))
            rank = np.int64(get_int(args.ranks + 4 * part))
            if first < end and rank > 0:
                if part != made:
                    a = args.a + part * args.max_rank * args.in_features * size_of
                    shrink(x, a, args.in_features, rank, inner)
                    made = part
                own_b = b + first * size_of
                if args.out_kind == kind:
                    expand(own_b, row_bytes, rank, inner, out + first * size_of, end - first)
                else:
                    expand_to_floats(own_b, row_bytes, rank, inner, out + 4 * first, end - first)

    return add_to_row


@each_unit(ADD_LORA)
def _add_lora_unit(args, unit, scratch):
    _add_lora(args, unit, scratch)
