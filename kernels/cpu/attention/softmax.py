"""Softmax for numba, online (Dao 2023): scores become weights a tile of keys at a time.

A row's state is its highest score so far and the sum of the weights relative to that; its sums are of V by
those weights. Rows go by vectors' lanes where it is about one number of each. Addresses are int64, `args` is
attention's record.
"""

import math
from typing import NamedTuple

import numpy as np

from ..simd.gather import copy_row, fetch_rows, highest_of_rows, totals_of_rows
from ..simd.memory import get_float, get_long, load, load_up_to, set_float, store, store_narrow, store_some_as
from ..simd.numbers import FLOAT32
from ..simd.vectors import (
    LANES,
    VECTOR_BYTES,
    add,
    exp2,
    exp2_of_negative,
    first_lane,
    fma,
    function,
    greater,
    inlined,
    lane_numbers,
    multiply,
    splat,
    subtract,
    where_from,
    where_greater,
)

TILE = 64  # keys
TILE_BYTES = 4 * TILE
WORK_VECTORS = LANES + 2
NOTHING = np.float32(-math.inf)
ZERO, ONE = np.float32(0.0), np.float32(1.0)
_LOG2E = np.float32(1.4426950408889634)


class View(NamedTuple):
    """Which rows a unit has, KV head by KV head, in these token by token."""

    first_head: int
    rows: int  # of each KV head
    token: int  # of row 0
    position: int  # the same in its sequence
    new_position: int  # of the first new token there


class Ahead(NamedTuple):
    """K and V of tokens that are read next, fetched while rows are weighed: little else is read then."""

    addresses: int  # of their K, and TILE further on of their V
    num_tokens: int
    share: int  # of these, that are fetched with a row
    key_offset: int  # bytes from there to what is read, and how many these are
    key_bytes: int
    value_offset: int
    value_bytes: int


class State(NamedTuple):
    """What some rows have so far: addresses, of a number a row or of so many vectors each."""

    scores: int  # TILE of a row, which become weights
    highest: int
    weights: int  # their sum
    sums: int  # of V by them
    num_vectors: int
    scales: int  # of each KV head's K and then V in the tile's tokens, where these are quantised
    work: int  # memory for WORK_VECTORS


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
    return first_lane(exp2(splat((score - highest_score) * _LOG2E)))


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
def _hide_tree(args, scores, tile, count, token, new_position):
    """-inf for the new keys of the tile that are no ancestors of a token; new_position: of the first."""
    bits = get_long(args.tree_mask + 8 * token)
    for j in range(max(0, new_position - tile), count):
        if not (bits >> (tile + j - new_position)) & 1:
            set_float(scores + 4 * j, NOTHING)


@inlined
def _bring_down(scores, width, start, end, factor):
    """The highest number in each lane of a row's scores times the factor, which they become; -inf for those
    before `start` and from `end` on.
    """
    top, times = splat(NOTHING), splat(factor)
    for j in range(0, width, LANES):
        x = load(scores + 4 * j)
        is_cut = j < start or j + LANES > end
        if factor != ONE:
            x = multiply(x, times)
        if is_cut:
            lanes = lane_numbers()
            x = where_from(lanes, splat(np.float32(end - j)), splat(NOTHING), x)
            x = where_greater(splat(np.float32(start - j)), lanes, splat(NOTHING), x)
        if is_cut or factor != ONE:
            store(scores + 4 * j, x)
        top = greater(x, top)
    return top


@inlined
def _weights_of(scores, highest_score):
    """e^(score - highest_score) of a vector of scores; subtracted first, however large they are."""
    power = multiply(subtract(load(scores), splat(highest_score)), splat(_LOG2E))
    return exp2_of_negative(greater(splat(np.float32(-127.0)), power))  # a NaN is not below anything


@inlined
def _take_weights(scores, width, highest_score, in_pairs, scales):
    """A row's scores become weights, times the scales of V if any, in_pairs in bfloat16. Returns the sum in
    each lane, before either.
    """
    total = splat(ZERO)
    if not in_pairs:
        for at in range(scores, scores + 4 * width, VECTOR_BYTES):
            weights = _weights_of(at, highest_score)
            total = add(total, weights)
            if scales:
                weights = multiply(weights, load(scales + at - scores))
            store(at, weights)
        return total
    for j in range(0, width, 2 * LANES):
        weights, others = _weights_of(scores + 4 * j, highest_score), splat(ZERO)
        if j + LANES < width:
            others = _weights_of(scores + 4 * (j + LANES), highest_score)
        total = add(add(total, weights), others)
        if scales:  # in_pairs they lie behind each other up to whole pairs of vectors, as scores do
            weights = multiply(weights, load(scales + 4 * j))
            others = multiply(others, load(scales + 4 * (j + LANES)))
        store_narrow(scores + 2 * j, weights, others)
    return total


@function
def rows_from(state, row, scores):
    """The state of the rows from one on, and where their scores are."""
    sums = state.sums + row * state.num_vectors * VECTOR_BYTES
    highest, weights = state.highest + 4 * row, state.weights + 4 * row
    return State(scores, highest, weights, sums, state.num_vectors, state.scales, state.work)


@function
def clear(state, rows):
    """No key so far."""
    fill(state.sums, rows * state.num_vectors, ZERO)
    for row in range(rows):
        set_float(state.highest + 4 * row, NOTHING)
        set_float(state.weights + 4 * row, ZERO)


@function
def weigh(args, view, state, first, rows, tile, count, width, hidden, in_pairs, ahead):
    """Scores of some rows of a unit, from the first on, with their heads' first `count` keys of a tile become
    what V is multiplied by, up to `width` of them, and the rows' state so far is adapted.

    hidden: not all see all. in_pairs: the scores are yet to be scaled, the weights become bfloat16. ahead: an
    Ahead or None, of whom each has code of its own.
    """
    for i in range(0, rows, LANES):
        group = rows_from(state, i, state.scores + i * TILE_BYTES)
        some = min(LANES, rows - i)
        _weigh_group(args, view, group, first + i, some, tile, count, width, hidden, in_pairs, ahead)


@function
def _fetch(ahead, row, addresses, offset, size):
    """A row's share of K or of V."""
    token = row * ahead.share
    fetch_rows(addresses, offset, size, token, min(token + ahead.share, ahead.num_tokens))


@function
def _weigh_group(args, view, state, first, rows, tile, count, width, hidden, in_pairs, ahead):
    """`weigh` for up to LANES rows: what is done with a number a row is done with a vector of them."""
    group, work = args.num_heads // args.num_kv_heads, state.work
    factor = np.float32(args.scale) if in_pairs else ONE
    is_edited = args.softcap or args.alibi_slopes
    # Of a row: its KV head in the unit, how many tokens it is later than row 0, its number in the group.
    head, later, number = first // view.rows, first % view.rows // group, first % group
    for i in range(rows):
        if ahead is not None:
            _fetch(ahead, first + i, ahead.addresses, ahead.key_offset, ahead.key_bytes)
        row, begin, end = state.scores + i * TILE_BYTES, 0, width
        if is_edited and in_pairs:
            _scale_row(row, width // LANES, factor)
        if args.key_scales:
            _multiply_row(row, state.scales + 2 * TILE_BYTES * head, width // LANES)
        if is_edited:
            query_head = (view.first_head + head) * group + number
            _edit_scores(args, row, query_head, tile, count, view.position + later)
        if hidden:
            end = count
            if args.tree_mask:
                _hide_tree(args, row, tile, count, view.token + later, view.new_position)
            elif args.causal:
                end = max(0, min(count, view.position + later + 1 - tile))
            if args.window:
                begin = max(0, view.position + later - args.window + 1 - tile)
        top = _bring_down(row, width, begin, end, ONE if is_edited else factor)
        store(work + i * VECTOR_BYTES, top)
        number += 1
        if number == group:
            number, later = 0, later + 1
            if later * group == view.rows:
                head, later = head + 1, 0

    none, tops, kept = splat(NOTHING), work + LANES * VECTOR_BYTES, work + (LANES + 1) * VECTOR_BYTES
    before = load_up_to(state.highest, rows, NOTHING)
    now = greater(highest_of_rows(work), before)
    change = multiply(subtract(before, now), splat(_LOG2E))
    power = exp2_of_negative(greater(splat(np.float32(-127.0)), change))
    keep = where_greater(before, none, power, splat(ONE))  # nothing is 0, times whatever
    store(tops, where_greater(now, none, now, splat(ZERO)))
    store(kept, keep)
    store_some_as(FLOAT32, state.highest, now, rows)
    for i in range(rows):
        share = get_float(kept + 4 * i)
        if share != ONE:
            _scale_row(state.sums + i * state.num_vectors * VECTOR_BYTES, state.num_vectors, share)

    for i in range(rows):
        if ahead is not None:
            _fetch(ahead, first + i, ahead.addresses + 8 * TILE, ahead.value_offset, ahead.value_bytes)
        row = state.scores + i * TILE_BYTES
        scales = 0
        if args.value_scales:
            scales = state.scales + TILE_BYTES * (2 * ((first + i) // view.rows) + 1)
        top = _take_weights(row, width, get_float(tops + 4 * i), in_pairs, scales)
        store(work + i * VECTOR_BYTES, top)
    weights = load_up_to(state.weights, rows, ZERO)
    total = fma(weights, load(kept), totals_of_rows(work))
    store_some_as(FLOAT32, state.weights, total, rows)


@function
def _scale_row(address, num_vectors, factor):
    times = splat(factor)
    for i in range(num_vectors):
        at = address + i * VECTOR_BYTES
        store(at, multiply(load(at), times))


@function
def merge_softmax(highest, weights, sums, part_score, part_weight, part_sums, num_vectors):
    """Add the softmax over some keys to that over the ones before them."""
    score, weight = get_float(highest), get_float(weights)
    now = max(score, part_score)
    kept, added = _weight(score, now), _weight(part_score, now)
    set_float(highest, now)
    set_float(weights, weight * kept + part_weight * added)
    for i in range(num_vectors):
        at = i * VECTOR_BYTES
        old = multiply(load(sums + at), splat(kept))
        store(sums + at, fma(load(part_sums + at), splat(added), old))


@function
def finish(score, weight, sums, out, out_kind, value_dim, sinks, head):
    """The weighted mean of V, in its place. A sink is one more weight, without a value."""
    if sinks:
        sink = get_float(sinks + 4 * head)
        now = max(score, sink)
        kept = _weight(score, now)
        weight = weight * kept + _weight(sink, now)
        _scale_row(sums, padded(value_dim) // LANES, kept)
    copy_row(out_kind, out, FLOAT32, sums, value_dim, ONE / weight)
