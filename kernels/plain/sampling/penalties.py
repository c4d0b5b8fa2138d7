"""Repetition, frequency and presence penalties."""

import torch
from torch import Tensor

from ...checked import checked
from .selection import places_where


@checked
def apply_penalties(
    logits: Tensor,  # f32[num_rows, vocab_size], changed in place
    rows: Tensor,  # i64[n], which rows of it
    slots: Tensor,  # i64[n], where the history of each is
    output_counts: Tensor,  # i32[num_slots, vocab_size], how often each token was generated
    seen: Tensor,  # bool[num_slots, vocab_size], the tokens of prompt and output
    repetition_penalty: Tensor,  # f32[n]
    frequency_penalty: Tensor,  # f32[n]
    presence_penalty: Tensor,  # f32[n]
) -> None:
    """Penalise tokens of the prompt or the output; see `reference.apply_penalties`."""
    num = rows.shape[0]
    vocab_size = logits.shape[1]
    if torch.equal(slots, torch.arange(num, device=slots.device)):  # without a copy of large tensors
        counts = output_counts[:num]
        seen = seen[:num]
    else:
        counts = output_counts[slots]
        seen = seen[slots]
    # Few tokens of the vocabulary were seen.
    found_at = places_where(seen)
    row = found_at // vocab_size
    places = rows[row], found_at % vocab_size
    found = logits[places]
    count = counts.reshape(-1)[found_at].float()
    penalty = repetition_penalty[row]
    found = torch.where(found > 0, found / penalty, found * penalty)
    found -= frequency_penalty[row] * count
    found -= presence_penalty[row] * (count > 0)
    logits[places] = found
