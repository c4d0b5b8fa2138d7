"""The images of a step as numbers, for the other processes of a model. Pixels are sent separately."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from ..requests.request import PromptImage
from ..scheduler.towers import TowerSteps, TowerWork
from .image_rows import ImageRows
from .plan import ComputedPart

_SHA_NUMBERS = 8  # i32 in a sha256
_VALUES_NUMBERS = 14  # i32 in `PromptImage.values`; all are 0 where it is empty
_NO_VALUES = (0,) * _VALUES_NUMBERS


class ImageLists(NamedTuple):
    """The fields of a `ComputedPart` that concern images, as lists of numbers.

    images: of each image of the step, the numbers of its sha256, its height and its width, and its values.
    rows: of each entry of the part's `images`, the image's place in `images`, `first`, and how many rows it
        has; then these rows.
    work: of each work of the tower, the image's place in `images`, and the other fields.
    moves: of each move of the tower's, the numbers of the sha256, and whether the image is needed.
    """

    images: Sequence[int]
    rows: Sequence[int]
    work: Sequence[int]
    moves: Sequence[int]
    last_keys: Sequence[int]
    rope_offsets: Sequence[int]
    grid_positions: Sequence[int]


def images_of(part: ComputedPart) -> list[PromptImage]:
    """Return each image of a step once: those the tower works on, and those whose embeddings it takes."""
    worked = [] if part.towers is None else part.towers.work
    found = chain((each.image for each in worked), (each.image for each in part.images))
    return [*{image.sha256: image for image in found}.values()]


def image_lists(part: ComputedPart) -> ImageLists:
    """Return what a step has of images."""
    images = images_of(part)
    place = {image.sha256: i for i, image in enumerate(images)}
    rows = ((place[each.image.sha256], each.first, len(each.rows), *each.rows) for each in part.images)
    moves, work = ((), ()) if part.towers is None else part.towers
    return ImageLists(
        _flat(
            (*_numbers(image.sha256), image.height, image.width, *(_numbers(image.values) or _NO_VALUES))
            for image in images
        ),
        _flat(rows),
        _flat((place[image.sha256], *others) for image, *others in work),
        _flat((*_numbers(sha256), is_needed) for sha256, is_needed in moves),
        part.last_keys or (),
        part.rope_offsets or (),
        part.grid_positions or (),
    )


def with_images(part: ComputedPart, lists: ImageLists) -> ComputedPart:
    """Return a part with what `image_lists` has found. Its images have no pixels."""
    images = [
        PromptImage(
            0, 0, _sha256(numbers), numbers[_SHA_NUMBERS], numbers[_SHA_NUMBERS + 1], b"", _values(numbers)
        )
        for numbers in _chunks(lists.images, _SHA_NUMBERS + 2 + _VALUES_NUMBERS)
    ]
    work = [
        TowerWork(images[place], first, count, bool(is_last))
        for place, first, count, is_last in _chunks(lists.work, len(TowerWork._fields))
    ]
    moves = [(_sha256(numbers), bool(numbers[-1])) for numbers in _chunks(lists.moves, _SHA_NUMBERS + 1)]
    return replace(
        part,
        images=[*_rows(lists.rows, images)],
        towers=TowerSteps(moves, work) if moves or work else None,
        last_keys=array("i", lists.last_keys) if lists.last_keys else None,
        rope_offsets=[*lists.rope_offsets] or None,
        grid_positions=array("q", lists.grid_positions) if lists.grid_positions else None,
    )


def with_pixels(part: ComputedPart, pixels: dict[bytes, bytes]) -> ComputedPart:
    """Return a part whose images have their pixels, by sha256."""

    def whole(image: PromptImage) -> PromptImage:
        return replace(image, pixels=pixels[image.sha256])

    images = [each._replace(image=whole(each.image)) for each in part.images]
    towers = part.towers
    if towers is not None:
        towers = towers._replace(work=[each._replace(image=whole(each.image)) for each in towers.work])
    return replace(part, images=images, towers=towers)


def _rows(numbers: Sequence[int], images: Sequence[PromptImage]) -> Iterator[ImageRows]:
    at = 0
    while at < len(numbers):
        place, first, count = numbers[at : at + 3]
        at += 3
        yield ImageRows(images[place], [*numbers[at : at + count]], first)
        at += count


def _flat(tuples: Iterable[Iterable[int]]) -> list[int]:
    return [*chain.from_iterable(tuples)]


def _chunks(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (numbers[at : at + size] for at in range(0, len(numbers), size))


def _numbers(sha256: bytes) -> array[int]:
    return array("i", sha256)


def _sha256(numbers: Sequence[int]) -> bytes:
    return array("i", numbers[:_SHA_NUMBERS]).tobytes()


def _values(numbers: Sequence[int]) -> bytes:
    values = numbers[-_VALUES_NUMBERS:]
    return array("i", values).tobytes() if any(values) else b""
