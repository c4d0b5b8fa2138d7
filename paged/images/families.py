"""How an image is written in a prompt: what stands for it, and what that becomes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ..architectures.towers import VisionSpec
from ..base.errors import CheckpointError
from .sizes import Size


class ImageTokens(NamedTuple):
    """The tokens that replace the placeholder of an image, and the text around them.

    before, after: the text in front of the tokens and behind them. token_ids: the tokens between these texts.
    """

    before: str
    token_ids: list[int]
    after: str


class PromptFamily(NamedTuple):
    """How a family writes images.

    placeholder: the token that stands for an image in prompts, or in their text.
    tokens: of an image of this size, once it is resized.
    boundary_texts: the texts of `VisionSpec.boundary_ids`, where config.json does not have these.
    boundary_offsets: where these tokens are behind that of an embedding, in a model without a tokenizer.
    is_wrapped: whether the placeholder stands between the boundaries.
    """

    placeholder: Callable[[VisionSpec], int]
    tokens: Callable[[VisionSpec, Size], ImageTokens]
    boundary_texts: tuple[str, ...] = ()
    boundary_offsets: tuple[int, ...] = ()
    is_wrapped: bool = False


def with_boundaries(vision: VisionSpec, ids: Mapping[str, int] | None) -> VisionSpec:
    """Return what a model sees images with, with the tokens between the rows of images.

    ids: the special tokens of the tokenizer by their texts; None: there is none.

    Raises CheckpointError if the tokenizer lacks one.
    """
    family = PROMPT_FAMILIES[vision.family]
    if not family.boundary_texts:
        return vision
    if ids is None:
        found = tuple(vision.token_id + offset for offset in family.boundary_offsets)
        return replace(vision, boundary_ids=found)
    for text in family.boundary_texts:
        if text not in ids:
            raise CheckpointError(
                f"the tokenizer has no special token {text}, which images are written with; "
                "language_model_only=True loads the text part alone"
            )
    return replace(vision, boundary_ids=tuple(ids[text] for text in family.boundary_texts))


def num_embeddings(vision: VisionSpec, size: Size) -> int:
    """Return the number of embeddings of an image that is resized to this size."""
    return size.height // vision.square * (size.width // vision.square)


def _gemma3(vision: VisionSpec, size: Size) -> ImageTokens:
    before, after = vision.boundary_ids
    return ImageTokens("\n\n", [before, *[vision.token_id] * num_embeddings(vision, size), after], "\n\n")


def _gemma4(vision: VisionSpec, size: Size) -> ImageTokens:
    before, after = vision.boundary_ids
    return ImageTokens("", [before, *[vision.token_id] * num_embeddings(vision, size), after], "")


def _in_a_row(vision: VisionSpec, size: Size) -> ImageTokens:
    return ImageTokens("", [vision.token_id] * num_embeddings(vision, size), "")


def _mistral3(vision: VisionSpec, size: Size) -> ImageTokens:
    """Write a row of embeddings after the other, with a token behind each."""
    behind_row, behind_image = vision.boundary_ids
    rows = size.height // vision.square
    row = [*[vision.token_id] * (size.width // vision.square), behind_row]
    return ImageTokens("", [*(row * rows)[:-1], behind_image], "")


PROMPT_FAMILIES: Mapping[str, PromptFamily] = {
    "gemma3": PromptFamily(lambda vision: vision.boundary_ids[0], _gemma3),
    "gemma4": PromptFamily(lambda vision: vision.token_id, _gemma4),
    "mistral3": PromptFamily(
        lambda vision: vision.token_id,
        _mistral3,
        boundary_texts=("[IMG_BREAK]", "[IMG_END]"),
        boundary_offsets=(2, 3),
    ),
    "qwen3_vl": PromptFamily(lambda vision: vision.token_id, _in_a_row, is_wrapped=True),
}
