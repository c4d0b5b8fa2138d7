"""Log-probabilities of tokens and of the likeliest ones, and the tokens' ranks."""

import math

import numpy as np

from ...sampling.logits import LOGPROBS
from ...target import LANES, VECTOR_BYTES
from ..kernels import each_unit
from ..simd.memory import get_float, get_long, load, load_up_to, set_float, set_long
from ..simd.vectors import (
    add,
    exp2_of_negative,
    function,
    greater,
    multiply,
    padded,
    splat,
    subtract,
    total,
    where_nan,
)
from .selection import (
    DEAD,
    MINUS_INFINITY,
    NAN,
    collect_keys,
    column_maxima,
    count_above,
    index_of,
    sort,
    threshold_for,
)

_LOG2E = np.float32(1.4426950408889634)


@function
def _mass(x, size, top):
    """Return the sum of e^(logit - top), NaN if a logit is; top: the highest logit."""
    mass = 0.0
    zero = splat(np.float32(0.0))
    dead = splat(DEAD)
    tops = splat(top)
    log2e = splat(_LOG2E)
    nans = zero
    whole = size // (2 * LANES) * (2 * LANES)
    for start in range(0, whole, 64 * LANES):
        some = zero
        others = zero
        for i in range(start, min(start + 64 * LANES, whole), 2 * LANES):  # two chains at a time
            log = multiply(subtract(load(x + 4 * i), tops), log2e)
            other = multiply(subtract(load(x + 4 * i + VECTOR_BYTES), tops), log2e)
            some = add(some, exp2_of_negative(greater(log, dead)))
            others = add(others, exp2_of_negative(greater(other, dead)))
            nans = where_nan(add(log, other), nans)
        mass += np.float64(total(add(some, others)))
    for i in range(whole, size, LANES):
        log = multiply(subtract(load_up_to(x + 4 * i, size - i, MINUS_INFINITY), tops), log2e)
        mass += np.float64(total(exp2_of_negative(greater(log, dead))))
        nans = where_nan(log, nans)
    return mass + np.float64(total(nans))


@each_unit(LOGPROBS)
def _token_logprobs(args, row, scratch):
    """Write a row's log-probabilities and ranks: of its token, then of the num_top likeliest."""
    x = args.logits + row * args.stride
    size = args.size
    width = args.width
    num_top = args.num_top
    values = args.values + 4 * row * (1 + num_top)
    ids = args.ids + 8 * row * (1 + num_top)
    top, columns = column_maxima(x, size, width, scratch)
    log_mass = math.log(_mass(x, size, top))  # NaN if a logit is, or if none is finite
    token = get_long(args.tokens + 8 * row)
    own = get_float(x + 4 * token)
    set_long(ids, token)
    set_float(values, np.float32(np.float64(own - top) - log_mass))
    if num_top == 0:
        set_long(args.ranks + 8 * row, 1 + count_above(x, size, own, False))
        return
    bound = threshold_for(columns, width, num_top) if num_top <= width else MINUS_INFINITY
    keys = scratch + 8 * padded(width)
    count = collect_keys(x, size, bound, keys)
    rank = 1
    sort(keys, count)
    for i in range(max(count, num_top)):
        # A NaN has no key: if there are too few, token 0 with NaN fills up.
        token = index_of(get_long(keys + 8 * i)) if i < count else 0
        logit = get_float(x + 4 * token) if i < count else NAN
        rank += logit > own
        if i < num_top:
            set_long(ids + 8 + 8 * i, token)
            set_float(values + 4 + 4 * i, np.float32(np.float64(logit - top) - log_mass))
    set_long(args.ranks + 8 * row, rank if own >= bound else 1 + count_above(x, size, own, False))
