"""Online softmax (Milakov 2018; FlashAttention, Dao 2022): a key tile's scores become weights.

The state of a row is its highest score so far, the sum of its weights relative to that score (the
normalizer), and its output: V summed up by these weights. What is one number for each row is computed for
LANES rows at once. Addresses are int64; `args` is the record of `kernel.ATTEND`.
"""

import math
from typing import NamedTuple

import numpy as np

from ...attention.paged_attention import TILE, TILE_BYTES
from ...formats import FLOAT32
from ...target import LANES, VECTOR_BYTES
from ..simd.gather import copy_row, fetch_rows, highest_of_rows, totals_of_rows
from ..simd.memory import get_float, get_int, load, load_up_to, set_float, store, store_narrow, store_some_as
from ..simd.vectors import (
    add,
    exp2,
    exp2_of_negative,
    first_lane,
    fma,
    function,
    gated_by,
    greater,
    inlined,
    lane_numbers,
    multiply,
    padded,
    splat,
    subtract,
    where_from,
    where_greater,
)

MINUS_INFINITY = np.float32(-math.inf)
ZERO = np.float32(0.0)
ONE = np.float32(1.0)
_LOG2E = np.float32(1.4426950408889634)


class KeyTile(NamedTuple):
    """Up to TILE consecutive keys of a sequence, from index `skip` to `end`."""

    start: int  # position of the tile's first place, a multiple of TILE
    skip: int
    end: int
    is_masked: bool  # some rows do not see all of these keys


class State(NamedTuple):
    """The softmax state of some rows: the addresses of one number, or of num_vectors vectors, per row."""

    scores: int  # TILE of each row, which become weights
    maxima: int
    normalizers: int
    outputs: int
    num_vectors: int
    scales: int  # of a quantized cache: for each KV head those of the tile's K, then of its V
    work: int  # memory for WORK_VECTORS


class Prefetch(NamedTuple):
    """Addresses of the next key tile's K and V, to be prefetched during softmax, while memory is idle."""

    addresses: int  # of their K, and TILE places further on of their V
    num_tokens: int
    tokens_per_row: int  # that are prefetched while one row is processed
    key_offset: int  # bytes from an address to what is read
    key_bytes: int
    value_offset: int
    value_bytes: int


@function
def end_of_keys(last_keys, position, first, end):
    """Return the position behind the last key that one of a unit's tokens [first, end) sees.

    last_keys: the address of the last position that each token of the unit sees; 0: its own.
    position: the position of the unit's first token.
    """
    behind = position + end
    if last_keys:
        for token in range(first, end):
            behind = max(behind, get_int(last_keys + 4 * token) + 1)
    return behind


@function
def fill(address, num_vectors, x):
    """Fill memory with x."""
    same = splat(x)
    for i in range(num_vectors):
        store(address + i * VECTOR_BYTES, same)


@function
def _scale_row(address, num_vectors, factor):
    """Multiply a row by a number."""
    times = splat(factor)
    for i in range(num_vectors):
        at = address + i * VECTOR_BYTES
        store(at, multiply(load(at), times))


@function
def _scale_columns(scores, scales, num_vectors):
    """Multiply the scores of a row by the scales of their keys."""
    for i in range(num_vectors):
        at = scores + i * VECTOR_BYTES
        store(at, multiply(load(at), load(scales + i * VECTOR_BYTES)))


@function
def _cap(scores, num_vectors, softcap):
    """Apply softcap to the scores of a row: cap tanh(x / cap) is 2 cap sigmoid(2 x / cap) - cap."""
    cap = splat(softcap)
    twice = splat(np.float32(2.0) * softcap)
    inner = splat(np.float32(2.0) / softcap)
    for i in range(num_vectors):
        at = scores + i * VECTOR_BYTES
        store(at, subtract(gated_by(twice, multiply(load(at), inner)), cap))


@inlined
def _scale_and_mask(scores, width, start, end, factor):
    """Multiply a row's scores by a factor, with -inf outside [start, end). Return each lane's maximum."""
    top = splat(MINUS_INFINITY)
    times = splat(factor)
    for j in range(0, width, LANES):
        x = load(scores + 4 * j)
        is_cut = j < start or j + LANES > end
        if factor != ONE:
            x = multiply(x, times)
        if is_cut:
            lanes = lane_numbers()
            x = where_from(lanes, splat(np.float32(end - j)), splat(MINUS_INFINITY), x)
            x = where_greater(splat(np.float32(start - j)), lanes, splat(MINUS_INFINITY), x)
        if is_cut or factor != ONE:
            store(scores + 4 * j, x)
        top = greater(x, top)
    return top


@inlined
def _exp(scores, maximum):
    """Return e^(score - maximum) of a vector of scores; they may be too large for e^score."""
    power = multiply(subtract(load(scores), splat(maximum)), splat(_LOG2E))
    return exp2_of_negative(greater(splat(np.float32(-127.0)), power))  # a NaN is not below anything


@inlined
def _exp_row(scores, width, maximum, in_pairs, scales):
    """Replace a row's scores by weights, times the scales of V if any; in_pairs: in bfloat16.

    Return each lane's sum of the weights, unscaled and unrounded.
    """
    total = splat(ZERO)
    if not in_pairs:
        for at in range(scores, scores + 4 * width, VECTOR_BYTES):
            weights = _exp(at, maximum)
            total = add(total, weights)
            if scales:
                weights = multiply(weights, load(scales + at - scores))
            store(at, weights)
        return total
    for j in range(0, width, 2 * LANES):
        weights = _exp(scores + 4 * j, maximum)
        others = splat(ZERO)
        if j + LANES < width:
            others = _exp(scores + 4 * (j + LANES), maximum)
        total = add(add(total, weights), others)
        if scales:  # there are as many as scores, padded to whole pairs of vectors
            weights = multiply(weights, load(scales + 4 * j))
            others = multiply(others, load(scales + 4 * (j + LANES)))
        store_narrow(scores + 2 * j, weights, others)
    return total


@function
def rows_from(state, row, scores):
    """Return the state of the rows from `row` on, with scores at another address."""
    outputs = state.outputs + row * state.num_vectors * VECTOR_BYTES
    maxima = state.maxima + 4 * row
    normalizers = state.normalizers + 4 * row
    return State(scores, maxima, normalizers, outputs, state.num_vectors, state.scales, state.work)


@function
def reset(state, rows):
    """Initialise the state of rows that have seen no key yet."""
    fill(state.outputs, rows * state.num_vectors, ZERO)
    for row in range(rows):
        set_float(state.maxima + 4 * row, MINUS_INFINITY)
        set_float(state.normalizers + 4 * row, ZERO)


@function
def softmax_step(args, unit, state, first, rows, tile, width, in_pairs, prefetch):
    """Turn scores into weights for V, and rescale the outputs so far accordingly.

    The rows are a unit's rows from `first` on. The first `width` scores of each row become weights.

    in_pairs: whether the weights become pairs of bfloat16. The scores are then not multiplied by args.scale
        yet.
    prefetch: a Prefetch or None; each case is compiled separately.
    """
    for i in range(0, rows, LANES):
        group = rows_from(state, i, state.scores + i * TILE_BYTES)
        some = min(LANES, rows - i)
        _softmax_group(args, unit, group, first + i, some, tile, width, in_pairs, prefetch)


@function
def _prefetch_share(prefetch, row, addresses, offset, size):
    """Prefetch K or V of the tokens that one row takes on."""
    token = row * prefetch.tokens_per_row
    fetch_rows(addresses, offset, size, token, min(token + prefetch.tokens_per_row, prefetch.num_tokens))


@function
def _softmax_group(args, unit, state, first, rows, tile, width, in_pairs, prefetch):
    """Do a softmax step of up to LANES rows."""
    group = args.num_heads // args.num_kv_heads
    work = state.work
    factor = np.float32(args.scale) if in_pairs else ONE
    is_capped = args.softcap != 0.0
    # A row's KV head in the unit, its token's distance from the unit's first, its query head in the group.
    head = first // unit.head_rows
    later = first % unit.head_rows // group
    number = first % group
    for i in range(rows):
        if prefetch is not None and prefetch.num_tokens:
            _prefetch_share(prefetch, first + i, prefetch.addresses, prefetch.key_offset, prefetch.key_bytes)
        row = state.scores + i * TILE_BYTES
        begin = 0
        end = width
        if is_capped and in_pairs:
            _scale_row(row, width // LANES, factor)
        if args.key_scales:
            _scale_columns(row, state.scales + 2 * TILE_BYTES * head, width // LANES)
        if is_capped:
            _cap(row, width // LANES, np.float32(args.softcap))
        if tile.is_masked:
            end_key = end_of_keys(unit.last_keys, unit.position, later, later + 1)
            end = max(0, min(tile.end, end_key - tile.start))
            if args.window:
                begin = max(0, unit.position + later - args.window + 1 - tile.start)
        top = _scale_and_mask(row, width, begin, end, ONE if is_capped else factor)
        store(work + i * VECTOR_BYTES, top)
        number += 1
        if number == group:
            number = 0
            later = later + 1
            if later * group == unit.head_rows:
                head = head + 1
                later = 0

    none = splat(MINUS_INFINITY)
    tops = work + LANES * VECTOR_BYTES
    kept = work + (LANES + 1) * VECTOR_BYTES
    before = load_up_to(state.maxima, rows, MINUS_INFINITY)
    now = greater(highest_of_rows(work), before)
    change = multiply(subtract(before, now), splat(_LOG2E))
    power = exp2_of_negative(greater(splat(np.float32(-127.0)), change))
    keep = where_greater(before, none, power, splat(ONE))  # a row without keys: its output is 0, keep it
    store(tops, where_greater(now, none, now, splat(ZERO)))
    store(kept, keep)
    store_some_as(FLOAT32, state.maxima, now, rows)
    for i in range(rows):
        share = get_float(kept + 4 * i)
        if share != ONE:
            _scale_row(state.outputs + i * state.num_vectors * VECTOR_BYTES, state.num_vectors, share)

    for i in range(rows):
        if prefetch is not None and prefetch.num_tokens:
            addresses = prefetch.addresses + 8 * TILE
            _prefetch_share(prefetch, first + i, addresses, prefetch.value_offset, prefetch.value_bytes)
        row = state.scores + i * TILE_BYTES
        scales = 0
        if args.value_scales:
            scales = state.scales + TILE_BYTES * (2 * ((first + i) // unit.head_rows) + 1)
        top = _exp_row(row, width, get_float(tops + 4 * i), in_pairs, scales)
        store(work + i * VECTOR_BYTES, top)
    weights = load_up_to(state.normalizers, rows, ZERO)
    total = fma(weights, load(kept), totals_of_rows(work))
    store_some_as(FLOAT32, state.normalizers, total, rows)


@function
def _rescaling(score, maximum):
    """Return e^(score - maximum), 0 for a score of -inf."""
    if score == MINUS_INFINITY:
        return ZERO
    if score == maximum:  # the common case
        return ONE
    return first_lane(exp2(splat((score - maximum) * _LOG2E)))


@function
def merge_softmax(maximum, normalizer, outputs, other_maximum, other_normalizer, other_outputs, num_vectors):
    """Merge the softmax over later keys into a row's softmax over earlier keys."""
    score = get_float(maximum)
    weight = get_float(normalizer)
    now = max(score, other_maximum)
    kept = _rescaling(score, now)
    added = _rescaling(other_maximum, now)
    set_float(maximum, now)
    set_float(normalizer, weight * kept + other_normalizer * added)
    for i in range(num_vectors):
        at = i * VECTOR_BYTES
        old = multiply(load(outputs + at), splat(kept))
        store(outputs + at, fma(load(other_outputs + at), splat(added), old))


@function
def write_output(args, maximum, normalizer, outputs, out, head):
    """Divide a row's output by its normalizer and store it. A sink adds one more weight, without a value."""
    if args.sinks:
        sink = get_float(args.sinks + 4 * head)
        now = max(maximum, sink)
        kept = _rescaling(maximum, now)
        normalizer = normalizer * kept + _rescaling(sink, now)
        _scale_row(outputs, padded(args.value_dim) // LANES, kept)
    copy_row(args.query_kind, out, FLOAT32, outputs, args.value_dim, ONE / normalizer)
