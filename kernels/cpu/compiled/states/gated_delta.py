"""The gated delta rule. A unit is a part of the columns of one head's state.

With q and k of length 1, decay d and share b of what is written, a token does

    m = Sᵀ k        S = d S + k (b (v - d m))ᵀ        out = Sᵀ q

Each number of m, S and out is one chain of multiply-adds over the rows of S, in their order. While S is
written for a token, m of the next one is added up, so that a prompt reads S once a token. The first token of
a step adds it up by itself, by the same chain: so the bits do not depend on how tokens are divided among
steps.

A run of drafts changes a copy of the state, and its inputs are kept. Those of its tokens that turned out
right are applied by the next step, before its own.
"""

import math
from typing import Any

import numpy as np

from ...formats import ITEM_SIZES
from ...states.gated_delta import GATED_DELTA, WIDE
from ...target import LANES, VECTOR_BYTES
from ..kernels import each_unit
from ..rows.row_kernel import by_kind_with
from ..simd.memory import get_float, get_int, load, some_of, store
from ..simd.vectors import fma, function, multiply, padded, splat, total
from .columns import copy_of, copy_state, forget, load_columns, store_columns

_EPS = np.float32(1e-6)


@function
def _remember(states, keys, key_dim, row_bytes, found):
    """Write Sᵀ k of WIDE vectors of columns to `found`."""
    m0 = m1 = m2 = m3 = splat(np.float32(0.0))
    for i in range(key_dim):
        row = states + i * row_bytes
        k = splat(get_float(keys + 4 * i))
        m0 = fma(load(row), k, m0)
        m1 = fma(load(row + VECTOR_BYTES), k, m1)
        m2 = fma(load(row + 2 * VECTOR_BYTES), k, m2)
        m3 = fma(load(row + 3 * VECTOR_BYTES), k, m3)
    store(found, m0)
    store(found + VECTOR_BYTES, m1)
    store(found + 2 * VECTOR_BYTES, m2)
    store(found + 3 * VECTOR_BYTES, m3)


@function
def _write(states, keys, queries, next_keys, key_dim, row_bytes, decay, changes, found):
    """Write k u ᵀ into the decayed state of WIDE vectors of columns.

    changes: u; they are replaced by Sᵀ q. found: becomes Sᵀ k of the next keys.
    """
    d = splat(decay)
    u0 = load(changes)
    u1 = load(changes + VECTOR_BYTES)
    u2 = load(changes + 2 * VECTOR_BYTES)
    u3 = load(changes + 3 * VECTOR_BYTES)
    o0 = o1 = o2 = o3 = m0 = m1 = m2 = m3 = splat(np.float32(0.0))
    for i in range(key_dim):
        row = states + i * row_bytes
        k = splat(get_float(keys + 4 * i))
        q = splat(get_float(queries + 4 * i))
        n = splat(get_float(next_keys + 4 * i))
        s0 = fma(u0, k, multiply(load(row), d))
        s1 = fma(u1, k, multiply(load(row + VECTOR_BYTES), d))
        s2 = fma(u2, k, multiply(load(row + 2 * VECTOR_BYTES), d))
        s3 = fma(u3, k, multiply(load(row + 3 * VECTOR_BYTES), d))
        store(row, s0)
        store(row + VECTOR_BYTES, s1)
        store(row + 2 * VECTOR_BYTES, s2)
        store(row + 3 * VECTOR_BYTES, s3)
        o0 = fma(s0, q, o0)
        o1 = fma(s1, q, o1)
        o2 = fma(s2, q, o2)
        o3 = fma(s3, q, o3)
        m0 = fma(s0, n, m0)
        m1 = fma(s1, n, m1)
        m2 = fma(s2, n, m2)
        m3 = fma(s3, n, m3)
    store(changes, o0)
    store(changes + VECTOR_BYTES, o1)
    store(changes + 2 * VECTOR_BYTES, o2)
    store(changes + 3 * VECTOR_BYTES, o3)
    store(found, m0)
    store(found + VECTOR_BYTES, m1)
    store(found + 2 * VECTOR_BYTES, m2)
    store(found + 3 * VECTOR_BYTES, m3)


@function
def _remember_some(states, keys, key_dim, row_bytes, found, count):
    """Write Sᵀ k of `count` columns, as `_remember` does."""
    for c in range(0, count, LANES):
        m = splat(np.float32(0.0))
        for i in range(key_dim):
            state = load_columns(states + i * row_bytes + 4 * c, count - c)
            m = fma(state, splat(get_float(keys + 4 * i)), m)
        store(found + 4 * c, m)


@function
def _write_some(states, keys, queries, next_keys, key_dim, row_bytes, decay, changes, found, count):
    """Write into `count` columns, as `_write` does."""
    d = splat(decay)
    for c in range(0, count, LANES):
        u = load(changes + 4 * c)
        o = m = splat(np.float32(0.0))
        for i in range(key_dim):
            row = states + i * row_bytes + 4 * c
            state = multiply(load_columns(row, count - c), d)
            state = fma(u, splat(get_float(keys + 4 * i)), state)
            store_columns(row, state, count - c)
            o = fma(state, splat(get_float(queries + 4 * i)), o)
            m = fma(state, splat(get_float(next_keys + 4 * i)), m)
        store(changes + 4 * c, o)
        store(found + 4 * c, m)


@function
def _sigmoid(x):
    """Return 1 / (1 + e^-x), in float64."""
    return 1.0 / (1.0 + math.exp(-x))


@function
def _decay(rate, x):
    """Return e^(rate softplus(x)), computed in float64."""
    softplus = max(x, 0.0) + math.log1p(math.exp(-abs(x)))
    return np.float32(math.exp(rate * softplus))


@by_kind_with
def _run(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    (load_some, store_some) = some_of(kind)
    copy_numbers = copy_of(kind)

    @function
    def read(numbers, to, size):
        """Copy a head of K or Q as float32. Return the inverse of its length."""
        squares = splat(np.float32(0.0))
        for i in range(0, size, LANES):
            number = load_some(numbers + i * size_of, size - i)
            squares = fma(number, number, squares)
            store(to + 4 * i, number)
        return np.float32(1.0) / np.sqrt(total(squares) + _EPS)

    @function
    def run_tokens(args, head, first, count, states, row_bytes, source, start, end, out, scratch):
        """Apply the tokens [start, end) of a sequence to `count` columns of a head, from column `first` on.

        source: where rows of inputs and of gates are, and how far apart; token t is in row t % num_rows.
        out: 0 keeps no results.
        """
        rows, row_stride, gates, gates_stride, num_rows = source
        key_dim = args.key_dim
        value_dim = args.value_dim
        key_bytes = 4 * padded(key_dim)
        keys = scratch
        next_keys = scratch + key_bytes
        queries = scratch + 2 * key_bytes
        changes = scratch + 3 * key_bytes
        found = changes + WIDE * VECTOR_BYTES
        # Where the head's Q, K and V begin in a row.
        query_at = head // (args.num_heads // args.num_key_heads) * key_dim * size_of
        key_at = query_at + args.num_key_heads * key_dim * size_of
        value_at = (2 * args.num_key_heads * key_dim + head * value_dim + first) * size_of
        rate = np.float64(get_float(args.rates + 4 * head))
        time_bias = np.float64(get_float(args.time_bias + 4 * head))
        root = np.float32(1.0) / np.sqrt(np.float32(key_dim))
        is_wide = count == WIDE * LANES
        key_scale = read(rows + start % num_rows * row_stride + key_at, keys, key_dim)
        if is_wide:
            _remember(states, keys, key_dim, row_bytes, found)
        else:
            _remember_some(states, keys, key_dim, row_bytes, found, count)
        for token in range(start, end):
            row = rows + token % num_rows * row_stride
            own_gates = gates + token % num_rows * gates_stride + head * size_of
            b = np.float64(total(load_some(own_gates, 1)))
            a = np.float64(total(load_some(own_gates + args.num_heads * size_of, 1)))
            decay = _decay(rate, a + time_bias)
            share = np.float32(_sigmoid(b))
            for c in range(0, count, LANES):
                value = load_some(row + value_at + c * size_of, count - c)
                change = fma(load(found + 4 * c), splat(-decay * key_scale), value)
                store(changes + 4 * c, multiply(change, splat(share * key_scale)))
            query_scale = read(row + query_at, queries, key_dim) * root
            next_scale = key_scale
            if token + 1 < end:
                next_scale = read(rows + (token + 1) % num_rows * row_stride + key_at, next_keys, key_dim)
            if is_wide:
                _write(states, keys, queries, next_keys, key_dim, row_bytes, decay, changes, found)
            else:
                _write_some(
                    states, keys, queries, next_keys, key_dim, row_bytes, decay, changes, found, count
                )
            if out != 0:
                to = out + ((token * args.num_heads + head) * value_dim + first) * size_of
                for c in range(0, count, LANES):
                    number = multiply(load(changes + 4 * c), splat(query_scale))
                    store_some(to + c * size_of, number, count - c)
            keys, next_keys = next_keys, keys
            key_scale = next_scale

    @function
    def keep_inputs(args, head, first, count, places, position, start, end):
        """Keep what this unit reads of a run's tokens, or what it shares with others if it is their first."""
        shares = args.num_heads // args.num_key_heads
        key_at = head // shares * args.key_dim * size_of
        query_bytes = args.num_key_heads * args.key_dim * size_of
        value_at = 2 * query_bytes + (head * args.value_dim + first) * size_of
        gates_at = 2 * query_bytes + args.num_heads * args.value_dim * size_of
        place_bytes = gates_at + 2 * args.num_heads * size_of
        for token in range(start, end):
            row = args.qkv + token * args.qkv_stride
            place = places + (position + token - start) % args.num_places * place_bytes
            copy_numbers(row + value_at, place + value_at, count)
            if first == 0:
                gates = args.gates + token * args.gates_stride
                for i in range(2):
                    at = (i * args.num_heads + head) * size_of
                    copy_numbers(gates + at, place + gates_at + at, 1)
                if head % shares == 0:
                    copy_numbers(row + key_at, place + key_at, args.key_dim)
                    copy_numbers(row + query_bytes + key_at, place + query_bytes + key_at, args.key_dim)

    @function
    def run_sequence(args, head, first, count, sequence, start, end, scratch):
        """Apply the tokens of a sequence, after those of its last run that its state has not seen."""
        slot = np.int64(get_int(args.slots + 4 * sequence))
        states = args.states + slot * args.state_stride
        states += 4 * (head * args.key_dim * args.value_dim + first)
        row_bytes = 4 * args.value_dim
        position = np.int64(get_int(args.seq_lens + 4 * sequence)) - (end - start)
        if position == 0:
            forget(states, args.key_dim, row_bytes, count)
        unapplied = np.int64(0)
        is_run = False
        if args.runs != 0:
            unapplied = np.int64(get_int(args.runs + 8 * sequence))
            is_run = get_int(args.runs + 8 * sequence + 4) != 0
        places = args.run_inputs + slot * args.run_stride
        gates_at = (2 * args.num_key_heads * args.key_dim + args.num_heads * args.value_dim) * size_of
        place_bytes = gates_at + 2 * args.num_heads * size_of
        for is_new in range(0 if unapplied > 0 else 1, 2):
            rows = places
            row_stride = place_bytes
            gates = places + gates_at
            gates_stride = place_bytes
            num_rows = args.num_places
            begin = position - unapplied
            stop = position
            out = np.int64(0)
            if is_new:
                rows = args.qkv
                row_stride = args.qkv_stride
                gates = args.gates
                gates_stride = args.gates_stride
                num_rows = args.num_tokens
                begin = start
                stop = end
                out = args.out
                if is_run:
                    keep_inputs(args, head, first, count, places, position, start, end)
                    copied = scratch + 4 * 3 * padded(args.key_dim) + 2 * WIDE * VECTOR_BYTES
                    copy_state(states, row_bytes, args.key_dim, count, copied)
                    states = copied
                    row_bytes = np.int64(WIDE * VECTOR_BYTES)
            source = rows, row_stride, gates, gates_stride, num_rows
            run_tokens(args, head, first, count, states, row_bytes, source, begin, stop, out, scratch)

    @function
    def run(args, unit, scratch):
        head = unit // args.num_parts
        first = unit % args.num_parts * WIDE * LANES
        count = min(WIDE * LANES, args.value_dim - first)
        sequence = 0
        start = np.int64(0)
        while start < args.num_tokens:
            end = np.int64(get_int(args.cu_seqlens_q + 4 * (sequence + 1)))
            if end > start:
                run_sequence(args, head, first, count, sequence, start, end, scratch)
            start = end
            sequence += 1

    return run


@each_unit(GATED_DELTA)
def _gated_delta_unit(args, unit, scratch):
    _run(args, unit, scratch)
