"""How an image is written in a prompt: what stands for it, and what that becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..architectures.towers import VisionSpec
from .sizes import Size


class ImageTokens(NamedTuple):
    """The tokens of an image, in the place of its placeholder, with text around them.

    before, after: text.
    token_ids: between them.
    """

    before: str
    token_ids: list[int]
    after: str


class PromptFamily(NamedTuple):
    """How a family writes images.

    placeholder: the token that stands for an image in prompts, or in their text.
    tokens: of an image of this size, once it is resized.
    """

    placeholder: Callable[[VisionSpec], int]
    tokens: Callable[[VisionSpec, Size], ImageTokens]


def num_embeddings(vision: VisionSpec, size: Size) -> int:
    """Return how many embeddings an image has that is resized to this size."""
    return size.height // vision.square * (size.width // vision.square)


def _gemma3(vision: VisionSpec, size: Size) -> ImageTokens:
    before, after = vision.boundary_ids
    return ImageTokens("\n\n", [before, *[vision.token_id] * num_embeddings(vision, size), after], "\n\n")


FAMILIES: Mapping[str, PromptFamily] = {
    "gemma3": PromptFamily(lambda vision: vision.boundary_ids[0], _gemma3),
}
