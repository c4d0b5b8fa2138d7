"""Tokens that see each other, as those of an image, are computed in one step: `RequestInputs.uncut`."""

from __future__ import annotations

from collections.abc import Sequence


def num_uncut(uncut: Sequence[tuple[int, int]], start: int, num_new: int, budget: int) -> int:
    """Return how many tokens from `start` on to compute, so that the chunk ends within no range of `uncut`.

    uncut: ranges [first, end) of tokens that must be computed in one step, in order.
    num_new: the size of the chunk without this rule.
    budget: the maximum size if a range needs a larger chunk.
    """
    end = start + num_new
    for first, stop in uncut:
        if first < end < stop:
            if first > start:
                return first - start
            return stop - start if stop - start <= budget else 0
    return num_new


def num_needed(uncut: Sequence[tuple[int, int]], start: int) -> int:
    """Return how many tokens from `start` on must be computed together in one step."""
    return next((stop - start for first, stop in uncut if first <= start < stop), 1)
