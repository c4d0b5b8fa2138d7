"""Scoring: the log-probabilities of continuations of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from ..requests.prompt_report import PromptReport
from ..requests.request import ErrorKind, Request
from ..text.prompt_parser import ParsedPrompt


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The log-probability of a continuation given its prompt.

    logprob: sum over its tokens; None where `error` gives the reason.
    token_logprobs: of each token given those before it.
    is_greedy: whether each token is the most likely one at its position.
    num_prompt_tokens: of the prompt before the continuation.
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
        """The number of tokens of the continuation."""
        return len(self.token_ids)

    @property
    def mean_logprob(self) -> float | None:
        """The log-probability per token, which compares continuations of different lengths."""
        return None if self.logprob is None else self.logprob / self.num_tokens


def score_reports(
    prompt: ParsedPrompt, continued: list[ParsedPrompt]
) -> list[tuple[ParsedPrompt, PromptReport]]:
    """Return each continued prompt with the report on its continuation, from the prompt's last token on."""
    first = len(prompt.token_ids) - 1
    return [(whole, PromptReport(first, len(whole.token_ids) - 1, num_top=0)) for whole in continued]


def score_output(request: Request) -> ScoreOutput:
    """Return the output of a finished request."""
    report = request.report
    assert report is not None
    token_ids = request.inputs.prompt_token_ids[report.start + 1 :]
    num_before = report.start + 1
    if request.finish_reason != "length":
        why = str(request.stop_reason or request.finish_reason)
        return ScoreOutput(token_ids, None, [], False, why, num_before, request.error_kind)
    assert report.is_complete
    logprobs = [row.logprobs[0] for row in report.logprobs]
    is_greedy = all(row.rank == 1 for row in report.logprobs)
    return ScoreOutput(token_ids, sum(logprobs), logprobs, is_greedy, None, num_before)


def names_of_scores(request_id: str, num_continuations: int) -> list[str]:
    """Return the ids of the requests that score continuations."""
    return [request_id] if num_continuations == 1 else [f"{request_id}-{i}" for i in range(num_continuations)]
