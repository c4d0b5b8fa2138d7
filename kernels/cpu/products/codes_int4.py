"""How int4 comes into registers."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ..simd import emit
from ..simd.emit import INTS, VECTOR, int64
from ..simd.numbers import BFLOAT16, INT8
from ..simd.vectors import LANES, VECTOR_BYTES
from .codes import GROUP, GROUP_BYTES, INT4_STEPS, PANEL, Rows


class Int4(Rows):
    """scale * (code - 8) + zero: a byte has the codes of an output of either half of the panel."""

    group_steps, group_bytes = GROUP, GROUP_BYTES
    offset = 8  # by which numbers made of codes are too large

    def __init__(self) -> None:
        super().__init__(INT8)

    def factors(self, builder: Any, address: Any) -> list[tuple[Any, Any]]:
        """For either half what multiplies a code, and what is added."""
        values = []
        for half in range(2):
            at = builder.add(address, int64(2 * LANES * half))
            scale = emit.load(builder, BFLOAT16, at)
            zero = emit.load(builder, BFLOAT16, builder.add(at, int64(2 * PANEL)))
            values.append((scale, emit.fma(builder, emit.constant(-self.offset), scale, zero)))
        return values

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:
        """See Rows."""
        codes = builder.zext(emit.read(builder, 8, address), INTS)
        return [_dequantized(builder, codes, half, *factors[half]) for half in range(2)]


class Int4Pairs(Int4):
    """The same, rounded to bfloat16, by fewer instructions.

    A vector has 8 steps of a quarter of the outputs: of an output two int32 side by side, one for either
    input of a step, with 4 bits for each step, those of the first one lowest.
    """

    in_pairs = True
    group_steps, at_a_time = GROUP // 2, INT4_STEPS
    offset = 16 + 8

    def factors(self, builder: Any, address: Any) -> list[tuple[Any, Any]]:
        """For each quarter of the outputs, twice side by side."""
        halves = super().factors(builder, address)
        return [
            (_twice(builder, scale, first), _twice(builder, least, first))
            for scale, least in halves
            for first in (0, LANES // 2)
        ]

    def some_steps(
        self, builder: Any, place: Any, first: Any, factors: Any, body: Callable[[Any, Any], None]
    ) -> None:
        """See Rows; with the factors comes for each quarter what they multiply."""
        places = [builder.add(place, int64(VECTOR_BYTES * quarter)) for quarter in range(4)]
        codes = [emit.read(builder, 32, quarter) for quarter in places]
        for step in range(self.at_a_time):
            numbers = [_from_16(builder, quarter, 4 * step) for quarter in codes]
            body(builder.add(first, int64(step)), (numbers, factors))

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:  # noqa: ARG002
        """See Rows."""
        quarters = [emit.fma(builder, number, *own) for number, own in zip(*factors, strict=True)]
        return [emit.narrow(builder, *quarters[:2]), emit.narrow(builder, *quarters[2:])]


def _from_16(builder: Any, codes: Any, first: int) -> Any:
    """16 and what 4 bits of an int32 hold, from the first on, which become the upper ones of a mantissa."""
    up = 19 - first
    move, by = (builder.shl, up) if up > 0 else (builder.lshr, -up)
    bits = builder.and_(move(codes, emit.constant(by, INTS)), emit.constant(15 << 19, INTS))
    return builder.bitcast(builder.or_(bits, emit.constant(0x41800000, INTS)), VECTOR)


def _dequantized(builder: Any, codes: Any, half: int, scale: Any, least: Any) -> Any:
    bits = builder.and_(builder.lshr(codes, emit.constant(4 * half, INTS)), emit.constant(15, INTS))
    return emit.fma(builder, builder.sitofp(bits, VECTOR), scale, least)


def _twice(builder: Any, x: Any, first: int) -> Any:
    """Half of the lanes from the first on, each twice."""
    lanes = [first + lane // 2 for lane in range(LANES)]
    return builder.shuffle_vector(x, x, ir.Constant(INTS, lanes))
