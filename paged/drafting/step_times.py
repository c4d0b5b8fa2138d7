"""StepTimes: how long decode steps take, by their requests, rows and context."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import NamedTuple

# The rows of steps with drafts. Few, as a step is recorded anew for each number of rows.
SIZES = (
    *(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512),
    *(768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
)
KNOWN_AT = 3  # measurements
MOST_MEASURED = 15  # measurements, the newest
NEWEST = 1 / 64  # the least weight of a measurement in a mean
OUTDATED = 2048  # steps after which a time is to be measured again
CURVE_KEPT = 16  # steps that a curve is used for, as it takes longer to make than a guess
SHORTEST = 1e-9  # seconds: a clock may stand still
CONTEXT_UNIT = 256  # tokens; contexts differ if they are above another power of two of it

Key = tuple[int, int, int]  # class of requests, rows or NO_DRAFTS, class of the mean context
NO_DRAFTS = 0


class _Time:
    """The times of steps of one key, as multiples of the seed's: their median, and their mean."""

    __slots__ = ("_newest", "mean", "measured_at", "median", "num")

    def __init__(self) -> None:
        self._newest: list[float] = []
        self.num = 0
        self.median = 0.0
        self.mean = 0.0
        self.measured_at = 0

    def add(self, factor: float, now: int) -> None:
        """Add a measurement."""
        newest = self._newest
        if len(newest) < MOST_MEASURED:
            newest.append(factor)
        else:
            newest[self.num % MOST_MEASURED] = factor
        self.num += 1
        self.measured_at = now
        self.median = sorted(newest)[(len(newest) - 1) // 2]
        self.mean += max(1 / self.num, NEWEST) * (factor - self.mean)


class DraftingTime(NamedTuple):
    """The duration of steps with a given number of rows (computed tokens).

    is_known: whether it was measured often enough, and recently enough.
    """

    rows: int
    seconds: float
    is_known: bool


class StepTimes:
    """Measured durations of decode steps in seconds. Missing durations are estimated from nearby
    measurements.

    most: maximum number of draft tokens of a request.
    seed: returns the relative duration of a step with a number of rows; used to scale measurements to other
        numbers of rows.
    """

    def __init__(self, most: int, seed: Callable[[int], float]) -> None:
        self._most = most
        self._seed = seed
        self._times: dict[Key, _Time] = {}
        self._curves: dict[tuple[int, int], list[DraftingTime]] = {}
        self._num_recorded = 0

    def plain(self, num_requests: int, context: int) -> float | None:
        """Return the median seconds of steps without drafts; None if no such step was measured."""
        time = self._near((bisect_left(SIZES, num_requests), NO_DRAFTS, _context_class(context)))
        return None if time is None else time.median * self._seed(num_requests)

    def mean_plain(self, num_requests: int, context: int) -> float | None:
        """Return the mean seconds of steps without drafts, including outliers; None if none was measured."""
        time = self._near((bisect_left(SIZES, num_requests), NO_DRAFTS, _context_class(context)))
        return None if time is None else time.mean * self._seed(num_requests)

    def drafting(self, num_requests: int, context: int) -> list[DraftingTime]:
        """Return the median seconds of steps with drafts, measured or estimated, in order of their rows."""
        key = num_requests, _context_class(context)
        curve = self._curves.get(key)
        if curve is None:
            first = bisect_right(SIZES, num_requests)
            end = bisect_right(SIZES, num_requests * (1 + self._most))
            curve = self._curves[key] = [self._drafting(*key, at) for at in range(first, end)]
        return curve

    def _drafting(self, num_requests: int, context: int, at: int) -> DraftingTime:
        """Return the time of steps with SIZES[at] rows."""
        rows = SIZES[at]
        size = bisect_left(SIZES, num_requests)
        own = self._times.get((size, rows, context))
        if own is not None:
            is_recent = self._num_recorded - own.measured_at < OUTDATED
            return DraftingTime(rows, own.median * self._seed(rows), own.num >= KNOWN_AT and is_recent)
        time = self._near((size, rows, context))
        for distance in range(1, len(SIZES)):
            for beside in (at - distance, at + distance):
                if time is None and size < beside < len(SIZES):
                    time = self._times.get((size, SIZES[beside], context))
        time = time or self._near((size, NO_DRAFTS, context))
        assert time is not None, "no plain step was measured"
        return DraftingTime(rows, time.median * self._seed(rows), False)

    def record(self, num_requests: int, rows: int, context: int, seconds: float) -> None:
        """Add a measured step."""
        self._num_recorded += 1
        place = NO_DRAFTS if rows == num_requests else rows
        key = bisect_left(SIZES, num_requests), place, _context_class(context)
        factor = max(seconds, SHORTEST) / self._seed(rows)
        time = self._times.get(key)
        if time is None:
            if place != NO_DRAFTS:  # it may have been recorded, which takes far longer than the step
                at = bisect_left(SIZES, rows)
                factor = min(factor, self._drafting(num_requests, key[2], at).seconds / self._seed(rows))
            time = self._times[key] = _Time()
        time.add(factor, self._num_recorded)
        if time.num <= KNOWN_AT or self._num_recorded % CURVE_KEPT == 0:
            self._curves.clear()

    def _near(self, key: Key) -> _Time | None:
        """Return the time of a key, or of a neighbouring key."""
        times = self._times
        time = times.get(key)
        if time is not None:
            return time
        size, place, context = key
        for beside in (
            *((size, place, context - 1), (size, place, context + 1)),
            *((size - 1, place, context), (size + 1, place, context)),
        ):
            time = times.get(beside)
            if time is not None and time.num > 1:
                return time
        return None


def _context_class(context: int) -> int:
    """Return the class of a mean number of computed tokens."""
    return (context // CONTEXT_UNIT).bit_length()
