"""Scheduler: which requests compute how many tokens in the next step."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from ..blocks.manager import BlockManager
from ..errors import QueueFullError, UsageError
from ..requests.request import Request, RequestStatus
from .policies import FirstComeFirstServed, Policy
from .running import RunningSet
from .schedule import NOT_FINITE, Schedule, SchedulerCounters
from .waiting import Room, WaitingQueue

NO_ERRORS: Mapping[int, str] = MappingProxyType({})


class Scheduler:
    """Continuous batching under a token budget.

    There is no prefill phase and no decode phase: a step gives every running request the tokens it lacks, as
    far as the budget goes, those that lack one first, and then admits waiting ones into what is left.

    When blocks run out, the running request of the highest rank gives its own back, is recomputed or swapped
    in later, and after max_preemptions is protected: it runs again once all blocks it can ever need are set
    aside for it. So every request ends after at most (max_preemptions + 1) max_total_tokens steps of its own,
    and every step computes something.

    Steps may overlap: `schedule` leaves out what a step in flight computes, `update` takes them in order.

    policy: who waits for whom; see `policies`.
    max_num_seqs: how many requests run at once.
    max_num_batched_tokens: tokens of a step.
    long_prefill_token_threshold: the most prompt tokens of one request in a step, so that a long prompt
        leaves room for others; None sets no limit.
    max_num_partial_prefills: how many running requests may have a prompt that is not computed yet; None sets
        no limit.
    watermark: the share of blocks kept free when a request is admitted, so that those running can grow.
    max_waiting: how many requests may wait; None sets no limit.
    max_preemptions: see above.
    swap_pays: whether it is cheaper to swap a request out and in than to recompute that many tokens; None
        never swaps.
    clock: in seconds, for deadlines and metrics.
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        # An empty policy is false: it has a length.
        self.policy: Policy = FirstComeFirstServed() if policy is None else policy
        self.max_chunk = min(long_prefill_token_threshold or max_num_batched_tokens, max_num_batched_tokens)
        self.max_num_partial_prefills = max_num_partial_prefills or max_num_seqs
        self.max_waiting, self.max_preemptions = max_waiting, max_preemptions
        self.swap_pays, self.clock = swap_pays, clock
        self.counters = SchedulerCounters()
        self._queue = WaitingQueue(self.policy, block_manager, self.max_chunk, watermark)
        self._running = RunningSet(
            block_manager,
            max_num_seqs=max_num_seqs,
            max_chunk=self.max_chunk,
            max_preemptions=max_preemptions,
        )
        self._num_arrivals = 0
        self._deadlines: list[tuple[float, int, Request]] = []

    # From outside

    @property
    def running(self) -> list[Request]:
        """The requests that run, by rank."""
        return self._running.requests

    @property
    def num_waiting(self) -> int:
        """How many requests wait."""
        return len(self._queue)

    def waiting(self) -> Iterator[Request]:
        """The requests that wait, roughly in order."""
        return iter(self._queue)

    def has_unfinished(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.running) or self.num_waiting > 0

    def add(self, request: Request) -> None:
        """Queue a request, which must be able to fit the pool when it is alone.

        Raises QueueFullError if max_waiting requests wait already.
        """
        if self.max_waiting is not None and self.num_waiting >= self.max_waiting:
            raise QueueFullError(
                f"{self.num_waiting} requests wait already and max_waiting is {self.max_waiting}; "
                "try again later or raise it"
            )
        # The last token is only sampled, never computed.
        assert self.block_manager.fits(request.inputs.max_total_tokens - 1), "a request that can never fit"
        assert 1 + len(request.siblings) <= self.max_num_seqs, "more samples than can run at once"
        request.blocks = self.block_manager.open(request.token_ids, request.inputs.namespace)
        self._enter(request)
        self._queue.push(request)

    def fork(self, request: Request, child: Request) -> None:
        """Let a child of a live request, with the same tokens so far but perhaps the newest, go on by itself.

        It shares the request's blocks, or waits where there is no place to run.
        """
        if request.status is RequestStatus.FINISHED:
            raise UsageError(f"request {request.request_id!r} is finished and cannot be forked")
        # Its own copy of the last block must not come out of what is set aside for others.
        spare = self.block_manager.pool.num_available - self._running.num_reserved_blocks() > 0
        if not (request.ready and self._running.num_seats > 0 and spare):
            self.add(child)
            return
        self._enter(child)
        self._share(request, child, request.num_computed_tokens)
        child.ready = True

    def pin(self, name: str, token_ids: Sequence[int], namespace: bytes) -> int:
        """Keep the cached blocks of a prefix, if every live request still fits beside them.

        Returns how many tokens they hold; 0, and nothing is pinned, if they do not fit or none is cached.
        """
        manager = self.block_manager
        num_tokens = manager.pin(name, token_ids, namespace)
        self._queue.reconsider()  # who waits need not bring what is pinned now
        live = itertools.chain(self.running, self.waiting())
        longest = max((request.inputs.max_total_tokens for request in live), default=1)
        spare = manager.pool.num_available - self._running.num_reserved_blocks()
        if num_tokens and manager.fits(longest - 1) and spare >= 0:
            return num_tokens
        manager.unpin(name)
        return 0

    def abort(self, request: Request, message: str | None = None) -> None:
        """End a request, wherever it is, and free its blocks."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._queue.remove(request)
        for ended in (request, *request.siblings):
            ended.finish("abort", self.clock(), message)
        self.block_manager.release(request.blocks)

    def expire(self) -> list[Request]:
        """Abort the requests whose deadline has passed, and return them."""
        now, expired = self.clock(), []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, request = heapq.heappop(self._deadlines)
            if request.status is not RequestStatus.FINISHED:
                self.abort(request, message="timeout_s has passed")
                expired.append(request)
        return expired

    def schedule(self) -> Schedule:
        """Choose the next step and allocate its blocks."""
        schedule = Schedule()
        if self.policy.preempts:
            self._preempt_for_waiting(schedule)
        num_preempted = schedule.num_preempted
        lacking = self._schedule_decodes(schedule)
        unfinished = self._schedule_prompts(lacking, schedule) if lacking else lacking
        # Whoever was preempted for want of blocks waits for the next step.
        if schedule.num_preempted == num_preempted and len(self._queue):
            self._admit_waiting(unfinished, schedule)
        if not schedule.is_empty:
            self.block_manager.begin_step()
        elif self.has_unfinished() and not self.block_manager.pool.num_steps_in_flight:
            raise AssertionError("an idle step with work to do")
        return schedule

    def update(
        self, schedule: Schedule, sampled: Sequence[int | None], errors: Mapping[int, str] = NO_ERRORS
    ) -> list[Request]:
        """Book a finished step, the oldest in flight.

        sampled: a token for each of `schedule.sampled_requests`; None ends that request with an error.
        errors: what the error is, by rows of sampled; by default that the logits were not finite.

        Returns those requests, but for the ones that were aborted meanwhile, and then those that ended with
        the report on their prompt.
        """
        self.block_manager.end_step()
        now, num_finished, num_aborted = self.clock(), 0, 0
        advanced, num_decodes = schedule.sampled_requests, schedule.num_decode_tokens
        reported = []
        for row in range(num_decodes, len(schedule.requests)):
            request = schedule.requests[row]
            request.num_computed_tokens += schedule.num_new_tokens[row]
            request.ready = True
            if request.report is not None and self._end_with_report(request, schedule, row, now):
                reported.append(request)
        # This loop and `_schedule_decodes` are what a step costs: they do by hand what methods would.
        for row, (request, token) in enumerate(zip(advanced, sampled, strict=True)):
            if row < num_decodes:
                request.num_computed_tokens += 1
            if request.finish_reason is not None:  # aborted in flight
                num_aborted += 1
                continue
            request.ready = True
            if token is None:
                request.finish("error", now, errors.get(row, NOT_FINITE))
                num_finished += 1
                continue
            token_ids = request.token_ids
            token_ids.append(token)
            if len(token_ids) >= request.alert_at or token in request.inputs.stop_ids:
                request.on_token(token, now)
                num_finished += request.finish_reason is not None
        self.counters.count(schedule)
        if num_finished or reported:
            self.release_finished()
        if num_aborted:
            advanced = [r for r in advanced if r.finish_reason != "abort"]
        self.policy.generated(advanced)
        return advanced + reported if reported else advanced

    def cancel(self) -> None:
        """Forget the steps in flight, which failed: nobody knows what they wrote, or copied.

        Everybody who runs waits again, to be computed anew, and the prefix cache is empty.
        """
        while self.block_manager.pool.num_steps_in_flight:
            self.block_manager.end_step()
        # Each goes to the front of its queue: the first of them comes last.
        for request in reversed(self._running.remove_all()):
            self._wait_again(request)
        for request in self.waiting():
            self.block_manager.release(request.blocks)
            request.num_computed_tokens = 0
        self.block_manager.reset_prefix_cache()

    def release_finished(self) -> None:
        """Take the blocks of finished requests back."""
        for request in self._running.remove_finished():
            self.counters.num_finished += 1
            self._release(request)

    # Steps

    def _schedule_decodes(self, schedule: Schedule) -> list[Request]:
        """Give a token to everybody who lacks one. Returns those who lack more."""
        requests, lacking, budget = schedule.requests, list[Request](), self.max_num_batched_tokens
        running, scarce = self.running.copy(), len(self.running) > budget
        for request in running:
            if not request.ready:  # in flight, or preempted just now
                continue
            end = request.num_computed_tokens + 1
            if end != len(request.token_ids) or request.siblings or not request.inputs.generates:
                lacking.append(request)
                continue
            if scarce and len(requests) == budget:
                break
            blocks = request.blocks
            if end > blocks.capacity:
                if not self._make_room(request, end, schedule):
                    continue
                schedule.grown.append(len(requests))
                if end > blocks.register_at:
                    self.block_manager.register(blocks, request.token_ids, end - 1)
            request.ready = False
            requests.append(request)
        num = schedule.num_tokens = schedule.num_decode_tokens = len(requests)
        schedule.num_new_tokens = [1] * num
        schedule.sampled = list(range(num))
        schedule.sampled_requests = requests.copy()
        return lacking

    def _schedule_prompts(self, lacking: list[Request], schedule: Schedule) -> list[Request]:
        """Go on with what running requests lack. Returns those who will still lack tokens after the step."""
        unfinished = []
        for request in lacking:
            if not request.ready:
                continue
            missing = request.num_tokens - request.num_computed_tokens
            num_new = min(missing, self.max_chunk, self._budget_left(schedule))
            end = request.num_computed_tokens + num_new
            # Those who decode go first, and end some time. Only where nobody does, room is made.
            if num_new and (
                self._running.grow(request, end, schedule.copies)
                or (schedule.is_empty and self._make_room(request, end, schedule))
            ):
                self._compute(request, num_new, schedule)
                if num_new == missing:
                    continue
            unfinished.append(request)
        return unfinished

    def _admit_waiting(self, unfinished: list[Request], schedule: Schedule) -> None:
        """Let waiting requests run while there are tokens, places and blocks for them."""
        pool = self.block_manager.pool
        # Those who run already come first.
        promised = sum(
            self._running.missing_blocks(request) for request in unfinished if not request.protected
        )
        promised += self._running.num_reserved_blocks()
        num_partial = self.max_num_partial_prefills - len(unfinished)
        while self._budget_left(schedule) and self._running.num_seats > 0:
            alone = not self.running and not pool.num_steps_in_flight
            num_blocks = math.inf if alone else pool.num_available - promised
            room = Room(self._budget_left(schedule), self._running.num_seats, num_partial, num_blocks)
            request = self._admit_head(room, schedule)
            if request is None:
                return
            partial = request.num_computed_tokens + schedule.num_new_tokens[-1] < request.num_tokens
            num_partial -= partial
            if partial or request.protected:
                promised += self._running.missing_blocks(request)

    def _admit_head(self, room: Room, schedule: Schedule) -> Request | None:
        """Let the head of the queue run, and return it, if there is room for all that is known of it."""
        manager, found = self.block_manager, self._queue.head_for(room)
        if found is None:
            return None
        request, need, num_new = found
        seq, start = request.blocks, need.num_computed_tokens
        if need.hits is not None:
            manager.start(seq, need.hits)
        elif not manager.swap_in(seq, start, schedule.swap_in):
            raise AssertionError("no room for a request that was admitted")
        if not manager.grow(seq, start, start + num_new, schedule.copies):
            raise AssertionError("no room for the first tokens of a request that was admitted")
        self._run(request, start)
        self._compute(request, num_new, schedule)
        return request

    def _compute(self, request: Request, num_new: int, schedule: Schedule) -> None:
        """Put tokens for which there is room into the step."""
        end = request.num_computed_tokens + num_new
        self.block_manager.register(request.blocks, request.token_ids, end)
        row = len(schedule.requests)
        schedule.requests.append(request)
        schedule.num_new_tokens.append(num_new)
        schedule.num_tokens += num_new
        request.ready = False
        if end < request.num_tokens or not request.inputs.generates:
            return
        samples = [request, *request.siblings]
        schedule.sampled += [row] * len(samples)
        schedule.sampled_requests += samples
        for sibling in self._running.take_siblings(request):
            self._enter(sibling)
            self._share(request, sibling, end)

    def _budget_left(self, schedule: Schedule) -> int:
        return self.max_num_batched_tokens - schedule.num_tokens

    # Blocks

    def _make_room(self, request: Request, end: int, schedule: Schedule) -> bool:
        """Preempt those of higher rank, for a protected request anybody, until it can grow.

        False if that is not enough: it keeps what it has, and waits for those who go on.
        """
        while not self._running.grow(request, end, schedule.copies):
            if self.block_manager.pool.num_deferred:
                return False  # blocks come back when a step in flight ends
            victim = self._running.victim(request)
            if victim is None:
                return False
            self._preempt(victim, schedule)
        return True

    def _release(self, request: Request) -> None:
        """Give a request's blocks back, to be found again by what they hold."""
        self.block_manager.register(request.blocks, request.token_ids, request.num_computed_tokens)
        self.block_manager.release(request.blocks)

    def _preempt(self, victim: Request, schedule: Schedule) -> None:
        """Take a request's blocks, and let it wait."""
        manager, computed = self.block_manager, victim.num_computed_tokens
        pays = self.swap_pays is not None and self.swap_pays(computed)
        if pays and manager.swap_out(victim.blocks, computed, schedule.swap_out):
            self.counters.num_swapped += 1
        else:
            self._release(victim)
            victim.num_computed_tokens = 0
            self.counters.num_recomputed += 1
        self._running.remove(victim)
        victim.metrics.num_preemptions += 1
        schedule.num_preempted += 1
        victim.protected = victim.metrics.num_preemptions >= self.max_preemptions
        self._wait_again(victim)

    def _preempt_for_waiting(self, schedule: Schedule) -> None:
        """Let those with a higher priority number make room for the head of the queue, if it then runs."""
        head, pool = self._queue.peek(), self.block_manager.pool
        if head is None or not self.running or self.running[-1].inputs.priority <= head.inputs.priority:
            return
        num_blocks = pool.num_available + pool.num_deferred  # those come back soon
        room = Room(self.max_num_batched_tokens, self.max_num_seqs, self.max_num_partial_prefills, num_blocks)
        for victim in self._running.victims_for(head, self._queue.need(head), room):
            self._preempt(victim, schedule)

    # Who waits, who runs

    def _enter(self, request: Request) -> None:
        """Take note of a new request."""
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        request.rank = self.policy.rank(request)
        if request.inputs.deadline < math.inf:
            # Most end long before: they go when they are more than those who are left.
            if len(self._deadlines) > 2 * (len(self.running) + self.num_waiting) + 64:
                live = [entry for entry in self._deadlines if entry[2].status is not RequestStatus.FINISHED]
                self._deadlines = sorted(live)
            heapq.heappush(self._deadlines, (request.inputs.deadline, request.arrival, request))

    def _run(self, request: Request, num_computed: int) -> None:
        """Move a request from the queue to those who run."""
        self._queue.pop(request)
        request.num_computed_tokens = num_computed
        if not request.ran_before:
            request.num_cached_tokens = num_computed
            self.counters.num_cached_tokens += num_computed
            self.counters.num_queried_tokens += request.num_tokens
        self._running.join(request)

    def _share(self, request: Request, child: Request, num_computed: int) -> None:
        """Let a child run with the blocks of a request."""
        child.blocks = self.block_manager.fork(request.blocks, num_computed)
        child.num_computed_tokens = child.num_cached_tokens = num_computed
        self._running.join(child)

    def _end_with_report(self, request: Request, schedule: Schedule, row: int, now: float) -> bool:
        """Finish a request of whose prompt a row was not finite, or all is computed that it wants."""
        if request.finish_reason is not None:  # aborted in flight
            return False
        if request.report is not None and request.report.failed:
            # In the step with the prompt's last token its siblings are no longer behind it, but beside it.
            beside = [
                q for at, q in zip(schedule.sampled, schedule.sampled_requests, strict=True) if at == row
            ]
            for ended in (request, *request.siblings, *beside):
                ended.finish("error", now, NOT_FINITE)
        elif not request.inputs.generates and request.num_computed_tokens == request.num_tokens:
            request.finish("length", now)
        return request.finish_reason is not None

    def _wait_again(self, request: Request) -> None:
        request.status, request.ready = RequestStatus.WAITING, False
        self._queue.push(request)

    def check(self) -> None:
        """The invariants of the class, and those of the block manager."""
        manager, waits, num_waiting = self.block_manager, RequestStatus.WAITING, 0
        manager.check()
        self._running.check()
        # No enum is looked up in the loop: the simulation does this after every step.
        for request in self.waiting():
            num_waiting += 1
            seq = request.blocks
            assert request.status is waits
            assert not any(seq.tables), "a request that does not run holds blocks"
            assert (request.num_computed_tokens > 0) is (seq.host is not None)
        assert num_waiting == self.num_waiting, "the queue is miscounted"
        held = {request.blocks for request in self.running}
        assert held.issuperset(manager.holders()), "blocks are held for nobody who runs"
