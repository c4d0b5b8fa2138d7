"""Files of images to pixels in RGB, with limits that are checked before anything is decoded.

PNG, JPEG and WebP, and the first frame of a GIF. EXIF's orientation is applied, transparent pixels go to
white, and palettes, 16 bits and other colour spaces are converted as Pillow does.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING, Any

from ..base.errors import RequestError, ResourceError
from .sizes import MOST_SIDE

if TYPE_CHECKING:
    from PIL import Image

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_PIXELS = 64 * 10**6
LIMIT = f"{MOST_SIDE:,} on a side or {MOST_PIXELS:,} in all"
ORIENTATION = 0x0112  # of EXIF


def pillow() -> Any:
    """Return Pillow's module of images. Raises ResourceError if it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise ResourceError(
            "images need Pillow, which is not installed; install paged with the extra 'images'"
        ) from None
    return Image


def decode(data: bytes) -> Image.Image:
    """Decode the image in a file, in RGB. Raises RequestError for other files and for images that are too
    large.
    """
    image = opened(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image.load()
            return in_rgb(image)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything for a damaged file
        raise RequestError(f"is a damaged {image.format}: {error}") from None


def opened(data: bytes) -> Image.Image:
    """Open the image in a file and read only its header. Raises RequestError."""
    found = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image: Image.Image = found.open(io.BytesIO(data), formats=IMAGE_FORMATS)
    except MemoryError:
        raise
    except found.DecompressionBombError:  # before the size is known here
        raise RequestError(f"has more pixels than {LIMIT}") from None
    except Exception:  # of any kind, as the decoders of headers do not validate them
        kinds = ", ".join(IMAGE_FORMATS[:-1])
        raise RequestError(
            f"is no image in {kinds} or {IMAGE_FORMATS[-1]}, or its header is damaged"
        ) from None
    check_size(image)
    return image


def check_size(image: Image.Image) -> None:
    """Raise RequestError for an image without pixels, or with too many."""
    width, height = image.size
    if min(width, height) < 1:
        raise RequestError(f"has {width} x {height} pixels")
    if max(width, height) > MOST_SIDE or width * height > MOST_PIXELS:
        raise RequestError(f"has {width:,} x {height:,} pixels, more than {LIMIT}")


def in_rgb(image: Image.Image) -> Image.Image:
    """Return an image in RGB, upright, on white where it is transparent."""
    from PIL import ImageOps

    if image.getexif().get(ORIENTATION, 1) != 1:
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16") or image.mode == "I":
        image = _of_16_bits(image)
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        white = pillow().new("RGBA", image.size, "white")
        white.alpha_composite(image)
        image = white
    return image if image.mode == "RGB" else image.convert("RGB")


def _of_16_bits(image: Image.Image) -> Image.Image:
    """Return a grey image of 16 bits as one of 8, of the upper bits. Pillow would cut the numbers off."""
    import numpy as np

    numbers = np.asarray(image).astype(np.int64).clip(0, 65535)
    upper = numbers >> 8
    if "transparency" in image.info:  # the number of the pixels that are transparent
        upper[numbers == image.info["transparency"]] = 255
    grey: Image.Image = pillow().fromarray(upper.astype(np.uint8))
    return grey
