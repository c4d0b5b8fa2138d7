"""The formats that a weight's panels are stored in: one table, which all that depends on a format reads.

A step is one input of all PANEL outputs, in formats named "pairs" two neighbouring inputs. Their numbers
reach registers as pairs of bfloat16 for the dot-product instructions and AMX, those of the others as float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..simd.numbers import BFLOAT16, FLOAT16, FLOAT32, INT8
from ..simd.vectors import HAS_DOT, HAS_LOOKUP, LANES, dispatch, missing
from .bf12 import BF12_GROUP_BYTES, Bf12
from .codes import Codes4, Codes4Pairs, Codes8, E4m3
from .reader import PANEL, Bfloat16, Bfloat16Pairs, Int8Pairs, Reader

# Formats of single numbers have the kinds of `simd.numbers`, the others these.
BF12, BFLOAT16_PAIRS, INT8_PAIRS, BF12_PAIRS = range(5, 9)
# The kinds from CODES4 on have factors for groups of inputs.
CODES4, CODES8, E4M3, CODES4_PAIRS, CODES8_PAIRS, E4M3_PAIRS = range(9, 15)

_INSTRUCTIONS = {"AVX512-BF16 and VBMI": HAS_DOT, "AVX2 or AVX512-BW": HAS_LOOKUP}
_DOT, _LOOKUP = _INSTRUCTIONS
_BY_GROUP = 0


class Format(NamedTuple):
    """How panels are stored and read."""

    name: str
    reader: Reader
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
_BF12 = Bf12(Bfloat16())
_BF12_PAIRS = Bf12(Bfloat16Pairs())
_BF12_STEPS = _BF12.group_steps
_BF12_PAIR_STEPS = _BF12_PAIRS.group_steps
# fmt: off
FORMATS = {
    FLOAT32: Format("float32", Reader(FLOAT32), 4 * PANEL, _WHOLE, FLOAT32, (), "float32"),
    FLOAT16: Format("float16", Reader(FLOAT16), 2 * PANEL, _WHOLE, FLOAT16, (),
                    "float16, and float32 that it holds exactly"),
    BFLOAT16: Format("bfloat16", Bfloat16(), 2 * PANEL, _WHOLE, BFLOAT16, (),
                     "bfloat16, and float32 that it holds exactly"),
    INT8: Format("int8", Reader(INT8), PANEL, _WHOLE, INT8, (), "int8"),
    BF12: Format("bf12", _BF12, BF12_GROUP_BYTES // _BF12_STEPS, _BF12_STEPS, BFLOAT16, (_LOOKUP,),
                 "large weights in bfloat16"),
    CODES4: Format("4-bit codes", Codes4(), LANES, _BY_GROUP, FLOAT32, (), "int4, and files with 4 bits"),
    CODES8: Format("8-bit codes", Codes8(), PANEL, _BY_GROUP, FLOAT32, (), "files with 8 bits"),
    E4M3: Format("e4m3", E4m3(), PANEL, _BY_GROUP, FLOAT32, (), "files with fp8"),
    BFLOAT16_PAIRS: Format("bfloat16 pairs", Bfloat16Pairs(), 4 * PANEL, _WHOLE, BFLOAT16_PAIRS, (_DOT,),
                           "bfloat16 for x in bfloat16, with AMX also in float32"),
    INT8_PAIRS: Format("int8 pairs", Int8Pairs(), 2 * PANEL, _WHOLE, BFLOAT16_PAIRS, (_DOT,),
                       "int8 for x in bfloat16, with AMX also in float32"),
    BF12_PAIRS: Format("bf12 pairs", _BF12_PAIRS, BF12_GROUP_BYTES // _BF12_PAIR_STEPS, _BF12_PAIR_STEPS,
                       BFLOAT16_PAIRS, (_DOT, _LOOKUP), "large weights in bfloat16 pairs"),
    CODES4_PAIRS: Format("4-bit codes in pairs", Codes4Pairs(), 2 * LANES, _BY_GROUP, BFLOAT16_PAIRS, (_DOT,),
                         "int4, and files with 4 bits, for x in bfloat16"),
    CODES8_PAIRS: Format("8-bit codes in pairs", Codes8(pairs=True), 2 * PANEL, _BY_GROUP, BFLOAT16_PAIRS,
                         (_DOT,), "files with 8 bits, for x in bfloat16"),
    E4M3_PAIRS: Format("e4m3 in pairs", E4m3(pairs=True), 2 * PANEL, _BY_GROUP, BFLOAT16_PAIRS, (_DOT,),
                       "files with fp8, for x in bfloat16"),
}
# fmt: on

# Columns by kind, for kernels.
STEP_BYTES, UNPACKED, PART_STEPS = (
    tuple(column(FORMATS[kind]) if kind in FORMATS else 0 for kind in range(E4M3_PAIRS + 1))
    for column in (lambda row: row.step_bytes, lambda row: row.unpacked, lambda row: row.part_steps)
)


def step_bytes_of(reader: Reader) -> int:
    """Return the bytes of a step of the format with this reader."""
    return next(row.step_bytes for row in FORMATS.values() if row.reader is reader)


def for_kinds(make: Callable[[Reader], Any], kinds: list[int]) -> Any:
    """Return call(kind, *args), which runs make(reader) of the kind's format.

    For a format that this CPU lacks instructions for it raises.
    """
    formats = {kind: FORMATS[kind] for kind in kinds}
    return dispatch({k: make(row.reader) if row.is_supported else missing for k, row in formats.items()})
