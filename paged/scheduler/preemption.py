"""Preemption: which running request gives its blocks back, and what happens to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..blocks.manager import BlockManager
from ..requests.request import Request, RequestStatus
from .running import RunningSet
from .schedule import Schedule, SchedulerCounters
from .waiting import Need, Room, WaitingQueue

if TYPE_CHECKING:
    from .policies import Fair
    from .victims import AboveShare


class Preemption:
    """Preempts running requests: their blocks go to other requests, and they wait and run again later.

    Held requests are preempted first, then the running request of the highest rank. If tenants have shares,
    requests of tenants above their share come before others. A request that was preempted max_preemptions
    times while it was not held is protected from then on, except while it is held. For swap_pays see
    `Scheduler`.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        running: RunningSet,
        queue: WaitingQueue,
        counters: SchedulerCounters,
        max_preemptions: int,
        swap_pays: Callable[[int], bool] | None,
        fair: Fair | None = None,
    ) -> None:
        self._above_share: AboveShare | None = None
        if fair is not None:
            from .victims import AboveShare

            self._above_share = AboveShare(fair, running, block_manager)
        self._manager = block_manager
        self._running = running
        self._queue = queue
        self._counters = counters
        self._max_preemptions = max_preemptions
        self.swap_pays = swap_pays
        # Lets the steps in flight end before any request is preempted, and returns whether there are any.
        self.drain: Callable[[], bool] | None = None
        self._grown_long: list[Request] = []
        self._held_since: dict[Request, float] = {}  # when each held request was held

    def make_room(self, request: Request, end: int, schedule: Schedule) -> bool:
        """Preempt other requests until a running request has blocks for its tokens up to `end`.

        Return False if this does not suffice. The request then keeps its blocks and is left out of this step.
        """
        while not self._running.grow(request, end, schedule.copies):
            if self._manager.pool.num_deferred:
                return False  # blocks come back when a step in flight ends
            if self.drain is not None and self.drain():
                return False
            victim = self.choose_victim(request)
            if victim is None:
                return False
            self.preempt(victim, schedule)
        return True

    def make_room_for_waiting(self, room: Room, schedule: Schedule) -> None:
        """Preempt requests with higher priority numbers, if the head of the queue can then run.

        room: the seats, blocks and tokens of an empty step.
        """
        running = self._running.requests
        head = self._queue.peek()
        if head is None or not running or running[-1].inputs.priority <= head.inputs.priority:
            return
        victims = self._victims_for(head, self._queue.need(head), room)
        for victim in victims if self._are_settled(victims) else ():
            self.preempt(victim, schedule)

    def make_room_for_adapter(self, room: Room, schedule: Schedule) -> None:
        """Preempt requests with higher priority numbers, if the next request without a slot can then run.

        All of them have one adapter, whose slot becomes free, but for those whose blocks or seats it needs.

        room: the seats, blocks and tokens of an empty step.
        """
        adapters = self._running.adapters
        assert adapters is not None, "no request has an adapter"
        request = adapters.next_request()
        if request is None or adapters.num_free:
            return
        head = self._queue.peek()
        from .adapters import place_of
        from .victims import users_to_preempt

        if head is not None and place_of(head) < place_of(request):
            return  # it is not its turn
        users = users_to_preempt(request, adapters.users(self._running.requests), self._max_preemptions)
        if not users:
            return
        victims = self._victims_for(request, self._queue.need(request), room, users)
        for victim in victims if self._are_settled(victims) else ():
            self.preempt(victim, schedule)

    def make_room_for_shares(self, room: Room, schedule: Schedule) -> None:
        """Preempt requests of tenants above their share; see `AboveShare.make_room`."""
        head = self._queue.peek()
        if self._above_share is not None and head is not None and not head.protected:
            for victim in self._above_share.make_room(room, self._queue, self._are_settled):
                self.preempt(victim, schedule, counts=False)

    def _are_settled(self, victims: list[Request]) -> bool:
        """Return whether no step in flight has any of these requests. If one does, let all steps end."""
        if all(victim.is_settled for victim in victims):
            return True
        assert self.drain is not None, "a request in flight was ready"
        self.drain()
        return False

    def preempt(self, victim: Request, schedule: Schedule, *, counts: bool = True) -> None:
        """Swap a request's blocks out or free them, and put it back into the queue.

        counts: whether this preemption counts towards max_preemptions.
        """
        manager = self._manager
        computed = victim.num_computed_tokens
        pays = computed > 0 and self.swap_pays is not None and self.swap_pays(computed)
        if pays and self._running.states is not None:
            self.keep(victim)
        if pays and manager.swap_out(victim.blocks, computed, schedule.swap_out):
            if self._running.states is not None:
                self._running.states.swap_out(victim)
            self._counters.num_swapped += 1
        else:
            self.free(victim)
            victim.num_computed_tokens = 0
            self._counters.num_recomputed += 1
        self._running.remove(victim)
        schedule.num_preempted += 1
        # A request that is held again and again must not become protected by that, nor one above a share.
        if counts and not victim.held:
            victim.metrics.num_preemptions += 1
            victim.protected = victim.metrics.num_preemptions >= self._max_preemptions
        self.requeue(victim)

    def hold(self, request: Request, now: float) -> None:
        """Record that a request is held from now on."""
        self._held_since.setdefault(request, now)

    def release(self, request: Request) -> None:
        """Record that a request is no longer held, or has ended."""
        self._held_since.pop(request, None)

    def preempt_held(self, since: float, schedule: Schedule) -> None:
        """Preempt requests that have been held since the time `since`, if another request waits to run."""
        if not self._held_since or not self._any_waits():
            return
        for request, held_at in self._held_since.items():
            if request.status is RequestStatus.RUNNING and request.is_settled and held_at <= since:
                self.preempt(request, schedule)

    def _any_waits(self) -> bool:
        """Return whether a request waits to run, in the queue or for the slot of an adapter."""
        adapters = self._running.adapters
        lacks_slot = adapters is not None and adapters.next_request() is not None
        return lacks_slot or self._queue.peek() is not None

    def hold_grown_long(self, request: Request) -> None:
        """Exclude a running request from steps: it has reached `RequestInputs.long_from`, so its KV is stale.

        `requeue_grown_long` queues it before the next step, unless its newest token completed a stop string.
        """
        request.ready = False
        self._grown_long.append(request)

    def requeue_grown_long(self) -> None:
        """Queue the unfinished requests that have reached `long_from`, so that all their KV is recomputed."""
        grown = self._grown_long
        self._grown_long = []
        for request in grown:
            if request.finish_reason is not None:
                continue
            self.free(request)
            request.blocks = self._manager.open(request.token_ids, request.namespace, request.inputs.contents)
            request.num_computed_tokens = 0
            self._running.remove(request)
            self.requeue(request)

    def free(self, request: Request) -> None:
        """Release a request's blocks. Its full blocks stay in the prefix cache."""
        self.keep(request)
        self._manager.release(request.blocks)

    def keep(self, request: Request) -> None:
        """Add the full blocks of a request to the prefix cache. No step in flight may compute it."""
        self._manager.register(request.blocks, request.token_ids, request.num_computed_tokens)
        if self._running.states is not None:
            self._running.states.keep(request)

    def requeue(self, request: Request) -> None:
        """Put a request that has run back into the queue."""
        request.status = RequestStatus.WAITING
        request.ready = False
        self._queue.push(request)

    def choose_victim(self, request: Request) -> Request | None:
        """Return the running request to preempt for `request`; None if there is none."""
        for candidate in reversed(self._running.requests if self._held_since else ()):
            if candidate.held and candidate.is_settled:
                return candidate
        if self._above_share is not None and not request.protected:
            above = self._above_share.youngest(request)
            if above is not None:
                return None if above is request else above
        # By policy, the highest rank yields first. A protected request takes from any rank.
        for candidate in reversed(self._running.requests):
            if candidate is request and not request.protected:
                return None
            if candidate.is_settled and not candidate.protected:
                return candidate
        return None

    def _victims_for(
        self, head: Request, need: Need, room: Room, users: Sequence[Request] = ()
    ) -> list[Request]:
        from .victims import victims_for

        return victims_for(head, need, room, self._running, self._manager, self._max_preemptions, users)

    def check(self) -> None:
        """Check that every request in the table of held requests is held and unfinished."""
        for request in self._held_since:
            assert request.held, "released, but its time is kept"
            assert request.status is not RequestStatus.FINISHED, "ended, but its time is kept"
