"""Log-probabilities of the chosen token of each row of logits, and of the most likely ones."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..device.transfers import Download, Received, Sent, Upload
from ..requests.prompt_report import TokenLogprobs

if TYPE_CHECKING:
    from ..kernels.operations import Kernels


class _Group(NamedTuple):
    """Rows that report equally many tokens. sent: the rows on the device; None: all, in order."""

    num_top: int
    rows: list[int]
    sent: Sent | None


class AskedLogprobs:
    """The log_softmax of each row's chosen and most likely tokens; NaN if a row is not finite.

    Results are batch-invariant: only rows that report equally many tokens are computed together.

    num_tops: how many of the most likely tokens to report for each row; -1 reports all.
    """

    def __init__(self, num_tops: Sequence[int], vocab_size: int, upload: Upload) -> None:
        self._num_rows = len(num_tops)
        rows_by_size: dict[int, list[int]] = {}
        for row, num_top in enumerate(num_tops):
            size = vocab_size if num_top < 0 else min(num_top, vocab_size)
            rows_by_size.setdefault(size, []).append(row)
        is_one = len(rows_by_size) == 1
        self._groups = [
            _Group(size, rows, None if is_one else upload.put(rows, torch.int64))
            for size, rows in rows_by_size.items()
        ]

    def compute(
        self,
        kernels: Kernels,
        logits: Tensor,  # f32[num_rows, vocab_size]
        tokens: Tensor,  # i64[num_rows], the chosen ones
        download: Download,
    ) -> list[list[Received]]:
        """Compute the log-probabilities. Once the download has arrived, the result goes to `reports`."""
        found = []
        for size, _, sent in self._groups:
            rows = logits if sent is None else kernels.take_rows(logits, sent.tensor)
            chosen = tokens if sent is None else tokens.index_select(0, sent.tensor)
            found.append([download.get(part) for part in kernels.token_logprobs(rows, chosen, size)])
        return found

    def reports(self, found: list[list[Received]]) -> list[TokenLogprobs]:
        """Return the log-probabilities of each row."""
        reports: dict[int, TokenLogprobs] = {}
        for group, (values, ids, ranks) in zip(self._groups, found, strict=True):
            # Arrays: lists would take eight times the memory as long as the request lives.
            rows = zip(ids.numbers.tolist(), values.numbers.tolist(), ranks.numbers.tolist(), strict=True)
            places = (TokenLogprobs(array("i", i), array("f", v), rank) for i, v, rank in rows)
            reports.update(zip(group.rows, places, strict=True))
        return [reports[row] for row in range(self._num_rows)]
