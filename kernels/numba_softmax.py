"""Softmax for numba, online (Dao 2023): scores become weights a tile of keys at a time.

A row's state is its highest score so far and the sum of the weights relative to that; its sums are of V by
those weights. Addresses are int64, `args` is attention's record.
"""

import math

import numpy as np

from .numba_memory import FLOAT32, get_float, get_long, load, set_float, store, store_bfloat
from .numba_rows import copy_row
from .numba_vectors import (
    LANES,
    VECTOR_BYTES,
    add,
    exp2,
    exp2_of_negative,
    fma,
    function,
    greater,
    highest,
    highest_number,
    lane_numbers,
    multiply,
    splat,
    total,
    where_from,
)

TILE = 64  # keys
TILE_BYTES = 4 * TILE
NOTHING = np.float32(-math.inf)
ZERO, ONE = np.float32(0.0), np.float32(1.0)
_LOG2E = np.float32(1.4426950408889634)


@function
def padded(dim):
    """dim rounded up to whole vectors."""
    return (dim + LANES - 1) // LANES * LANES


@function
def fill(address, num_vectors, x):
    same = splat(x)
    for i in range(num_vectors):
        store(address + i * VECTOR_BYTES, same)


@function
def _weight(score, highest_score):
    """e^(score - highest_score), 0 for nothing."""
    if score == NOTHING:
        return ZERO
    if score == highest_score:  # as it mostly is
        return ONE
    return highest(exp2(splat((score - highest_score) * _LOG2E)))


@function
def _multiply_row(scores, scales, num_vectors):
    """A row's scores, or its weights, by the scales of the K or V they belong to."""
    for i in range(num_vectors):
        at = scores + i * VECTOR_BYTES
        store(at, multiply(load(at), load(scales + i * VECTOR_BYTES)))


@function
def _edit_scores(args, scores, head, tile, count, query_position):
    """Softcap and ALiBi, where asked for: one row of scores in place."""
    for j in range(count):
        x = get_float(scores + 4 * j)
        if args.softcap:
            x = np.float32(args.softcap * math.tanh(x / args.softcap))
        if args.alibi_slopes:
            x += get_float(args.alibi_slopes + 4 * head) * np.float32(tile + j - query_position)
        set_float(scores + 4 * j, x)


@function
def _hide(args, scores, tile, count, width, token, query_position, new_position):
    """-inf for the keys of the tile, up to `width`, that a token does not see; new_position is that of the
    first new one.
    """
    end = count
    if args.tree_mask:
        bits = get_long(args.tree_mask + 8 * token)
        for j in range(max(0, new_position - tile), count):
            if not (bits >> (tile + j - new_position)) & 1:
                set_float(scores + 4 * j, NOTHING)
    elif args.causal:
        end = min(count, query_position + 1 - tile)
    start = max(0, query_position - args.window + 1 - tile) if args.window else 0
    for j in range(min(start, width)):
        set_float(scores + 4 * j, NOTHING)
    for first in range(max(0, end) // LANES * LANES, width, LANES):
        at = scores + 4 * first
        store(at, where_from(lane_numbers(), splat(np.float32(end - first)), splat(NOTHING), load(at)))


@function
def _find_highest(scores, width, state, sums, num_vectors):
    """The highest score so far becomes a row's state, and what was summed up relative to the one before it
    relative to that.
    """
    top = load(scores)
    for i in range(1, width // LANES):
        top = greater(load(scores + i * VECTOR_BYTES), top)
    before = get_float(state)
    now = max(before, highest_number(top))
    kept = _weight(before, now)
    set_float(state, now)
    if kept != ONE:
        set_float(state + 4, get_float(state + 4) * kept)
        _scale_row(sums, num_vectors, kept)


@function
def _take_weights(scores, width, state, in_pairs):
    """A row's scores become weights relative to the highest; their sum is added to the state.

    in_pairs: they become bfloat16, after that.
    """
    now = get_float(state)
    log2e, base = splat(_LOG2E), splat(-now * _LOG2E if now > NOTHING else ZERO)
    weights, lowest = splat(ZERO), splat(np.float32(-127.0))
    for i in range(width // LANES):
        at = scores + i * VECTOR_BYTES
        # Never above 0, but for rounding; a NaN is not below anything.
        weight = exp2_of_negative(greater(lowest, fma(load(at), log2e, base)))
        if in_pairs:
            store_bfloat(scores + i * (VECTOR_BYTES // 2), weight)
        else:
            store(at, weight)
        weights = add(weights, weight)
    set_float(state + 4, get_float(state + 4) + total(weights))


@function
def weigh(
    args, scores, states, sums, num_vectors, scales, key_head, first, rows, tile, count,
    token, position, new_position, hidden, in_pairs,
):  # fmt: skip
    """Scores of some rows, from the first on, with a head's first `count` keys of a tile become what V is
    multiplied by, and their sums so far are adapted. token, position: of row 0. in_pairs: the scores are yet
    to be scaled, the weights become bfloat16.
    """
    width, group = padded(count), args.num_heads // args.num_kv_heads
    for i in range(rows):
        row, in_group, later = scores + i * TILE_BYTES, (first + i) % group, (first + i) // group
        if in_pairs:
            _scale_row(row, width // LANES, np.float32(args.scale))
        if args.key_scales:
            _multiply_row(row, scales, width // LANES)
        if args.softcap or args.alibi_slopes:
            _edit_scores(args, row, key_head * group + in_group, tile, count, position + later)
        if hidden:
            _hide(args, row, tile, count, width, token + later, position + later, new_position)
        _find_highest(row, width, states + 8 * i, sums + i * num_vectors * VECTOR_BYTES, num_vectors)
    # Apart, so that a row's long chains of instructions run beside those of the next ones.
    for i in range(rows):
        _take_weights(scores + i * TILE_BYTES, width, states + 8 * i, in_pairs)
        if args.value_scales:
            _multiply_row(scores + i * TILE_BYTES, scales + TILE_BYTES, width // LANES)


@function
def _scale_row(address, num_vectors, factor):
    times = splat(factor)
    for i in range(num_vectors):
        at = address + i * VECTOR_BYTES
        store(at, multiply(load(at), times))


@function
def merge_softmax(state, sums, part_state, part_sums, num_vectors):
    """Add the softmax over some keys to that over the ones before them."""
    now = max(get_float(state), get_float(part_state))
    kept, added = _weight(get_float(state), now), _weight(get_float(part_state), now)
    set_float(state, now)
    set_float(state + 4, get_float(state + 4) * kept + get_float(part_state + 4) * added)
    for i in range(num_vectors):
        at = i * VECTOR_BYTES
        old = multiply(load(sums + at), splat(kept))
        store(sums + at, fma(load(part_sums + at), splat(added), old))


@function
def finish(state, sums, out, out_kind, value_dim, sinks, head):
    """The weighted mean of V, in its place. A sink is one more weight, without a value."""
    score, weight = get_float(state), get_float(state + 4)
    if sinks:
        sink = get_float(sinks + 4 * head)
        now = max(score, sink)
        kept = _weight(score, now)
        weight = weight * kept + _weight(sink, now)
        _scale_row(sums, padded(value_dim) // LANES, kept)
    copy_row(out_kind, out, FLOAT32, sums, value_dim, ONE / weight)
