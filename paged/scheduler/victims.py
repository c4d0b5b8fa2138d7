"""Which running requests give their blocks to a waiting one: by priority, or by the shares of tenants."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..blocks.manager import BlockManager
from ..requests.request import Request
from .policies import Fair
from .policy import Holdings
from .running import RunningSet
from .waiting import Need, Room, WaitingQueue


def victims_for(
    head: Request,
    need: Need,
    room: Room,
    running: RunningSet,
    manager: BlockManager,
    max_preemptions: int,
    users: Sequence[Request] = (),
) -> list[Request]:
    """Choose requests to preempt for the head of the queue; none if it could still not run.

    room: the room of an empty step.
    users: requests that are among those to preempt in any case.
    """
    max_chunk = running.max_chunk
    for request in running.requests:
        room = room.minus(running.claim(request))
    victims = [*users]
    # The cached blocks that the head begins with do not become available: it will hold them.
    gone = Counter({block: -1 for blocks in need.hits or () for block in blocks})
    for user in users:
        room = room.plus(running.claim(user)).plus(Room(0, 0, 0, manager.num_freed(user.blocks, gone)))
    for candidate in reversed(running.requests):
        if room.first_chunk(need, max_chunk):
            break
        if candidate in victims:
            continue
        if candidate.inputs.priority <= head.inputs.priority:
            return []
        # One more preemption would protect it, and it would run again before the head.
        if candidate.ready and candidate.metrics.num_preemptions + 1 < max_preemptions:
            victims.append(candidate)
            freed = manager.num_freed(candidate.blocks, gone)
            room = room.plus(running.claim(candidate)).plus(Room(0, 0, 0, freed))
    if len(victims) == len(running.requests) and not manager.pool.num_steps_in_flight:
        room = room._replace(num_blocks=math.inf)
    return victims if room.first_chunk(need, max_chunk) else []


def users_to_preempt(
    request: Request, users: Mapping[int, Sequence[Request]], max_preemptions: int
) -> Sequence[Request]:
    """Return the users of the adapter that gives its slot to a request; none if no adapter does.

    All of them have higher priority numbers than the request. The users of the adapter whose first user has
    the highest rank are returned.

    users: the running requests by adapter.
    """

    def yields(user: Request) -> bool:
        # One more preemption would protect it, and it would run again before the request.
        is_weaker = user.inputs.priority > request.inputs.priority
        return is_weaker and user.ready and user.metrics.num_preemptions + 1 < max_preemptions

    candidates = [each for each in users.values() if all(map(yields, each))]
    return max(candidates, key=lambda each: each[0].rank, default=())


class AboveShare:
    """The running requests of tenants that have more than their share."""

    def __init__(self, fair: Fair, running: RunningSet, manager: BlockManager) -> None:
        self._fair = fair
        self._running = running
        self._manager = manager

    def make_room(
        self, room: Room, queue: WaitingQueue, are_settled: Callable[[list[Request]], bool]
    ) -> Iterator[Request]:
        """Yield the requests to preempt for the first waiting requests of tenants below their share.

        room: the seats, blocks and tokens of an empty step.
        are_settled: returns whether no step in flight has any of these requests.
        """
        now = self._running.holdings()
        if not self._fair.any_is_above(now):
            return
        for request in self._running.requests:
            room = room.minus(self._running.claim(request))
        left = Holdings(self._running.requests)
        for head in self._fair.heads_below_share(now):
            found = self.victims(queue.need(head), room, left)
            if found is None:
                return  # others behind this one could only take its place
            victims, room = found
            if not are_settled(victims):
                return
            yield from victims

    def victims(self, need: Need, room: Room, left: Holdings) -> tuple[list[Request], Room] | None:
        """Choose requests to preempt for a waiting one, the youngest first; None if it still could not run.

        left: what tenants hold. The holdings of the chosen requests are subtracted from it.

        Returns the requests, and the room that is left when the waiting request runs.
        """
        gone = Counter({block: -1 for blocks in need.hits or () for block in blocks})
        victims = list[Request]()
        max_chunk = self._running.max_chunk
        for candidate in reversed(self._running.requests):
            if room.first_chunk(need, max_chunk):
                break
            lacks_seats = need.num_seats > room.num_seats
            if not candidate.ready or candidate.protected:
                continue
            if self._fair.is_above(candidate.inputs.tenant, left, of_seats=lacks_seats):
                victims.append(candidate)
                freed = self._manager.num_freed(candidate.blocks, gone)
                room = room.plus(self._running.claim(candidate)).plus(Room(0, 0, 0, freed))
                left.remove(candidate)
        num_new = room.first_chunk(need, max_chunk)
        if not num_new:
            return None
        is_partial = num_new < need.num_missing_tokens
        return victims, room.minus(Room(num_new, need.num_seats, is_partial, need.num_blocks))

    def youngest(self, request: Request) -> Request | None:
        """Return the youngest running request of a tenant above its share of blocks; None if no tenant is.

        If the tenant of `request` is above its share, only its requests are considered. The oldest of all
        running requests is never returned, so that it makes progress.
        """
        holdings = self._running.holdings()
        tenant = request.inputs.tenant
        if self._fair.is_above(tenant, holdings, of_seats=False):
            above = {tenant}
        else:
            above = {
                other for other in holdings.seats if self._fair.is_above(other, holdings, of_seats=False)
            }
        if not above:
            return None
        for candidate in reversed(self._running.requests[1:]):
            if candidate.inputs.tenant not in above:
                continue
            if candidate is request or (candidate.is_settled and not candidate.protected):
                return candidate
        return None
