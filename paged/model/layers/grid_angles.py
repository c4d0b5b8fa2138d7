"""The angles of tokens that are rotated by three numbers, as those of images in Qwen3-VL."""

from __future__ import annotations

from torch import Tensor


def write_sections(sections: tuple[int, int, int], times: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Overwrite some of the time angles with the angles of rows and columns, in place.

    The frequencies of time, row and column alternate. The last frequencies are all of time.

    sections: the number of frequencies for time, rows and columns.
    """
    for first, count, other in ((1, sections[1], rows), (2, sections[2], columns)):
        own = slice(first, 3 * count, 3)
        times[:, own] = other[:, own]
