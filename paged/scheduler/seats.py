"""Seats: the places of running requests in what the device keeps about them."""

from __future__ import annotations

from collections import deque


class Seats:
    """The numbers 0 to num_seats - 1, each taken by at most one running request.

    A seat that is given up while steps are in flight, which may use it, is free when the newest of them ends.
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
        """Take a free seat."""
        seat: int = self._free.pop()
        return seat

    def release(self, seat: int) -> None:
        """Give a seat up."""
        (self._kept[-1] if self._kept else self._free).append(seat)

    def begin_step(self) -> None:
        """Start a step, in which any seat that is taken now may be."""
        self._kept.append([])

    def end_step(self) -> None:
        """End the oldest step in flight."""
        self._free += self._kept.popleft()

    def check(self, taken: list[int]) -> None:
        """Check that every seat is taken once, free, or kept for a step in flight."""
        kept = [seat for seats in self._kept for seat in seats]
        seats = sorted([*taken, *kept, *self._free])
        assert seats == [*range(self.num_seats)], "a seat is lost, or has two requests"
