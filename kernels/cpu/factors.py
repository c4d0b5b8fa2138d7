"""Factors of quantised weights: how `linear.pack_codes` stores them, and how they reach the readers.

They keep the file's precision, in one or two levels, in memory of their own: a head of int64 and the table of
codes, then for each panel its groups, and after them its units. A group has PANEL scales, and PANEL zeros or
offsets if there are any; a unit, which several groups share, has what their scales and offsets are multiplied
by. The low part of a scale's unit is what float32 lacks of it: a scale times a unit in two parts has the bits
of a quotient, where the unit is a reciprocal.
"""

from typing import NamedTuple

from .formats import PANEL
from .numbers import ITEM_SIZES
from .target import VECTOR_BYTES

TABLE_SIZE = 16
# Factors as readers take them: the table of 16 float32, the binary logarithm of a group's steps, and for each
# group four vectors: the scales of both halves of a panel, and its summands.
GROUP_SHIFT_AT = 4 * TABLE_SIZE
EXPANDED_HEAD_BYTES = 2 * GROUP_SHIFT_AT
GROUP_BYTES = 4 * VECTOR_BYTES
# What 1 in e4m3 is to readers, which multiply its float16 by scales that are larger by as much.
E4M3_UNIT = 2.0**-8
LEAST_GROUP = 16  # inputs
MOST_GROUP = 128  # a larger one is read as several that have the same factors
NONE = -1  # in place of the kind of what a weight does not have


class FactorHead(NamedTuple):
    """The integers in front of a weight's factors; the table follows them."""

    group: int  # inputs of a group as readers take it: a power of two from LEAST_GROUP to MOST_GROUP
    stored_group: int  # inputs of a group as it is stored, a multiple of `group`
    unit_groups: int  # groups, as they are stored, that share a unit
    # kinds of numbers
    scale: int
    zero: int
    offset: int
    scale_unit: int
    offset_unit: int
    low_unit: int
    units_at: int  # bytes of a panel's groups, which its units follow
    panel_bytes: int


TABLE_AT = 8 * len(FactorHead._fields)
FACTORS_AT = -(-(TABLE_AT + 4 * TABLE_SIZE) // 64) * 64


def head_of(
    in_features: int,
    stored_group: int,
    unit_groups: int,
    scale: int,
    zero: int = NONE,
    offset: int = NONE,
    scale_unit: int = NONE,
    offset_unit: int = NONE,
    low_unit: int = NONE,
) -> FactorHead:
    """Make the head of factors of these kinds, for groups of a size that `group_of` knows."""
    group_bytes = PANEL * sum(ITEM_SIZES[kind] for kind in (scale, zero, offset) if kind != NONE)
    unit_bytes = PANEL * sum(ITEM_SIZES[kind] for kind in (scale_unit, offset_unit, low_unit) if kind != NONE)
    units_at = in_features // stored_group * group_bytes
    panel_bytes = units_at + in_features // (stored_group * unit_groups) * unit_bytes
    kinds = scale, zero, offset, scale_unit, offset_unit, low_unit
    return FactorHead(group_of(stored_group), stored_group, unit_groups, *kinds, units_at, panel_bytes)


def group_of(stored_group: int) -> int:
    """Return the inputs of a group as readers take it; less than LEAST_GROUP: they cannot."""
    return min(stored_group & -stored_group, MOST_GROUP)


def is_valid_head(head: FactorHead, in_features: int) -> bool:
    """Return whether this is the head of the factors of a weight with so many inputs."""
    _, stored_group, unit_groups, *kinds, _, _ = head
    scale, zero, offset, scale_unit, offset_unit, low_unit = kinds
    if min(stored_group, unit_groups) < 1 or in_features % (stored_group * unit_groups):
        return False
    if not all(NONE <= kind < len(ITEM_SIZES) for kind in kinds) or scale == NONE:
        return False
    if NONE not in (zero, offset) or (offset == NONE and offset_unit != NONE):
        return False
    if low_unit != NONE and scale_unit == NONE:
        return False
    is_readable = group_of(stored_group) >= LEAST_GROUP
    return is_readable and head == head_of(in_features, stored_group, unit_groups, *kinds)


def expanded_bytes(num_inputs: int) -> int:
    """Return the memory that the factors of so many inputs of a panel take for readers."""
    return EXPANDED_HEAD_BYTES + -(-num_inputs // LEAST_GROUP) * GROUP_BYTES
