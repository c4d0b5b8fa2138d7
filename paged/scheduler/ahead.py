"""StepsAhead: decodes that are scheduled before the step in flight that draws their last token has ended."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from ..blocks.manager import BlockManager
from ..requests.request import Request
from .preemption import Preemption
from .running import RunningSet
from .schedule import Schedule


class StepsAhead:
    """Schedules decodes in steps that begin while the device still computes earlier steps.

    The token that a step in flight draws stays in the request's seat on the device, so the host need not know
    it to schedule the next token. The host does know the token's position, its blocks, and whether the output
    ends there by its length. If the output ends in another way (a stop token, a stop string or an abort), the
    steps in flight compute a useless row. `Scheduler.update` drops the row; the request's blocks and seat are
    not reused until these steps end.

    If the host must see a request's tokens to compute the next one (`follows_its_text`), or if the request
    may get drafts, its next step waits for all of its results. All such requests are put into one step,
    because a step with half as many takes nearly as long.

    If blocks run short, nothing is scheduled ahead: the steps in flight end first, and then requests are
    preempted.
    """

    def __init__(self, running: RunningSet, preemption: Preemption, manager: BlockManager) -> None:
        self._running = running
        self._preemption = preemption
        self._manager = manager
        self._drains = False
        self._is_drafting = False
        self._newest: Schedule | None = None
        self._has_waiting = deque[bool]()  # by step in flight: whether it has decodes that wait for results
        self._ended_at = -math.inf

    def is_draining(self) -> bool:
        """Return whether the steps in flight must end before the next step begins."""
        self._drains = self._drains and self._manager.pool.num_steps_in_flight > 0
        return self._drains

    def drain(self) -> bool:
        """Let the steps in flight end before the next step begins. Return whether any are in flight."""
        self._drains = self._manager.pool.num_steps_in_flight > 0
        return self._drains

    def schedule_decodes(self, schedule: Schedule, budget: int, *, is_drafting: bool) -> list[Request]:
        """Schedule one token for each request that needs exactly one, now or once its pending token is drawn.

        is_drafting: whether decodes may get drafts; these depend on the tokens so far.

        Returns the requests that need more than one token.
        """
        prefills = list[Request]()
        self._is_drafting = is_drafting
        if self.is_draining() or (self._lacks_blocks() and self.drain()):
            return prefills
        self._learn(self._running.newcomers)
        requests = schedule.requests
        starts = list[int]()
        num_in_flight = self._manager.pool.num_steps_in_flight
        gathers = any(self._has_waiting)
        states = self._running.states
        for request in self._running.requests.copy():
            if not request.ready or request.held:  # or preempted just now
                continue
            num_pending = request.num_pending
            end = len(request.token_ids) + num_pending
            if num_pending:
                if end >= request.ahead_until or (is_drafting and self._waits(request)):
                    continue
                if num_pending < num_in_flight and not self._is_in_newest(request):
                    continue
            elif request.num_computed_tokens + 1 != end or request.siblings or not request.generates:
                prefills.append(request)
                continue
            elif gathers and self._waits(request):
                continue
            if len(requests) >= budget:
                continue
            blocks = request.blocks
            if end > blocks.capacity:
                if not self._preemption.make_room(request, end, schedule):
                    if self._drains:
                        break
                    continue
                schedule.grown.append(len(requests))
                if end > blocks.register_at:  # the digest of a block needs its tokens
                    self._manager.register(blocks, request.token_ids, min(end - 1, request.num_tokens))
                if states is not None:
                    states.roll(request, end - 1)
            request.ready = False  # until the step begins: it must not be preempted for another one
            requests.append(request)
            starts.append(end - 1)
        schedule.sample_decodes(starts)
        return prefills

    def begin_step(self, schedule: Schedule) -> None:
        """Add the tokens that a step will draw to its requests' pending tokens. Make decodes ready again."""
        self._learn(schedule.newcomers)
        num_decodes = schedule.num_decode_tokens + len(schedule.drafts)
        decodes = schedule.requests[:num_decodes]
        self._has_waiting.append(any(map(self._waits, decodes)))
        for request in schedule.sampled_requests:
            request.num_pending += 1
            request.ready = True
        for request in decodes[schedule.num_decode_tokens :]:  # how many drafts are right is not known
            request.ready = False
        self._newest = schedule

    def end_step(self, schedule: Schedule, now: float) -> None:
        """Subtract the tokens that the oldest step drew from its requests' pending tokens.

        The step's scheduled_time becomes at least the time at which the step before it ended.
        """
        self._has_waiting.popleft()
        for request in schedule.sampled_requests:
            request.num_pending -= 1
        schedule.scheduled_time = max(schedule.scheduled_time, self._ended_at)
        self._ended_at = now

    def cancel(self) -> None:
        """Forget the steps in flight. Their tokens will be drawn again."""
        self._has_waiting.clear()
        self._newest = None
        for request in self._running.requests:
            request.num_pending = 0

    def _learn(self, requests: Iterable[Request]) -> None:
        """Find out how far requests that are new, or were changed, may go before their results are known."""
        for request in requests:
            inputs = request.inputs
            if follows_its_text(request):
                request.ahead_until = 0
            elif inputs.long_from is not None and request.num_tokens < inputs.long_from:
                # With that token all K and V are others.
                request.ahead_until = min(inputs.max_total_tokens, inputs.long_from)
            else:
                request.ahead_until = inputs.max_total_tokens

    def _waits(self, request: Request) -> bool:
        """Return whether a decode waits for the results of its steps."""
        may_draft = self._is_drafting and request.inputs.params.num_speculative_tokens != 0
        return may_draft or not request.ahead_until

    def _is_in_newest(self, request: Request) -> bool:
        """Return whether the newest step draws a token of this request.

        The sampler forgets what it has counted of requests that are not in a step.
        """
        return self._newest is not None and request in self._newest.sampled_requests

    def _lacks_blocks(self) -> bool:
        """Return whether there may be too few blocks for all decodes of the next step."""
        pool = self._manager.pool
        running = self._running
        spare = pool.num_available - running.num_reserved_blocks()
        most = 2 * len(self._manager.windows)  # of a decode: a new block and a copy
        if spare >= most * len(running.requests):
            return False
        num_missing = 0
        for request in running.requests:
            end = request.num_tokens + request.num_pending
            is_decode = request.num_pending or request.num_computed_tokens + 1 == end
            if is_decode and request.ready and not (request.held or request.protected):
                num_missing += self._manager.missing_blocks(request.blocks, end)
        return num_missing > spare


def follows_its_text(request: Request) -> bool:
    """Return whether the host must know all tokens of a request before its next token is drawn."""
    inputs = request.inputs
    params = inputs.params
    return (
        request.is_beam
        or request.sampling.grammar is not None
        or params.penalizes_last
        or bool(params.logits_processors)
        or (params.dry_multiplier > 0.0 and params.dry_penalty_last_n != 0)
        or any(len(word) > 1 for word in inputs.rules.bad_words)
    )
