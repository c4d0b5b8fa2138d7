"""Choosing among the numbers of a row: what sampling and log-probabilities on a CPU are made of.

A row stays in a core's cache after it was read once, so these look at all of it as often as they like.
As in `torch_selection`, a row is looked at as a matrix, the columns of which are added up apart; here each of
its rows has a `pitch` of whole vectors. Addresses are in bytes, sizes in numbers.
"""

import numpy as np

from ..simd.memory import (
    get_double,
    get_float,
    get_int,
    get_long,
    load,
    load_up_to,
    set_double,
    set_long,
    store,
)
from ..simd.vectors import (
    LANES,
    VECTOR_BYTES,
    add,
    bits_of,
    exp2_of_negative,
    float_of,
    function,
    greater,
    highest,
    lanes_from,
    splat,
    subtract,
    total,
    where_from,
    where_greater,
)

DEAD = np.float32(-127.0)  # the base-2 logarithm of what is not drawn: it weighs 0 in float32
MINUS_INFINITY, NAN = np.float32(-np.inf), np.float32(np.nan)
_MINUS_INFINITY, _NAN = -0x7F800001, 0x7F800001  # see float_in_order
# The bits of positive float32 are in order too. These make 256 bins of an octave, from 2^-8 to 2^8; what is
# beyond shares the first and the last.
_BIN_SHIFT, _FIRST_BIN, NUM_BINS = 15, (127 - 8) * 256, 16 * 256
_EVERY_LANE = (1 << LANES) - 1
_TOKEN = 0xFFFFFFFF  # the part of a key that is where the number is


@function
def whole(size):
    """As many numbers in whole vectors."""
    return -(-size // LANES) * LANES


@function
def column_maxima(x, size, width, columns):
    """The maxima of the columns of a row, and -inf where these are padded; NaN is passed over.

    Returns the greatest, and where they are: in columns, or behind these.
    """
    to = columns + 4 * whole(width)
    for at in range(0, width, LANES):
        store(columns + 4 * at, splat(MINUS_INFINITY))
    for start in range(0, size, width):
        left = min(size - start, width)
        for at in range(0, width, LANES):
            number = load_up_to(x + 4 * (start + at), left - at, MINUS_INFINITY)
            # To another place: back where it was, LLVM would store it masked, which some CPUs are slow at.
            store(to + 4 * at, greater(number, load(columns + 4 * at)))
        columns, to = to, columns
    top = splat(MINUS_INFINITY)
    for at in range(0, width, LANES):
        top = greater(load(columns + 4 * at), top)
    return highest(top), columns


@function
def count_above(numbers, size, bound, equals):
    """How many of a row are greater than the bound, or as great if `equals`; exact up to 2^24."""
    count, one, zero = splat(np.float32(0.0)), splat(np.float32(1.0)), splat(np.float32(0.0))
    bounds = splat(bound)
    for i in range(0, size, LANES):
        number = load_up_to(numbers + 4 * i, size - i, NAN)
        found = where_from(number, bounds, one, zero) if equals else where_greater(number, bounds, one, zero)
        count = add(count, found)
    return np.int64(total(count))


@function
def reached_by(numbers, size, k):
    """A bound that is no higher than the k-th largest, k from 1 to size, and that few more than k reach."""
    low, high, count = _MINUS_INFINITY, _NAN, size
    while high - low > 1 and count > k + k // 4:
        middle = (low + high) >> 1
        reached = count_above(numbers, size, float_in_order(middle), True)
        if reached >= k:
            low, count = middle, reached
        else:
            high = middle
    return float_in_order(low)


@function
def float_in_order(number):
    """The float32 by its place in the order of all: -0x7F800001 is -inf, 0 is 0, and 0x7F800000 inf."""
    return float_of(np.int32(number if number >= 0 else number ^ 0x7FFFFFFF))


@function
def collect(x, size, bound, keys):
    """A key of each number that is at least the bound; returns how many. Keys ascend as numbers descend."""
    count = 0
    for i in range(0, size, LANES):
        found = lanes_from(load_up_to(x + 4 * i, size - i, NAN), splat(bound))
        place = i
        while found != 0:
            if found & 1:
                set_long(keys + 8 * count, _key(x, place))
                count += 1
            found >>= 1
            place += 1
    return count


@function
def _key(x, place):
    """What sorts by the number there, the largest first, and among equals by place."""
    in_order = np.int64(get_int(x + 4 * place))
    if get_float(x + 4 * place) == np.float32(0.0):  # both zeros are equals
        in_order = np.int64(0)
    elif in_order < 0:
        in_order ^= 0x7FFFFFFF
    return ~in_order << 32 | place


@function
def place_of(key):
    """Where the number of a key is."""
    return key & _TOKEN


@function
def sort(keys, count):
    """Ascending, in place (Shell, 1959, with Knuth's gaps)."""
    gap = 1
    while 3 * gap < count:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, count):
            key, place = get_long(keys + 8 * i), i
            while place >= gap and get_long(keys + 8 * (place - gap)) > key:
                set_long(keys + 8 * place, get_long(keys + 8 * (place - gap)))
                place -= gap
            set_long(keys + 8 * place, key)
        gap //= 3


@function
def away_from(x, centre):
    """How far numbers are from the centre, which is in every lane."""
    return greater(subtract(x, splat(centre)), subtract(splat(centre), x))


def _bound_search(weigh, weigh_one):
    """A search by what a number weighs: in a vector, and alone."""

    @function
    def add_up(numbers, size, centre, sums, buffer):
        """Add up the weights by bins of distances."""
        for i in range(NUM_BINS):
            set_double(sums + 8 * i, 0.0)
        nothing, nearest, furthest = splat(np.float32(0.0)), splat(_start_of(0)), splat(_end_of(NUM_BINS - 1))
        for i in range(0, size, LANES):
            weights = weigh(load(numbers + 4 * i))
            if lanes_from(nothing, weights) == _EVERY_LANE:
                continue
            away = greater(away_from(load(numbers + 4 * i), centre), nearest)
            store(buffer, where_greater(away, furthest, furthest, away))
            store(buffer + VECTOR_BYTES, weights)
            for lane in range(LANES):
                at = sums + 8 * ((get_int(buffer + 4 * lane) >> _BIN_SHIFT) - _FIRST_BIN)
                weight = np.float64(get_float(buffer + VECTOR_BYTES + 4 * lane))
                set_double(at, get_double(at) + weight)

    @function
    def search(numbers, size, centre, target, scratch):
        """The least distance from the centre within which numbers weigh the target; inf where all weigh less.

        The weights are added up by bins, and only the bin is sorted in which the sum reaches the target.
        size: whole vectors. scratch: room for the bins and a key of every number.
        """
        add_up(numbers, size, centre, scratch, scratch + 8 * NUM_BINS)
        reached, mass = 0, get_double(scratch)
        while mass < target:
            reached += 1
            if reached == NUM_BINS:
                return np.float32(np.inf)
            mass += get_double(scratch + 8 * reached)
        mass -= get_double(scratch + 8 * reached)
        keys, distance = scratch, np.float32(np.inf)
        count = _collect_bin(numbers, size, centre, reached, keys)
        sort(keys, count)
        for i in range(count):
            key = get_long(keys + 8 * i)
            distance = float_of(np.int32(key >> 32))
            mass += weigh_one(get_float(numbers + 4 * place_of(key)))
            # Added up in another order, all of a bin may be short of it by a rounding: then it is the last.
            if mass >= target:
                break
        return distance

    return search


@function
def _start_of(number):
    """The least number of a bin."""
    return float_of(np.int32((number + _FIRST_BIN) << _BIN_SHIFT))


@function
def _end_of(number):
    """The greatest number of a bin."""
    return float_of(np.int32(((number + 1 + _FIRST_BIN) << _BIN_SHIFT) - 1))


@function
def _collect_bin(numbers, size, centre, number, keys):
    """A key of each number whose distance is of that bin; returns how many. Keys ascend as distances do."""
    low = _start_of(number) if number > 0 else np.float32(0.0)
    high = _end_of(number) if number < NUM_BINS - 1 else np.float32(np.inf)
    count = 0
    for i in range(0, size, LANES):
        away = away_from(load(numbers + 4 * i), centre)
        found, place = lanes_from(away, splat(low)) & lanes_from(splat(high), away), i
        while found != 0:
            if found & 1:
                bits = bits_of(abs(get_float(numbers + 4 * place) - centre))
                set_long(keys + 8 * count, np.int64(bits) << 32 | place)
                count += 1
            found >>= 1
            place += 1
    return count


@function
def _one(x):
    """Of those that may be drawn at all."""
    return where_greater(x, splat(DEAD), splat(np.float32(1.0)), splat(np.float32(0.0)))


@function
def _one_alone(_x):
    return 1.0


@function
def _exp2_alone(x):
    return 2.0 ** np.float64(x)


# How far numbers are away that weigh so much, by 2 to the power of each; and that are so many.
mass_bound, number_bound = _bound_search(exp2_of_negative, _exp2_alone), _bound_search(_one, _one_alone)
