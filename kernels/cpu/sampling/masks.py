"""Masks of allowed tokens, a bit each: words of zeros are skipped 32 tokens at a time."""

import numpy as np
from torch import Tensor

from ...arguments import WORD_BITS, checked
from ...plain.sampling.masks import mask_logits as by_torch
from ...reference import greedy_of_allowed as by_reference
from ..launch.tasks import Task, addresses, are_contiguous
from ..rows.greedy import first_highest
from ..rows.row_kernel import has_regular_rows
from ..simd.memory import get_float, get_int, get_long, load, set_float, set_long, store
from ..simd.vectors import LANES, VECTOR_BYTES, function, greater, splat, where_bits, where_greater, where_nan

_LOWEST = np.float32(-np.inf)
_VECTORS = WORD_BITS // LANES  # of a word's tokens

MASK = Task(("logits", "rows", "allowed"), ("size", "stride", "num_words"))
CHOOSE = Task(("logits", "rows", "allowed", "tokens", "highest"), ("size", "stride", "num_words"))


@function
def _is_allowed(words, token):
    """Return whether a token's bit is set."""
    bits = np.int64(get_int(words + 4 * (token // WORD_BITS)))
    return (bits >> token % WORD_BITS) & 1 == 1


@MASK.each_unit
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


@CHOOSE.each_unit
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


@checked
def mask_logits(
    logits: Tensor,  # f32[n, vocab_size], written in place
    rows: Tensor,  # i64[m]
    allowed: Tensor,  # i32[m, num_words]
) -> None:
    """Set the logits of tokens that are not allowed to -inf; see `reference.mask_logits`."""
    if not (has_regular_rows(logits) and are_contiguous(rows, allowed)):
        by_torch(logits, rows, allowed)
        return
    size = logits.shape[1]
    MASK.run(len(rows), *addresses(logits, rows, allowed), size, logits.stride(0) * 4, allowed.shape[1])


@checked
def greedy_of_allowed(
    logits: Tensor,  # f32[n, vocab_size]
    rows: Tensor,  # i64[m]
    allowed: Tensor,  # i32[m, num_words]
    tokens: Tensor,  # i64[n], of `greedy`; those of `rows` are written
    highest: Tensor,  # f32[n], of `greedy`; those of `rows` are written
) -> None:
    """Write the likeliest allowed tokens of some rows; see `reference.greedy_of_allowed`."""
    if not (has_regular_rows(logits) and are_contiguous(rows, allowed, tokens, highest)):
        by_reference(logits, rows, allowed, tokens, highest)
        return
    CHOOSE.run(
        len(rows),
        *addresses(logits, rows, allowed, tokens, highest),
        logits.shape[1],
        logits.stride(0) * 4,
        allowed.shape[1],
        scratch_size=2 * VECTOR_BYTES,
    )
