"""AdapterSlots: which LoRA adapters of running requests are in which slots of the device."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict

from ..requests.request import NO_ADAPTER, Request, RequestStatus
from .policy import Rank
from .schedule import Schedule

Place = tuple[bool, Rank]
_Entry = tuple[Place, int, Request]  # the number says which of equals came first


def place_of(request: Request) -> Place:
    """Return a request's place among those that wait for slots: protected ones come first, then by rank."""
    return not request.protected, request.rank


class AdapterSlots:
    """The adapter slots of the device. A slot holds an adapter of running requests, or an earlier one.

    A request whose adapter has no slot is set aside while all slots are in use, so that others pass it. The
    first of these requests, by rank, is the next one: of the slots that become free, one is kept for it,
    which only a request of lower rank may take. Requests of other adapters and higher ranks pass it, but
    after as many admissions as may run at once none does, nor does one of lower priority at any time. So a
    slot becomes free.

    Steps copy adapters into slots in the order in which they are launched. Therefore a slot may get another
    adapter while a step in flight still reads the old one.

    max_passes: how many requests may start before the next one.
    """

    def __init__(self, num_slots: int, max_passes: int) -> None:
        self.num_slots = num_slots
        self.max_passes = max_passes
        self.slot_of: dict[int, int] = {}
        self._num_users = Counter[int]()  # running requests by adapter
        self._idle = OrderedDict[int, None]()  # adapters in a slot that no request uses, the earliest first
        self._loads: list[tuple[int, int]] = []  # of the next step: adapters and slots
        # The requests that were set aside, by adapter, as heaps. Some may have ended since, or are held.
        self._aside: dict[int, list[_Entry]] = {}
        self._numbers = itertools.count()
        self._next: Request | None = None  # see `next_request`
        self._num_passes = 0  # admissions since it is the next one

    def next_request(self) -> Request | None:
        """Return the request that waits for a slot and comes first, set aside or in the queue again."""
        if self._next is None or not self._waits(self._next):
            self._next = None
            self._num_passes = 0
            tops = [heap[0] for adapter in [*self._aside] if (heap := self._cleared(adapter))]
            if tops:
                self._next = min(tops)[-1]
        return self._next

    def _waits(self, request: Request) -> bool:
        """Return whether a request waits for a slot and for nothing else."""
        waits = request.status is RequestStatus.WAITING and request.held in (0, NO_ADAPTER)
        return waits and request.inputs.adapter not in self.slot_of

    def _cleared(self, adapter: int) -> list[_Entry]:
        """Return the heap of an adapter that has no slot, once its first request waits for nothing else."""
        heap = self._aside[adapter]
        if adapter in self.slot_of:
            return []
        while heap and not self._waits(heap[0][-1]):
            heapq.heappop(heap)  # it has ended or is held, and then asks again later
        if not heap:
            del self._aside[adapter]
        return heap

    def admits(self, request: Request) -> bool:
        """Return whether a slot has, or can get, the adapter of a waiting request."""
        adapter = request.inputs.adapter
        if not adapter:
            return True
        first = self.next_request()
        is_first = first is None or first.inputs.adapter == adapter or place_of(request) < place_of(first)
        if adapter not in self.slot_of:
            return self.num_free > (0 if is_first else 1)
        # Requests of lower priority do not pass: they would keep the slots from the one of higher priority.
        if is_first or first is None:
            return True
        return self._num_passes < self.max_passes and request.rank[0] <= first.rank[0]

    @property
    def num_free(self) -> int:
        """The number of slots that no running request uses."""
        return self.num_slots - len(self._num_users)

    def set_aside(self, request: Request) -> None:
        """Record that a request waits for a slot."""
        heap = self._aside.setdefault(request.inputs.adapter, [])
        heapq.heappush(heap, (place_of(request), next(self._numbers), request))
        first = self.next_request()
        if first is not None and place_of(request) < place_of(first) and self._waits(request):
            self._next = request
            self._num_passes = 0

    def take_released(self) -> list[Request]:
        """Remove and return the requests that may have a slot now, or must be asked again."""
        if not self._aside:
            return []
        first = self.next_request()
        adapters = [
            adapter
            for adapter in self.slot_of
            if (heap := self._aside.get(adapter)) and self.admits(heap[0][-1])
        ]
        if first is not None and self.num_free and first.inputs.adapter in self._aside:
            adapters.append(first.inputs.adapter)  # the others ask once it runs
        found = dict.fromkeys(entry[-1] for adapter in adapters for entry in self._aside.pop(adapter))
        return [r for r in found if r.status is RequestStatus.WAITING and r.held == NO_ADAPTER]

    def users(self, running: list[Request]) -> dict[int, list[Request]]:
        """Return the running requests by adapter."""
        found: dict[int, list[Request]] = {}
        for request in running:
            if request.inputs.adapter:
                found.setdefault(request.inputs.adapter, []).append(request)
        return found

    def join(self, request: Request) -> None:
        """Assign a slot to a request that starts to run: its adapter's, or the least recently used one."""
        self._num_passes += 1
        adapter = request.inputs.adapter
        if not adapter:
            return
        if adapter not in self.slot_of:
            slot = len(self.slot_of)
            if slot == self.num_slots:
                longest_unused, _ = self._idle.popitem(last=False)
                slot = self.slot_of.pop(longest_unused)
            self.slot_of[adapter] = slot
            self._loads.append((adapter, slot))
        self._idle.pop(adapter, None)
        self._num_users[adapter] += 1
        request.adapter_slot = self.slot_of[adapter]

    def leave(self, request: Request) -> None:
        """Record that a request stops running. Its adapter stays in the slot until another one needs it."""
        adapter = request.inputs.adapter
        if not adapter:
            return
        request.adapter_slot = NOWHERE
        self._num_users[adapter] -= 1
        if not self._num_users[adapter]:
            del self._num_users[adapter]
            self._idle[adapter] = None

    def forget(self) -> None:
        """Mark all slots as empty after a failed step, which may not have copied adapters."""
        assert not self._num_users, "a running request has a slot"
        self.slot_of.clear()
        self._idle.clear()
        self._loads.clear()

    def take(self, schedule: Schedule) -> None:
        """Write into a schedule the slots of its requests, and the adapters to copy before the step."""
        loads, self._loads = self._loads, []
        slots = [request.adapter_slot for request in schedule.requests]
        has_any = any(slot != NOWHERE for slot in slots)
        schedule.adapters = (slots if has_any else (), loads)

    def check(self, running: list[Request]) -> None:
        """Check that each running request has the slot of its adapter, and each slot one adapter."""
        users = Counter(r.inputs.adapter for r in running if r.inputs.adapter)
        assert users == self._num_users, "the users of adapters are miscounted"
        assert {*self._idle} == {*self.slot_of} - {*users}, "an adapter in use may lose its slot"
        slots = [*self.slot_of.values()]
        assert len(slots) == len({*slots}) <= self.num_slots, "two adapters have one slot"
        for request in running:
            own = self.slot_of[request.inputs.adapter] if request.inputs.adapter else NOWHERE
            assert request.adapter_slot == own, "a request has the slot of another adapter"
            assert not request.held & NO_ADAPTER, "a request runs that was set aside"


NOWHERE = -1
