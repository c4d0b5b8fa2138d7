"""Resized images to patches, in numpy: bitwise what transformers' processors with Pillow make of them.

A resized image has whole numbers of 8 bits, so that what becomes of each is looked up in a table.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..architectures.towers import ProcessingSpec, VisionSpec
from .sizes import Pixels, Resizing

_VALUES = struct.Struct("<7d")  # scale, mean and std; NaN for those that are not applied
_NONE = (math.nan,) * 3


def processing_of(vision: VisionSpec) -> ProcessingSpec:
    """Return the processing of images for a loaded tower."""
    assert vision.processing is not None, "a tower without processing is not loaded"
    return vision.processing


def resizing_of(vision: VisionSpec) -> Resizing:
    """Return the resizing of images for a loaded tower."""
    spec = processing_of(vision)
    return Resizing(spec.rule, spec.sizes, spec.resample, vision.square)


def sha256_of(vision: VisionSpec, pixels: Pixels, uuid: str | None = None) -> bytes:
    """Return the sha256 of an image and of all processing that its embeddings depend on.

    uuid: the user's name of the image. It tells equal images apart, but makes none of two that differ: by a
        name alone, one user would find another's image.
    """
    named = () if uuid is None else (uuid,)
    digest = hashlib.sha256(repr((vision.family, vision.processing, pixels.size, *named)).encode())
    digest.update(pixels.data)
    return digest.digest()


def values_of(own: ProcessingSpec, engine: ProcessingSpec) -> bytes:
    """Return what numbers of pixels become, in bytes; b"" if that is what the engine's processing says."""
    if (own.scale, own.mean, own.std) == (engine.scale, engine.mean, engine.std):
        return b""
    scale = math.nan if own.scale is None else own.scale
    return _VALUES.pack(scale, *(own.mean or _NONE), *(own.std or _NONE))


def _with_values(spec: ProcessingSpec, values: bytes) -> ProcessingSpec:
    """Return a processing with what `values_of` has found."""
    if not values:
        return spec
    scale, *channels = _VALUES.unpack(values)
    mean, std = (None if math.isnan(each[0]) else tuple(each) for each in (channels[:3], channels[3:]))
    return replace(spec, scale=None if math.isnan(scale) else scale, mean=mean, std=std)


def patches_of(
    vision: VisionSpec, height: int, width: int, data: bytes, values: bytes = b""
) -> NDArray[np.float32]:
    """Return the patches of a resized image, f32[num_patches, patch_numbers], square by square.

    A patch has the numbers of one channel after the other, row by row.

    values: see `PromptImage`.
    """
    side = vision.projector.side
    size = vision.tower.patch_size
    pixels = np.frombuffer(data, np.uint8).reshape(height, width, 3)
    table = _table(_with_values(processing_of(vision), values))
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
