"""PromptImage: an image among the tokens of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

from ..blocks.content_chain import Content


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt, resized.

    start, end: the range of the prompt's tokens that stand for the image, including tokens between its rows.
    sha256: a hash of the pixels and of everything that determines the image's embeddings.
    height, width: the size in pixels.
    pixels: uint8[height, width, 3], row by row.
    values: what numbers of pixels become; b"": what the engine's processing says. See `images.processing`.
    """

    start: int
    end: int
    sha256: bytes
    height: int
    width: int
    pixels: bytes
    values: bytes = b""

    @property
    def content(self) -> Content:
        """Its place in the prompt and its content, for the prefix cache."""
        return Content(self.start, self.end, self.sha256)
