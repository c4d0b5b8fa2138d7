"""Selection in a row of logits: maxima, thresholds, radix search by bins, and sorting of few candidates.

After a row was read once it stays in a core's cache, so that several passes over all of it are cheap. As in
`plain.sampling.selection`, a row is seen as a matrix with sums or maxima for each column; here rows of the
matrix are padded to whole vectors. Addresses are in bytes, sizes in numbers.
"""

import numpy as np

from ...sampling.sample_tokens import NUM_BINS
from ...target import LANES, VECTOR_BYTES
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
    add,
    bits_of,
    exp2_of_negative,
    float_of,
    function,
    greater,
    highest,
    lanes_from,
    padded,
    splat,
    subtract,
    total,
    where_from,
    where_greater,
)

DEAD = np.float32(-127.0)  # the base-2 logarithm of a token that is excluded: its weight is 0 in float32
MINUS_INFINITY, NAN = np.float32(-np.inf), np.float32(np.nan)
# see float_at_rank
_MINUS_INFINITY = -0x7F800001
_NAN = 0x7F800001
# Positive float32 are ordered as their bits are. The upper bits make 256 bins in each octave from 2^-8 to
# 2^8; the first and the last bin also hold what is beyond.
_BIN_SHIFT = 15
_FIRST_BIN = (127 - 8) * 256
_EVERY_LANE = (1 << LANES) - 1
_INDEX = 0xFFFFFFFF  # the bits of a key that are an index


@function
def column_maxima(x, size, width, columns):
    """Write the maxima of a row's columns, padded by -inf; NaN is ignored.

    Return the highest maximum, and the address of the maxima: `columns`, or the memory right after them,
    which must be as large.
    """
    to = columns + 4 * padded(width)
    for at in range(0, width, LANES):
        store(columns + 4 * at, splat(MINUS_INFINITY))
    for start in range(0, size, width):
        left = min(size - start, width)
        for at in range(0, width, LANES):
            number = load_up_to(x + 4 * (start + at), left - at, MINUS_INFINITY)
            # In place, LLVM would use masked stores, which some CPUs are slow at.
            store(to + 4 * at, greater(number, load(columns + 4 * at)))
        columns, to = to, columns
    top = splat(MINUS_INFINITY)
    for at in range(0, width, LANES):
        top = greater(load(columns + 4 * at), top)
    return highest(top), columns


@function
def count_above(numbers, size, bound, equals):
    """Count the numbers of a row above the bound; with `equals`, also those at it. Exact up to 2^24."""
    count = splat(np.float32(0.0))
    one = splat(np.float32(1.0))
    zero = splat(np.float32(0.0))
    bounds = splat(bound)
    for i in range(0, size, LANES):
        number = load_up_to(numbers + 4 * i, size - i, NAN)
        found = where_from(number, bounds, one, zero) if equals else where_greater(number, bounds, one, zero)
        count = add(count, found)
    return np.int64(total(count))


@function
def threshold_for(numbers, size, k):
    """Return a number that is at most the k-th largest, and that few more than k numbers reach."""
    low = _MINUS_INFINITY
    high = _NAN
    count = size
    while high - low > 1 and count > k + k // 4:
        middle = (low + high) >> 1
        reached = count_above(numbers, size, float_at_rank(middle), True)
        if reached >= k:
            low = middle
            count = reached
        else:
            high = middle
    return float_at_rank(low)


@function
def float_at_rank(number):
    """Return the float32 with a rank in ascending order: -0x7F800001 is -inf, 0 is 0, 0x7F800000 is inf."""
    return float_of(np.int32(number if number >= 0 else number ^ 0x7FFFFFFF))


@function
def collect_keys(x, size, bound, keys):
    """Write a sort key for each number at or above the bound. Return the number of keys."""
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
    """Return an int64 that sorts by the number at an index, the largest first, and equal ones by index."""
    in_order = np.int64(get_int(x + 4 * place))
    if get_float(x + 4 * place) == np.float32(0.0):  # -0 is equal to 0
        in_order = np.int64(0)
    elif in_order < 0:
        in_order ^= 0x7FFFFFFF
    return ~in_order << 32 | place


@function
def index_of(key):
    """Return the index of the number that a sort key belongs to."""
    return key & _INDEX


@function
def sort(keys, count):
    """Sort int64 in ascending order, in place (Shellsort with Knuth's gaps)."""
    gap = 1
    while 3 * gap < count:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, count):
            key = get_long(keys + 8 * i)
            place = i
            while place >= gap and get_long(keys + 8 * (place - gap)) > key:
                set_long(keys + 8 * place, get_long(keys + 8 * (place - gap)))
                place -= gap
            set_long(keys + 8 * place, key)
        gap //= 3


@function
def distances(x, centre):
    """Return the distance of each lane from the centre."""
    return greater(subtract(x, splat(centre)), subtract(splat(centre), x))


def _radius_search(weigh, weigh_one):
    """Make a search with a weight of each number: weigh(vector) and weigh_one(number)."""

    @function
    def add_up(numbers, size, centre, sums, buffer):
        """Sum up the weights in bins of distances."""
        for i in range(NUM_BINS):
            set_double(sums + 8 * i, 0.0)
        nothing = splat(np.float32(0.0))
        nearest = splat(_start_of(0))
        furthest = splat(_end_of(NUM_BINS - 1))
        for i in range(0, size, LANES):
            weights = weigh(load(numbers + 4 * i))
            if lanes_from(nothing, weights) == _EVERY_LANE:
                continue
            away = greater(distances(load(numbers + 4 * i), centre), nearest)
            store(buffer, where_greater(away, furthest, furthest, away))
            store(buffer + VECTOR_BYTES, weights)
            for lane in range(LANES):
                at = sums + 8 * ((get_int(buffer + 4 * lane) >> _BIN_SHIFT) - _FIRST_BIN)
                weight = np.float64(get_float(buffer + VECTOR_BYTES + 4 * lane))
                set_double(at, get_double(at) + weight)

    @function
    def search(numbers, size, centre, target, scratch):
        """Return the least distance from the centre within which weights sum up to the target, else inf.

        Weights are summed up in bins; only the bin in which the sum reaches the target is sorted.
        size: of whole vectors. scratch: memory for the bins and a key of each number.
        """
        add_up(numbers, size, centre, scratch, scratch + 8 * NUM_BINS)
        reached = 0
        mass = get_double(scratch)
        while mass < target:
            reached += 1
            if reached == NUM_BINS:
                return np.float32(np.inf)
            mass += get_double(scratch + 8 * reached)
        mass -= get_double(scratch + 8 * reached)
        keys = scratch
        distance = np.float32(np.inf)
        count = _collect_bin(numbers, size, centre, reached, keys)
        sort(keys, count)
        for i in range(count):
            key = get_long(keys + 8 * i)
            distance = float_of(np.int32(key >> 32))
            mass += weigh_one(get_float(numbers + 4 * index_of(key)))
            # Rounding may differ in this order: if the target is not reached, the bin's last distance counts.
            if mass >= target:
                break
        return distance

    return search


@function
def _start_of(number):
    """Return the smallest number of a bin."""
    return float_of(np.int32((number + _FIRST_BIN) << _BIN_SHIFT))


@function
def _end_of(number):
    """Return the largest number of a bin."""
    return float_of(np.int32(((number + 1 + _FIRST_BIN) << _BIN_SHIFT) - 1))


@function
def _collect_bin(numbers, size, centre, number, keys):
    """Write a key, distance then index, for each number whose distance is in a bin. Return how many."""
    low = _start_of(number) if number > 0 else np.float32(0.0)
    high = _end_of(number) if number < NUM_BINS - 1 else np.float32(np.inf)
    count = 0
    for i in range(0, size, LANES):
        away = distances(load(numbers + 4 * i), centre)
        found = lanes_from(away, splat(low)) & lanes_from(splat(high), away)
        place = i
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
    """Return 1 for each number that is not excluded."""
    return where_greater(x, splat(DEAD), splat(np.float32(1.0)), splat(np.float32(0.0)))


@function
def _one_alone(_x):
    return 1.0


@function
def _exp2_alone(x):
    return 2.0 ** np.float64(x)


# With weights 2^x; with weights 1, which makes the target a number of tokens.
mass_radius = _radius_search(exp2_of_negative, _exp2_alone)
count_radius = _radius_search(_one, _one_alone)
