"""WaitingQueue: the waiting requests in order. Need and Room: what a request takes, what is free."""

from __future__ import annotations

import heapq
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ..blocks.manager import BlockManager
from ..blocks.pool import BlockId
from ..blocks.sequence import NEVER
from ..requests.request import Request
from .policy import Policy, Rank

if TYPE_CHECKING:
    from .backlog import Backlog


class Need(NamedTuple):
    """The tokens, seats and blocks that a waiting request needs in order to run.

    hits: the cached blocks that the request begins with, for each layer group; None if the request is swapped
        in.
    num_computed_tokens: how many of its tokens these blocks hold.
    num_missing_tokens: how many tokens are left to compute.
    most_new: the maximum number of tokens in its first step, which ends where a snapshot is due.
    """

    hits: list[list[BlockId]] | None
    num_computed_tokens: int
    num_missing_tokens: int
    num_seats: int
    num_blocks: int
    most_new: int = NEVER


class Room(NamedTuple):
    """The tokens, seats and blocks that a step has left, or that one request takes.

    num_seats: how many requests may run.
    num_partial: how many prompts may stay incomplete; see max_num_partial_prefills.
    num_blocks: infinite if the request has the pool to itself, because every request fits there.
    """

    num_tokens: int
    num_seats: int
    num_partial: int
    num_blocks: float

    def plus(self, other: Room) -> Room:
        """Return the sum of two rooms, field by field."""
        return Room(*map(operator.add, self, other))

    def minus(self, other: Room) -> Room:
        """Return the difference of two rooms, field by field."""
        return Room(*map(operator.sub, self, other))

    def first_chunk(self, need: Need, max_chunk: int) -> int:
        """Return how many tokens a request can compute first in this room; 0 if it cannot run."""
        num_new = min(need.num_missing_tokens, need.most_new, max_chunk, self.num_tokens)
        in_part = num_new < need.num_missing_tokens
        if need.num_seats > self.num_seats or need.num_blocks > self.num_blocks:
            return 0
        return 0 if in_part and self.num_partial <= 0 else max(0, num_new)


def num_tokens_ahead(request: Request) -> int:
    """Count the tokens for which a request needs blocks before it runs or continues its prompt."""
    # The last token is only sampled, never computed.
    last = request.inputs.max_total_tokens - 1
    return last if request.protected else min(request.num_tokens + request.num_pending + 1, last)


class WaitingQueue:
    """The waiting requests: first protected requests by rank, then others in the policy's order.

    Held requests, and held-back parts of a call (see `Backlog`), are not in this order.

    max_chunk: maximum number of tokens with which a request begins.
    watermark: the share of blocks that stays free when a request is admitted.
    arrive: sets arrival and rank of a part of a call that joins the queue.
    num_tokens: the number of tokens of all waiting requests. It is constant while a request waits.
    """

    def __init__(
        self,
        policy: Policy,
        block_manager: BlockManager,
        max_chunk: int,
        watermark: float,
        arrive: Callable[[Request], None],
    ) -> None:
        self._policy = policy
        self._manager = block_manager
        self._max_chunk = max_chunk
        self._watermark_blocks = int(watermark * block_manager.pool.num_blocks)
        self._protected: list[tuple[Rank, Request]] = []
        self._held: dict[Request, None] = {}  # not to run until they are released
        self._backlog: Backlog | None = None  # None until a call with many prompts comes
        self._arrive = arrive
        self.num_tokens = 0
        self._num_changes = 0  # of the queue: requests that came or went
        # The state in which the head was refused last, and what it needed.
        self._refused: tuple[tuple[int, int, int], Need] | None = None

    def push(self, request: Request) -> None:
        """Add a waiting request, for the first time or again."""
        self._num_changes += 1
        self.num_tokens += request.num_tokens
        if request.held:
            self._held[request] = None
        elif request.protected:
            heapq.heappush(self._protected, (request.rank, request))
        elif not self._is_kept_back(request):
            self._policy.push(request)

    def _is_kept_back(self, request: Request) -> bool:
        """Return whether a request joins the backlog, because another part of its call is in the queue."""
        if request.inputs.part_of and self._backlog is None:
            from .backlog import Backlog

            self._backlog = Backlog()
        return self._backlog is not None and self._backlog.keeps(request)

    def peek(self) -> Request | None:
        """Return the request that should run next; None if all waiting requests are held."""
        return self._protected[0][1] if self._protected else self._policy.peek()

    def pop(self, request: Request) -> None:
        """Remove the head, because it runs now."""
        self._num_changes += 1
        self.num_tokens -= request.num_tokens
        if request.protected:
            heapq.heappop(self._protected)
        else:
            self._policy.pop(request)
            self._let_next_arrive(request)

    def remove(self, request: Request) -> None:
        """Remove a request that was aborted, or that becomes held or released."""
        self._num_changes += 1
        self.num_tokens -= request.num_tokens
        if request in self._held:
            del self._held[request]
            self._let_next_arrive(request)  # if it was set aside
        elif request.protected:
            self._remove_protected(request)
        elif self._backlog is None or not self._backlog.discard(request):
            self._policy.remove(request)
            self._let_next_arrive(request)

    def _remove_protected(self, request: Request) -> None:
        self._protected = sorted(entry for entry in self._protected if entry[1] is not request)

    def set_aside(self, request: Request) -> None:
        """Hold the head without the loss of its turn among the parts of its call."""
        self._num_changes += 1
        if request.protected:
            self._remove_protected(request)
        else:
            self._policy.remove(request)
        self._held[request] = None

    def take_back(self, request: Request) -> None:
        """Put a request that was set aside back into its place."""
        self._num_changes += 1
        del self._held[request]
        if request.protected:
            heapq.heappush(self._protected, (request.rank, request))
        else:
            self._policy.push(request)

    def _let_next_arrive(self, request: Request) -> None:
        """Queue the next part of the call to which a request belongs that has left the queue."""
        following = None if self._backlog is None else self._backlog.next_after(request)
        if following is not None:
            self._arrive(following)
            self._policy.push(following)

    def head_for(self, room: Room) -> tuple[Request, Need, int] | None:
        """Return the head, its need, and the size of its first chunk; None if the room is too small."""
        # While this stays the same, the head needs no less than before.
        snapshots = self._manager.snapshots
        num_made = 0 if snapshots is None else snapshots.num_made
        state = (self._num_changes, self._manager.pool.last_serial, num_made)
        if self._refused is not None:
            before, need = self._refused
            if before == state and not room.first_chunk(need, self._max_chunk):
                return None
        request = self.peek()
        if request is None:
            return None
        need = self.need(request)
        if need.hits is not None and request.blocks.is_due:
            return None  # this step leaves a state behind, with which the next one can begin
        num_new = room.first_chunk(need, self._max_chunk)
        if not num_new:
            self._refused = (state, need)
            return None
        return request, need, num_new

    def reconsider(self) -> None:
        """Forget the stored need of the head, because it may be lower now."""
        self._refused = None

    def need(self, request: Request) -> Need:
        """Return what a waiting request needs in order to run."""
        manager = self._manager
        seq = request.blocks
        hits = manager.match(seq, request.token_ids, request.first_needed) if seq.host is None else None
        computed = request.num_computed_tokens if hits is None else len(hits[0]) * manager.block_size
        # For more than the first chunk: it would be computed and preempted again and again.
        num_blocks = manager.blocks_to_start(hits or (), num_tokens_ahead(request))
        num_blocks += len(request.siblings) * len(manager.windows) + self._watermark_blocks
        num_seats = 1 + len(request.siblings)
        most_new = NEVER if manager.snapshots is None else manager.snapshots.most_new(seq, computed)
        return Need(hits, computed, request.num_tokens - computed, num_seats, num_blocks, most_new)

    def check(self) -> None:
        """Check that the backlog and the queue hold the parts of calls that they should."""
        if self._backlog is not None:
            aside = [request for request in self._held if self._backlog.is_turn_of(request)]
            self._backlog.check([*self._policy, *aside])

    def __len__(self) -> int:
        return len(self._protected) + len(self._policy) + len(self._held) + len(self._backlog or ())

    def __iter__(self) -> Iterator[Request]:
        protected = [r for _, r in sorted(self._protected)]
        kept_back = () if self._backlog is None else self._backlog.requests()
        return itertools.chain(protected, self._policy, kept_back, self._held)
