"""Codes of a byte each, int8 or e4m3, with scales: fp8 of all writers, and "int-quantized"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...architectures.schemes import Scheme
from ..coded import CodedWeight, Factors, Weight
from ..stored import Layout, StoredFormat, StoredPart
from .groups import NO_NAN, InputGroups, Integers, ScaleLayout


@dataclass(frozen=True)
class ByteFormat(StoredFormat):
    """An int8 or e4m3 weight [outputs, inputs] with its scales, and with zeros if it has any."""

    title: str
    codes: torch.dtype
    scale_name: str
    scale: ScaleLayout
    zeros: bool
    integers: Integers

    def layouts(self, part: StoredPart) -> dict[str, Layout]:
        check = NO_NAN if self.codes == torch.float8_e4m3fn else None
        found = {
            "weight": Layout((part.num_inputs,), self.codes, stored_dtypes=(self.codes,), check=check),
            self.scale_name: self.scale.layout(part.num_inputs),
        }
        if self.zeros:
            found["weight_zero_point"] = self.scale.layout_of_zeros(part.num_inputs)
        return found

    def weight(self, tensors: Mapping[str, Tensor]) -> Weight:
        codes = tensors["weight"]
        scale = self.scale.by_row(tensors[self.scale_name])
        if self.codes == torch.int8:
            zeros = self.scale.by_row(tensors["weight_zero_point"]) if self.zeros else None
            return self.integers.signed_weight(codes, scale, zeros)
        return CodedWeight(codes, Factors(self.integers.groups.expand(scale)))


def integer_format(scheme: Scheme, part: StoredPart) -> ByteFormat:
    """Return the format of a weight's part that is stored in int8."""
    return _byte_format(scheme, part, torch.int8, "weight_scale")


def fp8_format(scheme: Scheme, part: StoredPart) -> ByteFormat:
    """Return the format of a weight's part that is stored in e4m3.

    Despite its name, transformers' weight_scale_inv is multiplied, like all other scales. Older checkpoints
    store one weight_scale for the whole tensor instead.
    """
    name = "weight_scale"
    if scheme.producer == "fp8":
        if part.get(name) is None:
            name = "weight_scale_inv"
        else:
            scheme = Scheme(scheme.kind, scheme.title, scale_rows=None, scale_inputs=None)
    return _byte_format(scheme, part, torch.float8_e4m3fn, name)


def _byte_format(scheme: Scheme, part: StoredPart, codes: torch.dtype, name: str) -> ByteFormat:
    groups = InputGroups.even(part.num_inputs, scheme.scale_inputs)
    integers = Integers(8, groups, part.dtype)
    scale = ScaleLayout.of(scheme, part, name)
    return ByteFormat(scheme.title, codes, name, scale, scheme.zeros, integers)
