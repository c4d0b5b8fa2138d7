"""Groups of inputs that share factors, words that pack codes, and what factors must be.

Integers are weights that are (code - zero) * scale. ScaleLayout: scales by tensor, output, group, or block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...architectures.schemes import Scheme
from ...kernels.half_bytes import HalfBytes
from ..coded import CodedWeight, Factors, Weight
from ..stored import Layout, StoredPart, ValueCheck

SCALES = (torch.float32, torch.float16, torch.bfloat16)  # dtypes of scales that are floats


def is_not_finite(x: Tensor) -> Tensor:
    """Return where floats of any dtype are NaN or infinite."""
    return ~x.float().isfinite()


FINITE = ValueCheck(is_not_finite, "be finite")
# The one code of e4m3 that is no number, with either sign.
NO_NAN = ValueCheck(
    lambda codes: codes.view(torch.uint8) & 0x7F == 0x7F,
    "be a number",
    lambda codes: int((codes.view(torch.uint8) & 0x7F).max()) == 0x7F,
)


@dataclass(frozen=True)
class InputGroups:
    """The group of factors that each input belongs to.

    In memory, inputs are sorted by group. Groups of different sizes are divided into smaller groups of one
    size, each with a copy of the factors.
    """

    group_of_input: bytes  # i64[num_inputs]

    @classmethod
    def even(cls, num_inputs: int, size: int | None) -> InputGroups:
        """Return groups of `size` consecutive inputs, the last perhaps smaller. None makes a single group."""
        return cls.of(torch.arange(num_inputs, device="cpu") // (size or max(1, num_inputs)))

    @classmethod
    def of(cls, group_of_input: Tensor) -> InputGroups:
        """Return the groups given by each input's group number."""
        return cls(group_of_input.to(torch.int64).contiguous().numpy().tobytes())

    @cached_property
    def _groups(self) -> Tensor:
        return torch.frombuffer(bytearray(self.group_of_input), dtype=torch.int64)

    @cached_property
    def order(self) -> Tensor | None:
        """The inputs sorted by group, i64[num_inputs]; None if they are sorted already."""
        order = torch.argsort(self._groups, stable=True)
        return None if bool((order.diff() == 1).all()) else order

    @cached_property
    def _index(self) -> Tensor:
        """Which factor each group in memory takes."""
        sorted_groups = self._groups.sort().values
        starts = (sorted_groups.diff() != 0).nonzero().flatten() + 1
        return sorted_groups[:: math.gcd(len(sorted_groups), *starts.tolist())]

    def sort(self, columns: Tensor | HalfBytes) -> Tensor | HalfBytes:
        """Reorder the columns of [num_rows, num_inputs] so that each group is consecutive."""
        if self.order is None:
            return columns
        columns = columns.unpacked() if isinstance(columns, HalfBytes) else columns
        if columns.device.type == "cpu":  # numpy takes a third of the time
            return torch.from_numpy(columns.numpy().take(self.order.numpy(), axis=1))
        return columns[:, self.order.to(columns.device)]

    def expand(self, factors: Tensor) -> Tensor:
        """Expand stored factors [num_rows, num_groups] to [num_rows, number of groups in memory]."""
        is_stored_so = torch.equal(self._index, torch.arange(factors.shape[1], device="cpu"))
        return factors if is_stored_so else factors[:, self._index.to(factors.device)]


def codes_of(words: Tensor, bits: int, num_inputs: int) -> Tensor | HalfBytes:
    """Unpack codes of 4 or 8 bits from rows of int32 or uint8, lowest bits first: [n, num_inputs]."""
    packed = _bytes_of(words)
    return packed[:, :num_inputs] if bits == 8 else HalfBytes(packed, num_inputs)


def rows_of(words: Tensor, bits: int) -> Tensor:  # i32[n, m] -> u8[n * codes in each, m]
    """Unpack codes from words that hold the codes of several rows each, lowest bits first."""
    packed = _bytes_of(words[..., None])
    codes = packed if bits == 8 else torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return codes.movedim(-1, 1).flatten(0, 1)


def _bytes_of(words: Tensor) -> Tensor:
    return words.contiguous().view(-1).view(torch.uint8).view(*words.shape[:-1], -1)


SIGNED = tuple(map(float, range(-8, 8)))  # of 4-bit codes around 8


@dataclass(frozen=True)
class Integers:
    """Makes a weight from codes and factors.

    Half of the range is subtracted from both unsigned codes and zeros, so their difference stays the same.
    """

    bits: int
    groups: InputGroups
    dtype: torch.dtype  # of the model

    def weight(self, codes: Tensor | HalfBytes, scale: Tensor, zero: Tensor | None) -> Weight:
        """Make a weight from unsigned codes [num_rows, num_inputs] and unsigned zeros per group."""
        middle = 1 << self.bits - 1
        around = None if zero is None else zero.to(torch.int16) - middle
        if self.bits == 4:
            return self._made(codes, SIGNED, scale, around)
        assert isinstance(codes, Tensor), "codes of 8 bits are whole bytes"
        return self._made((codes ^ middle).view(torch.int8), None, scale, around)

    def signed_weight(self, numbers: Tensor, scale: Tensor, zero: Tensor | None) -> Weight:
        """Make a weight from signed numbers, i8[num_rows, num_inputs], and zeros that are not shifted."""
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


@dataclass(frozen=True)
class ScaleLayout:
    """How the scales of a weight are stored."""

    rows: int | None  # how many outputs a scale is for; None: all
    inputs: int | None
    shape: tuple[int, ...]  # of a scale for all inputs: () or (1,), as writers differ
    dtype: torch.dtype  # in memory

    @classmethod
    def of(cls, scheme: Scheme, part: StoredPart, name: str) -> ScaleLayout:
        """Return the layout of a part's scales."""
        tensor = part.get(name)
        shape = [1] if tensor is None else tensor.shape
        own = shape if scheme.scale_rows is None else shape[1:]
        is_one = math.prod(own) == 1 and len(own) <= 1
        dtype = torch.float32 if tensor is None else tensor.dtype
        if dtype == torch.float8_e8m0fnu:
            dtype = torch.bfloat16  # which holds all its numbers
        return cls(
            scheme.scale_rows,
            scheme.scale_inputs,
            tuple(own) if is_one else (1,),
            dtype if dtype in SCALES else torch.float32,
        )

    def num_groups(self, num_inputs: int) -> int:
        """Return how many scales a row of this many inputs has."""
        return 1 if self.inputs is None else -(-num_inputs // self.inputs)

    def layout(self, num_inputs: int) -> Layout:
        """Return the layout of the scales."""
        columns = self.shape if self.inputs is None else (self.num_groups(num_inputs),)
        return Layout(
            columns,
            self.dtype,
            None if self.rows is None else 0,
            self.rows or 1,
            stored_dtypes=(*SCALES, torch.float8_e8m0fnu),
            check=FINITE,
        )

    def layout_of_zeros(self, num_inputs: int) -> Layout:
        """Return the layout of integer zeros, one for each scale."""
        layout = self.layout(num_inputs)
        return layout._replace(dtype=torch.int8, stored_dtypes=(torch.int8,), check=None)

    def by_row(self, values: Tensor) -> Tensor:
        """Reshape values that were read with `layout` to [num_rows, num_groups]."""
        return values.view(len(values), -1)
