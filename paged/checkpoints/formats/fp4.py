"""Floats of 4 bits, e2m1, two to a byte: MXFP4 and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...architectures.schemes import Scheme
from ...kernels.half_bytes import HalfBytes
from ..coded import CodedWeight, Factors, Weight
from ..stored import Layout, StoredFormat, StoredPart, ValueCheck
from .groups import FINITE, NO_NAN, InputGroups, codes_of, is_not_finite

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENTS = ValueCheck(lambda x: x.view(torch.uint8) == 255, "be less, as 255 stands for NaN")
DIVISOR = ValueCheck(lambda x: is_not_finite(x) | is_not_finite(1 / x.float()), "be finite and not 0")


@dataclass(frozen=True)
class Mxfp4Format(StoredFormat):
    """MXFP4: weight_packed u8[outputs, inputs / 2], first code in the low bits, and a power-of-two scale per
    32 inputs.
    """

    title: str
    groups: InputGroups
    num_groups: int
    scale_dtype: torch.dtype  # uint8 or float8_e8m0fnu: the same bytes

    def layouts(self, part: StoredPart) -> dict[str, Layout]:
        is_byte = self.scale_dtype == torch.uint8
        scale = Layout(
            (self.num_groups,),
            torch.uint8 if is_byte else torch.bfloat16,
            stored_dtypes=(self.scale_dtype,),
            check=EXPONENTS if is_byte else FINITE,
        )
        return {"weight_packed": _packed(part), "weight_scale": scale}

    def weight(self, tensors: Mapping[str, Tensor]) -> Weight:
        scale = tensors["weight_scale"]
        if scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu).to(torch.bfloat16)
        factors = Factors(self.groups.expand(scale))
        return CodedWeight(_codes(tensors["weight_packed"], self.groups), factors, E2M1)


@dataclass(frozen=True)
class Nvfp4Format(StoredFormat):
    """NVFP4: codes u8[outputs, inputs / 2], an e4m3 scale per 16 inputs, and one global scale.

    compressed-tensors divides by the global scale, ModelOpt multiplies by it.
    """

    title: str
    groups: InputGroups
    num_groups: int
    codes_name: str
    unit_name: str
    unit_shape: tuple[int, ...]
    divides: bool

    def layouts(self, part: StoredPart) -> dict[str, Layout]:
        e4m3 = torch.float8_e4m3fn
        floats = (torch.float32,)
        return {
            self.codes_name: _packed(part),
            "weight_scale": Layout((self.num_groups,), e4m3, stored_dtypes=(e4m3,), check=NO_NAN),
            self.unit_name: Layout(
                *(self.unit_shape, torch.float32, None),
                stored_dtypes=floats,
                check=DIVISOR if self.divides else FINITE,
            ),
        }

    def weight(self, tensors: Mapping[str, Tensor]) -> Weight:
        codes = _codes(tensors[self.codes_name], self.groups)
        scale = self.groups.expand(tensors["weight_scale"])
        unit = tensors[self.unit_name].reshape(len(codes), 1)
        factors = Factors(scale, scale_divisor=unit) if self.divides else Factors(scale, scale_unit=unit)
        return CodedWeight(codes, factors, E2M1)


def mxfp4_format(scheme: Scheme, part: StoredPart) -> Mxfp4Format:
    """Return the format of a weight's part that is stored in MXFP4."""
    stored = part.get("weight_scale")
    is_float = stored is not None and stored.dtype == torch.float8_e8m0fnu
    dtype = torch.float8_e8m0fnu if is_float else torch.uint8
    groups = InputGroups.even(part.num_inputs, 32)
    return Mxfp4Format(scheme.title, groups, -(-part.num_inputs // 32), dtype)


def nvfp4_format(scheme: Scheme, part: StoredPart) -> Nvfp4Format:
    """Return the format of a weight's part that is stored in NVFP4."""
    is_theirs = scheme.producer == "modelopt"
    unit_name = "weight_scale_2" if is_theirs else "weight_global_scale"
    stored = part.get(unit_name)
    shape = () if stored is not None and not stored.shape else (1,)
    groups = InputGroups.even(part.num_inputs, 16)
    codes_name = "weight" if is_theirs else "weight_packed"
    num_groups = -(-part.num_inputs // 16)
    return Nvfp4Format(scheme.title, groups, num_groups, codes_name, unit_name, shape, not is_theirs)


def _packed(part: StoredPart) -> Layout:
    return Layout((-(-part.num_inputs // 2),), torch.uint8, stored_dtypes=(torch.uint8,))


def _codes(packed: Tensor, groups: InputGroups) -> Tensor | HalfBytes:
    return codes_of(packed, 4, len(groups.group_of_input) // 8)
