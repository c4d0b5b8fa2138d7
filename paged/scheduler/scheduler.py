"""Scheduler: which requests compute how many tokens in the next step."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from ..base.errors import QueueFullError, UsageError
from ..blocks.manager import BlockManager
from ..blocks.sequence import SequenceBlocks
from ..requests.request import (
    NO_ADAPTER,
    NO_MASK,
    TIMEOUT_MESSAGE,
    ErrorKind,
    FinishReason,
    Request,
    RequestStatus,
)
from .policy import FirstComeFirstServed, Policy
from .preemption import Preemption
from .running import RunningSet
from .schedule import NOT_FINITE, RowError, Schedule, SchedulerCounters
from .waiting import Room, WaitingQueue

if TYPE_CHECKING:
    from ..blocks.content_chain import Content
    from .ahead import StepsAhead
    from .deadlines import Deadlines
    from .drafts import Drafts
    from .policies import Fair
    from .runs import Runs
    from .state_moves import StateMoves
    from .towers import TowerQueue

NO_ERRORS: Mapping[int, RowError] = MappingProxyType({})
NO_RUNS: Mapping[int, Sequence[int]] = MappingProxyType({})


class Scheduler:
    """Continuous batching under a token budget.

    There is no prefill phase and no decode phase. A step computes the missing tokens of running requests,
    decodes first, and then admits waiting requests with the rest of the budget.

    When blocks run out, the running request of the highest rank is preempted, and later recomputed or swapped
    in. After max_preemptions it is protected: it runs again once all blocks that it may ever need are
    reserved for it. Therefore every request ends after at most (max_preemptions + 2) max_total_tokens of its
    own steps, and every step computes something.

    Steps may overlap. `schedule` skips requests that a step in flight computes, unless `ahead` allows them;
    `update` must be called in the order of steps.

    policy: the order of waiting requests and the ranks of running ones; see `policies`.
    max_num_seqs: maximum number of requests that run at once.
    max_num_batched_tokens: maximum number of tokens in a step.
    long_prefill_token_threshold: maximum number of prompt tokens of a request in a step; None sets no limit.
    max_num_partial_prefills: maximum number of running requests with incomplete prompts; None sets no limit.
    watermark: the share of blocks left free when a request is admitted, so that running requests can grow.
    max_waiting: maximum number of waiting requests; None sets no limit.
    swap_pays: returns whether swapping a number of tokens takes less time than recomputing them; None never
        swaps.
    held_for_s: seconds for which a held request keeps its seat and its blocks although another request waits
        for them.
    clock: returns the time in seconds, for deadlines and metrics.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: Policy | None = None,
        long_prefill_token_threshold: int | None = None,
        max_num_partial_prefills: int | None = None,
        watermark: float = 0.01,
        max_waiting: int | None = None,
        max_preemptions: int = 8,
        swap_pays: Callable[[int], bool] | None = None,
        held_for_s: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        # An empty policy is false: it has a length.
        self.policy: Policy = FirstComeFirstServed() if policy is None else policy
        self.max_chunk = min(long_prefill_token_threshold or max_num_batched_tokens, max_num_batched_tokens)
        self.max_num_partial_prefills = max_num_partial_prefills or max_num_seqs
        self.max_waiting = max_waiting
        self.clock = clock
        self.held_for_s = held_for_s
        # How many steps are to be in flight at once, of different requests: decodes are divided among them.
        self.num_in_flight = 1
        self.counters = SchedulerCounters()
        self._queue = WaitingQueue(self.policy, block_manager, self.max_chunk, watermark, self._arrive)
        self._running = RunningSet(block_manager, max_num_seqs=max_num_seqs, max_chunk=self.max_chunk)
        # The engine's user may have written the policy, without this attribute.
        self._fair = cast("Fair", self.policy) if getattr(self.policy, "divides_seats", False) else None
        self.preemption = Preemption(
            block_manager, self._running, self._queue, self.counters, max_preemptions, swap_pays, self._fair
        )
        if self._fair is not None:
            num_blocks = block_manager.pool.num_blocks
            self._fair.divide(
                self._running.holdings,
                lambda num_tokens: block_manager.blocks_for(num_tokens) * len(block_manager.windows),
                max_num_seqs,
                num_blocks,
                self._fair.OUTPUT_COST * num_blocks * block_manager.block_size,
            )
        self.drafts: Drafts | None = None
        # Chooses the decodes where steps in flight may have the same requests; see `run_ahead`.
        self.ahead: StepsAhead | None = None
        # The most tokens of waiting requests, unless there is one alone. None sets no limit.
        self.max_queued_tokens: int | None = None
        # What the images of prompts wait for; None: the model sees none. See `see_images`.
        self.towers: TowerQueue | None = None
        self._num_kept_tokens = 0  # of the next step's budget, for tokens that are computed in one step
        # Ends the output of a request whose newest token, of a run, completes a stop string.
        self.end_at_stop_string: Callable[[Request], None] | None = None
        self._watermark_blocks = int(watermark * block_manager.pool.num_blocks)
        self._num_arrivals = 0
        self._deadlines: Deadlines | None = None  # None until a request has one

    @property
    def running(self) -> list[Request]:
        """The running requests by rank."""
        return self._running.requests

    @property
    def states(self) -> StateMoves | None:
        """The moves of recurrent states in the next step; None if the model has no such states."""
        return self._running.states

    @property
    def num_waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._queue)

    @property
    def num_queued_tokens(self) -> int:
        """The number of tokens in waiting requests."""
        return self._queue.num_tokens

    def waiting(self) -> Iterator[Request]:
        """Iterate over the waiting requests, roughly in order."""
        return iter(self._queue)

    def has_unfinished(self) -> bool:
        """Return whether any request is unfinished."""
        return bool(self.running) or self.num_waiting > 0

    def has_runnable(self) -> bool:
        """Return whether any unfinished request is not held."""
        return self._queue.peek() is not None or not all(request.held for request in self.running)

    def run_ahead(self) -> None:
        """Schedule decodes from now on even while a step in flight still computes their last token."""
        from .ahead import StepsAhead

        self.ahead = StepsAhead(self._running, self.preemption, self.block_manager)
        self.preemption.drain = self.ahead.drain

    def have_adapters(self, num_slots: int) -> None:
        """Enable requests with LoRA adapters.

        num_slots: how many adapters are on the device at once.
        """
        from .adapters import AdapterSlots

        self._running.adapters = AdapterSlots(num_slots, self.max_num_seqs)

    def schedule(self) -> Schedule:
        """Choose the work of the next step and allocate its blocks."""
        schedule = Schedule(scheduled_time=self.clock())
        if self.ahead is not None and self.ahead.is_draining():
            return schedule
        self._make_room_for_others(schedule)
        num_kept = self._num_kept_tokens
        self._choose_requests(schedule)
        if num_kept and schedule.is_empty:  # what the tokens were kept for cannot run any more
            self._num_kept_tokens = 0
            self._choose_requests(schedule)
        if not schedule.is_empty:
            self._running.begin_step()
            if self._running.states is not None:
                self._running.states.take(schedule)
            if schedule.requests:
                self._running.take_changes(schedule)
                if self._running.adapters is not None:
                    self._running.adapters.take(schedule)
            if self.ahead is not None:
                self.ahead.begin_step(schedule)
        elif not self.block_manager.pool.num_steps_in_flight and self._must_run():
            raise AssertionError("an idle step with work to do")
        return schedule

    def _make_room_for_others(self, schedule: Schedule) -> None:
        """Preempt the requests that give way to others, whatever room there is."""
        self.preemption.requeue_grown_long()
        self._let_others_pass()
        self.preemption.preempt_held(schedule.scheduled_time - self.held_for_s, schedule)
        if self.policy.preempts:
            if self._running.adapters is not None:
                self.preemption.make_room_for_adapter(self._whole_step(), schedule)
                self._let_others_pass()
            self.preemption.make_room_for_waiting(self._whole_step(), schedule)
        if self._fair is not None:
            self._running.count_anew()
            self._queue.reconsider()  # who is below a share may have changed
            self._split_head(self._fair)
            self.preemption.make_room_for_shares(self._whole_step(), schedule)

    def _choose_requests(self, schedule: Schedule) -> None:
        """Choose who computes how many tokens, and allocate their blocks."""
        num_preempted = schedule.num_preempted
        if self.towers is not None:
            head = self._queue.peek()
            self.towers.begin_step([*self.running, *([] if head is None else [head])])
        unfinished = self._schedule_prompts(self._schedule_decodes(schedule), schedule)
        # A request that was just preempted for want of blocks waits for the next step.
        is_short = schedule.num_preempted != num_preempted
        is_short = is_short or (self.ahead is not None and self.ahead.is_draining())
        if not is_short and len(self._queue):
            self._admit_waiting(unfinished, schedule)
        if self.drafts is not None and schedule.num_decode_tokens and not schedule.num_preempted:
            budget = self._budget_left(schedule)
            self.drafts.extend(schedule, self.block_manager, budget, self.max_chunk, self._num_spare_blocks)
        if self.towers is not None:
            schedule.towers = self.towers.take(is_alone=schedule.is_empty)

    def _let_others_pass(self) -> None:
        """Set the requests at the head of the queue aside whose adapters have no slot."""
        adapters = self._running.adapters
        if adapters is None:
            return
        for request in adapters.take_released():
            request.held &= ~NO_ADAPTER
            self._queue.take_back(request)
        while (head := self._queue.peek()) is not None and not adapters.admits(head):
            head.held |= NO_ADAPTER
            adapters.set_aside(head)
            self._queue.set_aside(head)

    def _split_head(self, fair: Fair) -> None:
        """Let the samples of the head run one by one where they exceed their tenant's share together.

        Until enough seats are free for all of them, none could be taken by other tenants.
        """
        head = self._queue.peek()
        if head is None or not head.siblings or not fair.exceeds_share(head, self._running.holdings()):
            return
        siblings = head.siblings
        head.siblings = ()
        for sibling in siblings:
            sibling.blocks = self._open(sibling)
            self._enter(sibling)
            self._queue.push(sibling)

    def _must_run(self) -> bool:
        """Return whether a step must not be empty: a request can run, and no held one keeps its blocks."""
        return self.has_runnable() and not any(request.held for request in self.running)

    def _whole_step(self) -> Room:
        """Return what a step has at most, the blocks that come back soon included."""
        pool = self.block_manager.pool
        num_blocks = pool.num_available + pool.num_deferred
        return Room(self.max_num_batched_tokens, self.max_num_seqs, self.max_num_partial_prefills, num_blocks)

    def _schedule_decodes(self, schedule: Schedule) -> list[Request]:
        """Schedule one token for each request that needs exactly one. Return the requests that need more."""
        if self.ahead is not None:
            is_drafting = self.drafts is not None and not self.drafts.is_idle
            budget = self.max_num_batched_tokens - self._num_kept_tokens
            return self.ahead.schedule_decodes(schedule, budget, is_drafting=is_drafting)
        requests = schedule.requests
        prefills: list[Request] = []
        budget = self.max_num_batched_tokens - self._num_kept_tokens
        running = self.running.copy()
        states = self._running.states
        if self.num_in_flight > 1:
            budget = min(budget, self._share_of_decodes())
        scarce = len(self.running) > budget
        for request in running:
            if not request.ready or request.held:  # or in flight, or preempted just now
                continue
            end = request.num_computed_tokens + 1
            if end != len(request.token_ids) or request.siblings or not request.generates:
                prefills.append(request)
                continue
            if scarce and len(requests) >= budget:
                continue
            blocks = request.blocks
            if end > blocks.capacity:
                if not self.preemption.make_room(request, end, schedule):
                    continue
                schedule.grown.append(len(requests))
                if end > blocks.register_at:
                    self.block_manager.register(blocks, request.token_ids, end - 1)
                if states is not None:
                    states.roll(request, end - 1)
            request.ready = False
            requests.append(request)
        schedule.sample_decodes([request.num_computed_tokens for request in requests])
        return prefills

    def _share_of_decodes(self) -> int:
        """Return how many decodes the next step takes at most, so that the steps in flight have equally many.

        Else the first would take all of them, and the next ones had none until it ends.
        """
        num_ready = num_computed = 0
        for request in self.running:
            if request.held or request.siblings or not request.generates:
                continue
            if request.ready:
                num_ready += request.num_tokens - request.num_computed_tokens == 1
            else:
                num_computed += 1
        num_left = max(1, self.num_in_flight - self.block_manager.pool.num_steps_in_flight)
        share = min(-(-num_ready // num_left), -(-(num_ready + num_computed) // self.num_in_flight))
        return max(1, share)

    def _schedule_prompts(self, prefills: list[Request], schedule: Schedule) -> list[Request]:
        """Schedule chunks of prompts. Return the requests that need more tokens after the step."""
        unfinished = []
        self._num_kept_tokens = 0
        for request in prefills:
            if not request.ready:
                continue
            missing = request.num_tokens - request.num_computed_tokens
            num_new = min(missing, self._running.most_new(request), self._budget_left(schedule))
            if request.inputs.images:
                num_new = self._seen(request, request.num_computed_tokens, num_new, schedule)
            if request.inputs.uncut and num_new:
                start = request.num_computed_tokens
                num_new = self._without_cut(request, start, num_new, self._budget_left(schedule))
            end = request.num_computed_tokens + num_new
            # Decodes keep their blocks and end some time. Only in a step without them others are preempted.
            if num_new and (
                self._running.grow(request, end, schedule.copies)
                or (schedule.is_empty and self.preemption.make_room(request, end, schedule))
            ):
                self._compute(request, num_new, schedule)
                if num_new == missing:
                    continue
            unfinished.append(request)
        return unfinished

    def _seen(self, request: Request, start: int, num_new: int, schedule: Schedule) -> int:
        """Return how many of the next tokens a request computes, whose images must be seen before."""
        assert self.towers is not None, "a request with images of a model that sees none"
        budget = self.max_num_batched_tokens - schedule.num_tokens
        return self.towers.most_new(request, start, num_new, budget)

    def _without_cut(self, request: Request, start: int, num_new: int, budget: int) -> int:
        """Return how many tokens from `start` on a request computes so that none are cut that must not be.

        If it can compute none, as others have taken the budget, so much of the next step is kept.
        """
        from .uncut import num_needed, num_uncut

        found = num_uncut(request.inputs.uncut, start, num_new, budget)
        if not found and not self._num_kept_tokens:
            self._num_kept_tokens = num_needed(request.inputs.uncut, start)
        return found

    def _admit_waiting(self, unfinished: list[Request], schedule: Schedule) -> None:
        """Run waiting requests while there are tokens, seats and blocks for them."""
        pool = self.block_manager.pool
        # Running requests come first.
        reserved = sum(
            self._running.missing_blocks(request) for request in unfinished if not request.protected
        )
        reserved += self._running.num_reserved_blocks()
        num_partial = self.max_num_partial_prefills - len(unfinished)
        while self._budget_left(schedule) and self._running.num_seats > 0:
            alone = not self.running and not pool.num_steps_in_flight
            num_blocks = math.inf if alone else pool.num_available - reserved
            room = Room(self._budget_left(schedule), self._running.num_seats, num_partial, num_blocks)
            self._let_others_pass()
            request = self._admit_head(room, schedule)
            if request is None:
                return
            partial = request.num_computed_tokens + schedule.num_new_tokens[-1] < request.num_tokens
            num_partial -= partial
            if partial or request.protected:
                reserved += self._running.missing_blocks(request)

    def _admit_head(self, room: Room, schedule: Schedule) -> Request | None:
        """Run the head of the queue and return it, if there is room for all of its known tokens."""
        manager = self.block_manager
        found = self._queue.head_for(room)
        if found is None:
            return None
        request, need, num_new = found
        seq = request.blocks
        start = need.num_computed_tokens
        if request.inputs.images:
            num_new = self._seen(request, start, num_new, schedule)
        if request.inputs.uncut and num_new:
            num_new = self._without_cut(request, start, num_new, self._budget_left(schedule))
        if not num_new:
            return None
        if need.hits is not None:
            manager.start(seq, need.hits)
        elif not manager.swap_in(seq, start, schedule.swap_in):
            raise AssertionError("no room for a request that was admitted")
        if not manager.grow(seq, start, start + num_new, schedule.copies):
            raise AssertionError("no room for the first tokens of a request that was admitted")
        self._run(request, start, schedule.scheduled_time)
        self._compute(request, num_new, schedule)
        return request

    def _run(self, request: Request, num_computed: int, now: float) -> None:
        """Move a request from the queue to the running ones."""
        self._queue.pop(request)
        request.num_computed_tokens = num_computed
        if not request.ran_before:
            request.num_cached_tokens = num_computed
            request.metrics.first_scheduled_time = now
            self.counters.count_first_run(request)
        self._running.join(request)
        if self._running.states is not None:
            self._running.states.begin(request)

    def _compute(self, request: Request, num_new: int, schedule: Schedule) -> None:
        """Put tokens of a request, whose blocks are allocated, into the step."""
        end = request.num_computed_tokens + num_new
        self.block_manager.register(request.blocks, request.token_ids, end)
        if self._running.states is not None:
            self._running.states.roll(request, request.num_computed_tokens)
            self._running.states.leave(request, end)
        row = len(schedule.requests)
        schedule.add(request, num_new)
        request.ready = False
        if end < request.num_tokens or not request.generates:
            return
        schedule.sample(request, row)
        for sibling in self._running.take_siblings(request):
            self._enter(sibling)
            self._share(request, sibling, end, after_step=True)
            schedule.sample(sibling, row)

    def _num_spare_blocks(self) -> int:
        """Count the blocks that are neither reserved, nor kept for others, nor needed for begun prompts."""
        begun = [r for r in self.running if not r.protected and r.num_tokens - r.num_computed_tokens > 1]
        kept = self._running.num_reserved_blocks() + self._watermark_blocks
        return self.block_manager.pool.num_available - kept - sum(map(self._running.missing_blocks, begun))

    def _budget_left(self, schedule: Schedule) -> int:
        """Return how many tokens the step can still have, besides its work on images."""
        left = self.max_num_batched_tokens - schedule.num_tokens
        return left if self.towers is None else self.towers.beside(left)

    def update(
        self,
        schedule: Schedule,
        sampled: Sequence[int | None],
        errors: Mapping[int, RowError] = NO_ERRORS,
        runs: Mapping[int, Sequence[int]] = NO_RUNS,
    ) -> list[Request]:
        """Record the results of a finished step, which must be the oldest in flight.

        sampled: a token for each of `schedule.sampled_requests`. None ends the request with an error, unless
            its row is in `runs`.
        errors: the errors by rows of `sampled`; by default, the error is that the logits were not finite.
        runs: the tokens of rows that got none or several, by rows of `sampled`.

        Returns the sampled requests that got a token or an error, without requests that ended while the step
        was in flight; then the requests that ended with the report on their prompt.
        """
        self._running.end_step()
        now = self.clock()
        if self.ahead is not None:
            self.ahead.end_step(schedule, now)
        num_finished = 0
        dropped = list[int]()  # rows of requests that ended in flight
        advanced = schedule.sampled_requests
        num_decodes = schedule.num_decode_tokens
        first_prompt = num_decodes + len(schedule.drafts)
        reported = []
        for row in range(num_decodes, len(schedule.requests)):
            request = schedule.requests[row]
            # Which of its drafts a run accepts, `Runs.take` knows.
            request.num_computed_tokens += 1 if row < first_prompt else schedule.num_new_tokens[row]
            request.ready = True
            if request.report is not None and schedule.end_reported(row, now):
                reported.append(request)
        # This loop and `_schedule_decodes` are most of a step's cost on the host: method calls are inlined.
        for row, (request, token) in enumerate(zip(advanced, sampled, strict=True)):
            if row < num_decodes:
                request.num_computed_tokens += 1
            if request.finish_reason is not None:
                dropped.append(row)
                continue
            request.ready = True
            if token is None:
                if row in runs:
                    drafts = schedule.drafts[row - num_decodes] if num_decodes <= row < first_prompt else None
                    self._runs.take(request, runs[row], now, drafts, self.end_at_stop_string)
                    if self.drafts is not None and drafts is not None:
                        self.drafts.record(self._runs.num_accepted)
                else:
                    if self._running.states is not None and num_decodes <= row < first_prompt:
                        self._running.states.end_run(request, 1)  # the token before its drafts
                    request.finish("error", now, *errors.get(row, NOT_FINITE))
                num_finished += request.finish_reason is not None
                continue
            token_ids = request.token_ids
            token_ids.append(token)
            if len(token_ids) >= request.on_token_from or token in request.stop_ids:
                request.on_token(token, now)
                num_finished += request.finish_reason is not None
                if request.has_just_grown_long:
                    self.preemption.hold_grown_long(request)
        self.counters.count(schedule, now)
        if num_finished or reported:
            self.release_finished()
        if dropped:
            self.counters.num_generated_tokens -= len(dropped)
            gone = {*dropped}
            advanced = [request for row, request in enumerate(advanced) if row not in gone]
        if runs:
            empty = {id(schedule.sampled_requests[row]) for row, run in runs.items() if not run}
            advanced = [r for r in advanced if id(r) not in empty]
        self.policy.generated(advanced)
        if self.drafts is not None:
            self.drafts.end_step(schedule, self.clock)
        return advanced + reported if reported else advanced

    @cached_property
    def _runs(self) -> Runs:
        """What records the rows of steps that got none or several tokens."""
        from .runs import Runs

        return Runs(self.block_manager, self._running, self.preemption, self.counters, self.policy)

    def release_finished(self) -> None:
        """Free the blocks of finished requests."""
        for request in self._running.remove_finished(self.preemption.free):
            self.counters.num_finished += 1
            self.preemption.release(request)

    def cancel(self) -> None:
        """Discard the steps in flight after a failure, because it is unknown what they have written.

        All running requests wait again and are recomputed, and the prefix cache is emptied.
        """
        while self.block_manager.pool.num_steps_in_flight:
            self._running.end_step()
        if self.ahead is not None:
            self.ahead.cancel()
        if self.towers is not None:
            self.towers.forget()
        self.preemption.requeue_grown_long()
        # Each goes to the front of its queue, so the first is pushed last.
        for request in reversed(self._running.remove_all()):
            self.preemption.requeue(request)
        for request in self.waiting():
            self.block_manager.release(request.blocks)
            request.num_computed_tokens = 0
        self.block_manager.reset_prefix_cache()

    def add(self, request: Request) -> None:
        """Queue a request. It must fit into the pool when it runs alone.

        Raises QueueFullError if max_waiting requests, or max_queued_tokens tokens, are already waiting.
        """
        refusal = None if request.inputs.is_resumed else self.refusal(request)
        if refusal is not None:
            raise QueueFullError(refusal)
        # The last token is only sampled, never computed.
        assert self.block_manager.fits(request.inputs.max_total_tokens - 1), "a request that can never fit"
        assert 1 + len(request.siblings) <= self.max_num_seqs, "more samples than can run at once"
        request.blocks = self._open(request)
        self._enter(request)
        self._queue.push(request)

    def _open(self, request: Request) -> SequenceBlocks:
        return self.block_manager.open(request.token_ids, request.namespace, request.inputs.contents)

    def refusal(self, request: Request) -> str | None:
        """Return why the queue is too full for a request; None if it is not too full."""
        if self.max_waiting is not None and self.num_waiting >= self.max_waiting:
            return (
                f"{self.num_waiting} requests wait already and max_waiting is {self.max_waiting}; "
                "try again later or raise it"
            )
        most = self.max_queued_tokens
        num_tokens = self.num_queued_tokens
        # One that waits alone may have more: else it could never run.
        if most is not None and num_tokens and num_tokens + request.num_tokens > most:
            return (
                f"requests of {num_tokens:,} tokens wait already, this one has {request.num_tokens:,} and "
                f"max_queued_tokens is {most:,}; try again later or raise it"
            )
        return None

    def fork(self, request: Request, child: Request) -> None:
        """Start a copy of a live request with the same tokens, except perhaps the newest one.

        The child shares the request's blocks. It waits in the queue if no seat is free, or if a step in
        flight computes more of the request than its newest token.
        """
        if request.status is RequestStatus.FINISHED:
            raise UsageError(f"request {request.request_id!r} is finished and cannot be forked")
        # Its own copy of the last block must not be one of the reserved blocks.
        spare = self.block_manager.pool.num_available > self._running.num_reserved_blocks()
        can_share = request.ready and child.namespace == request.namespace
        if request.num_pending:
            # Blocks that leave the window of a later token are gone, and so is the state before it.
            num_unsure = request.num_tokens - request.num_computed_tokens
            has_states = self.block_manager.has_states
            can_share = can_share and not has_states and request.num_pending == num_unsure == 1
        if not (can_share and self._running.num_seats > 0 and spare):
            self.add(child)
            return
        self._enter(child)
        self._share(request, child, request.num_computed_tokens)
        child.ready = True

    def replace_last_token(self, request: Request, token: int) -> None:
        """Replace the newest token of a request. No step may have computed that token yet."""
        request.token_ids[-1] = token
        self._running.resend(request)

    def _enter(self, request: Request) -> None:
        """Give a new request its arrival, rank and deadline."""
        self._arrive(request)
        if request.inputs.deadline != math.inf:
            if self._deadlines is None:
                from .deadlines import Deadlines

                self._deadlines = Deadlines()
            self._deadlines.add(request, len(self.running) + self.num_waiting)

    def _arrive(self, request: Request) -> None:
        """Give a request the next arrival, and the rank that follows from it."""
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        request.rank = self.policy.rank(request)

    def _share(
        self, request: Request, child: Request, num_computed: int, *, after_step: bool = False
    ) -> None:
        """Run a child with the blocks of a request, and its state: before this step, or as it leaves it."""
        child.blocks = self.block_manager.fork(request.blocks, num_computed)
        child.num_computed_tokens = child.num_cached_tokens = num_computed
        child.metrics.start_beside(request.metrics)
        self._running.join(child)
        if self._running.states is not None:
            self._running.states.copy(request, child, after_step=after_step)

    def hold(self, request: Request, reason: int = NO_MASK) -> None:
        """Pause a request until `release`, because its reader is slow or its grammar mask is not ready.

        A running request keeps its seat and its blocks. It is preempted if a running request needs blocks, or
        if another request waits after held_for_s; such a preemption does not count towards max_preemptions. A
        waiting request is not admitted. Steps in flight may still give a held request a token.

        reason: SLOW_READER or NO_MASK. If both reasons apply, the request continues after the release of
            both.
        """
        if request.status is not RequestStatus.FINISHED:
            self._set_held(request, request.held | reason)

    def release(self, request: Request, reason: int = NO_MASK) -> None:
        """Remove one reason for holding a request. The request continues if it was the last reason."""
        self._set_held(request, request.held & ~reason)

    def _set_held(self, request: Request, held: int) -> None:
        before = request.held & ~NO_ADAPTER
        after = held & ~NO_ADAPTER
        # One that was set aside and is held asks for a slot again once it is released.
        request.held = after or held
        if bool(before) is bool(after):
            return
        # A sample that has not arrived runs when its prompt is computed.
        if request.status is RequestStatus.WAITING and request.arrival >= 0:
            self._queue.remove(request)
            self._queue.push(request)
        if after:
            self.preemption.hold(request, self.clock())
        else:
            self.preemption.release(request)

    def abort(self, request: Request, message: str | None = None, kind: ErrorKind = "abort") -> None:
        """End a request, running or waiting, and free its blocks."""
        self._end(request, "abort", message, kind)

    def complete(self, request: Request) -> None:
        """End a request whose grammar allows no further token. No step may be computing it."""
        self._end(request, "stop")
        self.counters.num_finished += 1

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        message: str | None = None,
        kind: ErrorKind | None = None,
    ) -> None:
        if self._running.states is not None and request.is_settled:
            self.preemption.keep(request)
        (self._running if request.status is RequestStatus.RUNNING else self._queue).remove(request)
        for ended in (request, *request.siblings):
            ended.finish(reason, self.clock(), message, kind)
            self.preemption.release(ended)
        self.block_manager.release(request.blocks)

    def expire(self) -> list[Request]:
        """Abort and return the requests whose deadline has passed."""
        if self._deadlines is None:
            return []
        expired = self._deadlines.take_expired(self.clock())
        for request in expired:
            self.abort(request, TIMEOUT_MESSAGE, "timeout")
        return expired

    def pin(
        self,
        name: str,
        token_ids: Sequence[int],
        namespace: bytes,
        longest: int = 1,
        contents: Sequence[Content] = (),
    ) -> int:
        """Pin the cached blocks of a prefix. Return how many tokens they hold; 0 if nothing was pinned.

        Nothing is pinned if no block is cached, or if a live request would not fit in the other blocks.

        longest: the maximum number of tokens of requests that are not in the queue yet.
        """
        manager = self.block_manager
        num_tokens = manager.pin(name, token_ids, namespace, contents)
        self._queue.reconsider()  # pinned blocks are no longer needed from the pool
        live = itertools.chain(self.running, self.waiting())
        longest = max(longest, *(request.inputs.max_total_tokens for request in live), 1)
        spare = manager.pool.num_available - self._running.num_reserved_blocks()
        if num_tokens and manager.fits(longest - 1) and spare >= 0:
            return num_tokens
        manager.unpin(name)
        return 0

    def check(self) -> None:
        """Check the invariants of the scheduler and its block manager."""
        self.preemption.check()
        manager = self.block_manager
        waits = RequestStatus.WAITING
        num_waiting = num_queued_tokens = 0
        manager.check()
        self._running.check()
        self._queue.check()
        if self.towers is not None:
            self.towers.check()
        # No enum is looked up in the loop: the simulation does this after every step.
        for request in self.waiting():
            num_waiting += 1
            num_queued_tokens += request.num_tokens
            assert request.status is waits
            assert not any(request.blocks.tables), "a request that does not run holds blocks"
            assert (request.num_computed_tokens > 0) is (request.blocks.host is not None)
        assert num_waiting == self.num_waiting, "the queue is miscounted"
        assert num_queued_tokens == self.num_queued_tokens, "the tokens of the queue are miscounted"
        held = {request.blocks for request in self.running}
        assert held.issuperset(manager.holders()), "blocks are held for a request that does not run"
