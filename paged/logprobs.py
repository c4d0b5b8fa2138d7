"""Log-probabilities: what a row of logits says of the token at its place, and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .kernels.torch_selection import HEIGHT, top_candidates
from .request import TokenLogprobs


def token_logprobs(
    logits: Tensor,  # f32[num_rows, vocab_size], not changed
    token_ids: Sequence[int],  # the token at each row's place
    num_tops: Sequence[int],  # of how many most likely tokens each row tells; -1 of all
) -> list[TokenLogprobs]:
    """The token at each place and the most likely ones, by log_softmax. NaN where a row has NaN or inf.

    A row's report depends on its own logits alone: rows are taken together only where they tell of as many.
    """
    return report(logits.log_softmax(-1), token_ids, num_tops)


def report(
    logprobs: Tensor,  # f32[num_rows, vocab_size]
    token_ids: Sequence[int],
    num_tops: Sequence[int],
) -> list[TokenLogprobs]:
    """The same of rows that are log-probabilities already."""
    num_rows, vocab_size = logprobs.shape
    rows_by_size: dict[int, list[int]] = {}
    for row, num_top in enumerate(num_tops):
        size = vocab_size if num_top < 0 else min(num_top, vocab_size)
        rows_by_size.setdefault(size, []).append(row)
    reports: dict[int, TokenLogprobs] = {}
    for size, rows in rows_by_size.items():
        chosen = logprobs if len(rows) == num_rows else logprobs[rows]
        reports.update(zip(rows, _report(chosen, [token_ids[row] for row in rows], size), strict=True))
    return [reports[row] for row in range(num_rows)]


def _report(logprobs: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    tokens = torch.tensor(token_ids, device=logprobs.device)[:, None]
    own = logprobs.gather(-1, tokens)
    top_values, top_tokens = _top(logprobs, num_top)
    ids = torch.cat([tokens, top_tokens], dim=1)
    values = torch.cat([own, top_values], dim=1)
    columns = zip(ids.tolist(), values.tolist(), _ranks(logprobs, own, top_values), strict=True)
    return [TokenLogprobs(*column) for column in columns]


def _top(logprobs: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """The largest of each row and where they are: [num_rows, num_top]."""
    num_rows, vocab_size = logprobs.shape
    if logprobs.device.type == "cpu" and 0 < num_top <= vocab_size // HEIGHT:
        top = top_candidates(logprobs, torch.full((num_rows,), num_top))
        # Fewer where the others are -inf.
        if top[0].shape[1] >= num_top and bool((top[0][:, num_top - 1] > -torch.inf).all()):
            return top[0][:, :num_top], top[1][:, :num_top]
    values, tokens = logprobs.topk(num_top)
    return values, tokens


def _ranks(logprobs: Tensor, own: Tensor, top_values: Tensor) -> list[int]:
    """How many are more likely, and one: counted among the top where the token is one of them."""
    ranks = 1 + (top_values > own).sum(-1)
    beyond = (ranks > top_values.shape[1]).nonzero()[:, 0].tolist()
    if not beyond:
        return ranks.tolist()
    if logprobs.device.type != "cpu":
        ranks[beyond] = 1 + (logprobs[beyond] > own[beyond]).sum(-1)
        return ranks.tolist()
    # numpy counts bools several times as fast as torch, a row at a time without copies.
    array, bounds, counted = logprobs.numpy(), own.numpy(), ranks.tolist()
    for row in beyond:
        counted[row] = 1 + int(np.count_nonzero(array[row] > bounds[row]))
    return counted
