"""Log-probabilities: what a row of logits says of the token at its place, and of the likeliest ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.backend import Kernels
from ..requests.request import TokenLogprobs


def token_logprobs(
    kernels: Kernels,
    logits: Tensor,  # f32[num_rows, vocab_size]
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
        tokens = torch.tensor([token_ids[row] for row in rows], device=logits.device)
        values, ids, ranks = kernels.token_logprobs(chosen, tokens, size)
        columns = zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True)
        reports.update(zip(rows, (TokenLogprobs(*column) for column in columns), strict=True))
    return [reports[row] for row in range(num_rows)]
