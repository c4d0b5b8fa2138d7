"""SentRequest: a request on its way through one engine process, or several, one after another."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from ..engine.async_base import Deadline
from ..engine.request_spec import SampleSoFar, closed_error
from ..options.sampling_params import SamplingParams
from ..requests.request import RequestMetrics, RequestOutput
from . import frames
from .deaths import Suspicion
from .inbox import Inbox

# Of `RequestMetrics`: what each process counts anew.
COUNTS_OF_REQUEST = ("num_preemptions", "num_drafts", "num_draft_tokens", "num_accepted_tokens")

Beginning = frames.Generate | frames.Embed | frames.ScoreTokens  # an order that begins a request


class Carrier(Protocol):
    """The process that computes a request, as the request sees it."""

    def abort(self, request: SentRequest) -> None:
        """Abort a request that has lost its reader, or that moves to another process."""

    def end(self, request: SentRequest) -> None:
        """Abort an unfinished request. Its reader still gets a last output."""


class Keeper(Protocol):
    """The object that sends requests to processes, as a request sees it."""

    def next_key(self) -> int:
        """Return a new number that identifies a request in frames."""

    def unfinished(self, request_id: str) -> SentRequest | None:
        """Return the request with this id; None if it has finished, perhaps unread."""

    def abort(self, request: SentRequest) -> None:
        """Abort a request that has lost its reader."""

    def call_in_loop(self, function: Callable[[], None]) -> None:
        """Call a function in the event loop: soon, or at once if this thread runs the loop."""


@dataclass(slots=True)
class _Sample:
    """What an engine process has sent of one sample.

    end: its last output without text and tokens, once it has ended.
    """

    token_ids: array[int] = field(default_factory=lambda: array("q"))
    cumulative_logprob: float | None = None
    end: frames.Completion | None = None

    def add(self, new: frames.Completion) -> None:
        self.token_ids.extend(new.token_ids)
        self.cumulative_logprob = new.cumulative_logprob
        if new.finish_reason is not None and self.end is None:
            logprobs: list[frames.Place] | None = None if new.logprobs is None else []
            self.end = msgspec.structs.replace(new, text="", token_ids=[], logprobs=logprobs)


class _Times:
    """The times of a request on the clock of the first engine process that told some.

    The clocks of two processes do not compare. How much later another process got the request, the front end
    knows.
    """

    def __init__(self) -> None:
        self._began_at: float | None = None  # when the first process got it, which may have told nothing
        self._sent_at = 0.0  # to the process that has it
        self._first: RequestMetrics | None = None  # as the first process that told some told them last
        self._first_sent_at = 0.0
        self._is_first = True

    def on_send(self) -> None:
        """Record that a process gets the request."""
        self._sent_at = time.monotonic()
        if self._began_at is None:
            self._began_at = self._sent_at
        if self._first is None:
            self._first_sent_at = self._sent_at
        else:
            self._is_first = False

    def of_first(self, told: RequestMetrics) -> RequestMetrics:
        """Return what the present process told, on the clock of the first one."""
        assert self._began_at is not None, "no process has it"
        first = self._first
        if first is None or self._is_first:
            earlier = self._first_sent_at - self._began_at
            self._first = replace(told, arrival_time=told.arrival_time - earlier) if earlier else told
            return self._first
        later = first.arrival_time - told.arrival_time + self._sent_at - self._began_at
        return RequestMetrics(
            first.arrival_time,
            _moved(first.first_scheduled_time, told.first_scheduled_time, later),
            _moved(first.first_token_time, told.first_token_time, later),
            _moved(None, told.finished_time, later),
            **{name: getattr(first, name) + getattr(told, name) for name in COUNTS_OF_REQUEST},
        )


def _moved(known: float | None, told: float | None, later: float) -> float | None:
    return known if known is not None or told is None else told + later


class SentRequest:
    """The `RequestHandle` of a request that an engine process computes or will compute.

    It stores what another process needs to continue the request: the order and the outputs received so far.

    order: the order that begins the request; for a fork, it is known once the parent's tokens are known.
    params: the sampling parameters, if the order is to generate tokens.
    fork: the order of a fork; None for other requests.
    is_bound: whether no other process can continue the request.
    connection: the process that computes the request; None while it waits for a process.
    was_sent: whether the request was ever sent to a process.
    has_waited: whether the request has ever waited for a process.
    suspicion: whether the request may be killing its processes.
    has_left: whether the request has left a process unfinished, because the process ended or gave it up.
    timer: ends the request if it waits too long.
    """

    def __init__(
        self,
        keeper: Keeper,
        order: Beginning,
        inbox: Inbox,
        params: SamplingParams | None = None,
        *,
        fork: frames.Fork | None = None,
    ) -> None:
        self._keeper = keeper
        self.order = order
        self.params = params
        self.fork = fork
        self.is_bound = False
        self.inbox = inbox
        self.connection: Carrier | None = None
        self.replica = 0
        self.was_sent = False
        self.has_waited = False
        self.suspicion = Suspicion()
        self.has_left = False
        self.timer: asyncio.TimerHandle | None = None
        self._has_output = False
        self._times = _Times()
        self._num_cached_tokens: int | None = None
        self._num_samples = 0 if params is None else params.num_samples
        self._begins_anew = params is None or params.best_of is not None  # the best are known at the end only
        self._samples = [_Sample() for _ in range(0 if self._begins_anew else self._num_samples)]
        timeout_s = _timeout_of(order)
        self._deadline = None if timeout_s is None else Deadline(timeout_s)

    # Of its reader

    async def get(self) -> RequestOutput:
        """Return the next output. The memory of the previous output is released."""
        self.inbox.release()
        return await self.inbox.get()

    async def result(self) -> Any:
        """Return the result of a request that only reports on its prompt."""
        await self.inbox.wait()
        return self.inbox.result

    def close(self) -> None:
        """Abort the request if it is unfinished, and free its unread outputs. Any thread may call this."""
        self._keeper.call_in_loop(self._close)

    def _close(self) -> None:
        self._keeper.abort(self)
        self.inbox.fail(closed_error(self.request_id))  # to who still waits
        self.inbox.give_back()

    # Of its keeper

    @property
    def key(self) -> int:
        """The number that has identified the request in frames since it was last sent."""
        return self.order.key

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self.inbox.request_id

    @property
    def num_tokens(self) -> int:
        """The number of tokens in its prompt and its output so far."""
        return len(self.inbox.token_ids) + sum(len(sample.token_ids) for sample in self._samples)

    @property
    def left_s(self) -> float | None:
        """The seconds left of the request's timeout_s, which counts from its arrival."""
        return None if self._deadline is None else self._deadline.left_s

    @property
    def is_suspect(self) -> bool:
        """Whether the request may have killed the processes that computed it."""
        return self.suspicion.is_there and self.follows is None  # a fork begins beside its parent

    @property
    def follows(self) -> str | None:
        """The id of a fork's parent, whose process must get the fork, until the fork's tokens are known."""
        return None if self.fork is None or self._has_output else self.fork.request_id

    @property
    def can_go_on(self) -> bool:
        """Whether another process can continue the request with the same tokens."""
        if self.is_bound:
            return False
        return self.follows is None or self._keeper.unfinished(self.follows) is not None

    def next_order(self) -> Beginning | frames.Fork:
        """Return the order to send to the next process that gets the request.

        The order has a new key each time, because an output for an earlier key may still be on its way.
        """
        self._times.on_send()
        self.suspicion.on_send()
        if self.was_sent:
            key = self._keeper.next_key()
            self.order = msgspec.structs.replace(self.order, key=key)
            self.fork = self.fork and msgspec.structs.replace(self.fork, key=key)
        if self.fork is not None and self.follows is not None:
            return self.fork
        order = self.order
        if self.has_waited and self._deadline is not None:
            order = _with_timeout(order, self.left_s)
        if not self.was_sent or not isinstance(order, frames.Generate):
            return order
        params = order.params
        if self.inbox.has_whole_prompt:  # reported already
            params = msgspec.structs.replace(params, prompt_logprobs=msgspec.UNSET)
        else:
            self.inbox.drop_prompt()
        # Its steps are watched while it is alone, so that what is new is sent at once.
        is_whole = order.is_whole and not self.suspicion.is_alone
        return msgspec.structs.replace(order, params=params, resumed=self._so_far(), is_whole=is_whole)

    def _so_far(self) -> list[SampleSoFar]:
        if self._begins_anew:
            return [SampleSoFar(index, []) for index in range(self._num_samples)]
        assert isinstance(self.order, frames.Generate)
        given = [] if self.inbox.in_full and self._has_output else self.order.generated_token_ids
        return [
            SampleSoFar(index, [*given, *sample.token_ids], sample.cumulative_logprob)
            for index, sample in enumerate(self._samples)
            if sample.end is None
        ]

    def take(self, new: frames.Output) -> frames.Output:
        """Record an output. Return it as if the first process had sent it."""
        self._has_output = True
        if self._num_cached_tokens is None:
            self._num_cached_tokens = new.num_cached_tokens
        completions: Sequence[frames.Completion] = new.completions
        if not self._begins_anew:
            completions = self._recorded(completions)
        metrics = None if new.metrics is None else self._times.of_first(new.metrics)
        if not self.has_left:  # most outputs are as they came
            return new
        return frames.Output(new.key, [*completions], new.finished, self._num_cached_tokens, metrics)

    def _recorded(self, completions: Sequence[frames.Completion]) -> Sequence[frames.Completion]:
        samples = self._samples
        if self.inbox.in_full and completions:
            samples[0].token_ids = array("q")
        for completion in completions:
            samples[completion.index].add(completion)
        if len(completions) == len(samples) or not completions:
            return completions
        # Samples that had ended are unknown to this process.
        by_index = {completion.index: completion for completion in completions}
        ended = {index: sample.end for index, sample in enumerate(samples) if sample.end is not None}
        every = {**ended, **by_index}
        return [every[index] for index in sorted(every)]

    def aborted(self) -> frames.Output:
        """Return the last output of a request that is aborted while no process computes it."""
        left = []
        for index, sample in enumerate(self._samples):
            if sample.end is None:
                own = ("", []) if not self.inbox.in_full else (self.inbox.text(), sample.token_ids.tolist())
                end = frames.Completion(index, *own, "abort", error_kind="abort")
                end.cumulative_logprob = sample.cumulative_logprob
                left.append(end)
        return self.take(frames.Output(self.key, left, True, None, None))

    def cancel_timer(self) -> None:
        """Stop the timer that ends the request while it waits."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def _with_timeout(order: Beginning, timeout_s: float | None) -> Beginning:
    if isinstance(order, frames.Generate):
        params = msgspec.structs.replace(order.params, timeout_s=timeout_s)
        return msgspec.structs.replace(order, params=params)
    return msgspec.structs.replace(order, terms=order.terms._replace(timeout_s=timeout_s))


def _timeout_of(order: Beginning) -> float | None:
    if isinstance(order, frames.Generate):
        timeout_s = order.params.timeout_s  # type: ignore[attr-defined]
        return None if timeout_s is msgspec.UNSET else timeout_s
    return order.terms.timeout_s
