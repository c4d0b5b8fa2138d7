"""The size that an image is resized to. Free of numpy, for the process that decodes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.errors import RequestError

if TYPE_CHECKING:
    from PIL import Image

MOST_SIDE = 16384  # pixels, of an image as it comes and as it is resized
MAX_RATIO = 200  # of the sides of an image that is resized to an area, as in transformers


class Size(NamedTuple):
    """The size of an image, in pixels."""

    height: int
    width: int


class Pixels(NamedTuple):
    """A resized image: uint8[height, width, 3], row by row."""

    size: Size
    data: bytes


class Resizing(NamedTuple):
    """How images are resized: see `ProcessingSpec`.

    square: the pixels on a side of the square that becomes one embedding.
    """

    rule: str
    sizes: tuple[int, ...]
    resample: int
    square: int

    def target(self, size: Size) -> Size:
        """Return the size that an image is resized to. Raises RequestError for an image too narrow."""
        if self.rule == "fixed":
            return Size(*self.sizes)
        if self.rule == "longest_edge":
            return self._within(size, Size(*self.sizes))
        if self.rule == "tokens":
            return self._of_tokens(size, *self.sizes)
        return self._of_area(size, *self.sizes)

    def _within(self, size: Size, most: Size) -> Size:
        """Return a size of whole squares; an image larger than `most` keeps its proportions."""
        height, width = size
        ratio = max(height / most.height, width / most.width)
        if ratio > 1:
            height = math.floor(height / ratio)
            width = math.floor(width / ratio)
        if min(height, width) < 1:
            raise RequestError(
                f"has {size.width:,} x {size.height:,} pixels; within {most.width:,} x {most.height:,} "
                "nothing is left of its shorter side"
            )
        square = self.square
        return Size(((height - 1) // square + 1) * square, ((width - 1) // square + 1) * square)

    def _of_area(self, size: Size, least: int, most: int) -> Size:
        """Return a size of whole squares whose area is from `least` to `most` pixels."""
        height, width = size
        square = self.square
        if max(height, width) / min(height, width) > MAX_RATIO:
            raise RequestError(f"has {width} x {height} pixels; one side may be {MAX_RATIO} times the other")
        whole = Size(round(height / square) * square, round(width / square) * square)
        area = whole.height * whole.width
        if area > most:
            shrink = math.sqrt((height * width) / most)
            return Size(*(max(square, math.floor(side / shrink / square) * square) for side in size))
        if area < least:
            grow = math.sqrt(least / (height * width))
            return Size(*(math.ceil(side * grow / square) * square for side in size))
        return whole

    def _of_tokens(self, size: Size, most: int) -> Size:
        """Return the largest size of at most so many whole squares; the proportions stay as they are."""
        square = self.square
        factor = math.sqrt(most * square**2 / (size.height * size.width))
        height, width = (math.floor(factor * side / square) for side in size)
        if height == 0:
            return Size(square, min(size.width // size.height, most) * square)
        if width == 0:
            return Size(min(size.height // size.width, most) * square, square)
        return Size(height * square, width * square)

    def apply(self, image: Image.Image) -> Pixels:
        """Resize an image in RGB. Raises RequestError for an image that is too narrow."""
        target = self.target(Size(image.height, image.width))
        resample: Any = self.resample
        found = image.resize((target.width, target.height), resample)
        return Pixels(target, found.tobytes())
