"""The process that decodes images: see `worker`. It gets no more memory than the declared pixels need."""

from __future__ import annotations

import base64
import resource
import sys
from typing import Any

from ..base.errors import PagedError
from ..images.decoding import decode, opened
from ..images.sizes import Resizing
from .worker import serve

BASE_BYTES = 640 * 2**20  # of the address space of Python and Pillow
PIXEL_BYTES = 20  # for each pixel, of which there are several copies


def answer(data: str, resizing: list[Any], most_characters: int) -> dict[str, Any]:
    """Return the pixels of an image in a file, resized, or what is wrong with it.

    data: the file in base64. resizing: the fields of `Resizing`.
    """
    rule, sizes, *rest = resizing
    file = base64.b64decode(data)
    try:
        width, height = opened(file).size
        _limit_memory(BASE_BYTES + PIXEL_BYTES * width * height)
        (found_height, found_width), pixels = Resizing(rule, tuple(sizes), *rest).apply(decode(file))
    except PagedError as error:
        return {"wrong": str(error)}
    if len(pixels) > most_characters:
        return {"wrong": f"has {len(pixels):,} bytes once it is resized"}
    return {"height": found_height, "width": found_width, "text": base64.b64encode(pixels).decode()}


def _limit_memory(num_bytes: int) -> None:
    """Limit the address space of the process for now."""
    if sys.platform == "darwin":  # macOS has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (min(num_bytes, most), most))


if __name__ == "__main__":
    serve(answer)
