"""Repetition, frequency and presence penalties."""

import numpy as np
import torch
from torch import Tensor

from ...arguments import check_penalties
from ...checks import is_trusted
from ...plain import sampling as torch_sampling
from ..launch.tasks import Task, addresses, is_plain
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
    if not is_trusted():
        penalties = repetition_penalty, frequency_penalty, presence_penalty
        check_penalties(logits, rows, slots, output_counts, seen, *penalties)
    num = rows.shape[0]
    size = logits.shape[1]
    columns = (repetition_penalty, frequency_penalty, presence_penalty)
    regular = (
        logits.dtype == torch.float32
        and logits.stride(1) == 1
        and all(is_plain(x, torch.int64, num) for x in (rows, slots))
        and is_plain(output_counts, torch.int32, output_counts.shape[0] * size)
        and is_plain(seen, torch.bool, seen.shape[0] * size)
        and all(is_plain(x, torch.float32, num) for x in columns)
    )
    if not regular:
        torch_sampling.apply_penalties(logits, rows, slots, output_counts, seen, *columns)
        return
    histories = (logits, rows, slots, output_counts, seen, *columns)
    PENALTIES.run(num, *addresses(*histories), size, logits.stride(0) * 4)
