"""Masks of allowed tokens, a bit each: words of zeros are skipped 32 tokens at a time."""

import numpy as np

from ....arguments import WORD_BITS
from ...sampling.logits import CHOOSE, MASK
from ...target import LANES, VECTOR_BYTES
from ..kernels import each_unit
from ..rows.greedy import first_highest
from ..simd.memory import get_float, get_int, get_long, load, set_float, set_long, store
from ..simd.vectors import function, greater, splat, where_bits, where_greater, where_nan

_LOWEST = np.float32(-np.inf)
_VECTORS = WORD_BITS // LANES  # of a word's tokens


@function
def _is_allowed(words, token):
    """Return whether a token's bit is set."""
    bits = np.int64(get_int(words + 4 * (token // WORD_BITS)))
    return (bits >> token % WORD_BITS) & 1 == 1


@each_unit(MASK)
def _mask(args, i):
    """Write -inf over the tokens of a row that are not allowed."""
    x = args.logits + get_long(args.rows + 8 * i) * args.stride
    words = args.allowed + 4 * i * args.num_words
    size = args.size
    lowest = splat(_LOWEST)
    for word in range(size // WORD_BITS):
        bits = np.int64(get_int(words + 4 * word))
        if bits == -1:
            continue
        at = x + 4 * WORD_BITS * word
        for part in range(_VECTORS):
            number = load(at)
            store(at, where_bits(bits >> LANES * part, number, where_nan(number, lowest)))
            at += VECTOR_BYTES
    for token in range(size // WORD_BITS * WORD_BITS, size):
        number = get_float(x + 4 * token)
        if not _is_allowed(words, token) and number == number:
            set_float(x + 4 * token, _LOWEST)


@each_unit(CHOOSE)
def _choose(args, i, scratch):
    """Write the highest logit of a row's allowed tokens and the first of these tokens that has it.

    Nothing is left to do where the first of the highest of all tokens is allowed, as most are in a string.
    """
    row = get_long(args.rows + 8 * i)
    x = args.logits + row * args.stride
    words = args.allowed + 4 * i * args.num_words
    size = args.size
    token = get_long(args.tokens + 8 * row)
    highest = get_float(args.highest + 4 * row)
    if _is_allowed(words, token) and highest == highest:
        return
    lowest = splat(_LOWEST)
    top = lowest
    block = splat(np.float32(0.0))  # which vector each lane's maximum is in; exact up to 2^24
    for word in range(size // WORD_BITS):
        bits = np.int64(get_int(words + 4 * word))
        if bits == 0:
            continue
        for part in range(_VECTORS):
            vector = _VECTORS * word + part
            number = where_bits(bits >> LANES * part, load(x + VECTOR_BYTES * vector), lowest)
            block = where_greater(number, top, splat(np.float32(vector)), block)
            top = greater(number, top)
    best, place = first_highest(top, block, scratch)
    for token in range(size // WORD_BITS * WORD_BITS, size):
        number = get_float(x + 4 * token)
        if _is_allowed(words, token) and number > best:
            best = number
            place = np.int64(token)
    set_float(args.highest + 4 * row, best)
    set_long(args.tokens + 8 * row, place)
