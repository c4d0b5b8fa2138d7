"""Resized images to patches, in numpy: bitwise what transformers' processors with Pillow make of them.

A resized image has whole numbers of 8 bits, so that what becomes of each is looked up in a table.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..architectures.towers import ProcessingSpec, VisionSpec
from .sizes import Pixels, Resizing


def processing_of(vision: VisionSpec) -> ProcessingSpec:
    """Return the processing of images for a loaded tower."""
    assert vision.processing is not None, "a tower without processing is not loaded"
    return vision.processing


def resizing_of(vision: VisionSpec) -> Resizing:
    """Return the resizing of images for a loaded tower."""
    spec = processing_of(vision)
    return Resizing(spec.rule, spec.sizes, spec.resample, vision.square)


def sha256_of(vision: VisionSpec, pixels: Pixels) -> bytes:
    """Return the sha256 of an image and of all processing that its embeddings depend on."""
    digest = hashlib.sha256(repr((vision.family, vision.processing, pixels.size)).encode())
    digest.update(pixels.data)
    return digest.digest()


def patches_of(vision: VisionSpec, height: int, width: int, data: bytes) -> NDArray[np.float32]:
    """Return the patches of a resized image, f32[num_patches, patch_numbers], square by square.

    A patch has the numbers of one channel after the other, row by row.
    """
    side = vision.projector.side
    size = vision.tower.patch_size
    pixels = np.frombuffer(data, np.uint8).reshape(height, width, 3)
    table = _table(processing_of(vision))
    squares = height // size // side, side, size, width // size // side, side, size
    channels = [table[c][pixels[:, :, c]].reshape(squares) for c in range(3)]
    # [rows of squares, squares, rows of patches, patches, channels, rows, columns]
    ordered = np.stack(channels).transpose(1, 4, 2, 5, 0, 3, 6)
    return ordered.reshape(height // size * (width // size), 3 * size**2)


@lru_cache(maxsize=16)
def _table(spec: ProcessingSpec) -> NDArray[np.float32]:
    """Return what each number of a channel becomes, f32[3, 256], by transformers' arithmetic."""
    numbers = np.arange(256, dtype=np.uint8)
    values = numbers.astype(np.float32)
    if spec.scale is not None:
        values = (numbers.astype(np.float64) * spec.scale).astype(np.float32)
    made: NDArray[np.float32] = np.stack([values] * 3)
    if spec.mean is not None and spec.std is not None:
        mean, std = (np.array(each, np.float32)[:, None] for each in (spec.mean, spec.std))
        made = (made - mean) / std
    return np.float32(2) * (made - np.float32(0.5)) if spec.is_centred else made
