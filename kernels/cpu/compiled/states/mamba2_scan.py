"""The state space of Mamba-2. A unit is a part of the columns of one head's state.

With a time step t and the decay d = e^(rate t), a token does

    S = d S + B (t x)ᵀ        out = Sᵀ C + skip x

Each number of S and out is one chain of multiply-adds over the rows of S, in their order, for a token of a
prompt as for a decode: so the bits do not depend on how tokens are divided among steps.

A run of drafts changes a copy of the state, and its inputs are kept. Those of its tokens that turned out
right are applied by the next step, before its own.
"""

import math
from typing import Any

import numpy as np

from ...formats import ITEM_SIZES
from ...states.gated_delta import WIDE
from ...states.mamba2_scan import MAMBA2_SCAN
from ...target import LANES, VECTOR_BYTES
from ..kernels import each_unit
from ..rows.row_kernel import by_kind_with
from ..simd.memory import get_float, get_int, load, some_of, store
from ..simd.vectors import fma, function, multiply, padded, splat, total
from .columns import copy_of, copy_state, forget, load_columns, store_columns


@function
def _write(states, keys, queries, state_dim, row_bytes, decay, written):
    """Write B (t x)ᵀ into the decayed state of WIDE vectors of columns.

    written: t x; it is replaced by Sᵀ C.
    """
    d = splat(decay)
    u0 = load(written)
    u1 = load(written + VECTOR_BYTES)
    u2 = load(written + 2 * VECTOR_BYTES)
    u3 = load(written + 3 * VECTOR_BYTES)
    o0 = o1 = o2 = o3 = splat(np.float32(0.0))
    for i in range(state_dim):
        row = states + i * row_bytes
        b = splat(get_float(keys + 4 * i))
        c = splat(get_float(queries + 4 * i))
        s0 = fma(u0, b, multiply(load(row), d))
        s1 = fma(u1, b, multiply(load(row + VECTOR_BYTES), d))
        s2 = fma(u2, b, multiply(load(row + 2 * VECTOR_BYTES), d))
        s3 = fma(u3, b, multiply(load(row + 3 * VECTOR_BYTES), d))
        store(row, s0)
        store(row + VECTOR_BYTES, s1)
        store(row + 2 * VECTOR_BYTES, s2)
        store(row + 3 * VECTOR_BYTES, s3)
        o0 = fma(s0, c, o0)
        o1 = fma(s1, c, o1)
        o2 = fma(s2, c, o2)
        o3 = fma(s3, c, o3)
    store(written, o0)
    store(written + VECTOR_BYTES, o1)
    store(written + 2 * VECTOR_BYTES, o2)
    store(written + 3 * VECTOR_BYTES, o3)


@function
def _write_some(states, keys, queries, state_dim, row_bytes, decay, written, count):
    """Write into `count` columns, as `_write` does."""
    d = splat(decay)
    for c in range(0, count, LANES):
        u = load(written + 4 * c)
        o = splat(np.float32(0.0))
        for i in range(state_dim):
            row = states + i * row_bytes + 4 * c
            state = multiply(load_columns(row, count - c), d)
            state = fma(u, splat(get_float(keys + 4 * i)), state)
            store_columns(row, state, count - c)
            o = fma(state, splat(get_float(queries + 4 * i)), o)
        store(written + 4 * c, o)


@function
def _time_step(x, least, most):
    """Return softplus(x) within the limits, in float64. A NaN stays."""
    step = max(x, 0.0) + math.log1p(math.exp(-abs(x)))
    if step < least:
        step = least
    if step > most:
        step = most
    return step


@by_kind_with
def _run(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load_some, store_some) = some_of(kind)
    copy_numbers = copy_of(kind)

    @function
    def read(numbers, to, size):
        """Copy B or C of a token as float32."""
        for i in range(0, size, LANES):
            store(to + 4 * i, load_some(numbers + i * size_of, size - i))

    @function
    def run_tokens(args, head, first, count, states, row_bytes, source, start, end, out, scratch):
        """Apply the tokens [start, end) of a sequence to `count` columns of a head, from column `first` on.

        source: where rows of inputs and of time steps are, and how far apart; token t is in row t % num_rows.
        out: 0 keeps no results.
        """
        rows, row_stride, steps, steps_stride, num_rows = source
        state_dim = args.state_dim
        head_dim = args.head_dim
        keys = scratch
        queries = scratch + 4 * padded(state_dim)
        written = queries + 4 * padded(state_dim)
        # Where the head's x, B and C begin in a row.
        x_at = (head * head_dim + first) * size_of
        group = head // (args.num_heads // args.num_groups)
        key_at = (args.num_heads * head_dim + group * state_dim) * size_of
        query_at = key_at + args.num_groups * state_dim * size_of
        rate = np.float64(get_float(args.rates + 4 * head))
        time_bias = np.float64(get_float(args.time_bias + 4 * head))
        skip = splat(get_float(args.skip + 4 * head))
        is_wide = count == WIDE * LANES
        for token in range(start, end):
            row = rows + token % num_rows * row_stride
            raw = np.float64(total(load_some(steps + token % num_rows * steps_stride + head * size_of, 1)))
            step = _time_step(raw + time_bias, args.least, args.most)
            decay = np.float32(math.exp(rate * step))
            factor = splat(np.float32(step))
            read(row + key_at, keys, state_dim)
            read(row + query_at, queries, state_dim)
            for c in range(0, count, LANES):
                number = load_some(row + x_at + c * size_of, count - c)
                store(written + 4 * c, multiply(number, factor))
            if is_wide:
                _write(states, keys, queries, state_dim, row_bytes, decay, written)
            else:
                _write_some(states, keys, queries, state_dim, row_bytes, decay, written, count)
            if out != 0:
                to = out + ((token * args.num_heads + head) * head_dim + first) * size_of
                for c in range(0, count, LANES):
                    number = load_some(row + x_at + c * size_of, count - c)
                    store_some(to + c * size_of, fma(number, skip, load(written + 4 * c)), count - c)

    @function
    def keep_inputs(args, head, first, count, places, position, start, end):
        """Keep what this unit reads of a run's tokens, or what it shares with others if it is their first."""
        shares = args.num_heads // args.num_groups
        x_at = (head * args.head_dim + first) * size_of
        key_at = (args.num_heads * args.head_dim + head // shares * args.state_dim) * size_of
        group_bytes = args.num_groups * args.state_dim * size_of
        steps_at = args.num_heads * args.head_dim * size_of + 2 * group_bytes
        place_bytes = steps_at + args.num_heads * size_of
        for token in range(start, end):
            row = args.x + token * args.x_stride
            place = places + (position + token - start) % args.num_places * place_bytes
            copy_numbers(row + x_at, place + x_at, count)
            if first == 0:
                step = args.time_steps + token * args.steps_stride + head * size_of
                copy_numbers(step, place + steps_at + head * size_of, 1)
                if head % shares == 0:
                    copy_numbers(row + key_at, place + key_at, args.state_dim)
                    copy_numbers(row + key_at + group_bytes, place + key_at + group_bytes, args.state_dim)

    @function
    def run_sequence(args, head, first, count, sequence, start, end, scratch):
        """Apply the tokens of a sequence, after those of its last run that its state has not seen."""
        slot = np.int64(get_int(args.slots + 4 * sequence))
        states = args.states + slot * args.state_stride
        states += 4 * (head * args.state_dim * args.head_dim + first)
        row_bytes = 4 * args.head_dim
        position = np.int64(get_int(args.seq_lens + 4 * sequence)) - (end - start)
        if position == 0:
            forget(states, args.state_dim, row_bytes, count)
        unapplied = np.int64(0)
        is_run = False
        if args.runs != 0:
            unapplied = np.int64(get_int(args.runs + 8 * sequence))
            is_run = get_int(args.runs + 8 * sequence + 4) != 0
        places = args.run_inputs + slot * args.run_stride
        steps_at = (args.num_heads * args.head_dim + 2 * args.num_groups * args.state_dim) * size_of
        place_bytes = steps_at + args.num_heads * size_of
        for is_new in range(0 if unapplied > 0 else 1, 2):
            rows = places
            row_stride = place_bytes
            steps = places + steps_at
            steps_stride = place_bytes
            num_rows = args.num_places
            begin = position - unapplied
            stop = position
            out = np.int64(0)
            if is_new:
                rows = args.x
                row_stride = args.x_stride
                steps = args.time_steps
                steps_stride = args.steps_stride
                num_rows = args.num_tokens
                begin = start
                stop = end
                out = args.out
                if is_run:
                    keep_inputs(args, head, first, count, places, position, start, end)
                    copied = scratch + 4 * 2 * padded(args.state_dim) + WIDE * VECTOR_BYTES
                    copy_state(states, row_bytes, args.state_dim, count, copied)
                    states = copied
                    row_bytes = np.int64(WIDE * VECTOR_BYTES)
            source = rows, row_stride, steps, steps_stride, num_rows
            run_tokens(args, head, first, count, states, row_bytes, source, begin, stop, out, scratch)

    @function
    def run(args, unit, scratch):
        head = unit // args.num_parts
        first = unit % args.num_parts * WIDE * LANES
        count = min(WIDE * LANES, args.head_dim - first)
        sequence = 0
        start = np.int64(0)
        while start < args.num_tokens:
            end = np.int64(get_int(args.cu_seqlens_q + 4 * (sequence + 1)))
            if end > start:
                run_sequence(args, head, first, count, sequence, start, end, scratch)
            start = end
            sequence += 1

    return run


@each_unit(MAMBA2_SCAN)
def _mamba2_scan_unit(args, unit, scratch):
    _run(args, unit, scratch)
