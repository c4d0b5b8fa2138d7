"""Reporter: log-probabilities of prompt tokens and sums of hidden states, in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.backend import Kernels
from ..requests.request import TokenLogprobs
from ..scheduler.schedule import AskedRows
from .logprobs import token_logprobs

# The most logits in memory at once: 64 MiB, and as much again for their log-probabilities. A vocabulary of
# 131,072 makes them 128 rows, enough to read the head efficiently.
MAX_LOGITS = 2**24
Reported = list[TokenLogprobs] | Tensor


class Reporter:
    """Computes what requests report on positions of their prompts.

    head: the output head, [n, hidden_size] -> f32[n, vocab_size].
    max_rows: how many rows of logits are in memory at once, at least 1: the vocabulary is not split, because
        ranks and the most likely tokens need all of it.
    """

    def __init__(self, head: Callable[[Tensor], Tensor], vocab_size: int, kernels: Kernels) -> None:
        self.head, self.kernels = head, kernels
        self.max_rows = max(1, MAX_LOGITS // vocab_size)

    def report(
        self,
        asked: Sequence[AskedRows],
        hidden: Tensor,  # [num_rows, hidden_size], the rows of all reports, one after another
    ) -> list[tuple[AskedRows, Reported]]:
        """Return each report's results: log-probabilities by row, or a sum, f64[hidden_size] on the CPU."""
        parts = hidden.split_with_sizes([rows.end - rows.start for rows in asked])
        scored = [i for i, rows in enumerate(asked) if rows.report.num_top is not None]
        summed = [i for i, rows in enumerate(asked) if rows.report.num_top is None]
        found: dict[int, Reported] = {}
        if scored:
            chosen = hidden if not summed else torch.cat([parts[i] for i in scored])
            logprobs = iter(self._logprobs([asked[i] for i in scored], chosen))
            found |= {i: [*itertools.islice(logprobs, len(parts[i]))] for i in scored}
        if summed:
            # One transfer from the GPU.
            sums = torch.stack([parts[i].sum(0, dtype=torch.float64) for i in summed]).cpu()
            found |= zip(summed, sums, strict=True)
        return [(rows, found[i]) for i, rows in enumerate(asked)]

    def _logprobs(self, asked: Sequence[AskedRows], hidden: Tensor) -> list[TokenLogprobs]:
        """Return the log-probabilities of the token that follows each row."""
        tokens, num_tops = list[int](), list[int]()
        for request, report, start, end, _ in asked:
            assert report.num_top is not None
            tokens += request.token_ids[start + 1 : end + 1]
            num_tops += [report.num_top] * (end - start)
        logprobs = []
        for i in range(0, len(tokens), self.max_rows):
            rows = slice(i, i + self.max_rows)
            logits = self.head(hidden[rows])
            logprobs += token_logprobs(self.kernels, logits, tokens[rows], num_tops[rows])
        return logprobs
