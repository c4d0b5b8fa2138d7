"""OutputProcessor: makes the outputs of requests, and ends requests at stop strings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..options.sampling_params import RequestOutputKind
from ..requests.request import CompletionOutput, Logprob, Request, RequestGroup, RequestOutput
from .tokenizer import Tokenizer
from .transcript import Transcript

if TYPE_CHECKING:
    from .logprobs import PromptLogprobs, SampleLogprobs


def _by_likelihood(completion: CompletionOutput) -> tuple[bool, float]:
    """Return a sort key: the most likely first, unfinished ones last, as they have fewer tokens."""
    assert completion.cumulative_logprob is not None
    return completion.finish_reason in ("abort", "error"), -completion.cumulative_logprob


class OutputProcessor:
    """Makes the text of requests. Text is made only when an output is requested."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._progress: dict[Request, _Progress] = {}
        self._prompts: dict[RequestGroup, PromptLogprobs] = {}  # of requests that ask for theirs

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
            if num < most and (logprobs := self._progress_of(sample).logprobs) is not None:
                num += logprobs.decode(most - num)
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

    def _prompt_of(self, group: RequestGroup) -> PromptLogprobs | None:
        report = group.samples[0].report
        if report is None or report.failed:  # most requests have none, and this is asked for every output
            return None
        params = group.samples[0].inputs.params
        if params.prompt_logprobs is None:
            return None
        found = self._prompts.get(group)
        if found is None:
            tokenizer = self._tokenizer if params.detokenize else None
            from .logprobs import PromptLogprobs

            found = self._prompts[group] = PromptLogprobs(report, tokenizer)
        return found


class _Progress:
    """The text and log-probabilities of one request, and how much of them was returned."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self._request = request
        self.transcript: Transcript | None = None
        if tokenizer is not None and request.inputs.params.detokenize:
            self.transcript = Transcript(tokenizer, request)
        self.logprobs: SampleLogprobs | None = None
        if request.inputs.wants_logprobs:
            from .logprobs import SampleLogprobs

            self.logprobs = SampleLogprobs(request, tokenizer)
        self._num_characters_shown = 0
        self._num_tokens_shown = request.inputs.num_given_tokens
        if self.transcript is not None and self._num_tokens_shown:
            self.transcript.read_given(self._num_tokens_shown)
            self._num_characters_shown = self.transcript.num_visible

    def cumulative(self) -> CompletionOutput:
        """Return the whole completion so far: as lists at the end, before that as views, to copy nothing."""
        self._catch_up()
        request = self._request
        text = self.transcript.visible if self.transcript is not None else ""
        logprobs = None if self.logprobs is None else self.logprobs.all()
        if request.finish_reason is not None:
            return self._completion(text, request.output_token_ids, logprobs)
        from .view import View

        token_ids = View(request.token_ids, request.num_prompt_tokens, request.num_tokens)
        return self._completion(text, token_ids, logprobs)

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
        logprobs = None if self.logprobs is None else self.logprobs.take(shown)
        return self._completion(text, token_ids, logprobs)

    def _completion(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]] | None
    ) -> CompletionOutput:
        request = self._request
        return CompletionOutput(
            index=request.index,
            text=text,
            token_ids=token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=None if self.logprobs is None else self.logprobs.cumulative,
            error_kind=request.error_kind,
        )

    def _catch_up(self) -> None:
        """Add the text of new tokens, and their log-probabilities to the sum."""
        if self.transcript is not None:
            self.transcript.read()
        if self.logprobs is not None:
            self.logprobs.decode(math.inf)
