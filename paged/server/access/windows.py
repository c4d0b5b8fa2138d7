"""Window: how much was used in the last minute, exactly."""

from __future__ import annotations

from typing import NewType

WINDOW_S = 60.0
MOST_EXPIRED = 1024  # uses that count no more and are still in the lists
Use = NewType("Use", int)  # the number of an addition to a window


class Window:
    """What was used within the last WINDOW_S seconds. Times are given by the caller, and never go back.

    used: the sum, once `expire` was called.
    """

    def __init__(self) -> None:
        # Plain lists of numbers: a busy key has many, and the garbage collector need not look at them.
        self._untils: list[float] = []  # when each use counts no more, in order
        self._amounts: list[int] = []
        self._first = 0  # the place of the first that counts
        self._num_dropped = 0  # uses that are in the lists no more
        self.used = 0

    def expire(self, now: float) -> None:
        """Forget what was used WINDOW_S seconds ago or earlier."""
        untils = self._untils
        first = self._first
        while first < len(untils) and untils[first] <= now:
            self.used -= self._amounts[first]
            first += 1
        self._first = first
        if first > MOST_EXPIRED and first > len(untils) // 2:
            del self._untils[:first]
            del self._amounts[:first]
            self._num_dropped += first
            self._first = 0

    def add(self, amount: int, now: float) -> Use:
        """Count an amount from now on."""
        self._untils.append(now + WINDOW_S)
        self._amounts.append(amount)
        self.used += amount
        return Use(self._num_dropped + len(self._amounts) - 1)

    def change(self, use: Use, amount: int, now: float) -> None:
        """Replace the amount of a use, unless it counts no more."""
        self.expire(now)
        place = use - self._num_dropped
        if place >= self._first:
            self.used += amount - self._amounts[place]
            self._amounts[place] = amount

    def wait_s(self, amount: int, limit: int, now: float) -> float:
        """Return in how many seconds an amount fits below a limit, which is not smaller than it."""
        self.expire(now)
        excess = self.used + amount - limit
        place = self._first
        while excess > 0:
            excess -= self._amounts[place]
            place += 1
        return self._untils[place - 1] - now if place > self._first else 0.0

    def reset_s(self, now: float) -> float:
        """Return in how many seconds nothing counts any more."""
        self.expire(now)
        return self._untils[-1] - now if self._first < len(self._untils) else 0.0

    def check(self) -> None:
        """Every use that counts is in the sum, and the oldest is the first."""
        assert self.used == sum(self._amounts[self._first :])
        assert self._untils == sorted(self._untils)
        assert len(self._untils) == len(self._amounts)
