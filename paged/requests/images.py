"""PromptImage: an image of a prompt, processed as far as the host does it."""

from __future__ import annotations

from dataclasses import dataclass

from ..blocks.content_chain import Content


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt, resized.

    start, end: the prompt's tokens that stand for it, those between its rows included.
    sha256: of the pixels and of all that decides what the model makes of them.
    height, width: in pixels.
    pixels: uint8[height, width, 3], row by row.
    """

    start: int
    end: int
    sha256: bytes
    height: int
    width: int
    pixels: bytes

    @property
    def content(self) -> Content:
        """Where it is in the prompt, and what it is, for the prefix cache."""
        return Content(self.start, self.end, self.sha256)
