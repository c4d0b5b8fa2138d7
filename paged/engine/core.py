"""EngineCore: the unfinished requests of an engine, and the steps they take together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..errors import RequestError
from ..requests.request import Outbox, Prompt, Request, RequestGroup, RequestStatus
from ..runner.model_runner import ModelRunner
from ..sampling_params import SamplingParams
from ..scheduler.schedule import Schedule
from ..scheduler.scheduler import Scheduler
from ..text.outputs import OutputProcessor
from ..text.tokenizer import Tokenizer
from .request_factory import Prepared, RequestFactory


class EngineCore:
    """What `LLMEngine`, `generation` and the async engine are made of. Not thread-safe.

    groups: the unfinished requests, by their ids.
    outbox: where outputs go of requests that were made without another one.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        factory: RequestFactory,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.runner, self.scheduler, self.factory = runner, scheduler, factory
        self.outputs = OutputProcessor(tokenizer)
        self.groups: dict[str, RequestGroup] = {}
        self.outbox = Outbox()
        self._with_stops: set[RequestGroup] = set()  # those with stop strings
        self._finished: dict[RequestGroup, None] = {}  # those whose last output is due
        self._ids = itertools.count()

    # Requests

    def next_id(self) -> str:
        """An id that nobody has."""
        return next(i for i in map(str, self._ids) if i not in self.groups)

    def queue(self, *terms: Any, outbox: Outbox | None = None) -> None:
        """Make a request of `new_group`'s terms, and give it to the scheduler."""
        group = self.new_group(*terms, outbox=outbox)
        try:
            self.scheduler.add(group.samples[0])
        except RequestError:
            self._forget(group)
            raise

    def new_group(
        self,
        request_id: str,
        prompt: Prompt | Prepared,
        params: SamplingParams,
        priority: float | None,
        tenant: str,
        timeout_s: float | None,
        *,
        outbox: Outbox | None = None,
    ) -> RequestGroup:
        """A request that the scheduler has not got yet.

        Raises RequestError if anything is wrong.
        """
        self._check_id(request_id)
        given: dict[str, Any] = {"priority": priority, "timeout_s": timeout_s}
        given = {name: value for name, value in given.items() if value is not None}
        if given and isinstance(params, SamplingParams):
            params = replace(params, **given)
        group = self.factory.new_group(request_id, prompt, params, tenant, self.scheduler.clock())
        self.book(group, outbox)
        return group

    def book(self, group: RequestGroup, outbox: Outbox | None = None) -> None:
        """Take note of a request, whose outputs go to this outbox."""
        group.outbox = self.outbox if outbox is None else outbox
        self.groups[group.request_id] = group
        if group.samples[0].inputs.params.stop:
            self._with_stops.add(group)

    def fork(self, request_id: str, new_request_id: str | None, params: SamplingParams | None) -> str:
        """Let a request go on twice; see `LLMEngine.fork`."""
        group = self._unfinished(request_id)
        if group is None or group.finished:
            raise RequestError(f"there is no unfinished request {request_id!r} to fork")
        if len(group.samples) > 1:
            raise RequestError(
                f"request {request_id!r} has {len(group.samples)} samples; only one can be forked"
            )
        new_request_id = self.next_id() if new_request_id is None else new_request_id
        self._check_id(new_request_id)
        now = self.scheduler.clock()
        child = self.factory.new_fork(new_request_id, group.samples[0], params, now)
        self.scheduler.fork(group.samples[0], child.samples[0])
        self.book(child)
        return new_request_id

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks; nothing if there is no unfinished one of this id."""
        group = self._unfinished(request_id)
        if group is None:
            return
        now = self.scheduler.clock()
        for sample in group.samples:
            if sample.status is RequestStatus.FINISHED:
                continue
            if sample.arrival >= 0:
                self.scheduler.abort(sample)
            elif sample is group.samples[0]:
                # The scheduler has not got it yet. Samples that wait for their prompt end with the first.
                for waiting in group.samples:
                    waiting.finish("abort", now)
        if group.outbox is not self.outbox:  # who iterates waits for the end, who aborts knows of it
            group.outbox.put(self.outputs.output(group))
        self._forget(group)

    def has_work(self) -> bool:
        """Whether there is anything left to compute or to publish."""
        return bool(self._finished) or self.scheduler.has_unfinished()

    def has_unfinished(self) -> bool:
        """Whether there is anything left to do or to deliver."""
        return bool(self.outbox) or self.has_work()

    # Steps

    def advance(self, before: Callable[[Schedule], None] | None = None) -> list[Request]:
        """Run one step, whose outputs are then to be published. Returns who got a token, or an error.

        before: called with what will be computed.
        """
        scheduler, advanced = self.scheduler, list[Request]()
        try:
            ended = scheduler.expire()
            schedule = scheduler.schedule()
            if before is not None:
                before(schedule)
            if not schedule.is_empty:
                step = self.runner.execute(schedule)
                num_finished = scheduler.counters.num_finished
                step.record_reports()  # both by position: recomputed rows are not recorded twice
                step.record_logprobs(schedule)
                advanced = scheduler.update(schedule, step.tokens, step.errors)
                num_stopped = self._end_at_stop_strings(advanced) if self._with_stops else 0
                # Most steps finish nobody, and need not be looked through.
                if num_stopped or scheduler.counters.num_finished > num_finished:
                    ended += [request for request in advanced if request.finish_reason is not None]
            if ended:
                scheduler.release_finished()
                self._note_finished(self.groups_of(ended))
        except BaseException:
            self._recover()
            raise
        return advanced

    def advance_others(self) -> None:
        """Run a step for requests that nobody is told of; the others' outputs go where they belong."""
        self.advance()
        self.publish(())

    def publish(self, groups: Iterable[RequestGroup]) -> None:
        """Put the outputs of who finished, and of these groups where they are wanted, where they belong."""
        finished = [*self._finished]
        for group in dict.fromkeys([*groups, *finished]):
            if group in self._finished or group.outbox.wants(group.output_kind):
                group.outbox.put(self.outputs.output(group))
        for group in finished:
            self._forget(group)

    def groups_of(self, requests: list[Request]) -> Iterator[RequestGroup]:
        """The unfinished requests that these are samples of."""
        return (self.groups[r.request_id] for r in requests if r.request_id in self.groups)

    # How it works

    def _recover(self) -> None:
        """After a step that failed: whoever it ended stays ended, everybody else is computed again."""
        # The step may have got as far as their tokens, which are not taken back.
        unsure = [sample for group in self._with_stops for sample in group.samples]
        self._end_at_stop_strings([s for s in unsure if not isinstance(s.stop_reason, str)])
        self.scheduler.release_finished()
        self.scheduler.cancel()
        self._note_finished(self.groups.values())

    def _end_at_stop_strings(self, advanced: list[Request]) -> int:
        """Finish those whose newest token completes a stop string. Returns how many finished."""
        for request in advanced:
            if request.inputs.params.stop:
                self.outputs.end_at_stop_string(request, self.scheduler.clock())
        return sum(request.finish_reason is not None for request in advanced)

    def _note_finished(self, groups: Iterable[RequestGroup]) -> None:
        self._finished |= dict.fromkeys(group for group in groups if group.finished)

    def _unfinished(self, request_id: str) -> RequestGroup | None:
        # What cannot be an id may not even have a hash.
        return self.groups.get(request_id) if isinstance(request_id, str) else None

    def _check_id(self, request_id: str) -> None:
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, got {request_id!r}")
        if request_id in self.groups:
            raise RequestError(f"request id {request_id!r} is in use by an unfinished request")

    def _forget(self, group: RequestGroup) -> None:
        del self.groups[group.request_id]
        self._finished.pop(group, None)
        self._with_stops.discard(group)
        self.outputs.forget(group)
