"""The pixels of images, which the driver sends to the ranks of the first stage: they have the tower."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from ..requests.request import PromptImage
from ..runner.image_bytes import images_of, with_pixels
from ..runner.plan import ComputedPart
from .transport import Transport

MOST_PIXEL_BYTES = 64 * 2**20  # of pixels that a rank keeps, beside those of the current step


class KeptPixels:
    """The images of the last steps, whose pixels are not sent again. Driver and receivers store the same."""

    def __init__(self) -> None:
        # The size and the pixels, by sha256; the image that was used last is at the end.
        self._kept = OrderedDict[bytes, tuple[int, bytes]]()
        self._num_bytes = 0

    def missing(self, images: Sequence[PromptImage]) -> list[PromptImage]:
        """Return the images of a step whose pixels are not stored. The others become the most recent ones."""
        for image in images:
            if image.sha256 in self._kept:
                self._kept.move_to_end(image.sha256)
        return [image for image in images if image.sha256 not in self._kept]

    def add(self, image: PromptImage, pixels: bytes) -> None:
        """Keep the pixels of an image of the step, or b"" where they need not be known."""
        size = num_bytes(image)
        self._kept[image.sha256] = size, pixels
        self._num_bytes += size

    def pixels(self) -> dict[bytes, bytes]:
        """Return the pixels of all stored images, by sha256, the images of the current step included."""
        return {sha256: pixels for sha256, (_, pixels) in self._kept.items()}

    def trim(self) -> None:
        """Give up the images that were used for the longest time ago, down to the limit."""
        while self._num_bytes > MOST_PIXEL_BYTES:
            _, (size, _) = self._kept.popitem(last=False)
            self._num_bytes -= size


def num_bytes(image: PromptImage) -> int:
    """Return the size of an image's pixels."""
    return image.height * image.width * 3


class PixelSender:
    """Sends pixels to the ranks that have the tower, behind the message of the step that needs them."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._transport = transport
        self._ranks = ranks
        self._kept = KeptPixels()

    def send(self, step: ComputedPart) -> None:
        """Send the pixels of a step's images that the ranks do not have."""
        missing = self._kept.missing(images_of(step))
        if missing:
            joined = bytearray().join(image.pixels for image in missing)
            tensor = torch.frombuffer(joined, dtype=torch.uint8)
            for rank in self._ranks:
                self._transport.send(tensor, rank)
        for image in missing:
            self._kept.add(image, b"")
        self._kept.trim()


class PixelReceiver:
    """Receives what a `PixelSender` sends."""

    def __init__(self, transport: Transport, driver: int) -> None:
        self._transport = transport
        self._driver = driver
        self._kept = KeptPixels()

    def receive(self, step: ComputedPart) -> ComputedPart:
        """Return a step whose images have their pixels."""
        images = images_of(step)
        if not images:
            return step
        missing = self._kept.missing(images)
        if missing:
            size = sum(map(num_bytes, missing))
            pixels = self._transport.receive((size,), torch.uint8, self._driver).numpy().tobytes()
            at = 0
            for image in missing:
                self._kept.add(image, pixels[at : at + num_bytes(image)])
                at += num_bytes(image)
        whole = with_pixels(step, self._kept.pixels())
        self._kept.trim()
        return whole
