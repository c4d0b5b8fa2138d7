"""AWQ for its "gemm" kernel: words of int32 pack outputs, in an order of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...schemes import Scheme
from ..coded import Weight
from ..stored import Layout, StoredFormat, StoredPart
from .gptq import scale_dtype_of
from .groups import FINITE, SCALES, InputGroups
from .integers import Integers

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
            "qweight": Layout((part.num_inputs,), torch.uint8, 1, 8, awq_rows, words),
            "qzeros": Layout((self.num_groups,), torch.uint8, 1, 8, awq_rows, words),
            "scales": Layout((self.num_groups,), self.scale_dtype, 1, stored_dtypes=SCALES, check=FINITE),
        }

    def weight(self, tensors: Mapping[str, Tensor]) -> Weight:
        return self.integers.weight(tensors["qweight"], tensors["scales"], tensors["qzeros"])


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
