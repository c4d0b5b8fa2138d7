"""The tokens of a step that stand for images: which they are, and what they see."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..requests.request import PromptImage, Request

if TYPE_CHECKING:
    from ..architectures.towers import VisionSpec
    from ..scheduler.schedule import Schedule
    from .plan import ComputedPart


class ImageRows(NamedTuple):
    """Tokens of a step that get embeddings of an image.

    rows: among the step's tokens.
    first: the embedding of the first of them; the others follow.
    """

    image: PromptImage
    rows: list[int]
    first: int


def image_rows(
    requests: Sequence[Request], starts: Sequence[int], counts: Sequence[int], token_id: int
) -> list[ImageRows]:
    """Return the tokens of a step that get embeddings of images.

    starts, counts: how many tokens of each request are computed before the step, and in it.
    token_id: stands for an embedding.
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
    """Return the rows and columns of an image's embeddings. square: the pixels on a side of one."""
    return image.height // square, image.width // square


def rope_offset(images: Sequence[PromptImage], position: int, square: int) -> int:
    """Return how much the rotation of the token at a position behind some images differs from its position.

    An image takes as many positions as its longer side has embeddings.
    """
    return sum(
        max(grid_of(image, square)) - (image.end - image.start) for image in images if image.end <= position
    )


def rope_offsets(requests: Sequence[Request], starts: Sequence[int], square: int) -> list[int]:
    """Return the offset of each row of a step all of whose tokens are behind images; [] if all are 0."""
    offsets = [
        rope_offset(request.inputs.images, start, square) if request.inputs.images else 0
        for request, start in zip(requests, starts, strict=True)
    ]
    return offsets if any(offsets) else []


def grid_positions(
    requests: Sequence[Request], starts: Sequence[int], counts: Sequence[int], square: int
) -> array[int] | None:
    """Return the time, row and column of each token of a step, all times first; None if all are alike.

    Those of a text's token are one number, which goes on from the largest before it.
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
    """Return the last position that each token of a step sees, where some see later ones."""
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


class SeenImages:
    """The requests with images that steps must know of."""

    def __init__(self, vision: VisionSpec) -> None:
        self._vision = vision
        self._seeing = dict[int, Request]()  # by seat

    def add(self, schedule: Schedule, part: ComputedPart) -> None:
        """Add the tokens of images that a step computes, and what tokens behind images are rotated by."""
        vision = self._vision
        if schedule.newcomers or schedule.vacated:
            for seat in schedule.vacated:
                self._seeing.pop(seat, None)
            self._seeing.update((r.seat, r) for r in schedule.newcomers if r.inputs.images)
        if not self._seeing:
            return
        rows = schedule.requests, part.starts, part.counts
        part.images = image_rows(*rows, vision.token_id)
        if part.images and vision.sees_itself:
            part.last_keys = last_keys(*rows)
        if vision.sections is not None:
            part.grid_positions = grid_positions(*rows, vision.square)
            if part.grid_positions is None:
                part.rope_offsets = rope_offsets(schedule.requests, part.starts, vision.square)
            return
        for start, count, request in zip(part.starts, part.counts, schedule.requests, strict=True):
            if request.inputs.images and start + count >= request.inputs.images[-1].end:
                self._seeing.pop(request.seat, None)
