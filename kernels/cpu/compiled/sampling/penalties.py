"""Repetition, frequency and presence penalties."""

import numpy as np

from ...sampling.logits import PENALTIES
from ...target import VECTOR_BYTES
from ..kernels import each_unit
from ..simd.memory import any_set, get_byte, get_float, get_int, get_long, set_float
from ..simd.vectors import function


@function
def _penalize(args, i, at, count):
    """Penalize a logit. Repetition divides positive ones and multiplies others (Keskar et al., 2019)."""
    logit = get_float(at)
    repetition = get_float(args.repetition + 4 * i)
    logit = logit / repetition if logit > np.float32(0.0) else logit * repetition
    if count > 0:
        logit -= get_float(args.frequency + 4 * i) * np.float32(count)
        logit -= get_float(args.presence + 4 * i)
    set_float(at, logit)


@each_unit(PENALTIES)
def _apply_penalties(args, i):
    """Penalize the tokens of one history. Few were seen: whole vectors of flags are skipped."""
    size = args.size
    slot = get_long(args.slots + 8 * i)
    x = args.logits + get_long(args.rows + 8 * i) * args.stride
    counts = args.counts + slot * 4 * size
    seen = args.seen + slot * size
    whole = size // VECTOR_BYTES * VECTOR_BYTES
    for start in range(0, whole, VECTOR_BYTES):
        if any_set(seen + start):
            for token in range(start, start + VECTOR_BYTES):
                if get_byte(seen + token):
                    _penalize(args, i, x + 4 * token, get_int(counts + 4 * token))
    for token in range(whole, size):
        if get_byte(seen + token):
            _penalize(args, i, x + 4 * token, get_int(counts + 4 * token))
