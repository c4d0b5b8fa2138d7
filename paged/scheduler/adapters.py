"""AdapterSlots: which LoRA adapters of running requests are in which slots of the device."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque

from ..requests.request import NO_ADAPTER, Request, RequestStatus
from .schedule import Schedule


class AdapterSlots:
    """The adapter slots of the device. A slot holds an adapter of running requests, or an earlier one.

    A request is set aside if its adapter is in no slot and all slots are in use; the requests behind it may
    then run first. After max_passes such admissions, no request of another adapter is admitted, so that a
    slot becomes free.

    Steps copy adapters into slots in the order in which they are launched. Therefore a slot may get another
    adapter while a step in flight still reads the old one.

    max_passes: how many requests may run before the first request that was set aside.
    """

    def __init__(self, num_slots: int, max_passes: int) -> None:
        self.num_slots = num_slots
        self.max_passes = max_passes
        self.slot_of: dict[int, int] = {}
        self._num_users = Counter[int]()  # running requests by adapter
        self._idle = OrderedDict[int, None]()  # adapters in a slot that no request uses, the earliest first
        self._loads: list[tuple[int, int]] = []  # of the next step: adapters and slots
        # Requests that wait for a slot, by adapter; the adapter that waits longest is first.
        self._aside = OrderedDict[int, deque[Request]]()
        self._num_passes = 0  # admissions since the first of them waits

    def admits(self, request: Request) -> bool:
        """Return whether a slot has, or can get, the adapter of a waiting request."""
        adapter = request.inputs.adapter
        if not adapter:
            return True
        first = next(iter(self._aside), adapter)
        if adapter != first and self._num_passes >= self.max_passes:
            return False
        return adapter in self.slot_of or bool(self._idle) or len(self.slot_of) < self.num_slots

    def set_aside(self, request: Request) -> None:
        """Record that a request waits for a slot."""
        self._aside.setdefault(request.inputs.adapter, deque()).append(request)

    def take_released(self) -> list[Request]:
        """Remove and return the requests that no longer wait for a slot, or must be asked again."""
        released: list[Request] = []
        while self._aside:
            adapter, requests = next(iter(self._aside.items()))
            waiting = [r for r in requests if r.status is RequestStatus.WAITING and r.held & NO_ADAPTER]
            if waiting and not self.admits(waiting[0]):
                break
            del self._aside[adapter]
            self._num_passes = 0
            released += waiting
            if waiting:
                break  # the others ask once these run
        return released

    def join(self, request: Request) -> None:
        """Assign a slot to a request that starts to run: that of its adapter, or the least recently used."""
        self._num_passes += bool(self._aside)
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


NOWHERE = -1
