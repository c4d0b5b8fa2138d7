"""Units of work of a product by one weight, or by the weights of several experts.

Rows of experts are sorted by expert, and the offsets of their rows are found where the kernel runs, so that a
launch does not depend on how tokens were routed. Units are numbered through: those of an expert follow each
other, and so do those of a block of its rows.
"""

from typing import NamedTuple

from ..simd.memory import get_int, get_long
from ..simd.vectors import function

# Of the table of experts: i64, for each the addresses of its panels, scales and bias, and its kind.
PANELS_AT, SCALES_AT, BIAS_AT, KIND_AT, ENTRY_BYTES = range(0, 40, 8)


class Weight(NamedTuple):
    """The weight of a unit, and the range of rows of x to multiply by it."""

    panels: int
    scales: int
    bias: int
    kind: int
    start: int
    end: int


class Expert(NamedTuple):
    """An expert, and the number of units before its first unit. Without experts, a single Expert is used."""

    number: int
    first_unit: int


@function
def no_expert():
    """Return the Expert from which a search for experts begins."""
    return Expert(0, 0)


@function
def _units_of(args, expert, unit_rows, units_across):
    """Return how many units an expert has."""
    at = args.offsets + 4 * expert
    rows = get_int(at + 4) - get_int(at)
    return (rows + unit_rows - 1) // unit_rows * units_across


@function
def count_units(args, unit_rows, units_across):
    """Return the total number of units."""
    if args.offsets == 0:
        return args.all_units
    total = 0
    for expert in range(args.num_experts):
        total += _units_of(args, expert, unit_rows, units_across)
    return total


@function
def find_expert(args, unit, unit_rows, units_across, last):
    """Return the expert that an existing unit belongs to, searching from the last result on."""
    number = last.number
    first_unit = last.first_unit
    if args.offsets != 0:
        units = _units_of(args, number, unit_rows, units_across)
        while unit >= first_unit + units:
            first_unit += units
            number += 1
            units = _units_of(args, number, unit_rows, units_across)
    return Expert(number, first_unit)


@function
def weight_of(args, expert):
    """Return the packed weight of an expert, and the rows of x that it multiplies: without experts, all."""
    if args.offsets == 0:
        return Weight(args.panels, args.scales, args.bias, args.weight_kind, 0, args.num_rows)
    own = args.experts + ENTRY_BYTES * expert.number
    at = args.offsets + 4 * expert.number
    return Weight(
        get_long(own + PANELS_AT),
        get_long(own + SCALES_AT),
        get_long(own + BIAS_AT),
        get_long(own + KIND_AT),
        get_int(at) + 0,
        get_int(at + 4) + 0,
    )
