"""Routing: which experts each token has, and with what weights."""

import numpy as np

from ...rows.experts import ROUTE, SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN
from ...target import LANES
from ..kernels import each_unit
from ..simd.memory import get_float, get_int, get_long, load_up_to, set_float, set_int, set_long, store
from ..simd.vectors import (
    add,
    bits_of,
    exp2,
    function,
    gated_by,
    greater,
    highest,
    multiply,
    padded,
    splat,
    subtract,
    total,
)

_LOG2E = np.float32(1.4426950408889634)
_MINUS_INFINITY = np.float32(-np.inf)
# Keys of what can be chosen no more, and of what never could be.
_CHOSEN = -(2**63) + 1
_NEVER = -(2**63)


@function
def _softmax(x, count, out):
    """Write the softmax of numbers, in memory for whole vectors."""
    top = splat(_MINUS_INFINITY)
    for i in range(0, count, LANES):
        top = greater(load_up_to(x + 4 * i, count - i, _MINUS_INFINITY), top)
    most = splat(highest(top))
    log2e = splat(_LOG2E)
    mass = splat(np.float32(0.0))
    for i in range(0, count, LANES):
        number = load_up_to(x + 4 * i, count - i, _MINUS_INFINITY)
        power = exp2(multiply(subtract(number, most), log2e))
        store(out + 4 * i, power)
        mass = add(mass, power)
    inverse = total(mass)
    for i in range(count):
        at = out + 4 * i
        set_float(at, get_float(at) / inverse)


@function
def _sigmoid(x, count, out):
    """Write the sigmoid of numbers, in memory for whole vectors."""
    one = splat(np.float32(1.0))
    for i in range(0, count, LANES):
        store(out + 4 * i, gated_by(one, load_up_to(x + 4 * i, count - i, np.float32(0.0))))


@function
def _key(number, index):
    """Return an int64 that orders by number, NaN highest, and then by falling index."""
    if number != number:
        order = np.int64(0x7FFFFFFF)
    else:
        bits = np.int64(bits_of(number + np.float32(0.0)))  # -0 equals 0
        order = bits if bits >= 0 else -(bits & 0x7FFFFFFF)
    return order * 4294967296 + (0xFFFFFF - index)


@function
def _index_of(key):
    return 0xFFFFFF - (key & 0xFFFFFFFF)


@function
def _take_highest(keys, count):
    """Mark the highest key as chosen. Return its index."""
    best = np.int64(_NEVER)
    for i in range(count):
        best = max(best, get_long(keys + 8 * i))
    index = _index_of(best)
    set_long(keys + 8 * index, _CHOSEN)
    return index


@function
def _leave_groups(args, keys, ranked, of_groups):
    """Keep the keys of the groups of highest score."""
    size = args.num_experts // args.num_groups
    for group in range(args.num_groups):
        best = np.int64(_NEVER)
        second = np.int64(_NEVER)
        for i in range(group * size, (group + 1) * size):
            key = get_long(keys + 8 * i)
            if key > best:
                second = best
                best = key
            elif key > second:
                second = key
        score = get_float(ranked + 4 * _index_of(best))
        if args.by_best_two:
            score += get_float(ranked + 4 * _index_of(second))
        set_long(of_groups + 8 * group, _key(score, group))
    for _ in range(args.num_kept_groups):
        _take_highest(of_groups, args.num_groups)
    for group in range(args.num_groups):
        if get_long(of_groups + 8 * group) != _CHOSEN:
            for i in range(group * size, (group + 1) * size):
                set_long(keys + 8 * i, _NEVER)


@each_unit(ROUTE)
def _route(args, token, scratch):
    count = args.num_experts
    num_chosen = args.num_chosen
    logits = args.logits + token * args.stride
    scores = scratch
    ranked = scores + 4 * padded(count)
    keys = ranked + 4 * padded(count)
    of_groups = keys + 8 * padded(count)
    if args.score == SIGMOID:
        _sigmoid(logits, count, scores)
    elif args.score == SOFTMAX or args.by_logits == 0:
        _softmax(logits, count, scores)
    for i in range(count):
        number = get_float((logits if args.by_logits else scores) + 4 * i)
        if args.bias:
            number += get_float(args.bias + 4 * i)
        set_float(ranked + 4 * i, number)
        set_long(keys + 8 * i, _key(number, i))
    if args.num_groups > 1:
        _leave_groups(args, keys, ranked, of_groups)
    for _ in range(num_chosen):
        _take_highest(keys, count)
    experts = args.experts + 4 * token * num_chosen
    weights = args.weights + 4 * token * num_chosen
    place = 0
    for i in range(count):
        if get_long(keys + 8 * i) == _CHOSEN:
            set_int(experts + 4 * place, np.int32(i))
            source = logits if args.score == SOFTMAX_OF_CHOSEN else scores
            set_float(ranked + 4 * place, get_float(source + 4 * i))
            place += 1
    chosen = ranked
    if args.score == SOFTMAX_OF_CHOSEN:
        _softmax(ranked, num_chosen, scores)
        chosen = scores
    divisor = np.float32(1.0)
    if args.renormalise:
        divisor = np.float32(0.0)
        for i in range(num_chosen):
            divisor += get_float(chosen + 4 * i)
        divisor += np.float32(args.epsilon)
    scale = np.float32(args.scale)
    for i in range(num_chosen):
        weight = get_float(chosen + 4 * i) / divisor * scale
        if args.expert_scales:
            weight *= get_float(args.expert_scales + 4 * np.int64(get_int(experts + 4 * i)))
        set_float(weights + 4 * i, weight)
