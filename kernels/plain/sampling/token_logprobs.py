"""Log-probabilities in plain torch; on a CPU the vocabulary is not sorted to find the likeliest tokens."""

import numpy as np
import torch
from torch import Tensor

from ...checked import checked
from . import selection as torch_selection


@checked
def token_logprobs(
    logits: Tensor,  # f32[n, vocab_size]
    tokens: Tensor,  # i64[n]
    num_top: int,  # 0 to vocab_size
) -> tuple[Tensor, Tensor, Tensor]:  # f32 and i64 [n, 1 + num_top], i64[n]
    """Return log_softmax of tokens and of the likeliest; see `reference.token_logprobs`."""
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
