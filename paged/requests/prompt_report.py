"""PromptReport: what a request reports about its prompt, row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: first of the token there, then of the most likely tokens."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]  # as float32
    rank: int  # of the token there in the vocabulary, from 1


REPORTED = TokenLogprobs((), (), 0)  # in place of what another engine has reported


@dataclass(slots=True, eq=False)
class PromptReport:
    """Which prompt positions to report on. Row i is the model's output after token i.

    The rows [start, end) are computed even if the prefix cache holds their tokens. The report takes each row
    once and in order, even if a preempted request computes rows again.

    num_top: report the log-probability of the token after each row and of the num_top most likely tokens; -1
        reports the whole vocabulary. None sums the final hidden states instead.
    failed: whether a row contained NaN or infinity.
    """

    start: int
    end: int
    num_top: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    failed: bool = False
    # The first row not taken yet, and the sums of those before, f64[2, hidden_size], as `exact_sums` of the
    # reporter makes them. One value, so that an interrupt cannot leave the two out of step.
    progress: tuple[int, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.progress = (self.start, None)

    @property
    def next_row(self) -> int:
        """The first row that the report has not taken yet."""
        return self.progress[0]

    @property
    def is_complete(self) -> bool:
        """Whether the report has taken all rows."""
        return self.next_row >= self.end

    def take_logprobs(self, end: int, logprobs: list[TokenLogprobs]) -> None:
        """Take the log-probabilities of the rows from `next_row` up to `end`."""
        self.logprobs[self.next_row - self.start :] = logprobs
        self.failed = self.failed or not all(math.isfinite(row.logprobs[0]) for row in logprobs)
        self.progress = (end, None)

    def take_hidden(self, end: int, total: Any) -> None:
        """Take the sum of the hidden states of the rows from `next_row` up to `end`."""
        before = self.progress[1]
        self.failed = self.failed or not total.isfinite().all()
        self.progress = (end, total if before is None else before + total)

    def fork(self) -> PromptReport:
        """Return an independent copy."""
        copy = PromptReport(self.start, self.end, self.num_top, self.logprobs.copy(), self.failed)
        copy.progress = self.progress
        return copy
