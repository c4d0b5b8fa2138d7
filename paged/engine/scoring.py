"""Scores: how likely continuations of a prompt are."""

from __future__ import annotations

from dataclasses import dataclass

from ..requests.request import PromptReport, Request
from ..text.prompt_parser import ParsedPrompt


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """How likely a continuation is behind a prompt.

    logprob: of all its tokens, in sum; None where `error` says why there is none.
    token_logprobs: of each token behind those before it.
    is_greedy: whether each of them is the most likely one in its place.
    """

    token_ids: list[int]
    logprob: float | None
    token_logprobs: list[float]
    is_greedy: bool
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the continuation."""
        return len(self.token_ids)

    @property
    def mean_logprob(self) -> float | None:
        """The sum over the number of tokens: continuations of other lengths compare by it."""
        return None if self.logprob is None else self.logprob / self.num_tokens


def score_reports(
    prompt: ParsedPrompt, continued: list[ParsedPrompt]
) -> list[tuple[ParsedPrompt, PromptReport]]:
    """Each continued prompt with the rows that tell of its continuation: from the prompt's last row on."""
    first = len(prompt.token_ids) - 1
    return [(whole, PromptReport(first, len(whole.token_ids) - 1, num_top=0)) for whole in continued]


def score_output(request: Request) -> ScoreOutput:
    """What the owner of a request that has ended gets."""
    report = request.report
    assert report is not None
    token_ids = request.inputs.prompt_token_ids[report.start + 1 :]
    if request.finish_reason != "length":
        return ScoreOutput(token_ids, None, [], False, str(request.stop_reason or request.finish_reason))
    assert report.is_complete
    logprobs = [row.logprobs[0] for row in report.logprobs]
    is_greedy = all(row.rank == 1 for row in report.logprobs)
    return ScoreOutput(token_ids, sum(logprobs), logprobs, is_greedy)
