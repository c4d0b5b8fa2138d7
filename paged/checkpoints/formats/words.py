"""Integers in words of int32: GPTQ, AWQ, and "pack-quantized" of compressed-tensors.

Words of GPTQ pack inputs, their zeros pack outputs, and g_idx may order inputs by activation. Those of AWQ,
for its "gemm" kernel, pack outputs, in an order of their own; those of compressed-tensors lie along the
inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...architectures.schemes import Scheme
from ...base.errors import CheckpointError
from ..coded import Weight
from ..stored import Layout, StoredFormat, StoredPart
from .groups import FINITE, SCALES, InputGroups, Integers, ScaleLayout, codes_of, rows_of


@dataclass(frozen=True)
class GptqFormat(StoredFormat):
    """GPTQ: qweight i32[inputs / 8, outputs], qzeros i32[groups, outputs / 8], scales [groups, outputs]."""

    title: str
    num_groups: int
    zeros_less_one: bool
    symmetric: bool
    in_any_order: bool
    scale_dtype: torch.dtype
    integers: Integers

    def layouts(self, part: StoredPart) -> dict[str, Layout]:
        bits = self.integers.bits
        per_word = 32 // bits
        words = (torch.int32,)
        middle = (1 << bits - 1) - self.zeros_less_one
        found = {
            "qweight": Layout((-(-part.num_inputs // per_word),), torch.int32, 1, stored_dtypes=words),
            "qzeros": Layout(
                *((self.num_groups,), torch.uint8, 1, per_word, partial(rows_of, bits=bits), words),
                usual=_word_of(middle, bits) if self.symmetric else None,
            ),
            "scales": Layout((self.num_groups,), self.scale_dtype, 1, stored_dtypes=SCALES, check=FINITE),
        }
        if self.in_any_order or part.get("g_idx"):
            found["g_idx"] = Layout(
                (part.num_inputs,), torch.int32, dim=None, stored_dtypes=words, is_read=False
            )
        return found

    def weight(self, tensors: Mapping[str, Tensor]) -> Weight:
        bits = self.integers.bits
        num_inputs = len(self.integers.groups.group_of_input) // 8
        codes = codes_of(tensors["qweight"], bits, num_inputs)
        zeros = tensors["qzeros"].to(torch.int16) + self.zeros_less_one
        return self.integers.weight(codes, tensors["scales"], zeros)


def gptq_format(scheme: Scheme, part: StoredPart) -> GptqFormat:
    """Return the format of a weight's part that is stored as in GPTQ."""
    size = scheme.scale_inputs or max(1, part.num_inputs)
    num_groups = -(-part.num_inputs // size)
    groups = read_groups(part, "g_idx", num_groups, is_needed=scheme.in_any_order)
    groups = groups or InputGroups.even(part.num_inputs, size)
    integers = Integers(scheme.bits, groups, part.dtype)
    return GptqFormat(
        scheme.title,
        num_groups,
        scheme.zeros_less_one,
        scheme.symmetric,
        scheme.in_any_order,
        scale_dtype_of(part, "scales"),
        integers,
    )


def _word_of(code: int, bits: int) -> int:
    """Return the word that holds a code in each of its places."""
    byte = code if bits == 8 else code | code << 4
    return int.from_bytes([byte] * 4, "little", signed=True)


def scale_dtype_of(part: StoredPart, name: str) -> torch.dtype:
    """Return the dtype of scales in memory: their dtype in the file. Unsupported ones are refused later."""
    found = part.get(name)
    return found.dtype if found is not None and found.dtype in SCALES else torch.float32


def read_groups(part: StoredPart, name: str, num_groups: int, *, is_needed: bool) -> InputGroups | None:
    """Read the group of each input. Return None if the tensor is absent, holds no groups, or will be refused
    later.

    Raises CheckpointError for the number of a group that does not exist.
    """
    tensor = part.get(name)
    if tensor is None or tensor.shape != [part.num_inputs] or tensor.dtype != torch.int32:
        return None
    if not tensor.has_data:
        return None
    groups = tensor.read()
    if not is_needed and bool((groups == -1).all()):  # compressed-tensors: not set
        return None
    wrong = ((groups < 0) | (groups >= num_groups)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} is {int(groups[place])} at [{place}], but must be from 0 to "
            f"{num_groups - 1}, as there are {num_groups} groups"
        )
    return InputGroups.of(groups)


_PER_WORD = 8
_WORDS_AT_A_TIME = 2**18  # that are transposed, so that they stay in a cache
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of its eight outputs each 4 bits of a word hold, the lowest first


@dataclass(frozen=True)
class AwqFormat(StoredFormat):
    """AWQ: qweight i32[inputs, outputs / 8], qzeros i32[groups, outputs / 8], scales [groups, outputs]."""

    title: str
    num_groups: int
    scale_dtype: torch.dtype
    integers: Integers

    def layouts(self, part: StoredPart) -> dict[str, Layout]:
        words = (torch.int32,)
        return {
            "qweight": Layout(
                (part.num_inputs,), torch.int32, 1, 8, awq_words, words, columns_in_one=_PER_WORD
            ),
            "qzeros": Layout((self.num_groups,), torch.uint8, 1, 8, awq_rows, words),
            "scales": Layout((self.num_groups,), self.scale_dtype, 1, stored_dtypes=SCALES, check=FINITE),
        }

    def weight(self, tensors: Mapping[str, Tensor]) -> Weight:
        codes = codes_of(tensors["qweight"], 4, len(self.integers.groups.group_of_input) // 8)
        return self.integers.weight(codes, tensors["scales"], tensors["qzeros"])


def awq_words(words: Tensor) -> Tensor:  # i32[n, num_inputs] -> i32[8 n, num_inputs / 8]
    """Repack words of eight outputs of an input into words of eight inputs of an output, first one lowest."""
    by_input = words.T
    num_inputs, num_words = by_input.shape
    rows = torch.empty(
        num_words, _PER_WORD, -(-num_inputs // _PER_WORD), dtype=torch.int32, device=words.device
    )
    step = max(16, _WORDS_AT_A_TIME // num_inputs)
    for out, part in zip(torch.split(rows, step), torch.split(by_input, step, dim=1), strict=True):
        padded = F.pad(part, (0, 0, 0, -num_inputs % _PER_WORD)).contiguous()
        packed = padded.view(-1, _PER_WORD, part.shape[1])
        _transpose(packed)
        for place, output in enumerate(ORDER):
            out[:, output] = packed[:, place].T
    return rows.flatten(0, 1)


def _transpose(words: Tensor) -> None:
    """Exchange 4 bits number i of word k and number k of word i, of each 8 words i32[n, 8, m], in place."""
    for distance, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        low, high = words.view(-1, 2, distance, words.shape[2]).unbind(1)
        shift = 4 * distance
        changed = (low >> shift).bitwise_xor_(high).bitwise_and_(mask)
        high ^= changed
        low ^= changed.bitwise_left_shift_(shift)


def awq_rows(words: Tensor) -> Tensor:  # i32[n, m] -> u8[8 n, m]
    """Unpack the codes of eight outputs from each word."""
    words = words.contiguous()
    rows = torch.empty(len(words), 8, words.shape[1], dtype=torch.uint8, device=words.device)
    bytes_of = words.view(-1).view(torch.uint8).view(*words.shape, 4)
    for place, output in enumerate(ORDER):
        rows[:, output] = bytes_of[..., place // 2] >> 4 * (place % 2) & 15
    return rows.flatten(0, 1)


def awq_format(scheme: Scheme, part: StoredPart) -> AwqFormat:
    """Return the format of a weight's part that is stored as in AWQ."""
    groups = InputGroups.even(part.num_inputs, scheme.scale_inputs)
    num_groups = -(-part.num_inputs // (scheme.scale_inputs or max(1, part.num_inputs)))
    integers = Integers(4, groups, part.dtype)
    return AwqFormat(scheme.title, num_groups, scale_dtype_of(part, "scales"), integers)


@dataclass(frozen=True)
class PackedFormat(StoredFormat):
    """compressed-tensors: weight_packed i32[outputs, inputs / 8], weight_scale, zeros packed by outputs."""

    title: str
    scale: ScaleLayout
    zeros: torch.dtype | None  # int32 if words pack them, int8 in old files
    in_any_order: bool
    integers: Integers

    def layouts(self, part: StoredPart) -> dict[str, Layout]:
        bits = self.integers.bits
        per_word = 32 // bits
        words = (torch.int32,)
        num_words = -(-part.num_inputs // per_word)
        found = {
            "weight_packed": Layout((num_words,), torch.int32, stored_dtypes=words),
            "weight_scale": self.scale.layout(part.num_inputs),
        }
        if self.zeros == torch.int32:
            columns = self.scale.layout(part.num_inputs).columns
            found["weight_zero_point"] = Layout(
                columns, torch.uint8, 0, per_word, partial(rows_of, bits=bits), words
            )
        elif self.zeros is not None:
            found["weight_zero_point"] = self.scale.layout_of_zeros(part.num_inputs)
        for name, columns, dtypes in (
            ("weight_shape", (2,), (torch.int64, torch.int32)),
            ("weight_g_idx", (part.num_inputs,), words),
        ):
            if (name == "weight_g_idx" and self.in_any_order) or part.get(name):
                found[name] = Layout(columns, dtypes[0], dim=None, stored_dtypes=dtypes, is_read=False)
        return found

    def weight(self, tensors: Mapping[str, Tensor]) -> Weight:
        bits = self.integers.bits
        num_inputs = len(self.integers.groups.group_of_input) // 8
        codes = codes_of(tensors["weight_packed"], bits, num_inputs)
        zeros = tensors.get("weight_zero_point")
        if zeros is not None:
            zeros = self.scale.by_row(zeros)
            if self.zeros == torch.int8:
                zeros = zeros.to(torch.int16) + (1 << bits - 1)
        return self.integers.weight(codes, self.scale.by_row(tensors["weight_scale"]), zeros)


def packed_format(scheme: Scheme, part: StoredPart) -> PackedFormat:
    """Return the format of a weight's part that is stored as packed integers.

    Raises CheckpointError if weight_shape differs from the shape of the part.
    """
    _check_shape(part)
    scale = ScaleLayout.of(scheme, part, "weight_scale")
    num_groups = scale.num_groups(part.num_inputs)
    groups = read_groups(part, "weight_g_idx", num_groups, is_needed=scheme.in_any_order)
    groups = groups or InputGroups.even(part.num_inputs, scheme.scale_inputs)
    zeros = None
    if scheme.zeros:
        stored = part.get("weight_zero_point")
        is_plain = stored is not None and stored.dtype == torch.int8
        zeros = torch.int8 if is_plain or scheme.scale_rows is None else torch.int32
    integers = Integers(scheme.bits, groups, part.dtype)
    return PackedFormat(scheme.title, scale, zeros, scheme.in_any_order, integers)


def _check_shape(part: StoredPart) -> None:
    tensor = part.get("weight_shape")
    if (
        tensor is None
        or not tensor.has_data
        or tensor.shape != [2]
        or tensor.dtype not in (torch.int64, torch.int32)
    ):
        return
    stored = tensor.read().tolist()
    if stored != [part.num_rows, part.num_inputs]:
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} is {stored}, but config.json makes it "
            f"{[part.num_rows, part.num_inputs]}"
        )
