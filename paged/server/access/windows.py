"""Window: how much was used in the last minute, exactly."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 60.0


@dataclass(slots=True, eq=False)
class Use:
    """An amount that was used at a time, and counts until another."""

    until: float
    amount: int


class Window:
    """What was used within the last WINDOW_S seconds. Times are given by the caller, and never go back.

    used: the sum.
    """

    def __init__(self) -> None:
        self._uses: deque[Use] = deque()  # the oldest first
        self.used = 0

    def expire(self, now: float) -> None:
        """Forget what was used WINDOW_S seconds ago or earlier."""
        uses = self._uses
        while uses and uses[0].until <= now:
            self.used -= uses.popleft().amount

    def add(self, amount: int, now: float) -> Use:
        """Count an amount from now on."""
        use = Use(now + WINDOW_S, amount)
        self._uses.append(use)
        self.used += amount
        return use

    def change(self, use: Use, amount: int, now: float) -> None:
        """Replace the amount of a use, unless it counts no more."""
        self.expire(now)
        if use.until > now:
            self.used += amount - use.amount
            use.amount = amount

    def wait_s(self, amount: int, limit: int, now: float) -> float:
        """Return in how many seconds an amount fits below a limit, which is not smaller than it."""
        self.expire(now)
        excess = self.used + amount - limit
        for use in self._uses:
            if excess <= 0:
                break
            excess -= use.amount
            if excess <= 0:
                return use.until - now
        return 0.0

    def reset_s(self, now: float) -> float:
        """Return in how many seconds nothing counts any more."""
        self.expire(now)
        return self._uses[-1].until - now if self._uses else 0.0

    def check(self) -> None:
        """Every use counts in the sum, and the oldest is the first."""
        assert self.used == sum(use.amount for use in self._uses)
        assert [*self._uses] == sorted(self._uses, key=lambda use: use.until)
