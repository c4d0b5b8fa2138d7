"""Backlog: the requests of calls with many prompts, of each call one at a time in the queue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from ..requests.request import Request


class Backlog:
    """Holds back requests of calls with many prompts or continuations: one at a time waits in the queue.

    The requests of a call are its parts. A part joins the end of the queue when the part before it begins or
    ends. Thus at most one part of a call that has not begun is ahead of a later request. Parts that ran
    before are not held back and keep their place.
    """

    def __init__(self) -> None:
        self._queued: dict[str, Request] = {}  # the part of each call that waits in the queue
        self._parts: dict[str, OrderedDict[Request, None]] = {}  # those behind it, in order
        self._num_parts = 0

    def keeps(self, request: Request) -> bool:
        """Return whether to hold a request back, because another part of its call is in the queue."""
        call = request.inputs.part_of
        if not call or request.ran_before:
            return False
        if call not in self._queued:
            self._queued[call] = request
            return False
        self._parts.setdefault(call, OrderedDict())[request] = None
        self._num_parts += 1
        return True

    def discard(self, request: Request) -> bool:
        """Remove a part that has ended. Return whether it was held back."""
        parts = self._parts.get(request.inputs.part_of)
        if parts is None or request not in parts:
            return False
        del parts[request]
        self._num_parts -= 1
        return True

    def is_turn_of(self, request: Request) -> bool:
        """Return whether a request is the part of its call that waits in the queue."""
        return self._queued.get(request.inputs.part_of) is request

    def next_after(self, request: Request) -> Request | None:
        """Return the part that joins the queue after `request` has left it; None if there is none."""
        call = request.inputs.part_of
        if self._queued.get(call) is not request:
            return None
        parts = self._parts.get(call)
        if not parts:
            del self._queued[call]
            self._parts.pop(call, None)
            return None
        following, _ = parts.popitem(last=False)
        self._num_parts -= 1
        self._queued[call] = following
        return following

    def __len__(self) -> int:
        return self._num_parts

    def check(self, queued: Collection[Request]) -> None:
        """Check that at most one new part of each call is in the queue, and no held-back part."""
        for call, request in self._queued.items():
            assert request in queued, "the part whose turn it is does not wait in the queue"
            assert request.inputs.part_of == call
        assert self._parts.keys() <= self._queued.keys(), "parts wait behind none"
        fresh = [r for r in queued if r.inputs.part_of and not r.ran_before]
        assert len(fresh) == len(self._queued), "two parts of a call that have not begun wait in the queue"
        assert not {*self.requests()} & {*queued}, "a part waits twice"
        assert self._num_parts == len(self.requests()), "the parts are miscounted"

    def requests(self) -> list[Request]:
        """Return all parts that are held back."""
        return [request for parts in self._parts.values() for request in parts]
