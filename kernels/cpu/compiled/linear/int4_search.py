"""`kernels.int4_search`, compiled: a lane searches for the scale and the zero of a group."""

import numpy as np

from ....int4_search import RANGES, REFINEMENTS
from ...linear.int4_search import BEST_FIT, FIT_BYTES
from ...target import VECTOR_BYTES
from ..kernels import each_unit
from ..simd.memory import get_float, load, store
from ..simd.vectors import add, divide, function, multiply, splat, subtract, where_greater, where_nan

_RANGE_BYTES = 8
_NUM_RANGES = len(RANGES)
_SCALE, _ZERO, _EXPLAINED = (VECTOR_BYTES * i for i in range(3))  # in the memory of a fit


@function
def _total(at, size):
    """Add up vectors into the first of them, in the order of `int4_search`. Overwrites them."""
    half = size // 2
    while half:
        for to in range(at, at + half * VECTOR_BYTES, VECTOR_BYTES):
            store(to, add(load(to), load(to + half * VECTOR_BYTES)))
        half //= 2


@function
def _code(x):
    """Round to the nearest code, ties to even."""
    shift = splat(np.float32(1.5 * 2**23))
    rounded = subtract(add(x, shift), shift)
    most = splat(np.float32(7.0))
    least = where_greater(splat(np.float32(-8.0)), rounded, splat(np.float32(-8.0)), rounded)
    return where_nan(x, where_greater(least, most, most, least))


@function
def _fit(codes, levels, stride, size, sums_at, fit):
    """Round codes, and write the fit for them."""
    total = splat(np.float32(0.0))
    squares = total
    for k in range(size):
        code = _code(load(codes + k * VECTOR_BYTES))
        total = add(total, code)
        squares = add(squares, multiply(code, code))
        store(codes + k * VECTOR_BYTES, multiply(code, load(levels + k * stride)))
    _total(codes, size)
    sums = load(sums_at)
    part = splat(np.float32(1.0) / np.float32(size))
    mean = multiply(total, part)
    products = subtract(load(codes), multiply(mean, sums))
    mean_squares = multiply(multiply(mean, mean), splat(np.float32(size)))
    scale = divide(products, subtract(squares, mean_squares))
    store(fit + _SCALE, scale)
    store(fit + _ZERO, subtract(multiply(sums, part), multiply(scale, mean)))
    store(fit + _EXPLAINED, multiply(scale, products))


@function
def _keep_better(best, other):
    """Replace a fit by another one where that explains more."""
    new = load(other + _EXPLAINED)
    old = load(best + _EXPLAINED)
    for at in range(0, FIT_BYTES, VECTOR_BYTES):
        store(best + at, where_greater(new, old, load(other + at), load(best + at)))


@function
def _code_range(codes, levels, stride, size, place):
    factor = splat(get_float(place))
    shift = splat(get_float(place + 4))
    for k in range(size):
        store(codes + k * VECTOR_BYTES, add(multiply(load(levels + k * stride), factor), shift))


@function
def _search(levels, stride, size, ranges, codes, best, other):
    for k in range(size):
        store(codes + k * VECTOR_BYTES, load(levels + k * stride))
    _total(codes, size)
    sums = codes + size * VECTOR_BYTES
    store(sums, load(codes))
    _code_range(codes, levels, stride, size, ranges)
    _fit(codes, levels, stride, size, sums, best)
    for i in range(1, _NUM_RANGES):
        _code_range(codes, levels, stride, size, ranges + i * _RANGE_BYTES)
        _fit(codes, levels, stride, size, sums, other)
        _keep_better(best, other)
    for _ in range(REFINEMENTS):
        for k in range(size):
            above = subtract(load(levels + k * stride), load(best + _ZERO))
            store(codes + k * VECTOR_BYTES, divide(above, load(best + _SCALE)))
        _fit(codes, levels, stride, size, sums, other)
        _keep_better(best, other)


@each_unit(BEST_FIT)
def _best_fit(args, unit, scratch):
    best = scratch
    other = best + FIT_BYTES
    codes = other + FIT_BYTES
    first = unit * args.vectors_of_unit
    for vector in range(first, min(first + args.vectors_of_unit, args.num_vectors)):
        at = vector * VECTOR_BYTES
        _search(args.levels + at, args.stride, args.size, args.ranges, codes, best, other)
        store(args.scales + at, load(best + _SCALE))
        store(args.zeros + at, load(best + _ZERO))
