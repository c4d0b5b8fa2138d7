"""EngineCore: the unfinished requests of an engine and the step that advances them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ..base.errors import EngineDeadError, RequestError
from ..base.interrupts import HeldInterrupts
from ..options.sampling_params import SamplingParams
from ..requests.request import SLOW_READER, Outbox, Request, RequestGroup, RequestStatus
from ..scheduler.schedule import Schedule, StepOutput
from ..scheduler.scheduler import Scheduler
from ..text.outputs import OutputProcessor
from ..text.tokenizer import Tokenizer
from .request_factory import RequestFactory
from .request_spec import RequestSpec

if TYPE_CHECKING:
    from ..runner.executor import Executor, PendingStep
    from .grammar_waits import GrammarWaits
    from .logprob_turns import LogprobTurns
    from .reports import ReportSpec, ReportTerms


class EngineCore:
    """The unfinished requests of an engine, and the step that advances them. It is not thread-safe.

    `LLMEngine`, `generation` and the async engine use the same core.

    groups: the unfinished requests by id.
    outbox: receives the outputs of requests that were added without an outbox of their own.
    dead: the error that every further step raises, once the GPU or a process of the model has failed.
    """

    def __init__(
        self,
        runner: Executor,
        scheduler: Scheduler,
        factory: RequestFactory,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.factory = factory
        self.outputs = OutputProcessor(tokenizer)
        self.groups: dict[str, RequestGroup] = {}
        self.outbox = Outbox()
        self.dead: EngineDeadError | None = None
        scheduler.end_at_stop_string = self._end_at_stop_string
        self._with_stops: set[RequestGroup] = set()  # requests with stop strings
        self._with_grammars: set[RequestGroup] = set()
        self._waits: GrammarWaits | None = None  # from the first request with a grammar on
        self._finished: dict[RequestGroup, None] = {}  # finished requests that are not published yet
        self._logprobs: LogprobTurns | None = None  # from the first request with log-probabilities on
        self._ids = itertools.count()
        self._in_flight: deque[tuple[Schedule, PendingStep]] = deque()  # steps that were launched

    # Steps

    def step(
        self, outbox: Outbox | None = None, on_schedule: Callable[[Schedule], None] | None = None
    ) -> list[Request]:
        """Run one step. Return the requests that got a token or an error. Publish finished requests.

        outbox: unfinished requests that got a token are also published if this is their outbox.
        on_schedule: called with the schedule before the step computes it.

        Raises EngineDeadError if the GPU or a process of the model has failed; requests that finished earlier
        are published first.
        """
        if self.dead is not None:
            return self._publish_last()
        advanced: list[Request] = []
        with HeldInterrupts():
            try:
                schedule = self._schedule(on_schedule)
                is_blocked = schedule.is_empty and not (self._finished or self._in_flight)
                if self.runner.num_in_flight == 1:
                    if not schedule.is_empty:
                        output = self.runner.execute(schedule)  # launches it, and waits for its result
                        advanced = self._update(schedule, output)
                else:
                    # Launch steps until enough are in flight. Then wait for the result of the oldest one.
                    while not schedule.is_empty:
                        self._in_flight.append((schedule, self.runner.launch(self.runner.plan(schedule))))
                        if len(self._in_flight) == self.runner.num_in_flight:
                            break
                        schedule = self._schedule(on_schedule)
                    if self._in_flight:
                        oldest, pending = self._in_flight[0]
                        output = pending.result()
                        self._in_flight.popleft()
                        advanced = self._update(oldest, output)
            except BaseException as error:
                self.recover(error)
                raise
            if self._logprobs is not None:
                self._logprobs.decode(self._finished)
            self.publish(self._groups_in(outbox, advanced))
        if is_blocked and self._waits is not None:
            self._waits.wait()
        return advanced

    def _schedule(self, on_schedule: Callable[[Schedule], None] | None) -> Schedule:
        """End the requests that are over by now, and choose the next step."""
        expired = self.scheduler.expire()
        self._collect_finished(expired)
        if self._waits is not None:
            self._collect_finished(self._waits.settle())
        schedule = self.scheduler.schedule()
        # While a step is in flight, one with nothing to compute is none.
        if on_schedule is not None and not (schedule.is_empty and self._in_flight):
            on_schedule(schedule)
        return schedule

    def _publish_last(self) -> list[Request]:
        """Publish the requests that finished before the engine died. If there are none, raise."""
        assert self.dead is not None
        if not self._finished:
            raise EngineDeadError(str(self.dead)) from self.dead.__cause__
        if self._logprobs is not None:
            self._logprobs.decode(self._finished)
        self.publish()
        return []

    def publish(self, groups: Iterable[RequestGroup] = ()) -> None:
        """Put an output into the outbox of each finished request, and of each request in `groups` that wants
        one.

        A request whose log-probabilities are not all decoded yet is published after a later step.
        """
        undecoded = () if self._logprobs is None else self._logprobs.undecoded
        finished = [group for group in self._finished if group not in undecoded]
        for group in dict.fromkeys([*groups, *finished]):
            if group in undecoded:
                continue
            if group in self._finished or group.outbox.wants(group.output_kind):
                group.outbox.put(self.outputs.output(group))
        for group in finished:
            self._forget(group)

    def groups_of(self, requests: Iterable[Request]) -> Iterator[RequestGroup]:
        """Yield the groups of those requests that are unfinished."""
        return (self.groups[r.request_id] for r in requests if r.request_id in self.groups)

    def _groups_in(self, outbox: Outbox | None, requests: list[Request]) -> Iterable[RequestGroup]:
        if outbox is None:  # checked once, not for each request
            return ()
        return (group for group in self.groups_of(requests) if group.outbox is outbox)

    def recover(self, error: BaseException) -> None:
        """Have all requests that a failed step did not finish computed again.

        Raises EngineDeadError if no step can run any more.
        """
        # The failed step may have appended tokens. They stay, and may end an output.
        try:
            samples = [sample for group in self._with_stops for sample in group.samples]
            self._end_at_stop_strings([s for s in samples if not isinstance(s.stop_reason, str)])
            self.scheduler.release_finished()
        finally:  # also after another Ctrl-C: a step in flight holds its requests
            self.scheduler.cancel()
            self._in_flight.clear()
            self.runner.discard()
        if self._waits is not None:
            self._waits.begin([sample for group in self._with_grammars for sample in group.samples])
        self._finished |= dict.fromkeys(group for group in self.groups.values() if group.finished)
        self.dead = self.runner.recover(error)
        if self.dead is not None and isinstance(error, Exception):
            raise self.dead from self.dead.__cause__

    def check(self) -> None:
        """Detect processes of the model that ended between steps. Raises EngineDeadError."""
        if self.dead is None:
            try:
                self.runner.check()
            except BaseException as error:
                self.recover(error)
                raise

    def _update(self, schedule: Schedule, output: StepOutput) -> list[Request]:
        """Record the results of a step. Return the requests that got a token or an error."""
        if schedule.drafts:
            from ..scheduler.drafts import verified

            output = verified(schedule, output)
        num_finished = self.scheduler.counters.num_finished
        # Both by position, so that a step which is computed again overwrites them.
        output.record_reports(schedule)
        num_candidates = output.record_logprobs(schedule)
        if self._logprobs is not None:
            self._logprobs.num_new = num_candidates
        advanced = self.scheduler.update(schedule, output.tokens, output.errors, output.runs)
        num_stopped = self._end_at_stop_strings(advanced) if self._with_stops else 0
        if self._waits is not None and self._with_grammars:
            self._begin_masks(advanced, self._waits)
        # Most steps finish no request, and the search is skipped.
        if num_stopped or self.scheduler.counters.num_finished > num_finished:
            self._collect_finished([request for request in advanced if request.finish_reason is not None])
        return advanced

    def _end_at_stop_strings(self, advanced: list[Request]) -> int:
        """Finish the requests whose newest token completes a stop string. Return how many are finished."""
        for request in advanced:
            if request.inputs.params.stop:
                self._end_at_stop_string(request)
        return sum(request.finish_reason is not None for request in advanced)

    def _end_at_stop_string(self, request: Request) -> None:
        """Finish a request whose newest token completes one of its stop strings."""
        self.outputs.end_at_stop_string(request, self.scheduler.clock())

    def _begin_masks(self, advanced: list[Request], waits: GrammarWaits) -> None:
        """Begin the masks of the next tokens."""
        waits.begin(advanced, are_running=True)
        # Without stop tokens, the mask says whether the output ends: with its last token, if it is not late.
        if any(not request.stop_ids for request in advanced):
            self._collect_finished(waits.settle())

    def _collect_finished(self, requests: list[Request]) -> None:
        """Free the blocks of finished requests, and note the finished groups for `publish`."""
        if requests:
            self.scheduler.release_finished()
            self._finished |= dict.fromkeys(group for group in self.groups_of(requests) if group.finished)

    # Requests

    def next_id(self) -> str:
        """Return an id that no unfinished request has."""
        return next(i for i in map(str, self._ids) if i not in self.groups)

    def add(self, request_id: str, spec: RequestSpec, outbox: Outbox | None = None) -> None:
        """Make a request and add it to the queue.

        Raises RequestError if anything is wrong, QueueFullError if max_waiting requests are already waiting.
        """
        self._queue(self._made(request_id, spec), outbox)

    def _queue(self, group: RequestGroup, outbox: Outbox | None) -> None:
        with HeldInterrupts():
            self.register(group, outbox)
            try:
                self.enqueue(group)
            except RequestError:
                self._forget(group)
                raise

    def enqueue(self, group: RequestGroup) -> None:
        """Add a registered request to the scheduler. Raises QueueFullError if max_waiting already wait."""
        first = group.samples[0]
        for sample in (first, *(() if first.siblings else group.samples[1:])):
            self.scheduler.add(sample)
        if self._waits is not None:  # not before: a refused request must not be held or completed
            self._waits.begin(group.samples)

    def add_report(
        self, request_id: str, spec: ReportSpec[object], terms: ReportTerms, outbox: Outbox
    ) -> Request:
        """Queue a request that only reports on its prompt. Return the request, which will hold the report.

        Raises RequestError if anything is wrong, QueueFullError if max_waiting requests are already waiting.
        """
        self._check_id(request_id)
        from .reports import new_report

        group = new_report(self.factory, request_id, spec, terms, self.scheduler.clock())
        self._queue(group, outbox)
        return group.samples[0]

    def new_group(self, request_id: str, spec: RequestSpec, outbox: Outbox | None = None) -> RequestGroup:
        """Make and register a request, without adding it to the scheduler.

        Raises RequestError if anything is wrong.
        """
        group = self._made(request_id, spec)
        self.register(group, outbox)
        return group

    def _made(self, request_id: str, spec: RequestSpec) -> RequestGroup:
        self._check_id(request_id)
        return self.factory.new_group(request_id, spec, self.scheduler.clock())

    def register(self, group: RequestGroup, outbox: Outbox | None = None) -> None:
        """Register an unfinished request by its id. Its outputs go to `outbox`, by default the core's."""
        group.outbox = self.outbox if outbox is None else outbox
        self.groups[group.request_id] = group
        if group.samples[0].inputs.params.stop:
            self._with_stops.add(group)
        inputs = group.samples[0].inputs
        if inputs.wants_logprobs or inputs.params.prompt_logprobs is not None:
            if self._logprobs is None:
                from .logprob_turns import LogprobTurns

                self._logprobs = LogprobTurns(self.scheduler, self.outputs)
            self._logprobs.add(group)
        if group.samples[0].sampling.grammar is not None:
            self._with_grammars.add(group)
            if self._waits is None:
                from .grammar_waits import GrammarWaits

                self._waits = GrammarWaits(self.scheduler)

    def fork(
        self,
        request_id: str,
        new_request_id: str | None,
        params: SamplingParams | None,
        outbox: Outbox | None = None,
    ) -> str:
        """Duplicate an unfinished request; see `LLMEngine.fork`. The fork's outputs go to `outbox`."""
        parent = self.forkable(request_id).samples[0]
        new_request_id = self.next_id() if new_request_id is None else new_request_id
        self._check_id(new_request_id)
        from .forks import new_fork

        child = new_fork(self.factory, new_request_id, parent, params, self.scheduler.clock())
        with HeldInterrupts():
            self.scheduler.fork(parent, child.samples[0])
            self.register(child, outbox)
            if self._waits is not None:
                self._waits.begin(child.samples)
        return new_request_id

    def forkable(self, request_id: str) -> RequestGroup:
        """Return an unfinished request that can be forked: it has one sample. Raises RequestError."""
        group = self._unfinished(request_id)
        if group is None or group.finished:
            raise RequestError(f"there is no unfinished request {request_id!r} to fork")
        if len(group.samples) > 1:
            raise RequestError(
                f"request {request_id!r} has {len(group.samples)} samples; only one can be forked"
            )
        return group

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks. Do nothing if no unfinished request has this id."""
        group = self._unfinished(request_id)
        if group is not None:
            with HeldInterrupts():
                self._abort(group)

    def hold(self, request_id: str, is_held: bool) -> None:
        """Hold the request of a slow reader, so that it computes nothing, or release it."""
        group = self._unfinished(request_id)
        if group is not None:
            change = self.scheduler.hold if is_held else self.scheduler.release
            for sample in group.samples:
                change(sample, SLOW_READER)

    def _abort(self, group: RequestGroup) -> None:
        now = self.scheduler.clock()
        for sample in group.samples:
            if sample.status is RequestStatus.FINISHED:
                continue
            if sample.arrival >= 0:
                self.scheduler.abort(sample)
            elif sample is group.samples[0]:
                # The scheduler has not got it yet. The other samples wait for its prompt and end with it.
                for waiting in group.samples:
                    self.scheduler.release(waiting, waiting.held)
                    waiting.finish("abort", now, error_kind="abort")
        # A reader of another outbox waits for a last output; the core's outbox belongs to the caller.
        if group.outbox is not self.outbox:
            group.outbox.put(self.outputs.output(group))
        self._forget(group)

    def longest(self) -> int:
        """Return the maximum length of any unfinished request in tokens, also of those not queued yet."""
        samples = (sample for group in self.groups.values() for sample in group.samples)
        return max((sample.inputs.max_total_tokens for sample in samples), default=1)

    def has_unpublished(self) -> bool:
        """Return whether a finished request still waits to be published."""
        return bool(self._finished)

    def has_work(self) -> bool:
        """Return whether there is anything to compute or to publish."""
        return bool(self._finished or self._in_flight) or self.scheduler.has_unfinished()

    def has_runnable(self) -> bool:
        """Return whether there is anything to publish, or any request to compute that is not held."""
        return bool(self._finished or self._in_flight) or self.scheduler.has_runnable()

    def waits_for_masks(self) -> bool:
        """Return whether an empty step itself waits for grammar masks, so that the caller need not wait."""
        return bool(self._waits)

    def has_unfinished(self) -> bool:
        """Return whether there is anything to compute, to publish, or to take from `outbox`."""
        return bool(self.outbox) or self.has_work()

    def _unfinished(self, request_id: str) -> RequestGroup | None:
        # An argument that is no string may not even be hashable.
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
        self._with_grammars.discard(group)
        if self._waits is not None:
            self._waits.forget(group.samples)
        if self._logprobs is not None:
            self._logprobs.forget(group)
        self.outputs.forget(group)
