"""Weights as quantised files hold them: codes, and factors for groups of inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..kernels.half_bytes import HalfBytes


class Factors(NamedTuple):
    """The factors of quantised codes, by row and group of inputs: scales, zeros and offsets.

    Scales, zeros and offsets have shape [num_rows, num_groups]. A scale or offset may have a second level: it
    is stored as an integer or float8 and multiplied by a unit, or divided by a divisor. Units and divisors
    have shape [num_rows, num_units]; each covers the same number of consecutive groups.
    """

    scale: Tensor
    zero: Tensor | None = None  # an integer; its scales have at most 16 bits and no unit
    offset: Tensor | None = None
    scale_unit: Tensor | None = None
    offset_unit: Tensor | None = None
    scale_divisor: Tensor | None = None  # not beside a unit

    def scales(self) -> Tensor:
        """Return the scales in float32: each scale times its unit or divided by its divisor, rounded once."""
        if self.scale_divisor is not None:
            return self.scale.float() / _by_group(self.scale_divisor, self.scale)
        return _with_unit(self.scale, self.scale_unit)

    def offsets(self) -> Tensor | None:
        """Return the offsets in float32, each multiplied by its unit; None if there are no offsets."""
        return None if self.offset is None else _with_unit(self.offset, self.offset_unit)

    def take(self, rows: Tensor | slice) -> Factors:
        """Return the factors of these rows only."""
        zero, offset, *units = (None if x is None else x[rows] for x in self[1:])
        return Factors(self.scale[rows], zero, offset, *units)


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [num_rows, num_inputs] that is stored as codes and factors instead of floats.

    A code stands for a number. In float32 the weight is number * scale + offset, or (number - zero) * scale,
    and each operation rounds once. In all formats with an offset the product is exact, so a fused
    multiply-add gives the same result.
    """

    # u8 from 0 to 15, or HalfBytes, with a table of 16 numbers; i8, which are numbers; or float8_e4m3fn
    stored: Tensor | HalfBytes
    factors: Factors
    table: tuple[float, ...] | None = None
    # i64[num_inputs]: the input of x that each column is for; None: column k is for input k
    order: Tensor | None = None

    @property
    def codes(self) -> Tensor:
        """The codes, one per byte."""
        from ..kernels.half_bytes import HalfBytes

        return self.stored.unpacked() if isinstance(self.stored, HalfBytes) else self.stored

    @property
    def shape(self) -> torch.Size:
        """The shape [num_rows, num_inputs]."""
        return self.stored.shape

    @property
    def group(self) -> int:
        """The group size: how many consecutive inputs of a row share one scale."""
        return self.shape[1] // self.factors.scale.shape[1]

    def take(self, rows: Tensor | slice) -> CodedWeight:
        """Return these rows of the weight."""
        from ..kernels.half_bytes import HalfBytes

        stored = self.stored.take(rows) if isinstance(self.stored, HalfBytes) else self.stored[rows]
        return replace(self, stored=stored, factors=self.factors.take(rows))

    def numbers(self) -> Tensor:
        """Return the numbers that the codes stand for, in float32."""
        if self.table is None:
            return self.codes.float()
        return torch.tensor(self.table, dtype=torch.float32, device=self.stored.device)[self.codes.int()]

    def floats(self) -> Tensor:
        """Return the weight decoded to float32, with columns in the original order of the input features."""
        numbers = self.numbers().view(len(self.stored), -1, self.group)
        scale, zero, offset = self.factors.scales(), self.factors.zero, self.factors.offsets()
        if zero is not None:
            numbers = numbers - zero.float()[..., None]
        weight = numbers * scale[..., None]
        if offset is not None:
            weight = weight + offset[..., None]
        weight = weight.flatten(1)
        if self.order is None:
            return weight
        out = torch.empty_like(weight)
        out[:, self.order] = weight
        return out


Weight = Tensor | CodedWeight  # floats, or codes


def _with_unit(x: Tensor, unit: Tensor | None) -> Tensor:
    if unit is None:
        return x.float()
    return x.float() * _by_group(unit, x)


def _by_group(unit: Tensor, groups: Tensor) -> Tensor:
    """Return units in float32, each repeated once per group that it covers."""
    return unit.float().repeat_interleave(groups.shape[1] // unit.shape[1], dim=1)


@dataclass(slots=True)
class WholeWeight:
    """Access to the whole weight in a process that may hold only a shard of it.

    Some choices depend on all numbers of the weight. Each process reads the other shards itself instead of
    asking the other processes, so that a replacement process can load while the others compute.

    num_shards: how many shards the weight is divided into.
    read: reads the whole weight; None if this process holds all of it, or if the other shards need no check.
    """

    num_shards: int = 1
    read: Callable[[], Weight] | None = None

    def has(self, own: Weight, check: Callable[[Weight], bool]) -> bool:
        """Return whether the whole weight passes a check.

        own: the shard that this process holds.
        """
        return check(own) and (self.read is None or check(self.read()))
