"""Sampling, one row at a time: it is read from memory once and then stays in the core's cache.

The algorithm and the random numbers are those of `plain.sampling.sample_tokens`: where min_p, top_n_sigma or
a small top_k leave few candidates, a race of these in float64; else a race of columns and one within the
column, run again while top_p or typical_p exclude the token (rejection sampling). The latter works on `logs`:
base-2 logarithms of the tokens' weights relative to the likeliest token, whose logarithm is 0.
"""

import math

import numpy as np

from ....plain.sampling.sample_tokens import SMALLEST
from ...sampling.sample_tokens import SAMPLE
from ...target import LANES
from ..kernels import each_unit
from ..simd.memory import get_float, get_int, get_long, load, load_up_to, set_float, set_long, store
from ..simd.vectors import (
    add,
    exp2_of_negative,
    fma,
    function,
    greater,
    multiply,
    padded,
    splat,
    subtract,
    total,
    where_greater,
)
from .draws import draw_from_few, race, splitmix64
from .selection import (
    DEAD,
    MINUS_INFINITY,
    column_maxima,
    count_above,
    count_radius,
    distances,
    mass_radius,
    threshold_for,
)

_EVERYWHERE = np.float32(np.inf)  # a distance above that of any token
_LEAST = np.finfo(np.float32).min
_TINY = np.finfo(np.float32).tiny
_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LN_2 = math.log(2)


@function
def _option(column, row, unused):
    """Return a row's parameter, or `unused` if no row of the batch has it: then the address is 0."""
    return np.float64(get_float(column + 4 * row)) if column else unused


@function
def _moments(x, size, centre):
    """Return the sums of x - centre and of its square over all x above -inf, and how many there are."""
    zero = splat(_ZERO)
    lowest = splat(MINUS_INFINITY)
    least = splat(_LEAST)
    sums = 0.0
    squares = 0.0
    count = 0.0
    for start in range(0, size, 64 * LANES):
        some = zero
        square = zero
        number = zero
        for i in range(start, min(start + 64 * LANES, size), LANES):
            logit = load_up_to(x + 4 * i, size - i, MINUS_INFINITY)
            away = where_greater(logit, lowest, greater(subtract(logit, splat(centre)), least), zero)
            some = add(some, away)
            square = fma(away, away, square)
            number = add(number, where_greater(logit, lowest, splat(_ONE), zero))
        sums += np.float64(total(some))
        squares += np.float64(total(square))
        count += np.float64(total(number))
    return sums, squares, count


@function
def _deviation(x, size, top):
    """Return the standard deviation of the logits above -inf."""
    # Around an estimate of the mean, so that little precision is lost where the squared mean is subtracted.
    sums, squares, count = _moments(x, min(size, 1024), top)
    centre = np.float32(top + sums / count) if count > 0.0 else top
    sums, squares, count = _moments(x, size, centre)
    if (sums / count) ** 2 > squares / count / 2:
        sums, squares, count = _moments(x, size, np.float32(centre + sums / count))
    return math.sqrt(max(squares / count - (sums / count) ** 2, 0.0))


@function
def _lowest(args, row, x, top, temperature):
    """Return the lowest logit that min_p and top_n_sigma keep."""
    lowest = MINUS_INFINITY
    if args.min_p and get_float(args.min_p + 4 * row) > _ZERO:
        lowest = np.float32(top + math.log(_option(args.min_p, row, 0.0)) * temperature)
    sigmas = _option(args.top_n_sigma, row, 0.0)
    if sigmas > 0.0:
        lowest = max(lowest, np.float32(top - sigmas * _deviation(x, args.size, top)))
    return lowest


@function
def _first(x, size, value):
    """Return where a value occurs first; 0 if it does not."""
    for at in range(size):
        if get_float(x + 4 * at) == value:
            return at
    return 0


@function
def _sample(args, row, scratch):
    """Draw a row's token. scratch: sums or maxima of columns, then what the draw needs."""
    x = args.logits + row * args.stride
    size = args.size
    width = args.width
    top, columns = column_maxima(x, size, width, scratch)
    rest = scratch + 8 * padded(width)
    temperature = _option(args.temperature, row, 1.0)
    if temperature == 0.0:
        return _first(x, size, top)
    # A smaller temperature would be 0 in float32, and 0 / 0 is NaN.
    temperature = max(temperature, np.float64(_TINY))
    lowest = _lowest(args, row, x, top, temperature)
    typical_p = _option(args.typical_p, row, 1.0)
    top_p = _option(args.top_p, row, 1.0)
    top_k = np.int64(get_int(args.top_k + 4 * row)) if args.top_k else size
    asked = (temperature, typical_p, top_k, top_p)
    bits = splitmix64(np.uint64(get_long(args.seeds + 8 * row)))
    bits = splitmix64(bits ^ np.uint64(get_long(args.positions + 8 * row)))
    limited = top_k <= size // args.height and typical_p >= 1.0
    if limited or count_above(columns, width, lowest, True) <= width // 4:
        if limited:
            lowest = max(lowest, threshold_for(columns, width, top_k))
        return draw_from_few(x, size, top, max(lowest, _LEAST), asked, bits, rest)
    return _draw_from_all(x, size, width, top, lowest, asked, bits, columns, rest)


@function
def _draw_from_all(x, size, width, top, lowest, asked, bits, columns, scratch):
    """Draw from the tokens with logits from `lowest` on, until typical_p and top_p keep the token."""
    temperature, typical_p, top_k, top_p = asked
    typical_p = max(typical_p, SMALLEST)
    top_p = max(top_p, SMALLEST)
    logs = scratch
    height = -(-size // width)
    rest = logs + 4 * height * padded(width)
    matrix = (logs, height, width, columns)  # logarithms, and sums of their columns
    mass, mean = _to_logs(x, size, matrix, top, lowest, temperature)
    if not mass > 0.0:  # no logit is finite
        return 0
    typical_first = typical_p < 1.0 and (top_k < size or top_p < 1.0)
    if typical_first:  # the others apply to what it keeps
        bound = mass_radius(logs, height * padded(width), mean, typical_p * mass, rest)
        mass = _drop_beyond(matrix, mean, bound)
    if top_k < size:
        bound = count_radius(logs, height * padded(width), _ZERO, np.float64(top_k), rest)
        mass = _drop_beyond(matrix, _ZERO, bound)
    token = _draw(matrix, size, bits, rest, _ZERO, _EVERYWHERE)
    if typical_p < 1.0 and not typical_first:
        token = _redraw(matrix, size, bits, rest, token, mean, typical_p * mass)
    # The lightest tokens may not change a sum of float32; they can be drawn all the same.
    if top_p < 1.0:
        token = _redraw(matrix, size, bits, rest, token, _ZERO, top_p * mass)
    return token


@function
def _to_logs(x, size, matrix, top, lowest, temperature):
    """Write logarithms and sums of columns. Return the sum of all weights, and the mean logarithm.

    A token's logarithm is as far from the mean as its surprisal is from the entropy.
    """
    logs, _, width, columns = matrix
    scale = splat(np.float32(1.0 / (temperature * _LN_2)))
    tops = splat(top)
    lowests = splat(lowest)
    dead = splat(DEAD)
    zero = splat(_ZERO)
    moments = 0.0
    _clear(columns, width)
    for start in range(0, size, width):
        moment = zero
        for at in range(0, width, LANES):
            logit = load_up_to(x + 4 * (start + at), min(size - start, width) - at, MINUS_INFINITY)
            log = multiply(subtract(logit, tops), scale)
            log = where_greater(log, dead, where_greater(lowests, logit, dead, log), dead)
            store(logs, log)
            weight = exp2_of_negative(log)
            store(columns + 4 * at, add(load(columns + 4 * at), weight))
            moment = fma(weight, log, moment)
            logs += 4 * LANES
        moments += np.float64(total(moment))
    mass = _mass(columns, width)
    return mass, np.float32(moments / mass)


@function
def _clear(columns, width):
    """Clear the sums of columns."""
    for at in range(0, width, LANES):
        store(columns + 4 * at, splat(_ZERO))


@function
def _mass(columns, width):
    """Return the sum over all columns."""
    mass = 0.0
    for at in range(width):
        mass += np.float64(get_float(columns + 4 * at))
    return mass


@function
def _drop_beyond(matrix, centre, bound):
    """Exclude all further from the centre than the bound. Return the weight left."""
    logs, height, width, columns = matrix
    zero = splat(_ZERO)
    bounds = splat(bound)
    far = splat(np.float32(2.0) * DEAD)
    _clear(columns, width)
    for _ in range(height):
        for at in range(0, width, LANES):
            log = load(logs)
            cost = where_greater(distances(log, centre), bounds, far, zero)
            log = greater(add(log, cost), splat(DEAD))
            store(logs, log)
            store(columns + 4 * at, add(load(columns + 4 * at), exp2_of_negative(log)))
            logs += 4 * LANES
    return _mass(columns, width)


@function
def _nearer(log, centre, distance):
    """Return the weights of tokens nearer to the centre, and 0 for the others."""
    return where_greater(splat(distance), distances(log, centre), exp2_of_negative(log), splat(_ZERO))


@function
def _sum_nearer(matrix, centre, distance):
    """Write sums of columns over the tokens that are nearer. Return the sum of all."""
    logs, height, width, columns = matrix
    _clear(columns, width)
    for _ in range(height):
        for at in range(0, width, LANES):
            weight = _nearer(load(logs), centre, distance)
            store(columns + 4 * at, add(load(columns + 4 * at), weight))
            logs += 4 * LANES
    return _mass(columns, width)


@function
def _draw(matrix, size, bits, scratch, centre, distance):
    """Draw a token of those nearer to the centre: first a column by its sum, then a token in it."""
    logs, height, width, columns = matrix
    column = race(columns, width, bits, 0)
    for i in range(padded(height)):
        set_float(scratch + 4 * i, get_float(logs + 4 * (i * padded(width) + column)) if i < height else DEAD)
    for i in range(0, height, LANES):
        store(scratch + 4 * i, _nearer(load(scratch + 4 * i), centre, distance))
    # With other random numbers than the columns had.
    return min(column + width * race(scratch, height, bits, width), size - 1)


@function
def _redraw(matrix, size, bits, scratch, token, centre, limit):
    """Draw again while the tokens nearer to the centre than the one drawn reach the limit without it.

    Then it is excluded, with all that are not nearer; the next draw is among the others, whose weight is at
    least the limit, so that there is one. limit: above 0.
    """
    logs, _, width, _ = matrix
    while True:
        log = get_float(logs + 4 * (token // width * padded(width) + token % width))
        distance = abs(log - centre)
        # _sum_nearer also writes the columns' sums for the next draw.
        if distance == _ZERO or _sum_nearer(matrix, centre, distance) < limit:
            return token
        bits = splitmix64(~bits)
        token = _draw(matrix, size, bits, scratch, centre, distance)


@each_unit(SAMPLE)
def _sample_unit(args, row, scratch):
    set_long(args.tokens + 8 * row, _sample(args, row, scratch))
