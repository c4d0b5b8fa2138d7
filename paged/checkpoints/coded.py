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

    All have shape [num_rows, num_groups]. Units have shape [num_rows, num_units]; each covers the same number
    of consecutive groups. Scales and offsets with a unit have two levels: integers or float8 that are
    multiplied by the unit. A divisor is shaped like a unit; float8 scales are divided by it.
    """

    scale: Tensor
    zero: Tensor | None = None  # an integer; its scales have at most 16 bits and no unit
    offset: Tensor | None = None
    scale_unit: Tensor | None = None
    offset_unit: Tensor | None = None
    scale_divisor: Tensor | None = None  # not beside a unit

    def scales(self) -> Tensor:
        """Return the scales in float32: a scale times its unit, or over its divisor, rounded once."""
        if self.scale_divisor is not None:
            return self.scale.float() / _by_group(self.scale_divisor, self.scale)
        return _with_unit(self.scale, self.scale_unit)

    def offsets(self) -> Tensor | None:
        """Return the offsets in float32."""
        return None if self.offset is None else _with_unit(self.offset, self.offset_unit)

    def take(self, rows: Tensor | slice) -> Factors:
        """Return the factors of these rows."""
        zero, offset, *units = (None if x is None else x[rows] for x in self[1:])
        return Factors(self.scale[rows], zero, offset, *units)


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [num_rows, num_inputs] that is not stored as floats.

    In float32 the weight is number * scale + offset, or (number - zero) * scale, and each operation rounds
    once. In all formats with an offset the product is exact, so a fused multiply-add gives the same result.
    """

    # u8 from 0 to 15, or HalfBytes, with a table of 16 numbers; i8, which are numbers; or float8_e4m3fn
    stored: Tensor | HalfBytes
    factors: Factors
    table: tuple[float, ...] | None = None
    # i64[num_inputs]: the input of x that each column is for; None: column k is for input k
    order: Tensor | None = None

    @property
    def codes(self) -> Tensor:
        """The codes, one to a byte."""
        from ..kernels.half_bytes import HalfBytes

        return self.stored.unpacked() if isinstance(self.stored, HalfBytes) else self.stored

    @property
    def shape(self) -> torch.Size:
        """[num_rows, num_inputs]."""
        return self.stored.shape

    @property
    def group(self) -> int:
        """Return how many consecutive inputs share their factors."""
        return self.shape[1] // self.factors.scale.shape[1]

    def take(self, rows: Tensor | slice) -> CodedWeight:
        """Return these rows."""
        from ..kernels.half_bytes import HalfBytes

        stored = self.stored.take(rows) if isinstance(self.stored, HalfBytes) else self.stored[rows]
        return replace(self, stored=stored, factors=self.factors.take(rows))

    def numbers(self) -> Tensor:
        """Return the numbers that the codes stand for, in float32."""
        if self.table is None:
            return self.codes.float()
        return torch.tensor(self.table, dtype=torch.float32, device=self.stored.device)[self.codes.int()]

    def floats(self) -> Tensor:
        """Return the weight decoded to float32, its columns in the order of the input features (any
        reordering by `order` is undone).
        """
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
    """The whole weight, of which this process may hold only a shard.

    Some choices depend on all numbers of the weight. Each process reads the other shards and decides alone,
    so that a process that replaces another can load while the rest compute.

    num_shards: how many shards the weight is divided into.
    read: reads the whole weight; None if this process holds all of it, or other shards are known to be alike.
    """

    num_shards: int = 1
    read: Callable[[], Weight] | None = None

    def has(self, own: Weight, check: Callable[[Weight], bool]) -> bool:
        """Return whether the whole weight passes a check.

        own: the share of the weight that is in memory.
        """
        return check(own) and (self.read is None or check(self.read()))
