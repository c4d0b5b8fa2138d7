"""Log-probabilities of the chosen token of each row of logits, and of the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.backend import Kernels
from ..requests.request import TokenLogprobs


def token_logprobs(
    kernels: Kernels,
    logits: Tensor,  # f32[num_rows, vocab_size]
    token_ids: Sequence[int],  # the chosen token of each row
    num_tops: Sequence[int],  # how many of the most likely tokens to report for each row; -1: all
) -> list[TokenLogprobs]:
    """Compute the log_softmax of each row's chosen and most likely tokens; NaN if a row is not finite.

    Batch-invariant: only rows that report equally many tokens are computed together.
    """
    num_rows, vocab_size = logits.shape
    rows_by_size: dict[int, list[int]] = {}
    for row, num_top in enumerate(num_tops):
        size = vocab_size if num_top < 0 else min(num_top, vocab_size)
        rows_by_size.setdefault(size, []).append(row)
    reports: dict[int, TokenLogprobs] = {}
    for size, rows in rows_by_size.items():
        chosen = logits
        if len(rows) < num_rows:
            chosen = kernels.take_rows(logits, torch.tensor(rows, device=logits.device))
        tokens = torch.tensor([token_ids[row] for row in rows], device=logits.device)
        values, ids, ranks = kernels.token_logprobs(chosen, tokens, size)
        columns = zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True)
        reports.update(zip(rows, (TokenLogprobs(*column) for column in columns), strict=True))
    return [reports[row] for row in range(num_rows)]
