"""AWQ for its "gemm" kernel: words of int32 pack outputs, in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...architectures.schemes import Scheme
from ..coded import Weight
from ..stored import Layout, StoredFormat, StoredPart
from .gptq import scale_dtype_of
from .groups import FINITE, SCALES, InputGroups, codes_of
from .integers import Integers

_PER_WORD = 8
_WORDS_AT_A_TIME = 2**18  # that are transposed, so that they stay in a cache
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of its eight outputs each 4 bits of a word hold, the lowest first


@dataclass(frozen=True)
class AwqFormat(StoredFormat):
    """qweight i32[inputs, outputs / 8], qzeros i32[groups, outputs / 8], scales [groups, outputs]."""

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
    """Pack eight inputs of an output into each word, the first one lowest, not eight outputs of an input."""
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
    """Take the codes of eight outputs out of each word."""
    words = words.contiguous()
    rows = torch.empty(len(words), 8, words.shape[1], dtype=torch.uint8, device=words.device)
    bytes_of = words.view(-1).view(torch.uint8).view(*words.shape, 4)
    for place, output in enumerate(ORDER):
        rows[:, output] = bytes_of[..., place // 2] >> 4 * (place % 2) & 15
    return rows.flatten(0, 1)


def awq_format(scheme: Scheme, part: StoredPart) -> AwqFormat:
    """Return the format of a part that is stored as AWQ does."""
    groups = InputGroups.even(part.num_inputs, scheme.scale_inputs)
    num_groups = -(-part.num_inputs // (scheme.scale_inputs or max(1, part.num_inputs)))
    integers = Integers(4, groups, part.dtype)
    return AwqFormat(scheme.title, num_groups, scale_dtype_of(part, "scales"), integers)
