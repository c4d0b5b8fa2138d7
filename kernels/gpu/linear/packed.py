"""Weights in codes, packed into words for the Triton kernels."""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...checks import check_dtype, check_multiple, check_shape
from ...half_bytes import HalfBytes

# Inputs whose codes lie in as many words that follow each other; the next ones are in the next bits of these.
SUB = 16
_PART_ELEMENTS = 2**24  # of codes that are packed at once, so that they take little memory on their way
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_TABLE = (*_E2M1, *(-x for x in _E2M1))
_FACTORS = (torch.float32, torch.float16, torch.bfloat16)
_WITH_UNIT = (torch.int8, torch.uint8, torch.float8_e4m3fn)


class PackedLayout(NamedTuple):
    """What a launch depends on besides x. Weights with equal layouts share their kernels."""

    num_outputs: int
    num_inputs: int
    group: int  # inputs
    unit: int  # inputs whose factors share a unit
    numbers: str  # see CodeKind.NUMBERS
    table: tuple[float, ...] | None
    dtypes: tuple[torch.dtype | None, ...]  # of the factors
    device: torch.device

    @property
    def per_word(self) -> int:
        """The number of codes in a word."""
        return 4 if self.table is None else 8

    @property
    def tile(self) -> int:
        """The number of inputs in a tile: as many as SUB words hold."""
        return SUB * self.per_word

    @property
    def num_tiles(self) -> int:
        """The number of tiles of inputs. The last tile may be padded."""
        return -(-self.num_inputs // self.tile)


@dataclass(frozen=True, slots=True, eq=False)
class PackedCodes:
    """A weight [num_outputs, num_inputs] in codes: number * scale + offset, or (number - zero) * scale.

    A tile of inputs has SUB words for each output. The words of consecutive outputs are consecutive in
    memory, so that programs read whole cache lines. The padding of the last tile has codes of 0.
    """

    words: Tensor  # i32[num_tiles, num_outputs, SUB]
    # [num_groups, num_outputs], or [num_units, num_outputs], each contiguous
    scale: Tensor
    scale_unit: Tensor | None
    zero: Tensor | None
    offset: Tensor | None
    offset_unit: Tensor | None
    layout: PackedLayout

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, in the order in which kernels take them."""
        return self.words, self.scale, self.scale_unit, self.zero, self.offset, self.offset_unit


def can_pack_codes(codes: Tensor | HalfBytes, scale: Tensor, table: tuple[float, ...] | None) -> bool:
    """Return whether there are kernels for these codes, this group size and this table."""
    num_inputs = codes.shape[1]
    num_groups = scale.shape[1]
    whole = num_groups == 1 or (num_inputs % num_groups == 0 and num_inputs // num_groups % SUB == 0)
    return whole and (table is None or _numbers_of_table(table) is not None)


def pack_codes(
    codes: Tensor,  # [num_outputs, num_inputs]: u8 below 16 with a table; i8 or float8_e4m3fn without
    scale: Tensor,  # [num_outputs, num_groups], as all factors
    zero: Tensor | None = None,
    offset: Tensor | None = None,
    scale_unit: Tensor | None = None,  # [num_outputs, num_units]
    offset_unit: Tensor | None = None,
    scale_divisor: Tensor | None = None,
    *,
    table: tuple[float, ...] | None = None,
) -> PackedCodes:
    """Pack a quantised weight. Factors of a dtype that kernels cannot read become float32, which is exact.

    Raises ValueError unless a group has all inputs or a multiple of SUB inputs, and the table has e2m1
    numbers or 8-bit integers.
    """
    numbers = _numbers_of(codes, table)
    num_outputs, num_inputs = codes.shape
    if scale_divisor is not None:
        check_multiple("num_groups", scale.shape[1], "num_divisors", scale_divisor.shape[1])
        scale = scale.float() / scale_divisor.repeat_interleave(scale.shape[1] // scale_divisor.shape[1], 1)
    group = _group_of(codes, scale, zero, offset)
    tile = SUB * (4 if table is None else 8)
    scale, scale_unit, unit = _with_unit(scale, scale_unit, num_inputs, tile)
    if offset is not None:
        offset, offset_unit, own_unit = _with_unit(offset, offset_unit, num_inputs, tile)
        if unit and own_unit and unit != own_unit:
            raise ValueError(f"units must be of as many inputs, got {unit} and {own_unit}")
        unit = unit or own_unit
    if zero is not None and zero.itemsize > 1:
        zero = zero.float()
    factors = scale, scale_unit, zero, offset, offset_unit
    dtypes = tuple(None if x is None else x.dtype for x in factors)
    layout = PackedLayout(num_outputs, num_inputs, group, unit, numbers, table, dtypes, codes.device)
    words = codes.new_empty(layout.num_tiles, num_outputs, SUB, dtype=torch.int32)
    for rows in _parts(num_outputs, num_inputs):
        words[:, rows] = _words(codes[rows].view(torch.uint8), layout)
    return PackedCodes(
        words,
        _by_group(scale),
        scale_unit=None if scale_unit is None else _by_group(scale_unit),
        zero=None if zero is None else _by_group(zero),
        offset=None if offset is None else _by_group(offset),
        offset_unit=None if offset_unit is None else _by_group(offset_unit),
        layout=layout,
    )


@dataclass(frozen=True, slots=True, eq=False)
class PackedExperts:
    """The quantised weights of all experts: the tensors of their PackedCodes, stacked by expert."""

    tensors: tuple[Tensor | None, ...]  # in the order of PackedCodes.tensors, each [num_experts, ...]
    num_experts: int
    layout: PackedLayout  # of each expert

    def of_expert(self, expert: int) -> PackedCodes:
        """Return a view of one expert's weight."""
        words, scale, *others = (None if x is None else x[expert] for x in self.tensors)
        scale_unit, zero, offset, offset_unit = others
        assert words is not None, "every weight has codes"
        assert scale is not None, "and scales"
        return PackedCodes(words, scale, scale_unit, zero, offset, offset_unit, self.layout)


def stack_codes(experts: Iterable[PackedCodes], num_experts: int) -> PackedExperts:
    """Copy the weights of experts, one after the other, into stacked tensors.

    Raises ValueError unless there are num_experts weights with the same layout.
    """
    stacked: PackedExperts | None = None
    count = 0
    for expert in experts:
        if stacked is None:
            tensors = (None if x is None else x.new_empty(num_experts, *x.shape) for x in expert.tensors)
            stacked = PackedExperts(tuple(tensors), num_experts, expert.layout)
        if expert.layout != stacked.layout:
            raise ValueError(f"expert {count} must be packed as {stacked.layout}, got {expert.layout}")
        if count < num_experts:
            for all_experts, own in zip(stacked.tensors, expert.tensors, strict=True):
                if all_experts is not None and own is not None:
                    all_experts[count] = own
        count += 1
    if stacked is None or count != num_experts:
        raise ValueError(f"there must be weights of {num_experts} experts, got {count}")
    return stacked


def table_words(table: tuple[float, ...]) -> tuple[int, ...]:
    """Return the 16 integers of a table in four words, the first integer lowest."""
    return struct.unpack("<4i", struct.pack("16b", *map(int, table)))


def _numbers_of(codes: Tensor, table: tuple[float, ...] | None) -> str:
    """Check the dtype of codes and their table. Return how kernels make numbers of them."""
    if table is None:
        check_dtype("codes", codes, (torch.int8, torch.float8_e4m3fn))
        return "int8" if codes.dtype == torch.int8 else "e4m3"
    check_dtype("codes", codes, (torch.uint8,))
    numbers = _numbers_of_table(table)
    if numbers is None:
        raise ValueError(f"table must hold 16 integers of 8 bits or the numbers of e2m1, got {table}")
    return numbers


def _numbers_of_table(table: tuple[float, ...]) -> str | None:
    """Return how kernels make the numbers of a table, or None if there is no way."""
    if table == _E2M1_TABLE:
        return "e2m1"
    if len(table) != 16 or not all(x == int(x) and -128 <= x <= 127 for x in table):
        return None
    return "integers" if all(x == table[0] + i for i, x in enumerate(table)) else "table"


def _group_of(codes: Tensor, scale: Tensor, zero: Tensor | None, offset: Tensor | None) -> int:
    """Check the shapes of factors. Return how many inputs share theirs."""
    num_outputs, num_inputs = codes.shape
    check_shape("scale", scale, (num_outputs, None))
    for name, factor in (("zero", zero), ("offset", offset)):
        if factor is not None:
            check_shape(name, factor, scale.shape)
    num_groups = scale.shape[1]
    check_multiple("num_inputs", num_inputs, "the number of groups", num_groups)
    group = num_inputs // num_groups
    if num_groups > 1:
        check_multiple("the inputs of a group", group, "those of a word", SUB)
    return group


def _with_unit(
    factor: Tensor, unit: Tensor | None, num_inputs: int, tile: int
) -> tuple[Tensor, Tensor | None, int]:
    """Return factors as kernels read them, their units, and how many inputs share one of these; 0: none."""
    if unit is None:
        return _in_floats(factor), None, 0
    check_shape("units", unit, (len(factor), None))
    num_groups = factor.shape[1]
    num_units = unit.shape[1]
    check_multiple("the number of groups", num_groups, "units", num_units)
    inputs = num_inputs // num_units
    if factor.dtype in _WITH_UNIT and (num_units == 1 or inputs % tile == 0):
        return factor, _in_floats(unit), inputs
    return factor.float() * unit.float().repeat_interleave(num_groups // num_units, dim=1), None, 0


def _in_floats(factor: Tensor) -> Tensor:
    """Return factors in a dtype that kernels read; powers of two are exact in bfloat16."""
    if factor.dtype in _FACTORS:
        return factor
    return factor.bfloat16() if factor.dtype == torch.float8_e8m0fnu else factor.float()


def _by_group(factor: Tensor) -> Tensor:
    """Return factors [num_groups, num_outputs]; e4m3, which not every target has, as bytes."""
    by_group = factor.T.contiguous()
    return by_group.view(torch.uint8) if factor.dtype == torch.float8_e4m3fn else by_group


def _parts(num_outputs: int, num_inputs: int) -> Iterator[slice]:
    step = max(1, _PART_ELEMENTS // num_inputs)
    return (slice(start, min(start + step, num_outputs)) for start in range(0, num_outputs, step))


def _words(codes: Tensor, layout: PackedLayout) -> Tensor:  # -> i32[num_tiles, n, SUB]
    """Pack the codes of some outputs, u8[n, num_inputs]."""
    padding = layout.num_tiles * layout.tile - layout.num_inputs
    codes = torch.nn.functional.pad(codes, (0, padding)).view(len(codes), -1, layout.per_word, SUB)
    words = torch.zeros_like(codes[:, :, 0], dtype=torch.int32)
    for i in range(layout.per_word):
        words |= codes[:, :, i].int() << i * (32 // layout.per_word)
    return words.transpose(0, 1)
