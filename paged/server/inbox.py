"""Inbox: what an engine process has sent of one request and its reader has not read yet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..base.errors import RequestError
from ..engine.answer_memory import (
    CANDIDATE_BYTES,
    TOKEN_BYTES,
    AnswerAccount,
    AnswerBudget,
    AnswerLedger,
    comes_in_parts,
)
from ..options.sampling_params import RequestOutputKind
from ..requests.request import (
    CompletionOutput,
    ErrorKind,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from ..text.view import View
from . import frames

if TYPE_CHECKING:
    from ..options.lora_request import LoRARequest


@dataclass(slots=True)
class _Sample:
    """A sample's tokens: all or, for deltas, the unread ones."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: frames.Places[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error_kind: ErrorKind | None = None

    def add(self, new: frames.Completion) -> None:
        self.index = new.index
        self.finish_reason = new.finish_reason
        self.stop_reason = new.stop_reason
        self.error_kind = new.error_kind
        self.text += new.text
        self.token_ids += new.token_ids
        self.cumulative_logprob = new.cumulative_logprob
        if new.logprobs is not None:
            self.logprobs = self.logprobs or frames.Places()
            self.logprobs.add(new.logprobs)

    def output(self) -> CompletionOutput:
        """Return the sample as it is now: as lists at the end, before that as views, to copy nothing."""
        token_ids = self.token_ids
        logprobs = self.logprobs
        terms: Any = token_ids, logprobs
        if self.finish_reason is None:
            terms = View(token_ids, 0, len(token_ids)), logprobs and logprobs.so_far()
        return CompletionOutput(
            self.index,
            self.text,
            terms[0],
            self.finish_reason,
            self.stop_reason,
            terms[1],
            self.cumulative_logprob,
            self.error_kind,
        )


class Inbox:
    """The outputs of one request, for one reader in the event loop of the client.

    Each output of the engine holds only what is new. Unread outputs are merged.

    account: counts the bytes that are stored for the reader.
    in_full: whether each output for the reader holds everything so far, not only what is new.
    result: the result of a report on a prompt, once `wait` returns.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        token_ids: list[int],
        kind: RequestOutputKind,
        *,
        account: AnswerAccount | None = None,
        in_full: bool = False,
    ) -> None:
        self.in_full = in_full
        self.lora_request: LoRARequest | None = None
        self.account = AnswerAccount(AnswerBudget()) if account is None else account
        self.comes_in_parts = comes_in_parts(kind)
        self._ledger = AnswerLedger(self.account, comes_in_parts=self.comes_in_parts)
        self.request_id = request_id
        self.prompt = prompt
        self.token_ids = token_ids
        self.kind = kind
        self._samples: list[_Sample] = []
        self._metrics = RequestMetrics(0.0)
        self._num_cached_tokens: int | None = None
        self._prompt_logprobs: frames.Places[dict[int, Logprob] | None] | None = None
        self.finished = self._has_news = False
        self.result: Any = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, new: frames.Output) -> int:
        """Add an output. Return its number of tokens."""
        if self.in_full:
            self._ledger.replace_outputs()
            self._samples = []
        while len(self._samples) < len(new.completions):
            self._samples.append(_Sample(len(self._samples)))
        num = 0
        for sample, completion in zip(self._samples, new.completions, strict=False):
            sample.add(completion)
            num += len(completion.token_ids)
        self.finished = new.finished
        self._num_cached_tokens = new.num_cached_tokens
        if new.metrics is not None:
            self._metrics = new.metrics
        self._ledger.add_output(size_of(new), is_last=new.finished)
        if self.comes_in_parts or self.finished:
            self._wake()
        return num

    def put_prompt(self, places: list[frames.Place | None]) -> None:
        """Add the next log-probabilities of the prompt. All arrive before the first output with tokens."""
        self._prompt_logprobs = self._prompt_logprobs or frames.Places()
        self._prompt_logprobs.add(places)
        self._ledger.add_prompt(bytes_of(places))

    @property
    def has_whole_prompt(self) -> bool:
        """Whether all log-probabilities of the prompt have arrived."""
        return self._whole_prompt() is not None

    def drop_prompt(self) -> None:
        """Drop the log-probabilities of the prompt, because they will be computed again."""
        self._prompt_logprobs = None
        self._ledger.drop_prompt()

    def text(self) -> str:
        """Return the text so far of the request's only sample."""
        return self._samples[0].text if self._samples else ""

    def refusal(self) -> RequestError | None:
        """Return the error if an answer that is sent as a whole has become too large; None if it has not."""
        return self._ledger.refusal()

    def refuse(self, error: RequestError) -> None:
        """Drop all stored outputs. `wait` will raise this error instead."""
        self.give_back()
        self._has_news = False
        self.fail(error)

    def release(self) -> None:
        """Release the output that the reader took last and has now processed."""
        self._ledger.release()

    def give_back(self) -> None:
        """Drop all stored outputs once the reader is gone."""
        self._samples = []
        self._prompt_logprobs = None
        self._ledger.clear()

    def put_result(self, result: Any) -> None:
        """Add the result of a request that only reports on its prompt."""
        self.result = result
        self.finished = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Make `wait` raise this error once all outputs are read."""
        self._error = error
        self._wake()

    async def wait(self) -> None:
        """Wait for something new. Raise the error given to `fail` if nothing more will come."""
        while not self._has_news:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._has_news = False

    async def get(self) -> RequestOutput:
        """Return the next output."""
        await self.wait()
        output = RequestOutput(
            self.request_id,
            self.prompt,
            self.token_ids,
            [sample.output() for sample in self._samples],
            self.finished,
            self._num_cached_tokens,
            self._metrics,
            self._whole_prompt(),
            self.lora_request,
        )
        is_delta = self.kind is RequestOutputKind.DELTA
        self._ledger.take(is_delta=is_delta)
        if is_delta:
            self._samples = []
        return output

    def _whole_prompt(self) -> frames.Places[dict[int, Logprob] | None] | None:
        """Return the log-probabilities of the prompt; None before all are there."""
        places = self._prompt_logprobs
        return places if places is not None and len(places) == len(self.token_ids) else None

    def _wake(self) -> None:
        self._has_news = self._has_news or self._error is None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def size_of(output: frames.Output) -> int:
    """Return the approximate size in bytes that an output occupies until it is read."""
    size = 0
    for completion in output.completions:
        size += len(completion.text) + len(completion.token_ids) * TOKEN_BYTES
        size += bytes_of(completion.logprobs or ())
    return size


def bytes_of(places: Sequence[frames.Place | None]) -> int:
    """Return the approximate size in bytes of the candidates at positions of a text."""
    return sum(len(place[0]) for place in places if place is not None) * CANDIDATE_BYTES
