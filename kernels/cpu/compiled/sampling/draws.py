"""Draws by exponential races, and the draw from few candidates; see `plain.sampling.sample_tokens`.

In a race each token arrives after an exponential random time divided by its weight; the first one is drawn.
This is equivalent to the Gumbel-max trick. Each seed and position has a SplitMix64 stream, the same as in
`plain.sampling.sample_tokens`; the GPU kernels draw from Philox, so that a seed draws other tokens there.
"""

import math

import numpy as np

from ....plain.sampling.sample_tokens import SMALLEST
from ..simd.memory import get_double, get_float, get_long, set_double
from ..simd.vectors import function
from .selection import collect_keys, index_of, sort

# SplitMix64 (Steele et al., 2014), as in `plain.sampling.splitmix`.
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_BY_27 = np.uint64(27)
_BY_30 = np.uint64(30)
_BY_31 = np.uint64(31)
_BY_12 = np.uint64(12)


@function
def splitmix64(x):
    """Return the next 64 random bits of a SplitMix64 stream, as uint64."""
    x += _GOLDEN
    x = (x ^ (x >> _BY_30)) * _FIRST
    x = (x ^ (x >> _BY_27)) * _SECOND
    return x ^ (x >> _BY_31)


@function
def _arrival(bits, n, weight, best):
    """Return when a token of this weight arrives, by the n-th number of a stream, or `best` if not before.

    The time is -log1p(-x) / weight of a uniform x. As -log1p(-x) >= x, most need no logarithm.
    """
    number = (np.float64(splitmix64(bits + np.uint64(n) * _GOLDEN) >> _BY_12) + 0.5) * 2.0**-52
    if number < best * weight:
        return min(best, -math.log1p(-number) / weight)
    return best


@function
def race(weights, count, bits, first):
    """Draw an index of f32[count] with probabilities proportional to the weights; 0 if all weights are 0."""
    best = np.inf
    winner = 0
    for i in range(count):
        time = _arrival(bits, first + i, np.float64(get_float(weights + 4 * i)), best)
        if time < best:
            best = time
            winner = i
    return winner


@function
def draw_from_few(x, size, top, bound, asked, bits, scratch):
    """Draw from the logits at or above the bound, in float64.

    scratch: the address of 16 bytes for each logit of the row.
    """
    temperature, typical_p, top_k, top_p = asked
    keys = scratch
    weights = scratch + 8 * size
    count = collect_keys(x, size, bound, keys)
    if typical_p < 1.0 or top_k < size or top_p < 1.0:
        sort(keys, count)
    for i in range(count):
        set_double(weights + 8 * i, math.exp(_scaled(x, top, temperature, keys, i)))
    if typical_p < 1.0:
        _keep_typical(x, top, temperature, keys, weights, count, max(typical_p, SMALLEST))
    if top_k < size:
        _keep_first(x, keys, weights, count, np.float64(top_k), False)
    if top_p < 1.0:
        _keep_first(x, keys, weights, count, max(top_p, SMALLEST) * _sum(weights, count), True)
    best = np.inf
    winner = 0
    for i in range(count):
        token = index_of(get_long(keys + 8 * i))
        time = _arrival(bits, token, get_double(weights + 8 * i), best)
        if time < best:
            best = time
            winner = token
    return winner


@function
def _scaled(x, top, temperature, keys, i):
    """Return the natural logarithm of the i-th candidate's weight."""
    logit = get_float(x + 4 * index_of(get_long(keys + 8 * i)))
    return np.float64(logit - top) / temperature


@function
def _sum(weights, count):
    """Return the sum of f64[count]."""
    mass = 0.0
    for i in range(count):
        mass += get_double(weights + 8 * i)
    return mass


@function
def _keep_first(x, keys, weights, count, limit, by_weight):
    """Drop candidates if those with higher logits reach the limit: a sum of weights, or a number."""
    mass = 0.0
    before = 0.0
    last = np.float32(np.nan)
    for i in range(count):
        logit = get_float(x + 4 * index_of(get_long(keys + 8 * i)))
        weight = get_double(weights + 8 * i)
        if logit != last:
            before = mass
            last = logit
        if before >= limit:
            set_double(weights + 8 * i, 0.0)
        elif weight > 0.0:
            mass += weight if by_weight else 1.0


@function
def _keep_typical(x, top, temperature, keys, weights, count, typical_p):
    """Keep the candidates nearest to the entropy that together reach typical_p."""
    mass = _sum(weights, count)
    mean = 0.0
    limit = typical_p * mass
    for i in range(count):
        # A token of probability 0 adds nothing to the entropy.
        mean += get_double(weights + 8 * i) * max(_scaled(x, top, temperature, keys, i), -1e30) / mass
    end = 0  # of the candidates above the mean
    while end < count and _scaled(x, top, temperature, keys, end) >= mean:
        end += 1
    # Grow [first, end) from the mean outwards until its weight is enough; equal distances come together.
    first = end
    mass = 0.0
    while mass < limit and (first > 0 or end < count):
        distance = np.inf
        if first > 0:
            distance = _scaled(x, top, temperature, keys, first - 1) - mean
        if end < count:
            distance = min(distance, mean - _scaled(x, top, temperature, keys, end))
        while first > 0 and _scaled(x, top, temperature, keys, first - 1) - mean <= distance:
            first -= 1
            mass += get_double(weights + 8 * first)
        while end < count and mean - _scaled(x, top, temperature, keys, end) <= distance:
            mass += get_double(weights + 8 * end)
            end += 1
    for i in range(first):
        set_double(weights + 8 * i, 0.0)
    for i in range(end, count):
        set_double(weights + 8 * i, 0.0)
