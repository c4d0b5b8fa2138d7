"""Scoring: the log-probabilities of continuations of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..requests.prompt_report import PromptReport
from ..requests.request import ErrorKind, Request
from ..text.prompt_parser import ParsedPrompt

if TYPE_CHECKING:
    from .model_text import ModelText


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The log-probability of a continuation given its prompt.

    logprob: the sum over the continuation's tokens; None if scoring failed. `error` then gives the reason.
    token_logprobs: the log-probability of each token of the continuation, given the tokens before it.
    is_greedy: whether each token is the most likely one at its position.
    num_prompt_tokens: the length of the prompt, without the continuation.
    """

    token_ids: list[int]
    logprob: float | None
    token_logprobs: list[float]
    is_greedy: bool
    error: str | None = None
    num_prompt_tokens: int = 0
    error_kind: ErrorKind | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the continuation."""
        return len(self.token_ids)

    @property
    def mean_logprob(self) -> float | None:
        """The log-probability per token, which is comparable between continuations of different lengths."""
        return None if self.logprob is None else self.logprob / self.num_tokens


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """The `ReportSpec` for the log-probabilities of a continuation.

    prompt: the prompt and the continuation.
    num_prompt_tokens: the length of the prompt, without the continuation.
    """

    prompt: ParsedPrompt
    num_prompt_tokens: int

    def report(self, text: ModelText) -> PromptReport:  # noqa: ARG002
        """Return a new report on the positions from the prompt's last token on."""
        return PromptReport(self.num_prompt_tokens - 1, len(self.prompt.token_ids) - 1, num_top=0)

    def output(self, request: Request) -> ScoreOutput:
        """Return the output of the finished request."""
        report = request.report
        assert report is not None
        num_before = self.num_prompt_tokens
        token_ids = self.prompt.token_ids[num_before:]
        if request.finish_reason != "length":
            why = str(request.stop_reason or request.finish_reason)
            return ScoreOutput(token_ids, None, [], False, why, num_before, request.error_kind)
        assert report.is_complete
        logprobs = [row.logprobs[0] for row in report.logprobs]
        is_greedy = all(row.rank == 1 for row in report.logprobs)
        return ScoreOutput(token_ids, sum(logprobs), logprobs, is_greedy, None, num_before)


def names_of_scores(request_id: str, num_continuations: int) -> list[str]:
    """Return the request ids of a call for scores: one id per continuation."""
    return [request_id] if num_continuations == 1 else [f"{request_id}-{i}" for i in range(num_continuations)]
