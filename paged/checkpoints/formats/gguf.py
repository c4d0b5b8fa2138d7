"""The types of GGUF that store numbers in blocks, which llama.cpp defines.

A block holds 32 numbers with factors of their own, or 256 in groups of 16 or 32 with two levels of factors.
Each function here takes blocks u8[num_rows, num_blocks, num_bytes].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...base.errors import CheckpointError
from ...kernels.half_bytes import HalfBytes
from ..coded import CodedWeight, Factors
from ..gguf.gguf_file import GgmlType, GgufTensor
from ..stored import Layout, StoredFormat, StoredPart
from .fp4 import E2M1

_NUMBERS_AT_A_TIME = 2**18  # that are unpacked in several steps, so that they stay in a cache
_CENTRED = tuple(float(code - 8) for code in range(16))
_COUNTED = tuple(map(float, range(16)))
# e2m1, but llama.cpp has no -0.
_MXFP4 = tuple(number or 0.0 for number in E2M1)
# Of IQ4_NL and IQ4_XS: denser around 0.
_NON_LINEAR = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))


@dataclass(frozen=True, slots=True)
class GgufFormat(StoredFormat):
    """A weight stored in blocks of one GGML type."""

    title: str
    type: GgmlType
    columns: tuple[int, ...] | None = None  # see GgufTensor

    def layouts(self, part: StoredPart) -> dict[str, Layout]:
        kind = self.type
        if part.num_inputs % kind.num_inputs:
            raise CheckpointError(
                f"{part.name} is {kind.name}, in blocks of {kind.num_inputs}, but the model's rows have "
                f"{part.num_inputs} numbers"
            )
        row_bytes = part.num_inputs // kind.num_inputs * kind.num_bytes
        return {"weight": Layout((row_bytes,), torch.uint8, stored_dtypes=(torch.uint8,))}

    def weight(self, tensors: Mapping[str, Tensor]) -> CodedWeight:
        stored = tensors["weight"]
        weight = _READERS[self.type.name](stored.view(len(stored), -1, self.type.num_bytes))
        return weight if self.columns is None else _in_order(weight, self.columns)


def gguf_format(part: StoredPart) -> GgufFormat | None:
    """Return the format of a weight that a GGUF file stores in blocks; None if it is stored otherwise."""
    tensor = part.get("weight")
    if not isinstance(tensor, GgufTensor) or not tensor.type.in_blocks:
        return None
    return replace(format_in(tensor.type), columns=tensor.columns)


def _in_order(weight: CodedWeight, columns: tuple[int, ...]) -> CodedWeight:
    """Return a weight whose columns are for these inputs, in the order of inputs.

    Groups that stay whole are moved with their factors; else the inputs are ordered before each product.
    """
    order = torch.tensor(columns, device=weight.stored.device)

    def stays(size: int) -> bool:
        runs = order.view(-1, size)
        steps = torch.arange(size, device=order.device)
        return bool((runs == runs[:, :1] + steps).all() and (runs[:, 0] % size == 0).all())

    if len(order) % weight.group or not stays(weight.group):
        return replace(weight, order=order)

    def moved(x: Tensor) -> Tensor:
        size = len(order) // x.shape[1]
        while not stays(size):  # a unit of several groups, which are torn apart
            size //= 2
        x = x.repeat_interleave(len(order) // size // x.shape[1], dim=1)
        return x[:, order.view(-1, size)[:, 0].argsort()]

    codes = weight.codes[:, order.argsort()]
    stored: Tensor | HalfBytes = codes
    if isinstance(weight.stored, HalfBytes):
        stored = HalfBytes(codes[:, ::2] | codes[:, 1::2] << 4, len(order))
    scale, *others = weight.factors
    factors = Factors(moved(scale), *(None if x is None else moved(x) for x in others))
    return replace(weight, stored=stored, factors=factors)


def format_in(kind: GgmlType) -> GgufFormat:
    """Return the format of weights in blocks of this type."""
    return GgufFormat(f"GGUF {kind.name}", kind)


def _q4_0(blocks: Tensor) -> CodedWeight:
    return CodedWeight(_half_bytes(blocks, 2), Factors(_float16(blocks, 0)), _CENTRED)


def _q4_1(blocks: Tensor) -> CodedWeight:
    return CodedWeight(_half_bytes(blocks, 4), _with_offset(blocks), _COUNTED)


def _q5_0(blocks: Tensor) -> CodedWeight:
    codes = _halves(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return CodedWeight(_signed(codes, 16), Factors(_float16(blocks, 0)))


def _q5_1(blocks: Tensor) -> CodedWeight:
    codes = _halves(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return CodedWeight(_signed(codes, 0), _with_offset(blocks))


def _q8_0(blocks: Tensor) -> CodedWeight:
    return CodedWeight(_signed(blocks[..., 2:].flatten(1), 0), Factors(_float16(blocks, 0)))


def _q4_k(blocks: Tensor) -> CodedWeight:
    return CodedWeight(_half_bytes(blocks, 16, 32), _two_levels(blocks), _COUNTED)


def _q5_k(blocks: Tensor) -> CodedWeight:
    # Bit g of a byte is that of a number in group g.
    high = blocks[..., None, 16:48] >> _counted(8, blocks)[:, None] & 1
    codes = _nibbles(blocks[..., 48:]) | high << 4
    return CodedWeight(_signed(codes.flatten(1), 0), _two_levels(blocks))


def _q6_k(blocks: Tensor) -> CodedWeight:
    # Halves of 128 numbers: four groups of 32, the first two in low nibbles, and pairs of bits in one byte.
    codes = torch.empty(*blocks.shape[:2], 2, 4, 32, dtype=torch.int8, device=blocks.device)
    step = max(1, _NUMBERS_AT_A_TIME // codes[0].numel())
    for out, part in zip(torch.split(codes, step), torch.split(blocks, step), strict=True):
        # Eight numbers at once, in an int64.
        low = part[..., :128].contiguous().view(torch.int64).view(*out.shape[:3], 2, 4)
        high = part[..., 128:192].contiguous().view(torch.int64).view(*out.shape[:3], 4)
        halves = low & 0x0F0F0F0F0F0F0F0F, low >> 4 & 0x0F0F0F0F0F0F0F0F
        pairs = high << 4, high << 2, high, high >> 2
        numbers = out.view(torch.int64)
        for group in range(4):
            upper = pairs[group] & 0x3030303030303030
            torch.bitwise_or(halves[group // 2][..., group % 2, :], upper, out=numbers[..., group, :])
        # Subtract 32 from each: with the sign bits turned, none borrows from its neighbour.
        words = out.view(torch.int32)
        words += 0x60606060
        words ^= -0x7F7F7F80
    scales = _signed(blocks[..., 192:208].flatten(1), 0)
    return CodedWeight(codes.flatten(1), Factors(scales, scale_unit=_float16(blocks, 208)))


def _iq4_nl(blocks: Tensor) -> CodedWeight:
    return CodedWeight(_half_bytes(blocks, 2), Factors(_float16(blocks, 0)), _NON_LINEAR)


def _iq4_xs(blocks: Tensor) -> CodedWeight:
    high = blocks[..., 2:4, None] >> 2 * _counted(4, blocks) & 3
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], dim=3)
    scales = _signed((low.flatten(2) | high.flatten(2) << 4).flatten(1), 32)
    return CodedWeight(_half_bytes(blocks, 8), Factors(scales, scale_unit=_float16(blocks, 0)), _NON_LINEAR)


def _mxfp4(blocks: Tensor) -> CodedWeight:
    scales = blocks[..., 0].contiguous().view(torch.float8_e8m0fnu).to(torch.bfloat16)
    return CodedWeight(_half_bytes(blocks, 1), Factors(scales), _MXFP4)


_READERS: Mapping[str, Callable[[Tensor], CodedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def _counted(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, dtype=torch.uint8, device=like.device)


def _divided(blocks: Tensor, *shape: int) -> Tensor:
    return blocks.reshape(*blocks.shape[:2], *shape)


def _float16(blocks: Tensor, place: int) -> Tensor:  # [num_rows, num_blocks]
    """Return the float16 that each block has from this byte on."""
    return blocks[..., place : place + 2].contiguous().view(torch.float16).squeeze(2)


def _with_offset(blocks: Tensor) -> Factors:
    return Factors(_float16(blocks, 0), offset=_float16(blocks, 2))


def _signed(codes: Tensor, zero: int) -> Tensor:
    """Return u8 codes as i8, less what stands for 0."""
    signed = codes.contiguous().view(torch.int8)
    return signed - zero if zero else signed


def _half_bytes(blocks: Tensor, start: int, run: int = 16) -> HalfBytes:
    """Return the 4-bit codes of blocks, which begin at this byte: of each `run` bytes the low ones first."""
    _, num_blocks, num_bytes = blocks.shape
    block_inputs = 2 * (num_bytes - start)
    return HalfBytes(blocks.flatten(1), num_blocks * block_inputs, block_inputs, num_bytes, start, run)


def _halves(packed: Tensor) -> Tensor:  # u8[num_rows, num_blocks, n] -> u8[num_rows, 2 * num_blocks * n]
    """Return 4-bit codes: first the low nibbles of a block, then the high ones."""
    return torch.cat([packed & 15, packed >> 4], dim=2).flatten(1)


def _nibbles(packed: Tensor) -> Tensor:  # u8[num_rows, num_blocks, 128] -> [num_rows, num_blocks, 8, 32]
    """Return 4-bit codes: the low nibbles of 32 bytes, then their high ones."""
    packed = _divided(packed, 4, 1, 32)
    return torch.cat([packed & 15, packed >> 4], dim=3).flatten(2, 3)


def _bits(packed: Tensor) -> Tensor:  # u8[num_rows, num_blocks, n] -> u8[num_rows, 8 * num_blocks * n]
    return (packed[..., None] >> _counted(8, packed) & 1).flatten(1)


def _two_levels(blocks: Tensor) -> Factors:
    """Return the factors of Q4_K and Q5_K: 6 bits for each group of 32, in 12 bytes."""
    # Four bytes at once, in an int32.
    first, second, third = blocks[..., 4:16].contiguous().view(torch.int32).unbind(2)
    scales, mins = (
        torch.stack([own & 0x3F3F3F3F, low & 0x0F0F0F0F | own >> 2 & 0x30303030], dim=2)
        for own, low in ((first, third), (second, third >> 4))
    )
    return Factors(
        scales.view(torch.uint8).flatten(1),
        offset=mins.view(torch.uint8).flatten(1),
        scale_unit=_float16(blocks, 0),
        offset_unit=-_float16(blocks, 2),
    )
