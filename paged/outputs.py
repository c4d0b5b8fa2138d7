"""OutputProcessor: what the owner of a request sees of it, and the stop strings found on the way."""

from __future__ import annotations

from dataclasses import replace

from .request import (
    CompletionOutput,
    Logprob,
    Request,
    RequestGroup,
    RequestOutput,
    RequestStatus,
    TokenLogprobs,
)
from .tokenizer import Detokenizer, Tokenizer


def _by_likelihood(completion: CompletionOutput) -> tuple[bool, float]:
    """The most likely first, those that did not come to their end last: they have fewer tokens."""
    assert completion.cumulative_logprob is not None
    return completion.finish_reason in ("abort", "error"), -completion.cumulative_logprob


class OutputProcessor:
    """Keeps the text of the requests that somebody looks at; the others cost nothing until they finish."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._detokenizers: dict[Request, Detokenizer] = {}
        self._prompt_logprobs: dict[RequestGroup, list[dict[int, Logprob] | None]] = {}

    def end_at_stop_string(self, request: Request, now: float) -> None:
        """Finish a request whose newest token completes one of its stop strings, and cut its text there."""
        detokenizer = self._update(request)
        assert detokenizer is not None, "stop strings were admitted without a tokenizer"
        text, searched = detokenizer.text, detokenizer.num_searched
        # It may begin in what was looked at, or did not count for min_tokens, but must end behind that.
        starts = ((text.find(s, max(0, searched - len(s) + 1)), s) for s in request.params.stop)
        found = [(at, s) for at, s in starts if at >= 0]
        if found and request.num_output_tokens > request.params.min_tokens:
            at, stop = min(found)
            detokenizer.text = text[:at]
            request.finish("stop", now, stop)
        else:
            detokenizer.num_searched = len(text)

    def output(self, group: RequestGroup) -> RequestOutput:
        """The request so far."""
        first = group.samples[0]
        cached = first.num_cached_tokens  # of a fork, those that its parent had generated are among them
        return RequestOutput(
            request_id=group.request_id,
            prompt=first.prompt,
            prompt_token_ids=first.prompt_token_ids,
            outputs=self._completions(group),
            finished=group.finished,
            num_cached_tokens=cached and min(cached, first.num_prompt_tokens),
            metrics=first.metrics,
            prompt_logprobs=self._prompt_logprobs_of(group),
        )

    def forget(self, group: RequestGroup) -> None:
        """Drop the texts of a request that is over."""
        self._prompt_logprobs.pop(group, None)
        for sample in group.samples:
            self._detokenizers.pop(sample, None)

    def _completions(self, group: RequestGroup) -> list[CompletionOutput]:
        """One for each sample, or the best ones of a group that takes more than it returns."""
        params = group.samples[0].params
        if not group.samples[0].generates:
            return []
        completions = [self._completion(sample) for sample in group.samples]
        if params.best_of is None:
            return completions
        if not group.finished:
            return []  # nobody knows yet which they are
        best = sorted(completions, key=_by_likelihood)[: params.n]
        return [replace(completion, index=index) for index, completion in enumerate(best)]

    def _completion(self, request: Request) -> CompletionOutput:
        cut = request.finish_reason == "stop" and isinstance(request.stop_reason, str)
        detokenizer = self._detokenizers[request] if cut else self._update(request)
        text = detokenizer.text if detokenizer is not None else ""
        if request.status is not RequestStatus.FINISHED and request.params.stop:
            # The end might be the beginning of a stop string: it is shown once that is known.
            held_back = max(map(len, request.params.stop)) - 1
            text = text[: max(0, len(text) - held_back)]
        return CompletionOutput(
            index=request.index,
            text=text,
            token_ids=request.output_token_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=self._logprobs(request),
            cumulative_logprob=request.cumulative_logprob if request.wants_logprobs else None,
        )

    def _prompt_logprobs_of(self, group: RequestGroup) -> list[dict[int, Logprob] | None] | None:
        report = group.samples[0].report
        wanted = group.samples[0].params.prompt_logprobs is not None
        if not wanted or report is None or not report.is_complete:
            return None
        if group not in self._prompt_logprobs:
            self._prompt_logprobs[group] = [None, *map(self._readable, report.logprobs)]
        return self._prompt_logprobs[group]

    def _logprobs(self, request: Request) -> list[dict[int, Logprob]] | None:
        if request.params.logprobs is None:
            return None
        return [self._readable(place) for place in request.logprobs]

    def _readable(self, place: TokenLogprobs) -> dict[int, Logprob]:
        ranks = [place.rank, *range(1, len(place.token_ids))]
        entries = zip(place.token_ids, place.logprobs, ranks, strict=True)
        # The token itself comes first, and once.
        found: dict[int, Logprob] = {}
        for token_id, logprob, rank in entries:
            text = self._tokenizer.decode([token_id]) if self._tokenizer is not None else None
            found.setdefault(token_id, Logprob(logprob, rank, text))
        return found

    def _update(self, request: Request) -> Detokenizer | None:
        """Bring the text up to the tokens. None without a tokenizer."""
        if self._tokenizer is None:
            return None
        detokenizer = self._detokenizers.get(request)
        if detokenizer is None:
            detokenizer = Detokenizer(self._tokenizer, request.prompt_token_ids)
            self._detokenizers[request] = detokenizer
        end = request.num_tokens - request.ended_by_token
        detokenizer.append(request.token_ids[request.num_prompt_tokens + detokenizer.num_tokens : end])
        if request.status is RequestStatus.FINISHED:
            detokenizer.finish()
        return detokenizer
