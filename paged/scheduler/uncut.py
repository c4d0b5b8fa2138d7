"""Tokens that see each other, as those of an image, are computed in one step: `RequestInputs.uncut`."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.errors import RequestError
from ..requests.request import PromptImage


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


def runs_of(images: Sequence[PromptImage], most: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges of tokens of images that see each other. Raises RequestError for one of too many.

    most: of a step, in which a prompt has room.
    """
    for image in images:
        if image.end - image.start > most:
            raise RequestError(
                f"an image of the prompt has {image.end - image.start} tokens, which see each other and are "
                f"computed in one step, and a step has room for {most} (max_num_batched_tokens, "
                "long_prefill_token_threshold)",
                param="prompt",
            )
    return tuple((image.start, image.end) for image in images)
