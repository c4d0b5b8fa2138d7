"""The tokens of a step that stand for images: which they are, and what they see."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from ..requests.request import PromptImage, Request


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
