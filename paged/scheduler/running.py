"""RunningSet: the running requests by rank, and the blocks they may yet need."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..blocks.manager import BlockManager, Copy
from ..requests.request import NO_SEAT, Request, RequestStatus
from .policy import Holdings
from .schedule import Schedule
from .waiting import Room, num_tokens_ahead

if TYPE_CHECKING:
    from .adapters import AdapterSlots
    from .state_moves import StateMoves


class Seats:
    """The seats of running requests: the numbers 0 to num_seats - 1.

    If a seat is released while steps are in flight, it becomes free when the newest of these steps ends,
    because they may use it.
    """

    def __init__(self, num_seats: int) -> None:
        self.num_seats = num_seats
        self._free = [*range(num_seats - 1, -1, -1)]  # the lowest is taken first
        self._kept: deque[list[int]] = deque()  # by step in flight: those that are free when it ends

    @property
    def num_free(self) -> int:
        """The number of seats that can be taken now."""
        return len(self._free)

    def take(self) -> int:
        """Take the lowest free seat."""
        seat: int = self._free.pop()
        return seat

    def release(self, seat: int) -> None:
        """Release a seat. It is free once the steps in flight have ended."""
        (self._kept[-1] if self._kept else self._free).append(seat)

    def begin_step(self) -> None:
        """Start a step, which may use any seat that is taken now."""
        self._kept.append([])

    def end_step(self) -> None:
        """End the oldest step in flight."""
        self._free += self._kept.popleft()

    def check(self, taken: list[int]) -> None:
        """Check that every seat is taken once, free, or reserved until a step in flight ends."""
        kept = [seat for seats in self._kept for seat in seats]
        seats = sorted([*taken, *kept, *self._free])
        assert seats == [*range(self.num_seats)], "a seat is lost, or has two requests"


class RunningSet:
    """The running requests by rank, their seats, and the blocks reserved for protected requests.

    newcomers: the requests whose whole state the next step sends to the device, because they joined or
        changed since the last step with requests.
    corrected: the requests whose last token the next step sends, because the device has another last token in
        their seats.
    vacated: the seats that requests have left since the last step with requests.
    max_chunk: maximum number of tokens of one request in a step.
    """

    def __init__(self, block_manager: BlockManager, *, max_num_seqs: int, max_chunk: int) -> None:
        self.requests: list[Request] = []
        self.seats = Seats(max_num_seqs)
        self.newcomers: list[Request] = []
        self.corrected: list[Request] = []
        self.vacated: list[int] = []
        self.adapters: AdapterSlots | None = None
        self.states: StateMoves | None = None
        if block_manager.has_states:
            from .state_moves import StateMoves

            self.states = StateMoves(block_manager, max_num_seqs)
        self._manager = block_manager
        self.max_chunk = max_chunk
        self._num_protected = 0
        self._num_reserved_seats = 0  # for samples that join once their prompt is computed
        self._holdings: Holdings | None = None  # once they are counted

    @property
    def num_seats(self) -> int:
        """The number of further requests that may run now."""
        return self.seats.num_free - self._num_reserved_seats

    def holdings(self) -> Holdings:
        """Return the seats and blocks that each tenant holds, as counted once in a step."""
        if self._holdings is None:
            self._holdings = Holdings(self.requests)
        return self._holdings

    def count_anew(self) -> None:
        """Drop the counts of `holdings`, so that the next call counts again."""
        self._holdings = None

    def begin_step(self) -> None:
        """Start a step, which may use any block and any seat held now until it ends."""
        self._manager.begin_step()
        self.seats.begin_step()

    def end_step(self) -> None:
        """End the oldest step in flight. Seats and blocks given up since it began become available."""
        self._manager.end_step()
        self.seats.end_step()

    def join(self, request: Request) -> None:
        """Add a request to the running ones, and reserve seats for its siblings."""
        self._num_protected += request.protected
        self._num_reserved_seats += len(request.siblings)
        request.status = RequestStatus.RUNNING
        request.seat = self.seats.take()
        if self.adapters is not None:
            self.adapters.join(request)
        self.newcomers.append(request)
        bisect.insort(self.requests, request, key=lambda other: other.rank)
        if self._holdings is not None:
            self._holdings.add(request)

    def resend(self, request: Request) -> None:
        """Send the whole state of a changed request to the device with the next step, if it is running."""
        assert not request.num_pending, "a step in flight would overwrite what is sent"
        if request.seat != NO_SEAT and request not in self.newcomers:
            self.newcomers.append(request)

    def correct(self, request: Request) -> None:
        """Send a running request's last token and last block to the device with the next step."""
        assert not request.num_pending, "a step in flight would overwrite what is sent"
        if request.seat != NO_SEAT:
            self.corrected.append(request)

    def take_changes(self, schedule: Schedule) -> None:
        """Move the changes in the seats since the last step into a schedule."""
        if self.newcomers:
            schedule.newcomers = self.newcomers
            self.newcomers = []
        if self.corrected:
            schedule.corrected = self.corrected
            self.corrected = []
        if self.vacated:
            schedule.vacated = self.vacated
            self.vacated = []

    def take_siblings(self, request: Request) -> Sequence[Request]:
        """Return the siblings of a request, which now join it, and release the seats reserved for them."""
        siblings = request.siblings
        request.siblings = ()
        self._holdings = None
        self._num_reserved_seats -= len(siblings)
        return siblings

    def remove(self, request: Request) -> None:
        """Remove a request from the running ones."""
        self.requests.remove(request)
        self._leave(request)

    def remove_all(self) -> list[Request]:
        """Remove all requests and return them."""
        removed = self.requests
        self.requests = []
        for request in removed:
            self._leave(request)
        if self.states is not None:
            self.states.clear()
        if self.adapters is not None:
            self.adapters.forget()
        return removed

    def remove_finished(self, free: Callable[[Request], None]) -> list[Request]:
        """Remove and return the finished requests.

        free: called with each finished request while it still has its seat.
        """
        finished = [r for r in self.requests if r.status is RequestStatus.FINISHED]
        if finished:
            self.requests = [r for r in self.requests if r.status is not RequestStatus.FINISHED]
            for request in finished:
                free(request)
                self._leave(request)
        return finished

    def _leave(self, request: Request) -> None:
        self._holdings = None
        self._num_reserved_seats -= len(request.siblings)
        self._num_protected -= request.protected
        self.seats.release(request.seat)
        if self.states is not None:
            self.states.forget(request)
        self.vacated.append(request.seat)
        request.seat = NO_SEAT
        if self.adapters is not None:
            self.adapters.leave(request)
        if request in self.newcomers:
            self.newcomers.remove(request)
        if request in self.corrected:
            self.corrected.remove(request)

    def missing_blocks(self, request: Request) -> int:
        """Count the blocks that a request may need to finish its prompt or, if it is protected, to end."""
        return self._manager.missing_blocks(request.blocks, num_tokens_ahead(request))

    def num_reserved_blocks(self) -> int:
        """Count the free blocks that are reserved for protected requests."""
        if not self._num_protected:
            return 0
        return sum(self.missing_blocks(request) for request in self.requests if request.protected)

    def grow(self, request: Request, end: int, copies: list[Copy]) -> bool:
        """Allocate blocks for a request's tokens up to `end`, no reserved ones; see `BlockManager.grow`."""
        manager = self._manager
        if self._num_protected and not request.protected:
            available = manager.pool.num_available - self.num_reserved_blocks()
            if manager.missing_blocks(request.blocks, end) > available:
                return False
        # A request with pending tokens computes the last of them alone.
        start = end - 1 if request.num_pending else request.num_computed_tokens
        return manager.grow(request.blocks, start, end, copies)

    def most_new(self, request: Request) -> int:
        """Return the maximum number of tokens in the next chunk of a running request."""
        snapshots = self._manager.snapshots
        if snapshots is None:
            return self.max_chunk
        return min(self.max_chunk, snapshots.most_new(request.blocks, request.num_computed_tokens))

    def claim(self, request: Request) -> Room:
        """Return what a running request takes of the next step, and the blocks reserved for it."""
        takes_part = request.ready and not request.held
        missing = request.num_tokens - request.num_computed_tokens if takes_part else 0
        end = request.num_tokens + request.num_pending
        if request.num_pending:  # all but the last one are computed, or in flight
            missing = int(takes_part and end < request.ahead_until)
        num_new = min(missing, self.most_new(request))
        num_blocks = 0
        if num_new < missing or request.protected:
            num_blocks = self.missing_blocks(request)
        elif num_new and end > request.blocks.capacity:
            num_blocks = self._manager.missing_blocks(request.blocks, end)
        return Room(num_new, 1 + len(request.siblings), num_new < missing, num_blocks)

    def check(self) -> None:
        """Check the order by rank, the counts, and the maximum number of requests."""
        ranks = [request.rank for request in self.requests]
        assert ranks == sorted(ranks), "out of order"
        assert self._num_reserved_seats == sum([len(request.siblings) for request in self.requests])
        assert self._num_protected == sum([request.protected for request in self.requests])
        assert self.num_seats >= 0, "more requests run than max_num_seqs"
        self.seats.check([request.seat for request in self.requests])
        if self.adapters is not None:
            self.adapters.check(self.requests)
        runs = RequestStatus.RUNNING  # not looked up in the loop: the simulation does this after every step
        for request in self.requests:
            assert request.status is runs
            assert request.num_computed_tokens <= len(request.token_ids)
