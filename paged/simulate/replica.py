"""Replica: one engine of the fleet, with a cost model instead of a model."""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ..base.errors import QueueFullError
from ..drafting.drafter import Draft
from ..requests.request import Request, RequestInputs, RequestMetrics, RequestStatus
from ..runner.sizes import Sizes
from ..scheduler.drafts import Drafts
from ..scheduler.schedule import Schedule
from ..server.router import load_of
from .pipeline import Pipeline
from .workload import SAMPLED, Arrival


class Refusal(enum.Enum):
    """Why a request is refused. The value is the name in JSON."""

    TOO_LONG = "longer_than_max_model_len"
    NEVER_FITS = "larger_than_kv_cache"
    QUEUE_FULL = "max_waiting"
    EARLIER_TURN = "earlier_turn_refused"


class Guesses:
    """A drafter that always guesses as many tokens as allowed. Which are right is drawn at a step's end."""

    def propose(self, _: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        """Return a draft for each request."""
        return [Draft([0] * limit) for limit in limits]


class Step(NamedTuple):
    """A step in flight, with the time at which it ends."""

    schedule: Schedule
    end: float


class Replica:
    """A simulated engine: the real scheduler and block manager, with the steps in flight of a `Pipeline`.

    acceptance: the share of draft tokens that are accepted at each position; without entries, there are no
        drafts.
    load: the sum of `load_of` over unfinished requests, for routers.
    """

    def __init__(
        self,
        sizes: Sizes,
        num_blocks: int,
        num_host_blocks: int,
        pipeline: Pipeline,
        acceptance: Sequence[float] = (),
    ) -> None:
        self.now = 0.0
        self.in_flight: deque[Step] = deque()
        self.awake = False  # whether a step is in flight or about to begin
        self.load = 0
        self._silent: dict[str, int] = {}  # tokens, when they came, of requests without an output since
        self._pipeline = pipeline
        self._max_model_len = sizes.max_model_len
        self.manager = sizes.new_block_manager(num_blocks, num_host_blocks)
        self.scheduler = sizes.new_scheduler(
            self.manager,
            clock=lambda: self.now,
            num_in_flight=pipeline.num_in_flight,
            runs_ahead=pipeline.runs_ahead,
        )
        self._acceptance = acceptance
        self._rng = random.Random(0)
        if acceptance:
            most = len(acceptance)
            self.scheduler.drafts = Drafts(Guesses(), most, sizes.model.vocab_size, sizes.max_sampled_rows)

    def add(self, request_id: str, arrival: Arrival) -> Request | Refusal:
        """Queue a request. Return the request, or the reason why it is refused."""
        num_prompt_tokens = len(arrival.token_ids)
        # As in the engine: a prompt that fills the context still gets the token that follows it.
        most = min(
            num_prompt_tokens + arrival.num_output_tokens, max(self._max_model_len, num_prompt_tokens + 1)
        )
        if num_prompt_tokens > self._max_model_len:
            return Refusal.TOO_LONG
        if not self.manager.fits(most - 1):
            return Refusal.NEVER_FITS
        inputs = RequestInputs(
            request_id=request_id,
            prompt_token_ids=arrival.token_ids,
            max_total_tokens=most,
            priority=arrival.priority,
            tenant=arrival.tenant,
        )
        request = Request(inputs, metrics=RequestMetrics(arrival.time))
        try:
            self._queue(request)
        except QueueFullError:
            return Refusal.QUEUE_FULL
        return request

    def take_over(self, request: Request) -> Request:
        """Queue a request whose replica died. Return a new request that continues after its tokens."""
        moved = Request(replace(request.inputs, is_resumed=True), metrics=request.metrics)
        moved.token_ids += request.output_token_ids
        self._queue(moved)
        return moved

    def _queue(self, request: Request) -> None:
        self.scheduler.add(request)
        self._silent[request.request_id] = request.num_tokens
        self.load += load_of(request.num_tokens, has_output=False)

    @property
    def waited_s(self) -> float:
        """Total seconds that the replica's device has waited for the host; see `Pipeline`."""
        return self._pipeline.waited_s

    def unfinished(self) -> list[Request]:
        """Return the running requests by rank, followed by the waiting ones."""
        return [*self.scheduler.running, *self.scheduler.waiting()]

    def begin_step(self, now: float) -> Step | None:
        """Schedule a step, if another step may be in flight and there is anything to compute."""
        if len(self.in_flight) == self._pipeline.num_in_flight or not self.scheduler.has_unfinished():
            return None
        self.now = now
        schedule = self.scheduler.schedule()
        if schedule.is_empty:  # those in flight have all requests
            return None
        step = Step(schedule, self._pipeline.end_of(schedule, now))
        self.in_flight.append(step)
        return step

    def end_step(self, now: float) -> tuple[int, list[Request]]:
        """Record the oldest step's results. Return the number of sampled tokens and the finished requests."""
        step = self.in_flight.popleft().schedule
        num_finished = self.scheduler.counters.num_finished
        self.now = now
        tokens: list[int | None] = [SAMPLED] * len(step.sampled)
        runs = {}
        for row, drafts in enumerate(step.drafts, step.num_decode_tokens):
            # Place i is accepted with its own share, and then all before it are.
            chance = self._rng.random()
            num_accepted = sum(chance < share for share in self._acceptance[: len(drafts)])
            tokens[row] = None
            runs[row] = [SAMPLED] * (1 + num_accepted)
        generated_before = self.scheduler.counters.num_generated_tokens
        advanced = self.scheduler.update(step, tokens, runs=runs)
        num_sampled = self.scheduler.counters.num_generated_tokens - generated_before
        self.load += num_sampled
        for request in advanced if self._silent else ():
            if (num := self._silent.pop(request.request_id, None)) is not None:
                self.load += load_of(num, has_output=True) - load_of(num, has_output=False)
        if self.scheduler.counters.num_finished == num_finished:
            return num_sampled, []
        finished = [r for r in advanced if r.status is RequestStatus.FINISHED]
        self.load -= sum(load_of(request.num_tokens, has_output=True) for request in finished)
        return num_sampled, finished
