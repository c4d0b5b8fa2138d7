"""Log-probabilities: what a row of logits says of the token at its place, and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .request import TokenLogprobs


def token_logprobs(
    logits: Tensor,  # f32[num_rows, vocab_size], not changed; log-probabilities are logits too
    token_ids: Sequence[int],  # the token at each row's place
    num_tops: Sequence[int],  # of how many most likely tokens each row tells; -1 of all
) -> list[TokenLogprobs]:
    """The token at each place and the most likely ones, by log_softmax. NaN where a row has NaN or inf.

    A row's report depends on its own logits alone: rows are taken together only where they tell of as many.
    """
    num_rows, vocab_size = logits.shape
    rows_by_size: dict[int, list[int]] = {}
    for row, num_top in enumerate(num_tops):
        size = vocab_size if num_top < 0 else min(num_top, vocab_size)
        rows_by_size.setdefault(size, []).append(row)
    reports: dict[int, TokenLogprobs] = {}
    for size, rows in rows_by_size.items():
        chosen = logits if len(rows) == num_rows else logits[rows]
        reports.update(zip(rows, _report(chosen, [token_ids[row] for row in rows], size), strict=True))
    return [reports[row] for row in range(num_rows)]


def _report(logits: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    tokens = torch.tensor(token_ids, device=logits.device)[:, None]
    own = logits.gather(-1, tokens)
    # Counted in float32, exact below 2**24 tokens: a sum of bools takes 4 times as long on a CPU.
    ranks = 1 + torch.gt(logits, own, out=torch.empty_like(logits)).sum(-1)
    top = logits.topk(num_top)
    ids = torch.cat([tokens, top.indices], dim=1)
    logprobs = torch.cat([own, top.values], dim=1) - logits.logsumexp(-1, keepdim=True)
    columns = zip(ids.tolist(), logprobs.tolist(), ranks.long().tolist(), strict=True)
    return [TokenLogprobs(*column) for column in columns]
