"""The header of a weight's quantisation factors; see `formats` for what follows it."""

from typing import NamedTuple

from .formats import ITEM_SIZES, LEAST_GROUP, MOST_GROUP, NONE, PANEL, TABLE_SIZE


class FactorHead(NamedTuple):
    """The header of a weight's factors: integers, followed by the table."""

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
    """Make the header for a weight's quantisation factors. Each kind of factor has a number format, or NONE.

    `group_of(stored_group)` must be at least LEAST_GROUP.
    """
    group_bytes = PANEL * sum(ITEM_SIZES[kind] for kind in (scale, zero, offset) if kind != NONE)
    unit_bytes = PANEL * sum(ITEM_SIZES[kind] for kind in (scale_unit, offset_unit, low_unit) if kind != NONE)
    units_at = in_features // stored_group * group_bytes
    panel_bytes = units_at + in_features // (stored_group * unit_groups) * unit_bytes
    kinds = scale, zero, offset, scale_unit, offset_unit, low_unit
    return FactorHead(group_of(stored_group), stored_group, unit_groups, *kinds, units_at, panel_bytes)


def group_of(stored_group: int) -> int:
    """Return how many inputs share factors in memory. Readers cannot use a group smaller than LEAST_GROUP."""
    return min(stored_group & -stored_group, MOST_GROUP)


def is_valid_head(head: FactorHead, in_features: int) -> bool:
    """Return whether this is a valid header for the factors of a weight with in_features inputs."""
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
