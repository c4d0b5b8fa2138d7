"""Reporter: log-probabilities of prompt tokens and sums of hidden states, in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..device.transfers import Download, Received, Upload
from ..requests.prompt_report import TokenLogprobs
from ..scheduler.schedule import AskedRows, ReportedRows, ReportParams

if TYPE_CHECKING:
    from ..kernels.operations import Kernels

# Hidden states are added in units of these: the second has what the first leaves.
_UNITS = (2.0**-24, 2.0**-60)
# The most logits in memory at once: 64 MiB, and as much again for their log-probabilities. A vocabulary of
# 131,072 makes them 128 rows, enough to read the head efficiently.
MAX_LOGITS = 2**24


class Reporter:
    """Computes reports on prompts: log-probabilities, or sums of hidden states.

    head: the output head, [n, hidden_size] -> f32[n, vocab_size].
    max_rows: maximum number of rows of logits in memory at once, at least 1. The vocabulary is not split,
        because ranks and the most likely tokens need whole rows.
    """

    def __init__(self, head: Callable[[Tensor], Tensor], vocab_size: int, kernels: Kernels) -> None:
        self.head = head
        self.kernels = kernels
        self.vocab_size = vocab_size
        self.max_rows = max(1, MAX_LOGITS // vocab_size)

    def call_head(
        self,
        asked: Sequence[AskedRows],
        hidden: Tensor,  # as of `StepReports.run`
    ) -> None:
        """Call the head as often as `StepReports.run` does, in a process that does not report."""
        parts = hidden.split_with_sizes([rows.end - rows.start for rows in asked])
        scored = [part for part, rows in zip(parts, asked, strict=True) if rows.is_scored]
        for rows in torch.split(torch.cat(scored), self.max_rows) if scored else ():
            self.head(rows)

    def prepare(
        self, asked: Sequence[AskedRows], params: Sequence[ReportParams], upload: Upload
    ) -> StepReports:
        """Send the tensors that a step's reports need.

        params: the parameters of each entry of `asked`.
        """
        return StepReports(self, asked, params, upload)


class StepReports:
    """The reports on prompts that one step computes."""

    def __init__(
        self, reporter: Reporter, asked: Sequence[AskedRows], params: Sequence[ReportParams], upload: Upload
    ) -> None:
        from .logprobs import AskedLogprobs

        self._reporter = reporter
        self._asked = asked
        self._scored: list[int] = []
        self._summed: list[int] = []
        self._sums: Received | None = None
        tokens = list[int]()
        num_tops = list[int]()
        for i, (num_top, next_tokens) in enumerate(params):
            if num_top is None:
                self._summed.append(i)
            else:
                self._scored.append(i)
                tokens += next_tokens
                num_tops += [num_top] * len(next_tokens)
        # By part of bounded size: the tokens that follow its rows, and what they report.
        self._parts = [
            (
                upload.put(tokens[i : i + reporter.max_rows], torch.int64),
                AskedLogprobs(num_tops[i : i + reporter.max_rows], reporter.vocab_size, upload),
            )
            for i in range(0, len(tokens), reporter.max_rows)
        ]
        self._found: list[list[list[Received]]] = []

    def run(
        self,
        hidden: Tensor,  # [num_rows, hidden_size], the rows of all reports, one after another
        download: Download,
    ) -> None:
        """Compute the reports."""
        reporter = self._reporter
        parts = hidden.split_with_sizes([rows.end - rows.start for rows in self._asked])
        if self._scored:
            scored = hidden if not self._summed else torch.cat([parts[i] for i in self._scored])
            rows_of_parts = torch.split(scored, reporter.max_rows)
            for rows, (tokens, logprobs) in zip(rows_of_parts, self._parts, strict=True):
                logits = reporter.head(rows)
                self._found.append(logprobs.compute(reporter.kernels, logits, tokens.tensor, download))
        if self._summed:
            sums = torch.stack([exact_sums(parts[i]) for i in self._summed])
            self._sums = download.get(sums)

    def results(self) -> list[ReportedRows]:
        """Return the results of each report: log-probabilities by row, or `exact_sums` on the CPU."""
        found: dict[int, list[TokenLogprobs] | Tensor] = {}
        logprobs = itertools.chain.from_iterable(
            asked.reports(rows) for (_, asked), rows in zip(self._parts, self._found, strict=True)
        )
        for i in self._scored:
            rows = self._asked[i]
            found[i] = [*itertools.islice(logprobs, rows.end - rows.start)]
        if self._sums is not None:
            found |= zip(self._summed, torch.from_numpy(self._sums.numbers), strict=True)
        return [ReportedRows(rows.row, rows.end, found[i]) for i, rows in enumerate(self._asked)]


def exact_sums(
    rows: Tensor,  # [num_rows, hidden_size]
) -> Tensor:  # f64[2, hidden_size]
    """Add up rows exactly, so that the sum does not depend on chunks, batches or devices.

    Each number is split into a multiple of 2^-24 and a remainder, which is rounded to a multiple of 2^-60.
    Float64 adds up each kind exactly, as long as the numbers total less than 2^29 and there are fewer than
    2^18 of them: for instance 131,072 tokens whose hidden states average up to 4,096. The two returned rows
    add up to the total.
    """
    coarse, fine = _UNITS
    rest = rows.double()
    high = torch.round(rest / coarse) * coarse
    low = torch.round((rest - high) / fine) * fine
    return torch.stack([high.sum(0), low.sum(0)])
