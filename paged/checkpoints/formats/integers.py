"""Weights that are (code - zero) * scale, with integer codes and zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.half_bytes import HalfBytes
from ..coded import CodedWeight, Factors, Weight
from .groups import InputGroups

SIGNED = tuple(map(float, range(-8, 8)))  # of 4-bit codes around 8


@dataclass(frozen=True)
class Integers:
    """What makes a weight of codes and factors.

    Half of their range is subtracted from unsigned codes and zeros, whose difference stays the same.
    """

    bits: int
    groups: InputGroups
    dtype: torch.dtype  # of the model

    def weight(self, codes: Tensor | HalfBytes, scale: Tensor, zero: Tensor | None) -> Weight:
        """Make a weight of unsigned codes [num_rows, num_inputs] and unsigned zeros for each group."""
        middle = 1 << self.bits - 1
        around = None if zero is None else zero.to(torch.int16) - middle
        if self.bits == 4:
            return self._made(codes, SIGNED, scale, around)
        assert isinstance(codes, Tensor), "codes of 8 bits are whole bytes"
        return self._made((codes ^ middle).view(torch.int8), None, scale, around)

    def signed_weight(self, numbers: Tensor, scale: Tensor, zero: Tensor | None) -> Weight:
        """Make a weight of numbers, i8[num_rows, num_inputs], and zeros as they are."""
        return self._made(numbers, None, scale, None if zero is None else zero.to(torch.int16))

    def _made(
        self,
        codes: Tensor | HalfBytes,
        table: tuple[float, ...] | None,
        scale: Tensor,
        zero: Tensor | None,
    ) -> Weight:
        codes = self.groups.sort(codes)
        scale = self.groups.expand(scale)
        order = self.groups.order
        if zero is None or not bool(zero.any()):
            return CodedWeight(codes, Factors(scale), table, order)
        zero = self.groups.expand(zero)
        if scale.dtype != torch.float32:
            fits = int(zero.max()) < 128
            return CodedWeight(codes, Factors(scale, zero.to(torch.int8) if fits else zero), table, order)
        # zero * scale would be rounded, where number * scale is as well: subtract the zeros from the numbers.
        whole = codes.unpacked() if isinstance(codes, HalfBytes) else codes
        numbers = whole.to(torch.int16) if table is None else whole.to(torch.int16) - 8
        numbers = numbers.view(len(codes), zero.shape[1], -1) - zero[..., None]
        if int(numbers.min()) < -128 or int(numbers.max()) > 127:
            return CodedWeight(codes, Factors(scale, zero), table, order).floats().to(self.dtype)
        return CodedWeight(numbers.to(torch.int8).flatten(1), Factors(scale), None, order)
