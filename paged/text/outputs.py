"""OutputProcessor: makes the outputs of requests, and ends requests at stop strings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, overload

from ..options.sampling_params import RequestOutputKind
from ..requests.request import CompletionOutput, Logprob, Outbox, Request, RequestGroup, RequestOutput
from .tokenizer import Tokenizer
from .transcript import Transcript

if TYPE_CHECKING:
    from ..requests.prompt_report import PromptReport, TokenLogprobs

T = TypeVar("T")


class View(Sequence[T]):
    """A read-only view of a slice of a list. The list may grow; the items in the view do not change."""

    __slots__ = ("_items", "_start", "_stop")

    def __init__(self, items: Sequence[T], start: int, stop: int) -> None:
        self._items = items
        self._start = start
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        places = range(self._start, self._stop)[index]
        if isinstance(places, int):
            return self._items[places]
        return [self._items[place] for place in places]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View | list) and self[:] == other[:]

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __repr__(self) -> str:
        return repr(self[:])


def _by_likelihood(completion: CompletionOutput) -> tuple[bool, float]:
    """Return a sort key: the most likely first, unfinished ones last, as they have fewer tokens."""
    assert completion.cumulative_logprob is not None
    return completion.finish_reason in ("abort", "error"), -completion.cumulative_logprob


class OutputProcessor:
    """Makes the text of requests. Text is made only when an output is requested."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._progress: dict[Request, _Progress] = {}
        self._prompts: dict[RequestGroup, _PromptLogprobs] = {}  # of requests that ask for theirs

    def end_at_stop_string(self, request: Request, now: float) -> None:
        """If a request's newest token completes a stop string, finish the request and cut its text there."""
        transcript = self._progress_of(request).transcript
        assert transcript is not None, "stop strings were admitted without a tokenizer"
        stop = transcript.read()
        if stop is not None:
            request.finish("stop", now, stop)

    def output(self, group: RequestGroup) -> RequestOutput:
        """Return the output of a request so far; with output_kind DELTA, only what is new since last time."""
        return self._output(group, self._completions(group))

    def so_far(self, group: RequestGroup) -> RequestOutput:
        """Return the complete output so far of a request and its samples, even if it was returned before."""
        return self._output(group, [self._progress_of(sample).cumulative() for sample in group.samples])

    def _output(self, group: RequestGroup, completions: list[CompletionOutput]) -> RequestOutput:
        first = group.samples[0]
        cached = first.num_cached_tokens  # for a fork it includes tokens that the parent had generated
        return RequestOutput(
            request_id=group.request_id,
            prompt=first.inputs.prompt,
            prompt_token_ids=first.inputs.prompt_token_ids,
            outputs=completions,
            finished=group.finished,
            num_cached_tokens=cached and min(cached, first.num_prompt_tokens),
            metrics=first.metrics,
            prompt_logprobs=self._prompt_logprobs_of(group),
            lora_request=first.inputs.lora_request,
        )

    def forget(self, group: RequestGroup) -> None:
        """Drop the text of a request."""
        self._prompts.pop(group, None)
        for sample in group.samples:
            self._progress.pop(sample, None)

    def decode_logprobs(self, group: RequestGroup, most: int) -> int:
        """Decode the tokens of about `most` candidates in a request's log-probabilities. Return how many.

        An output needs all candidates decoded. For a long prompt or many samples this takes longer than a
        step. The outbox may take the prompt's candidates as soon as they are decoded.
        """
        num = 0
        if (prompt := self._prompt_of(group)) is not None:
            num = prompt.read(most)
            prompt.offer(group.outbox)
        for sample in group.samples:
            if num < most and sample.inputs.wants_logprobs:
                num += self._progress_of(sample).decode_logprobs(most - num)
        return num

    def _progress_of(self, request: Request) -> _Progress:
        progress = self._progress.get(request)
        if progress is None:
            progress = self._progress[request] = _Progress(request, self._tokenizer)
        return progress

    def _completions(self, group: RequestGroup) -> list[CompletionOutput]:
        """Return one completion per sample, or the n best of best_of samples."""
        params = group.samples[0].inputs.params
        if not group.samples[0].generates:
            return []
        if params.best_of is not None and not group.finished:
            return []  # the best are not known yet
        is_delta = params.output_kind is RequestOutputKind.DELTA
        progresses = map(self._progress_of, group.samples)
        completions = [own.delta() if is_delta else own.cumulative() for own in progresses]
        if params.best_of is None:
            return completions
        best = sorted(completions, key=_by_likelihood)[: params.n]
        return [replace(completion, index=index) for index, completion in enumerate(best)]

    def _prompt_logprobs_of(self, group: RequestGroup) -> list[dict[int, Logprob] | None] | None:
        prompt = self._prompt_of(group)
        return None if prompt is None else prompt.whole()

    def _prompt_of(self, group: RequestGroup) -> _PromptLogprobs | None:
        report = group.samples[0].report
        if report is None or report.failed:  # most requests have none, and this is asked for every output
            return None
        params = group.samples[0].inputs.params
        if params.prompt_logprobs is None:
            return None
        found = self._prompts.get(group)
        if found is None:
            tokenizer = self._tokenizer if params.detokenize else None
            found = self._prompts[group] = _PromptLogprobs(report, tokenizer)
        return found


class _PromptLogprobs:
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
        """Return those of all tokens; None until they are known, and if the outbox took them."""
        if self._num_taken or not self._report.is_complete:
            return None
        self.read(math.inf)
        return self._places


class _Progress:
    """The text and log-probabilities of one request, and how much of them was returned."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self._request = request
        self._tokenizer = tokenizer if request.inputs.params.detokenize else None
        self.transcript = None if self._tokenizer is None else Transcript(self._tokenizer, request)
        # Special tokens before a text do not belong to it.
        special = tokenizer.special_token_ids if tokenizer is not None else frozenset[int]()
        wants = request.inputs.params.logprobs is not None
        self._starts_text = wants and special.issuperset(request.inputs.prompt_token_ids)
        # Those that are readable, without the first _num_dropped.
        self._logprobs: list[dict[int, Logprob]] = []
        self._num_dropped = request.inputs.num_given_tokens if wants else 0
        # The sum of the first _num_summed log-probabilities, extended by each output.
        self._cumulative = request.inputs.given_logprob
        self._num_summed = request.inputs.num_given_tokens
        self._num_characters_shown = 0
        self._num_tokens_shown = request.inputs.num_given_tokens
        if self.transcript is not None and self._num_tokens_shown:
            self.transcript.read_given(self._num_tokens_shown)
            self._num_characters_shown = self.transcript.num_visible

    def cumulative(self) -> CompletionOutput:
        """Return the whole completion so far: as lists at the end, before that as views, to copy nothing."""
        self._catch_up()
        if self._num_dropped:  # of a request whose deltas were returned
            self._logprobs = [*map(self._readable_at, range(self._num_dropped)), *self._logprobs]
            self._num_dropped = 0
        request = self._request
        text = self.transcript.visible if self.transcript is not None else ""
        if request.finish_reason is not None:
            return self._completion(text, request.output_token_ids, self._logprobs)
        token_ids = View(request.token_ids, request.num_prompt_tokens, request.num_tokens)
        return self._completion(text, token_ids, View(self._logprobs, 0, len(self._logprobs)))

    def delta(self) -> CompletionOutput:
        """Return what is new since the last call."""
        self._catch_up()
        request = self._request
        text = ""
        if self.transcript is not None:
            text = self.transcript.since(self._num_characters_shown)
            self._num_characters_shown += len(text)
        shown = self._num_tokens_shown
        self._num_tokens_shown = request.num_output_tokens
        token_ids = request.token_ids[request.num_prompt_tokens + shown :]
        logprobs = self._logprobs[max(0, shown - self._num_dropped) :]
        # Not kept: they take ten times the memory of what they are made of.
        self._num_dropped += len(self._logprobs)
        self._logprobs = []
        return self._completion(text, token_ids, logprobs)

    def _completion(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]
    ) -> CompletionOutput:
        request = self._request
        return CompletionOutput(
            index=request.index,
            text=text,
            token_ids=token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=None if request.inputs.params.logprobs is None else logprobs,
            cumulative_logprob=self._cumulative if request.inputs.wants_logprobs else None,
            error_kind=request.error_kind,
        )

    def _catch_up(self) -> None:
        """Add the text of new tokens, and their log-probabilities to the sum."""
        if self.transcript is not None:
            self.transcript.read()
        if self._request.inputs.wants_logprobs:
            self.decode_logprobs(math.inf)

    def decode_logprobs(self, most: float) -> int:
        """Decode the tokens of about `most` candidates of new log-probabilities. Return how many."""
        request = self._request
        num = 0
        # A failed step may have added log-probabilities without their token.
        for place in request.sampling.logprobs[self._num_summed : request.num_output_tokens]:
            if num >= most:
                break
            if request.inputs.params.logprobs is not None:
                self._logprobs.append(self._readable_at(self._num_summed))
            # One by one: the sum must not depend on how often outputs are made.
            self._cumulative += place.logprobs[0]
            self._num_summed += 1
            num += len(place.token_ids)
        return num

    def _readable_at(self, i: int) -> dict[int, Logprob]:
        place = self._request.sampling.logprobs[i]
        return _candidates(place, self._tokenizer, first=self._starts_text and i == 0)


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
