"""The computed part of a plan as bytes, for the other processes of a model."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from ..scheduler.schedule import AskedRows
from .plan import ComputedPart, SeatChange


def to_bytes(part: ComputedPart) -> bytes:
    """Encode this part for `from_bytes`."""
    of_images = _of_images(part)
    pairs = (part.swap_out, part.swap_in, part.copies, part.state_moves)
    rows = (part.seats, part.starts, part.counts, part.rope_lens, part.sampled, part.sampled_seats)
    tuples = (*pairs, part.settled, part.asked, part.changes)
    flat = (chain.from_iterable(each) for each in tuples)
    return _write(
        [
            [part.num_decodes, part.num_drafting, len(of_images)],
            *map(list, flat),
            *rows,
            part.unapplied,
            part.adapters,
            part.last_tokens,
            part.tokens,
            *part.entries,
            *of_images,
        ]
    )


def _of_images(part: ComputedPart) -> Sequence[Sequence[int]]:
    """Return what a step has of images; nothing if it has none."""
    if not (part.images or part.towers or part.last_keys or part.rope_offsets or part.grid_positions):
        return ()
    from .image_bytes import image_lists

    return image_lists(part)


def from_bytes(data: bytes) -> ComputedPart:
    """Decode a part that `to_bytes` encoded."""
    lists = _read(data)
    num_decodes, num_drafting, num_of_images = next(lists)
    swap_out, swap_in, copies, state_moves = ([*_tuples(next(lists), 2)] for _ in range(4))
    settled = [*_tuples(next(lists), 3)]
    asked = [AskedRows(*numbers) for numbers in _tuples(next(lists), len(AskedRows._fields))]
    changes = [SeatChange(*numbers) for numbers in _tuples(next(lists), len(SeatChange._fields))]
    seats, starts, counts, rope_lens, sampled, sampled_seats = (next(lists) for _ in range(6))
    unapplied, adapters = next(lists), next(lists)
    last_tokens, tokens, *more = (array("i", numbers) for numbers in lists)
    num_groups = len(more) - num_of_images
    entries = more[:num_groups]
    part = ComputedPart(
        swap_out=swap_out,
        swap_in=swap_in,
        copies=copies,
        state_moves=state_moves,
        settled=settled,
        unapplied=unapplied,
        adapters=adapters or (),
        num_decodes=num_decodes,
        num_drafting=num_drafting,
        seats=seats,
        starts=starts,
        counts=counts,
        rope_lens=rope_lens,
        changes=changes,
        tokens=tokens,
        entries=entries,
        sampled=sampled,
        sampled_seats=sampled_seats,
        asked=asked,
        last_tokens=last_tokens,
    )
    if not num_of_images:
        return part
    from .image_bytes import ImageLists, with_images

    return with_images(part, ImageLists(*more[num_groups:]))


def _write(lists: Sequence[Sequence[int]]) -> bytes:
    """Write lists of integers: how many there are, how long each is, then their numbers."""
    return array("i", [len(lists), *map(len, lists), *chain.from_iterable(lists)]).tobytes()


def _tuples(numbers: Sequence[int], size: int) -> Iterator[Any]:
    """Yield the numbers in tuples of a size."""
    return zip(*[iter(numbers)] * size, strict=True)


def _read(data: bytes) -> Iterator[list[int]]:
    """Yield the lists that `_write` has written."""
    numbers = array("i", data)
    num_lists = numbers[0]
    start = 1 + num_lists
    for size in numbers[1:start]:
        yield numbers[start : start + size].tolist()
        start += size
