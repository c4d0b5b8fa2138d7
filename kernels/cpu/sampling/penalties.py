"""Repetition, frequency and presence penalties."""

from torch import Tensor

from ...checked import checked
from ..launch.tasks import Task, are_contiguous
from ..rows.row_kernel import has_regular_rows, in_torch

PENALTIES = Task(
    "sampling.penalties.penalties",
    ("logits", "rows", "slots", "counts", "seen", "repetition", "frequency", "presence"),
    ("size", "stride"),
)


by_torch = in_torch("apply_penalties")


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
    PENALTIES.run(
        len(rows),
        logits=logits,
        rows=rows,
        slots=slots,
        counts=output_counts,
        seen=seen,
        repetition=repetition_penalty,
        frequency=frequency_penalty,
        presence=presence_penalty,
        size=logits.shape[1],
        stride=logits.stride(0) * 4,
    )
