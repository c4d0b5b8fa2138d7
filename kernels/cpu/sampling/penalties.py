"""Repetition, frequency and presence penalties."""

import numpy as np
from torch import Tensor

from ...arguments import checked
from ...plain.sampling.penalties import apply_penalties as by_torch
from ..launch.tasks import Task, addresses, are_contiguous
from ..rows.row_kernel import has_regular_rows
from ..simd.memory import any_set, get_byte, get_float, get_int, get_long, set_float
from ..simd.vectors import VECTOR_BYTES, function

PENALTIES = Task(
    ("logits", "rows", "slots", "counts", "seen", "repetition", "frequency", "presence"), ("size", "stride")
)


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


@PENALTIES.each_unit
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


@checked
def apply_penalties(
    logits: Tensor,  # f32[num_rows, vocab_size], changed in place
    rows: Tensor,  # i64[n], rows of logits
    slots: Tensor,  # i64[n], where the history of each is
    output_counts: Tensor,  # i32[num_slots, vocab_size], how often each token was generated
    seen: Tensor,  # bool[num_slots, vocab_size], the tokens of prompt and output
    repetition_penalty: Tensor,  # f32[n]
    frequency_penalty: Tensor,  # f32[n]
    presence_penalty: Tensor,  # f32[n]
) -> None:
    """Subtract penalties from the logits of tokens seen; see `reference.apply_penalties`."""
    histories = rows, slots, output_counts, seen, repetition_penalty, frequency_penalty, presence_penalty
    if not (has_regular_rows(logits) and are_contiguous(*histories)):
        by_torch(logits, *histories)
        return
    PENALTIES.run(len(rows), *addresses(logits, *histories), logits.shape[1], logits.stride(0) * 4)
