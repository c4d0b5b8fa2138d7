"""int4: 4 bits a weight, with a scale and a zero in bfloat16 for each INT4_GROUP of an output's inputs."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ..simd import emit
from ..simd.emit import INTS, VECTOR, int64
from ..simd.numbers import BFLOAT16, INT8, ITEM_SIZES
from ..simd.vectors import LANES, VECTOR_BYTES
from .reader import PANEL, Reader

INT4_GROUP = 32  # inputs that share a scale and a zero
_GROUP_BYTES = 2 * PANEL * ITEM_SIZES[BFLOAT16]  # of a group's scales and zeros
PAIR_STEPS = 8  # steps of Int4Pairs in a vector


class Int4(Reader):
    """Codes of 4 bits for scale * (code - 8) + zero; a byte has those of outputs i and i + LANES."""

    group_steps = INT4_GROUP
    group_bytes = _GROUP_BYTES
    offset = 8  # that `read` adds to a code

    def __init__(self) -> None:
        super().__init__(INT8)

    def factors(self, builder: Any, address: Any) -> list[tuple[Any, Any]]:
        """Load the factor and the summand of each half of the outputs."""
        values = []
        for half in range(2):
            at = builder.add(address, int64(2 * LANES * half))
            scale = emit.load(builder, BFLOAT16, at)
            zero = emit.load(builder, BFLOAT16, builder.add(at, int64(2 * PANEL)))
            values.append((scale, emit.fma(builder, emit.constant(-self.offset), scale, zero)))
        return values

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:
        """Load the step at this address. Return its two vectors."""
        codes = builder.zext(emit.read(builder, 8, address), INTS)
        return [_dequantized(builder, codes, half, *factors[half]) for half in range(2)]


class Int4Pairs(Int4):
    """The same, rounded to pairs of bfloat16, in an order that takes fewer instructions.

    A vector holds PAIR_STEPS steps of a quarter of the outputs. An output has two neighbouring int32, one for
    each input of a step, with 4 bits for every step, the first one's lowest.
    """

    in_pairs = True
    group_steps = INT4_GROUP // 2
    at_a_time = PAIR_STEPS
    offset = 16 + 8

    def factors(self, builder: Any, address: Any) -> list[tuple[Any, Any]]:
        """Load the factors and summands of each quarter of the outputs, each twice side by side."""
        halves = super().factors(builder, address)
        return [
            (_twice(builder, scale, first), _twice(builder, least, first))
            for scale, least in halves
            for first in (0, LANES // 2)
        ]

    def some_steps(
        self, builder: Any, place: Any, first: Any, factors: Any, body: Callable[[Any, Any], None]
    ) -> None:
        """Call body for PAIR_STEPS steps; `read` gets each quarter's codes as float32 with the factors."""
        places = [builder.add(place, int64(VECTOR_BYTES * quarter)) for quarter in range(4)]
        codes = [emit.read(builder, 32, quarter) for quarter in places]
        for step in range(self.at_a_time):
            numbers = [_from_16(builder, quarter, 4 * step) for quarter in codes]
            body(builder.add(first, int64(step)), (numbers, factors))

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:  # noqa: ARG002
        """Dequantize a step: return its two vectors of bfloat16 pairs.

        The codes were read by `some_steps` and are in `factors`.
        """
        quarters = [emit.fma(builder, number, *own) for number, own in zip(*factors, strict=True)]
        return [emit.narrow(builder, *quarters[:2]), emit.narrow(builder, *quarters[2:])]


def _from_16(builder: Any, codes: Any, first: int) -> Any:
    """Return 16 + code in float32: the code's 4 bits, from `first` on, become the mantissa's upper ones."""
    up = 19 - first
    move, by = (builder.shl, up) if up > 0 else (builder.lshr, -up)
    bits = builder.and_(move(codes, emit.constant(by, INTS)), emit.constant(15 << 19, INTS))
    return builder.bitcast(builder.or_(bits, emit.constant(0x41800000, INTS)), VECTOR)


def _dequantized(builder: Any, codes: Any, half: int, scale: Any, least: Any) -> Any:
    bits = builder.and_(builder.lshr(codes, emit.constant(4 * half, INTS)), emit.constant(15, INTS))
    return emit.fma(builder, builder.sitofp(bits, VECTOR), scale, least)


def _twice(builder: Any, x: Any, first: int) -> Any:
    """Return LANES / 2 lanes from the first on, each twice."""
    lanes = [first + lane // 2 for lane in range(LANES)]
    return builder.shuffle_vector(x, x, ir.Constant(INTS, lanes))
