"""The angles of tokens that are rotated by three numbers, as those of images in Qwen3-VL."""

from __future__ import annotations

from torch import Tensor


def write_sections(sections: tuple[int, int, int], times: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Write the cosines, or sines, of tokens' rows and columns into those of their times.

    The frequencies of the three alternate; those behind the last row and column are of time.

    sections: how many frequencies rotate by each.
    """
    for first, count, other in ((1, sections[1], rows), (2, sections[2], columns)):
        own = slice(first, 3 * count, 3)
        times[:, own] = other[:, own]
