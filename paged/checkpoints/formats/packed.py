"""compressed-tensors' "pack-quantized": integers in words of int32, along the inputs."""

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
from .gptq import read_groups
from .groups import InputGroups, codes_of, rows_of
from .integers import Integers
from .scales import ScaleLayout


@dataclass(frozen=True)
class PackedFormat(StoredFormat):
    """weight_packed i32[outputs, inputs / 8], weight_scale, and zeros in words along the outputs."""

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
    """Return the format of a part in packed integers.

    Raises CheckpointError if its weight_shape is another than that of the part.
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
