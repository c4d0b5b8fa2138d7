"""Logits before and after a draw: masks, penalties and log-probabilities."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ...checked import checked
from . import selection as torch_selection
from .selection import places_where


@checked
def mask_logits(
    logits: Tensor,  # f32[n, vocab_size], written in place
    rows: Tensor,  # i64[m]
    allowed: Tensor,  # i32[m, num_words]
) -> None:
    """Set the logits of tokens that are not allowed to -inf; see `reference.mask_logits`."""
    size = logits.shape[1]
    table = _byte_table(logits.device)
    if logits.is_cpu:
        # On this thread alone: beside other work, torch's threads wait 100 ms for each other.
        values = logits.numpy()
        biases = table.numpy()
        for row, own in zip(rows.tolist(), allowed.numpy().view(np.uint8), strict=True):
            values[row] += biases[own].reshape(-1)[:size]
        return
    # [m, bytes, 8] -> [m, vocab_size]; a table of bytes is far faster than shifts.
    bias = torch.nn.functional.embedding(allowed.view(torch.uint8).int(), table)
    # Add rather than fill, to keep NaN.
    logits.index_add_(0, rows, bias.flatten(1)[:, :size])


@lru_cache(maxsize=4)
def _byte_table(device: torch.device) -> Tensor:
    """Return f32[256, 8]: for each byte, 0 where a bit is set and -inf where it is not."""
    flags = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(flags, 0.0, -np.inf)).to(device, torch.float32)


@checked
def apply_penalties(
    logits: Tensor,  # f32[num_rows, vocab_size], changed in place
    rows: Tensor,  # i64[n], the rows of logits to change
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


@checked
def token_logprobs(
    logits: Tensor,  # f32[n, vocab_size]
    tokens: Tensor,  # i64[n]
    num_top: int,  # 0 to vocab_size
) -> tuple[Tensor, Tensor, Tensor]:  # f32 and i64 [n, 1 + num_top], i64[n]
    """Return log-probabilities of given and most likely tokens; see `reference.token_logprobs`."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(-1, tokens[:, None])
    top_values, top_tokens = _top(logprobs, num_top)
    ids = torch.cat([tokens[:, None], top_tokens], dim=1)
    return torch.cat([own, top_values], dim=1), ids, _ranks(logprobs, own, top_values)


def _top(logprobs: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Return the largest of each row and their indices: [n, num_top]."""
    num_rows, vocab_size = logprobs.shape
    if logprobs.device.type == "cpu" and 0 < num_top <= vocab_size // torch_selection.HEIGHT:
        top = torch_selection.top_candidates(logprobs, torch.full((num_rows,), num_top))
        # Candidates leave out -inf, so that there may be fewer.
        if top[0].shape[1] >= num_top and bool((top[0][:, num_top - 1] > -torch.inf).all()):
            return top[0][:, :num_top], top[1][:, :num_top]
    values, tokens = logprobs.topk(num_top)
    return values, tokens


def _ranks(logprobs: Tensor, own: Tensor, top_values: Tensor) -> Tensor:  # i64[n]
    """Return one more than the number of likelier tokens, counted among the top ones where possible."""
    if logprobs.device.type != "cpu":  # the host does not wait to learn which rows need it
        return 1 + (logprobs > own).sum(-1)
    ranks = 1 + (top_values > own).sum(-1)
    beyond = (ranks > top_values.shape[1]).nonzero()[:, 0]
    # numpy counts bools several times as fast as torch, a row at a time without copies.
    array = logprobs.numpy()
    bounds = own.numpy()
    for row in beyond.tolist():
        ranks[row] = 1 + int(np.count_nonzero(array[row] > bounds[row]))
    return ranks
