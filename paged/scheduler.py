"""Scheduler: which requests compute how many tokens in the next step."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .block_manager import BlockManager
from .request import Request, RequestStatus


@dataclass(slots=True)
class Schedule:
    """What one step computes: num_new_tokens[i] of requests[i], from its num_computed_tokens on."""

    requests: list[Request] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    block_tables: list[array[int]] = field(default_factory=list)
    # Which of them compute their last known token, so that the next one can be sampled.
    sampled: list[int] = field(default_factory=list)
    num_tokens: int = 0
    num_preempted: int = 0

    @property
    def sampled_requests(self) -> list[Request]:
        """The requests that get a token, in order."""
        if len(self.sampled) == len(self.requests):
            return self.requests
        return [self.requests[i] for i in self.sampled]

    def add(self, request: Request, num_new_tokens: int, block_table: array[int]) -> None:
        """Compute this many more tokens of this request, for which its block table has room."""
        if request.num_computed_tokens + num_new_tokens == len(request.token_ids):
            self.sampled.append(len(self.requests))
        self.requests.append(request)
        self.num_new_tokens.append(num_new_tokens)
        self.block_tables.append(block_table)
        self.num_tokens += num_new_tokens


class Scheduler:
    """Continuous batching, first come first served, under a token budget.

    There is no prefill phase and no decode phase: a step gives every running request the tokens it lacks,
    as far as the budget goes, then admits waiting ones into what is left. When blocks run out, the request
    that came last gives its own back and is recomputed later.

    Invariants: `running` is in order of arrival; every waiting request came after every running one; only
    running requests hold blocks.
    """

    def __init__(
        self, block_manager: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request, which must be able to fit the pool when it is alone."""
        # The last token is only sampled, never computed.
        needed = self.block_manager.blocks_for(request.max_total_tokens - 1)
        assert needed <= self.block_manager.pool.num_blocks, "a request that can never fit was admitted"
        self.waiting.append(request)

    def has_unfinished(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.waiting or self.running)

    def schedule(self) -> Schedule:
        """Choose the next step and allocate its blocks."""
        schedule = Schedule()
        self._schedule_running(schedule)
        # After a preemption the pool is exhausted: whoever was preempted waits for the next step.
        if not schedule.num_preempted:
            self._admit_waiting(schedule)
        assert schedule.requests or not self.has_unfinished(), "an idle step with work to do"
        return schedule

    def update(self, schedule: Schedule, sampled: Sequence[int | None]) -> list[Request]:
        """Book a finished step.

        sampled: a token for each of `schedule.sampled`; None where its logits were not finite, which ends
        that request with an error. Returns those requests.
        """
        for request, num_new_tokens in zip(schedule.requests, schedule.num_new_tokens, strict=True):
            request.num_computed_tokens += num_new_tokens
        advanced, num_finished = schedule.sampled_requests, 0
        for request, token in zip(advanced, sampled, strict=True):
            if token is None:
                request.finish("error", "the model's logits are not finite")
            else:
                request.append(token)
            num_finished += request.finish_reason is not None
        if num_finished:
            self.release_finished()
        return advanced

    def release_finished(self) -> None:
        """Take the blocks of finished requests back."""
        for request in self.running:
            if request.status is RequestStatus.FINISHED:
                self.block_manager.release(request.request_id)
        self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]

    def abort(self, request: Request) -> None:
        """End a request, wherever it is, and free its blocks."""
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        request.finish("abort")
        self.release_finished()

    def check(self) -> None:
        """The invariants of the class, and those of the block manager."""
        self.block_manager.check()
        assert all(r.status is RequestStatus.RUNNING for r in self.running)
        assert all(r.status is RequestStatus.WAITING and r.num_computed_tokens == 0 for r in self.waiting)
        held = sum(len(self.block_manager.table(r.request_id)) for r in self.running)
        assert held == self.block_manager.num_used_blocks, "a request that does not run holds blocks"
        assert len(self.running) <= self.max_num_seqs
        arrivals = [r.metrics.arrival_time for r in (*self.running, *self.waiting)]
        assert arrivals == sorted(arrivals), "requests are out of their order of arrival"

    def _schedule_running(self, schedule: Schedule) -> None:
        grow, index = self.block_manager.grow, 0
        while index < len(self.running) and schedule.num_tokens < self.max_num_batched_tokens:
            request = self.running[index]
            num_new = self._num_new_tokens(request, schedule)
            num_total = request.num_computed_tokens + num_new
            table = grow(request.request_id, num_total) or self._make_room(request, num_total, schedule)
            if table is not None:
                schedule.add(request, num_new, table)
                index += 1

    def _make_room(self, request: Request, num_total: int, schedule: Schedule) -> array[int] | None:
        """Preempt the youngest until num_total tokens of `request` fit; None if that is `request`."""
        while True:
            # The youngest has the least computed work to lose.
            victim = self.running.pop()
            self._preempt(victim)
            schedule.num_preempted += 1
            if victim is request:
                return None
            table = self.block_manager.grow(request.request_id, num_total)
            if table is not None:
                return table

    def _preempt(self, request: Request) -> None:
        self.block_manager.release(request.request_id)
        request.num_computed_tokens = 0
        request.status = RequestStatus.WAITING
        request.metrics.num_preemptions += 1
        self.waiting.appendleft(request)

    def _admit_waiting(self, schedule: Schedule) -> None:
        if not self.waiting:
            return
        promised = sum(self._missing_blocks(request) for request in self.running)
        while (
            self.waiting
            and len(self.running) < self.max_num_seqs
            and schedule.num_tokens < self.max_num_batched_tokens
        ):
            request = self.waiting[0]
            num_new = self._num_new_tokens(request, schedule)
            # Not by its first chunk alone: it would be computed only to be preempted, again and again.
            needed = promised + self._missing_blocks(request)
            if self.running and needed > self.block_manager.pool.num_free:
                return
            table = self.block_manager.grow(request.request_id, num_new)
            if table is None:
                return
            promised = needed - len(table)
            self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            schedule.add(request, num_new, table)

    def _missing_blocks(self, request: Request) -> int:
        """What it takes to compute all tokens of a request, whose prompt may be in chunks, and the next."""
        return self.block_manager.missing_blocks(request.request_id, request.num_tokens + 1)

    def _num_new_tokens(self, request: Request, schedule: Schedule) -> int:
        # Decoding is the case where one token is missing.
        missing = len(request.token_ids) - request.num_computed_tokens
        return min(missing, self.max_num_batched_tokens - schedule.num_tokens)
