"""Write GGUF files, sound or damaged, and weights in their types: blocks of random bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paged.checkpoints.formats.gguf import format_in
from paged.checkpoints.gguf.gguf_file import GGML_TYPES

NUMBER_OF = {kind.name: number for number, kind in GGML_TYPES.items()}
KIND_OF = {kind.name: kind for kind in GGML_TYPES.values()}
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class Typed(NamedTuple):
    """A value of another type than `packed` would choose. type: for an array that of its values."""

    type: int
    value: Any


class Stored(NamedTuple):
    """The bytes of a tensor. shape: as torch has it, the fastest dimension last."""

    type: str
    shape: Sequence[int]
    data: bytes


def string(text: str | bytes) -> bytes:
    """Return a string as the file has it."""
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def packed(value: Any) -> bytes:
    """Return the type and bytes of a value: u32, f32, bool, string, or an array of these, but i32 for u32."""
    kinds = {bool: 7, int: 4, float: 6, str: 8}
    if isinstance(value, Typed) and not isinstance(value.value, list):
        return struct.pack(f"<I{_FORMS[value.type]}", value.type, value.value)
    if isinstance(value, Typed | list):
        values = value.value if isinstance(value, Typed) else value
        kind = value.type if isinstance(value, Typed) else {**kinds, int: 5, list: 9}[type(values[0])]
        bodies = [packed(Typed(kind, each) if kind in _FORMS else each)[4:] for each in values]
        return struct.pack("<IIQ", 9, kind, len(values)) + b"".join(bodies)
    if isinstance(value, str):
        return struct.pack("<I", 8) + string(value)
    return packed(Typed(kinds[type(value)], value))


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    *,
    version: int = 3,
    alignment: int = 32,
    offsets: Mapping[str, int] | None = None,
) -> Path:
    """Write a file. offsets: of tensors that do not begin where the one before ends."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(string(key) + packed(value) for key, value in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        dims = list(reversed(tensor.shape))
        kind = NUMBER_OF.get(tensor.type, 10)  # Q2_K
        offset = (offsets or {}).get(name, len(data))
        header += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        data += tensor.data + bytes(-len(tensor.data) % alignment)
    path.write_bytes(header + bytes(-len(header) % alignment) + data)
    return path


def in_type(name: str, weight: Tensor, generator: torch.Generator) -> tuple[Stored, Tensor]:
    """Return a weight in a type, and its numbers: of blocks, random ones of about the weight's size."""
    kind = KIND_OF[name]
    if not kind.in_blocks:
        numbers = weight.to(kind.dtype).contiguous()
        data = numbers.view(-1).view(torch.uint8).numpy().tobytes()
        return Stored(name, weight.shape, data), numbers.float()
    shape = (weight[..., 0].numel(), weight.shape[-1] // kind.num_inputs, kind.num_bytes)
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    size = float(weight.std()) / _SIZES[name]
    for place in kind.factors:
        values = size * torch.empty(shape[:2]).uniform_(0.5, 1.5, generator=generator)
        if place == 2:  # what is added, or in Q4_K and Q5_K subtracted
            values *= -1 if kind.num_inputs == 32 else 1
            values *= _MIDDLES[name]
        blocks[..., place : place + 2] = values.half().view(torch.uint8).view(*shape[:2], 2)
    for place in kind.exponents:
        middle = 127 + round(math.log2(size))
        blocks[..., place] = torch.randint(middle - 1, middle + 2, shape[:2], generator=generator)
    floats = format_in(kind).weight({"weight": blocks.flatten(1)}).floats()
    return Stored(name, weight.shape, blocks.numpy().tobytes()), floats.view(weight.shape)


# Of random blocks with factors of 1: about the deviation of numbers, and of codes with an offset the middle.
_SIZES = {
    "Q4_0": 4.6,
    "Q4_1": 4.6,
    "Q5_0": 9.2,
    "Q5_1": 9.2,
    "Q8_0": 74.0,
    "IQ4_NL": 64.0,
    "Q4_K": 250.0,
    "Q5_K": 500.0,
    "Q6_K": 1400.0,
    "IQ4_XS": 1200.0,
    "MXFP4": 2.9,
}
_MIDDLES = {"Q4_1": 7.5, "Q5_1": 15.5, "Q4_K": 7.5, "Q5_K": 15.5}
