"""The tokens of a step that stand for images: which they are, and what they see."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..requests.request import PromptImage, Request

if TYPE_CHECKING:
    from ..architectures.towers import VisionSpec
    from ..scheduler.schedule import Schedule


class ImageRows(NamedTuple):
    """The tokens of a step that take the embeddings of one image.

    rows: the numbers of these tokens in the step.
    first: the index of the first embedding. The other tokens take the embeddings that follow it.
    """

    image: PromptImage
    rows: list[int]
    first: int


def image_rows(
    requests: Sequence[Request], starts: Sequence[int], counts: Sequence[int], token_id: int
) -> list[ImageRows]:
    """Return the tokens of a step that take the embeddings of images.

    starts, counts: for each request, the number of tokens computed before the step, and in the step.
    token_id: the placeholder token. Each placeholder takes one embedding.
    """
    found = []
    first_row = 0
    for request, start, count in zip(requests, starts, counts, strict=True):
        for image in request.inputs.images:
            low = max(start, image.start)
            high = min(start + count, image.end)
            if low >= high:
                continue
            token_ids = request.token_ids
            rows = [first_row + at - start for at in range(low, high) if token_ids[at] == token_id]
            if rows:
                found.append(ImageRows(image, rows, token_ids[image.start : low].count(token_id)))
        first_row += count
    return found


def grid_of(image: PromptImage, square: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of an image's embeddings.

    square: the side in pixels of the square that one embedding covers.
    """
    return image.height // square, image.width // square


def rope_offset(images: Sequence[PromptImage], position: int, square: int) -> int:
    """Return the difference between the rotary position and the position of a token behind some images.

    An image takes as many rotary positions as its longer side has embeddings.
    """
    return sum(
        max(grid_of(image, square)) - (image.end - image.start) for image in images if image.end <= position
    )


def rope_offsets(requests: Sequence[Request], starts: Sequence[int], square: int) -> list[int] | None:
    """Return `rope_offset` for each row of a step that has no image tokens; None if all are 0."""
    offsets = [
        rope_offset(request.inputs.images, start, square) if request.inputs.images else 0
        for request, start in zip(requests, starts, strict=True)
    ]
    return offsets if any(offsets) else None


def grid_positions(
    requests: Sequence[Request], starts: Sequence[int], counts: Sequence[int], square: int
) -> array[int] | None:
    """Return the time, row and column position of each token of a step; None if the three are equal for all.

    A text token has one number for all three. The numbers continue after the largest number before them.
    """
    rows = zip(requests, starts, strict=True)
    if not any(request.inputs.images and start < request.inputs.images[-1].end for request, start in rows):
        return None
    times = array("q")
    heights = array("q")
    widths = array("q")
    for request, start, count in zip(requests, starts, counts, strict=True):
        images = request.inputs.images
        at = start
        while at < start + count:
            offset = rope_offset(images, at, square)
            image = next((each for each in images if each.end > at), None)
            if image is None or at < image.start:
                end = start + count if image is None else min(image.start, start + count)
                own = array("q", range(at + offset, end + offset))
                for axis in (times, heights, widths):
                    axis += own
            else:
                end = min(image.end, start + count)
                _, columns = grid_of(image, square)
                first = image.start + offset
                places = range(at - image.start, end - image.start)
                times += array("q", [first] * len(places))
                heights += array("q", [first + place // columns for place in places])
                widths += array("q", [first + place % columns for place in places])
            at = end
    return times + heights + widths


def last_keys(requests: Sequence[Request], starts: Sequence[int], counts: Sequence[int]) -> array[int]:
    """Return the last position that each token of a step attends to; None if no token sees later ones."""
    keys = array("i")
    for request, start, count in zip(requests, starts, counts, strict=True):
        own = array("i", range(start, start + count))
        for first, end in request.inputs.uncut:
            low = max(start, first)
            high = min(start + count, end)
            if low < high:
                assert end <= start + count, "a step computes a part of tokens that see each other"
                own[low - start : high - start] = array("i", [end - 1]) * (high - low)
        keys += own
    return keys


class ImagesOfStep(NamedTuple):
    """The fields of `ComputedPart` that concern images."""

    images: Sequence[ImageRows] = ()
    last_keys: array[int] | None = None
    rope_offsets: list[int] | None = None
    grid_positions: array[int] | None = None


class SeenImages:
    """The unfinished requests with images, from which the fields of each step are derived."""

    def __init__(self, vision: VisionSpec) -> None:
        self._vision = vision
        self._seeing = dict[int, Request]()  # by seat

    def of(self, schedule: Schedule, starts: Sequence[int], counts: Sequence[int]) -> ImagesOfStep:
        """Return the image tokens of a step, and the rotary positions of tokens behind images."""
        vision = self._vision
        if schedule.newcomers or schedule.vacated:
            for seat in schedule.vacated:
                self._seeing.pop(seat, None)
            self._seeing.update((r.seat, r) for r in schedule.newcomers if r.inputs.images)
        if not self._seeing:
            return ImagesOfStep()
        rows = schedule.requests, starts, counts
        images = image_rows(*rows, vision.token_id)
        if vision.sections is not None:
            positions = grid_positions(*rows, vision.square)
            if positions is not None:
                return ImagesOfStep(images, grid_positions=positions)
            return ImagesOfStep(images, rope_offsets=rope_offsets(schedule.requests, starts, vision.square))
        for start, count, request in zip(starts, counts, schedule.requests, strict=True):
            if request.inputs.images and start + count >= request.inputs.images[-1].end:
                self._seeing.pop(request.seat, None)
        return ImagesOfStep(images, last_keys(*rows) if images and vision.sees_itself else None)
