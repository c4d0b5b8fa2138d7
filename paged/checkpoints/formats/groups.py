"""Groups of inputs that share factors, words that pack codes, and what factors must be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...kernels.half_bytes import HalfBytes
from ..stored import ValueCheck

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
    """Which factors each input takes.

    Inputs are put in the order of their groups. Where groups are uneven, they are divided into smaller ones
    of one size, which repeat their factors.
    """

    group_of_input: bytes  # i64[num_inputs]

    @classmethod
    def even(cls, num_inputs: int, size: int | None) -> InputGroups:
        """Return groups of inputs that follow each other; the last may be smaller. None: all in one."""
        return cls.of(torch.arange(num_inputs, device="cpu") // (size or max(1, num_inputs)))

    @classmethod
    def of(cls, group_of_input: Tensor) -> InputGroups:
        """Return the groups of these numbers."""
        return cls(group_of_input.to(torch.int64).contiguous().numpy().tobytes())

    @cached_property
    def _groups(self) -> Tensor:
        return torch.frombuffer(bytearray(self.group_of_input), dtype=torch.int64)

    @cached_property
    def order(self) -> Tensor | None:
        """The inputs in the order of their groups, i64[num_inputs]; None: as they are."""
        order = torch.argsort(self._groups, stable=True)
        return None if bool((order.diff() == 1).all()) else order

    @cached_property
    def _index(self) -> Tensor:
        """Which factor each group in memory takes."""
        sorted_groups = self._groups.sort().values
        starts = (sorted_groups.diff() != 0).nonzero().flatten() + 1
        return sorted_groups[:: math.gcd(len(sorted_groups), *starts.tolist())]

    def sort(self, columns: Tensor | HalfBytes) -> Tensor | HalfBytes:
        """Put [num_rows, num_inputs] in the order of the groups."""
        if self.order is None:
            return columns
        columns = columns.unpacked() if isinstance(columns, HalfBytes) else columns
        if columns.device.type == "cpu":  # numpy takes a third of the time
            return torch.from_numpy(columns.numpy().take(self.order.numpy(), axis=1))
        return columns[:, self.order.to(columns.device)]

    def expand(self, factors: Tensor) -> Tensor:
        """Return the factors [num_rows, number of groups in memory] of stored ones [num_rows, num_groups]."""
        is_stored_so = torch.equal(self._index, torch.arange(factors.shape[1], device="cpu"))
        return factors if is_stored_so else factors[:, self._index.to(factors.device)]


def codes_of(words: Tensor, bits: int, num_inputs: int) -> Tensor | HalfBytes:
    """Return the codes [n, num_inputs] of 4 or 8 bits in rows of int32 or uint8, the lowest first."""
    packed = _bytes_of(words)
    return packed[:, :num_inputs] if bits == 8 else HalfBytes(packed, num_inputs)


def rows_of(words: Tensor, bits: int) -> Tensor:  # i32[n, m] -> u8[n * codes in each, m]
    """Take codes out of words that pack rows, the lowest first."""
    packed = _bytes_of(words[..., None])
    codes = packed if bits == 8 else torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return codes.movedim(-1, 1).flatten(0, 1)


def _bytes_of(words: Tensor) -> Tensor:
    return words.contiguous().view(-1).view(torch.uint8).view(*words.shape[:-1], -1)
