"""The angles of tokens that are rotated by three numbers, as those of images in Qwen3-VL."""

from __future__ import annotations

from .rotary import Angles


def by_section(sections: tuple[int, int, int], times: Angles, rows: Angles, columns: Angles) -> Angles:
    """Return the angles of tokens from those of their times, into which the others are written.

    The frequencies of the three alternate; those behind the last row and column are of time.

    sections: how many frequencies rotate by each.
    """
    for first, count, other in ((1, sections[1], rows), (2, sections[2], columns)):
        own = slice(first, 3 * count, 3)
        times.cos[:, own] = other.cos[:, own]
        times.sin[:, own] = other.sin[:, own]
    return times
