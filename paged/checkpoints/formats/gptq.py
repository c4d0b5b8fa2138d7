"""GPTQ: words of int32 pack inputs, their zeros pack outputs, and g_idx may order inputs by activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...architectures.schemes import Scheme
from ...base.errors import CheckpointError
from ..coded import Weight
from ..stored import Layout, StoredFormat, StoredPart
from .groups import FINITE, SCALES, InputGroups, codes_of, rows_of
from .integers import Integers


@dataclass(frozen=True)
class GptqFormat(StoredFormat):
    """qweight i32[inputs / 8, outputs], qzeros i32[groups, outputs / 8], scales [groups, outputs]."""

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
    """Return the format of a part that is stored as GPTQ does."""
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
    """Return the dtype of scales in memory: that of the file. Others are refused later."""
    found = part.get(name)
    return found.dtype if found is not None and found.dtype in SCALES else torch.float32


def read_groups(part: StoredPart, name: str, num_groups: int, *, is_needed: bool) -> InputGroups | None:
    """Read the group of each input; None if they are not set, or are in a tensor that is refused later.

    Raises CheckpointError for groups that do not exist.
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
