"""How the CPU kernels store numbers: kinds, formats of a weight's panels, factors of quantised weights.

The formats are one table, which all that depends on a format reads. A step is one input of all PANEL outputs,
in formats named "pairs" two neighbouring inputs. Their numbers reach registers as pairs of bfloat16 for the
dot-product instructions and AMX, those of the others as float32. `compiled.products.kinds` has the reader of
each format.

Factors keep the file's precision, in one or two levels, in memory of their own: a head of int64 and the table
of codes, then for each panel its groups, and after them its units. A group has PANEL scales, and PANEL zeros
or offsets if there are any; a unit, which several groups share, has what their scales and offsets are
multiplied by. The low part of a scale's unit is what float32 lacks of it: a scale times a unit in two parts
has the bits of a quotient, where the unit is a reciprocal. `linear.pack_codes` stores them.
"""

from typing import NamedTuple

import torch

from .target import HAS_DOT, HAS_LOOKUP, LANES, VECTOR_BYTES

FLOAT32, FLOAT16, BFLOAT16, INT8, FLOAT8 = range(5)  # FLOAT8 is e4m3fn
ITEM_SIZES = (4, 2, 2, 1, 1)  # bytes of a number
KINDS = {
    torch.float32: FLOAT32,
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.int8: INT8,
    torch.float8_e4m3fn: FLOAT8,
}


PANEL = 2 * LANES  # outputs
PANEL_WIDTH = 4 * PANEL  # bytes of a row of a panel's results in float32
GATED = 16  # added to the kind of a result: silu(gate) * up
# A step of int8 in pairs is two vectors of four parts of 8 numbers; in memory their parts alternate.
INT8_ORDER = 2, 4, 8

# bf12, see `compiled.products.bf12`.
BF12_GROUP = 1024  # numbers that share a table
TABLE_BYTES = 16
HEAD_BYTES = 32 if LANES == 16 else 64  # in front of a group, so that a step has a whole number of bytes
PART = 2 * PANEL  # numbers that are unpacked together, to two vectors
PART_BYTES = 3 * PANEL
PARTS = BF12_GROUP // PART
BF12_GROUP_BYTES = HEAD_BYTES + PARTS * PART_BYTES

# Formats of single numbers have the kinds of `numbers`, the others these.
BF12, BFLOAT16_PAIRS, INT8_PAIRS, BF12_PAIRS = range(5, 9)
# The kinds from CODES4 on have factors for groups of inputs.
CODES4, CODES8, E4M3, CODES4_PAIRS, CODES8_PAIRS, E4M3_PAIRS = range(9, 15)
# The format in pairs of each that has one.
PAIRS = {
    BFLOAT16: BFLOAT16_PAIRS, BF12: BF12_PAIRS, INT8: INT8_PAIRS, CODES4: CODES4_PAIRS,
    CODES8: CODES8_PAIRS, E4M3: E4M3_PAIRS,
}  # fmt: skip

_INSTRUCTIONS = {"AVX512-BF16 and VBMI": HAS_DOT, "AVX2 or AVX512-BW": HAS_LOOKUP}
_DOT, _LOOKUP = _INSTRUCTIONS
_BY_GROUP = 0


class Format(NamedTuple):
    """The storage format of panels."""

    name: str
    step_bytes: int  # of a panel
    part_steps: int  # panels are read in parts of a whole multiple of so many steps; _BY_GROUP: of a group
    unpacked: int  # the kind that `unpack` makes of it; its own if it is never unpacked
    needs: tuple[str, ...]  # instructions beyond those for vectors of float32
    use: str

    @property
    def is_supported(self) -> bool:
        """Whether this CPU has the instructions that the format needs."""
        return all(_INSTRUCTIONS[name] for name in self.needs)


_WHOLE = 32  # steps that parts of most formats are a multiple of
BF12_STEPS = BF12_GROUP // PANEL  # of a group
BF12_PAIR_STEPS = BF12_GROUP // (2 * PANEL)
# fmt: off
FORMATS = {
    FLOAT32: Format("float32", 4 * PANEL, _WHOLE, FLOAT32, (), "float32"),
    FLOAT16: Format("float16", 2 * PANEL, _WHOLE, FLOAT16, (), "float16, and float32 that it holds exactly"),
    BFLOAT16: Format("bfloat16", 2 * PANEL, _WHOLE, BFLOAT16, (),
                     "bfloat16, and float32 that it holds exactly"),
    INT8: Format("int8", PANEL, _WHOLE, INT8, (), "int8"),
    BF12: Format("bf12", BF12_GROUP_BYTES // BF12_STEPS, BF12_STEPS, BFLOAT16, (_LOOKUP,),
                 "large weights in bfloat16"),
    CODES4: Format("4-bit codes", LANES, _BY_GROUP, FLOAT32, (), "int4, and files with 4 bits"),
    CODES8: Format("8-bit codes", PANEL, _BY_GROUP, FLOAT32, (), "files with 8 bits"),
    E4M3: Format("e4m3", PANEL, _BY_GROUP, FLOAT32, (), "files with fp8"),
    BFLOAT16_PAIRS: Format("bfloat16 pairs", 4 * PANEL, _WHOLE, BFLOAT16_PAIRS, (_DOT,),
                           "bfloat16 for x in bfloat16, with AMX also in float32"),
    INT8_PAIRS: Format("int8 pairs", 2 * PANEL, _WHOLE, BFLOAT16_PAIRS, (_DOT,),
                       "int8 for x in bfloat16, with AMX also in float32"),
    BF12_PAIRS: Format("bf12 pairs", BF12_GROUP_BYTES // BF12_PAIR_STEPS, BF12_PAIR_STEPS, BFLOAT16_PAIRS,
                       (_DOT, _LOOKUP), "large weights in bfloat16 pairs"),
    CODES4_PAIRS: Format("4-bit codes in pairs", 2 * LANES, _BY_GROUP, BFLOAT16_PAIRS, (_DOT,),
                         "int4, and files with 4 bits, for x in bfloat16"),
    CODES8_PAIRS: Format("8-bit codes in pairs", 2 * PANEL, _BY_GROUP, BFLOAT16_PAIRS, (_DOT,),
                         "files with 8 bits, for x in bfloat16"),
    E4M3_PAIRS: Format("e4m3 in pairs", 2 * PANEL, _BY_GROUP, BFLOAT16_PAIRS, (_DOT,),
                       "files with fp8, for x in bfloat16"),
}
# fmt: on

# Columns by kind, for kernels.
STEP_BYTES, UNPACKED, PART_STEPS = (
    tuple(column(FORMATS[kind]) if kind in FORMATS else 0 for kind in range(E4M3_PAIRS + 1))
    for column in (lambda row: row.step_bytes, lambda row: row.unpacked, lambda row: row.part_steps)
)


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
NONE = -1  # the kind of a factor that a weight does not have


def expanded_bytes(num_inputs: int) -> int:
    """Return the bytes that readers need for the factors of num_inputs inputs of a panel."""
    return EXPANDED_HEAD_BYTES + -(-num_inputs // LEAST_GROUP) * GROUP_BYTES
