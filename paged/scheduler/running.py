"""RunningSet: who runs, by rank; which blocks they may yet need; who of them gives way."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence

from ..blocks.manager import BlockManager, Copy
from ..requests.request import Request, RequestStatus
from .waiting import Need, Room, num_tokens_ahead


class RunningSet:
    """Those who run, their seats, and the blocks that are set aside for the protected among them.

    requests: by rank.
    """

    def __init__(
        self, block_manager: BlockManager, *, max_num_seqs: int, max_chunk: int, max_preemptions: int
    ) -> None:
        self.requests: list[Request] = []
        self._manager = block_manager
        self._max_num_seqs, self._max_chunk, self._max_preemptions = max_num_seqs, max_chunk, max_preemptions
        self._num_protected = 0
        self._num_promised_seqs = 0  # samples that will run once their prompt is computed

    # Who runs

    @property
    def num_seats(self) -> int:
        """How many more may run."""
        return self._max_num_seqs - len(self.requests) - self._num_promised_seqs

    def join(self, request: Request) -> None:
        """Run a request; its siblings have seats kept for them."""
        self._num_protected += request.protected
        self._num_promised_seqs += len(request.siblings)
        request.status = RequestStatus.RUNNING
        bisect.insort(self.requests, request, key=lambda other: other.rank)

    def take_siblings(self, request: Request) -> Sequence[Request]:
        """Those for whom a request has kept seats, which they are to take now."""
        siblings, request.siblings = request.siblings, ()
        self._num_promised_seqs -= len(siblings)
        return siblings

    def remove(self, request: Request) -> None:
        """It runs no more."""
        self.requests.remove(request)
        self._leave(request)

    def remove_all(self) -> list[Request]:
        """Nobody runs any more. Returns who did."""
        removed, self.requests = self.requests, []
        for request in removed:
            self._leave(request)
        return removed

    def remove_finished(self) -> list[Request]:
        """Those who are finished run no more. Returns them."""
        finished = [r for r in self.requests if r.status is RequestStatus.FINISHED]
        if finished:
            self.requests = [r for r in self.requests if r.status is not RequestStatus.FINISHED]
            for request in finished:
                self._leave(request)
        return finished

    def _leave(self, request: Request) -> None:
        self._num_promised_seqs -= len(request.siblings)
        self._num_protected -= request.protected

    # Blocks

    def missing_blocks(self, request: Request) -> int:
        """What one who runs may yet need before it decodes; if it is protected, at all."""
        return self._manager.missing_blocks(request.blocks, num_tokens_ahead(request))

    def num_reserved_blocks(self) -> int:
        """What protected requests may yet need: nobody else gets it."""
        if not self._num_protected:
            return 0
        return sum(self.missing_blocks(request) for request in self.requests if request.protected)

    def grow(self, request: Request, end: int, copies: list[Copy]) -> bool:
        """Make room for the tokens up to `end` out of what is not reserved; see `BlockManager.grow`."""
        manager = self._manager
        if self._num_protected and not request.protected:
            available = manager.pool.num_available - self.num_reserved_blocks()
            if manager.missing_blocks(request.blocks, end) > available:
                return False
        return manager.grow(request.blocks, request.num_computed_tokens, end, copies)

    # Who gives way

    def victim(self, request: Request) -> Request | None:
        """Who gives way to one who runs, for a protected one anybody; None if nobody does."""
        # The youngest has the least computed work to lose.
        for candidate in reversed(self.requests):
            if candidate is request and not request.protected:
                return None
            if candidate.ready and not candidate.protected:
                return candidate
        return None

    def victims_for(self, head: Request, need: Need, room: Room) -> list[Request]:
        """Those with a higher priority number who make room for the head of the queue, if it then runs.

        room: what the next step has, those who run included.
        """
        pool = self._manager.pool
        for request in self.requests:
            room = room.minus(self._claim(request))
        victims = list[Request]()
        # What the head begins with does not come back: it holds it then.
        gone = Counter({block: -1 for blocks in need.hits or () for block in blocks})
        for candidate in reversed(self.requests):
            if room.first_chunk(need, self._max_chunk):
                break
            if candidate.inputs.priority <= head.inputs.priority:
                return []
            # Once more, and it would be protected: it would run again at once, before the head.
            if candidate.ready and candidate.metrics.num_preemptions + 1 < self._max_preemptions:
                victims.append(candidate)
                freed = self._manager.num_freed(candidate.blocks, gone)
                room = room.plus(self._claim(candidate)).plus(Room(0, 0, 0, freed))
        if len(victims) == len(self.requests) and not pool.num_steps_in_flight:
            room = room._replace(num_blocks=math.inf)
        return victims if room.first_chunk(need, self._max_chunk) else []

    def _claim(self, request: Request) -> Room:
        """What a running request takes of the next step and is promised beyond it, if nobody is short."""
        missing = request.num_tokens - request.num_computed_tokens if request.ready else 0
        num_new, num_blocks = min(missing, self._max_chunk), 0
        if num_new < missing or request.protected:
            num_blocks = self.missing_blocks(request)
        elif num_new and request.num_tokens > request.blocks.capacity:
            num_blocks = self._manager.missing_blocks(request.blocks, request.num_tokens)
        return Room(num_new, 1 + len(request.siblings), num_new < missing, num_blocks)

    def check(self) -> None:
        """In order, counted right, and no more than there may be."""
        ranks = [request.rank for request in self.requests]
        assert ranks == sorted(ranks), "out of order"
        assert self._num_promised_seqs == sum([len(request.siblings) for request in self.requests])
        assert self._num_protected == sum([request.protected for request in self.requests])
        assert self.num_seats >= 0, "more requests run than max_num_seqs"
        runs = RequestStatus.RUNNING  # not looked up in the loop: the simulation does this after every step
        for request in self.requests:
            assert request.status is runs
            assert request.num_computed_tokens <= len(request.token_ids)
