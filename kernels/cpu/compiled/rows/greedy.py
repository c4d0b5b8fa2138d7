"""The highest logit of each row."""

import numpy as np

from ...rows.row_kernels import GREEDY
from ...target import LANES, VECTOR_BYTES
from ..kernels import each_unit
from ..simd.memory import get_float, load, set_float, set_long, store
from ..simd.vectors import function, greater, splat, total, where_greater, where_nan


@function
def first_highest(top, block, scratch):
    """Return the highest value of all lanes and the first position at which it occurs.

    block: for each lane, the index of the vector that the lane's value comes from.
    """
    store(scratch, top)
    store(scratch + VECTOR_BYTES, block)
    best = get_float(scratch)
    place = np.int64(get_float(scratch + VECTOR_BYTES)) * LANES
    for lane in range(1, LANES):
        number = get_float(scratch + 4 * lane)
        at = np.int64(get_float(scratch + VECTOR_BYTES + 4 * lane)) * LANES + lane
        if number > best or (number == best and at < place):
            best = number
            place = at
    return best, place


@each_unit(GREEDY)
def _greedy(args, row, scratch):
    """Write a row's maximum and its first index; NaN and 0 if the row has a NaN."""
    x = args.logits + row * args.stride
    size = args.size
    top = splat(np.float32(-np.inf))
    nan = splat(np.float32(0.0))
    block = splat(np.float32(0.0))  # which vector each lane's maximum is in; exact up to 2^24
    for i in range(size // LANES):
        number = load(x + i * LANES * 4)
        block = where_greater(number, top, splat(np.float32(i)), block)
        top = greater(number, top)
        nan = where_nan(number, nan)
    best, place = first_highest(top, block, scratch)
    nans = total(nan)
    for i in range(size // LANES * LANES, size):
        number = get_float(x + 4 * i)
        nans += number if number != number else np.float32(0.0)
        if number > best:
            best = number
            place = np.int64(i)
    set_float(args.highest + 4 * row, best if nans == nans else nans)
    set_long(args.tokens + 8 * row, place if nans == nans else 0)
