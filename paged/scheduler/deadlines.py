"""Deadlines: the requests whose time runs out, soonest first."""

from __future__ import annotations

import heapq
import math

from ..requests.request import Request, RequestStatus


class Deadlines:
    """A heap of live requests with a deadline; finished ones are dropped when they outnumber the rest."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def add(self, request: Request, num_live: int) -> None:
        """Add a request if it has a deadline. num_live: how many requests run or wait."""
        if request.inputs.deadline == math.inf:
            return
        if len(self._heap) > 2 * num_live + 64:
            self._heap = sorted(e for e in self._heap if e[2].status is not RequestStatus.FINISHED)
        heapq.heappush(self._heap, (request.inputs.deadline, request.arrival, request))

    def take_expired(self, now: float) -> list[Request]:
        """Remove and return the unfinished requests whose deadline has passed."""
        expired = []
        while self._heap and self._heap[0][0] <= now:
            _, _, request = heapq.heappop(self._heap)
            if request.status is not RequestStatus.FINISHED:
                expired.append(request)
        return expired

    def __len__(self) -> int:
        return len(self._heap)
