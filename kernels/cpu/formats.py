"""The formats that a weight's panels are stored in: one table, which all that depends on a format reads.

A step is one input of all PANEL outputs, in formats named "pairs" two neighbouring inputs. Their numbers
reach registers as pairs of bfloat16 for the dot-product instructions and AMX, those of the others as float32.
`compiled.products.kinds` has the reader of each format.
"""

from typing import NamedTuple

from .numbers import BFLOAT16, FLOAT16, FLOAT32, INT8
from .target import HAS_DOT, HAS_LOOKUP, LANES

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

_INSTRUCTIONS = {"AVX512-BF16 and VBMI": HAS_DOT, "AVX2 or AVX512-BW": HAS_LOOKUP}
_DOT, _LOOKUP = _INSTRUCTIONS
_BY_GROUP = 0


class Format(NamedTuple):
    """How panels are stored."""

    name: str
    step_bytes: int  # of a panel
    part_steps: int  # panels are read in parts of a whole multiple of so many steps; _BY_GROUP: of a group
    unpacked: int  # the kind that `unpack` makes of it; its own if it is never unpacked
    needs: tuple[str, ...]  # instructions beyond those for vectors of float32
    use: str

    @property
    def is_supported(self) -> bool:
        """Whether this CPU has the instructions."""
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
