"""Histogram: how often a value fell into each of some fixed ranges."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# The bounds of a step's seconds, and of its tokens (those of vLLM's iteration_tokens_total).
SECONDS_OF_STEP = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
TOKENS_OF_STEP = (1.0, *(float(1 << power) for power in range(3, 15)))


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """A histogram at one moment.

    counts: the values up to each bound and above the one before, then those above the last bound.
    total: the sum of the values.
    """

    counts: tuple[int, ...]
    total: float

    @classmethod
    def total_of(cls, several: Sequence[HistogramCounts]) -> HistogramCounts:
        """Return the sum of the counts of histograms with the same bounds."""
        counts = zip(*(each.counts for each in several), strict=True)
        return cls(tuple(map(sum, counts)), sum(each.total for each in several))


class Histogram:
    """Counts values by fixed bounds. `add` takes a fraction of a microsecond."""

    __slots__ = ("_counts", "_total", "bounds")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(set(bounds)), "the bounds of a histogram increase"
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, once or several times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> HistogramCounts:
        """Return the counts so far."""
        return HistogramCounts(tuple(self._counts), self._total)
