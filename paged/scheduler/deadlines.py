"""Deadlines: the requests that are aborted at a given time."""

from __future__ import annotations

import heapq

from ..requests.request import Request, RequestStatus


class Deadlines:
    """A heap of requests with deadlines. Finished requests are dropped once they outnumber the live ones."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []

    def add(self, request: Request, num_live: int) -> None:
        """Add a request with a deadline.

        num_live: the number of running and waiting requests.
        """
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
