"""Log-probabilities as outputs have them: by token id, each with its text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..requests.prompt_report import PromptReport, TokenLogprobs
from ..requests.request import Logprob, Outbox, Request
from .tokenizer import Tokenizer
from .view import View


class SampleLogprobs:
    """The log-probabilities of one sample, decoded as its tokens come.

    cumulative: the sum of the chosen tokens' log-probabilities.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self._request = request
        inputs = request.inputs
        self._is_shown = inputs.params.logprobs is not None  # otherwise only the sum is wanted
        self._tokenizer = tokenizer if inputs.params.detokenize else None
        # Special tokens before a text do not belong to it.
        special = tokenizer.special_token_ids if tokenizer is not None else frozenset[int]()
        self._starts_text = special.issuperset(inputs.prompt_token_ids)
        # Those that are readable, without the first _num_dropped.
        self._readable: list[dict[int, Logprob]] = []
        self._num_dropped = inputs.num_given_tokens if self._is_shown else 0
        # The sum of the first _num_summed log-probabilities, extended by each output.
        self.cumulative = inputs.given_logprob
        self._num_summed = inputs.num_given_tokens

    def decode(self, most: float) -> int:
        """Decode the tokens of about `most` candidates of new log-probabilities. Return how many."""
        request = self._request
        num = 0
        # A failed step may have added log-probabilities without their token.
        for place in request.sampling.logprobs[self._num_summed : request.num_output_tokens]:
            if num >= most:
                break
            if self._is_shown:
                self._readable.append(self._at(self._num_summed))
            # One by one: the sum must not depend on how often outputs are made.
            self.cumulative += place.logprobs[0]
            self._num_summed += 1
            num += len(place.token_ids)
        return num

    def all(self) -> Sequence[dict[int, Logprob]] | None:
        """Return all so far: a list at the end, before that a view, to copy nothing. None: only the sum."""
        if not self._is_shown:
            return None
        if self._num_dropped:  # of a request whose deltas were returned
            self._readable = [*map(self._at, range(self._num_dropped)), *self._readable]
            self._num_dropped = 0
        is_finished = self._request.finish_reason is not None
        return self._readable if is_finished else View(self._readable, 0, len(self._readable))

    def take(self, start: int) -> list[dict[int, Logprob]] | None:
        """Return those from token `start` on. All are dropped: their source takes a tenth of the memory."""
        if not self._is_shown:
            return None
        taken = self._readable[max(0, start - self._num_dropped) :]
        self._num_dropped += len(self._readable)
        self._readable = []
        return taken

    def _at(self, i: int) -> dict[int, Logprob]:
        place = self._request.sampling.logprobs[i]
        return _candidates(place, self._tokenizer, first=self._starts_text and i == 0)


class PromptLogprobs:
    """The readable log-probabilities of a prompt that its outbox has not taken."""

    def __init__(self, report: PromptReport, tokenizer: Tokenizer | None) -> None:
        self._report = report
        self._tokenizer = tokenizer
        self._places: list[dict[int, Logprob] | None] = [None]  # the first token has none
        self._num_taken = 0

    def read(self, most: float) -> int:
        """Make about `most` more candidates readable. Return how many were."""
        report = self._report
        first = self._num_taken + len(self._places) - 1
        num = 0
        # The rows of a failed step are taken again: only those that were recorded count.
        for row in range(first, report.next_row - report.start):
            if num >= most:
                break
            place = report.logprobs[row]
            self._places.append(_candidates(place, self._tokenizer))
            num += len(place.token_ids)
        return num

    def offer(self, outbox: Outbox) -> None:
        """Let an outbox take what is readable."""
        if self._places and outbox.put_prompt(self._places):
            self._num_taken += len(self._places)
            self._places = []

    def whole(self) -> list[dict[int, Logprob] | None] | None:
        """Return all log-probabilities; None until they are known, and if the outbox took them."""
        if self._num_taken or not self._report.is_complete:
            return None
        self.read(math.inf)
        return self._places


def _candidates(
    place: TokenLogprobs, tokenizer: Tokenizer | None, *, first: bool = False
) -> dict[int, Logprob]:
    """Return the candidates at one place with their texts, by token id, the chosen token first.

    first: whether the place is the beginning of a text, where some tokenizers drop spaces.
    """
    ranks = [place.rank, *range(1, len(place.token_ids))]
    found = dict[int, Logprob]()
    for token_id, logprob, rank in zip(place.token_ids, place.logprobs, ranks, strict=True):
        text = None if tokenizer is None else tokenizer.token_text(token_id, first=first)
        found.setdefault(token_id, Logprob(logprob, rank, text))
    return found
