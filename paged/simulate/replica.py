"""Replica: one engine of the fleet, with a cost model instead of a model."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence

from ..drafting.drafter import Draft
from ..errors import QueueFullError
from ..requests.request import Request, RequestInputs, RequestMetrics, RequestStatus
from ..runner.sizes import Sizes
from ..scheduler.drafts import Drafts
from ..scheduler.schedule import Schedule
from .cost import StepCost
from .workload import SAMPLED, Arrival


class Refusal(enum.Enum):
    """Why a request is refused. The value is its name in JSON."""

    TOO_LONG = "longer_than_max_model_len"
    NEVER_FITS = "larger_than_kv_cache"
    QUEUE_FULL = "max_waiting"
    EARLIER_TURN = "earlier_turn_refused"


class Guesses:
    """A drafter of as many tokens as it is asked for: which are right is drawn when the step ends."""

    def propose(self, _: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        """Return a draft for each request."""
        return [Draft([0] * limit) for limit in limits]


class Replica:
    """The real scheduler and block manager, one step at a time.

    acceptance: the share of draft tokens that are accepted, by their place; without any there are no drafts.
    """

    def __init__(
        self, sizes: Sizes, num_blocks: int, cost: StepCost, acceptance: Sequence[float] = ()
    ) -> None:
        self.now = 0.0
        self.step: Schedule | None = None  # in flight
        self.awake = False  # whether a step is running or about to begin
        self._cost = cost
        self._max_model_len = sizes.max_model_len
        self.manager = sizes.new_block_manager(num_blocks, sizes.num_host_blocks)
        self.scheduler = sizes.new_scheduler(self.manager, clock=lambda: self.now)
        self._acceptance = acceptance
        self._rng = random.Random(0)
        if acceptance:
            most = len(acceptance)
            self.scheduler.drafts = Drafts(Guesses(), most, sizes.model.vocab_size, sizes.max_sampled_rows)

    def add(self, request_id: str, arrival: Arrival) -> Request | Refusal:
        """Queue a request. Return it, or the reason why it is refused."""
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
            self.scheduler.add(request)
        except QueueFullError:
            return Refusal.QUEUE_FULL
        return request

    def begin_step(self, now: float) -> float:
        """Schedule a step. Return the seconds it takes."""
        self.now, self.step = now, self.scheduler.schedule()
        return self._cost.seconds(self.step)

    def end_step(self, now: float) -> tuple[int, list[Request]]:
        """Record the results of the step. Return how many tokens it sampled and which requests finished."""
        assert self.step is not None, "no step is in flight"
        num_running = len(self.scheduler.running)
        self.now = now
        tokens: list[int | None] = [SAMPLED] * len(self.step.sampled)
        runs = {}
        for row, drafts in enumerate(self.step.drafts, self.step.num_decode_tokens):
            # Place i is accepted with its own share, and then all before it are.
            chance = self._rng.random()
            num_accepted = sum(chance < share for share in self._acceptance[: len(drafts)])
            tokens[row] = None
            runs[row] = [SAMPLED] * (1 + num_accepted)
        generated_before = self.scheduler.counters.num_generated_tokens
        advanced = self.scheduler.update(self.step, tokens, runs=runs)
        num_sampled = self.scheduler.counters.num_generated_tokens - generated_before
        self.step = None
        if len(self.scheduler.running) == num_running:
            return num_sampled, []
        return num_sampled, [r for r in advanced if r.status is RequestStatus.FINISHED]
