"""Readers: they load one step of a weight's panel from memory into two vector registers.

A panel holds PANEL outputs. A step is one input of all of them, in formats with pairs two neighbouring
inputs, side by side as bfloat16. Quantised weights are dequantised by the same instructions wherever a step
is read, so a product has the same bits whether each register tile does so or `unpack` did it once for many.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ..simd import emit
from ..simd.emit import INTS, VECTOR, int64
from ..simd.numbers import BFLOAT16, FLOAT32, INT8, ITEM_SIZES
from ..simd.vectors import HAS_HALVES, LANES, VECTOR_BYTES

PANEL = 2 * LANES  # outputs
INT8_UNIT = 2.0 if HAS_HALVES else 1.0  # what 1 in int8 becomes in pairs: see `_int8_by_float16`


class Reader:
    """One number per output and step, stored as `kind` and widened to float32."""

    in_pairs = False
    has_scales = True  # a factor for each output, which products are multiplied by
    group_steps = 0  # steps that have something in common, which `factors` loads; 0 without such groups
    at_a_time = 1  # steps of a group that `some_steps` loads together

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def factors_from(self, builder: Any, factors: Any, step: Any) -> Any:  # noqa: ARG002
        """Return the factors of the steps from this one on."""
        return factors

    def factors(self, builder: Any, address: Any) -> Any:  # noqa: ARG002
        """Load what `read` needs once per group."""
        return None

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:  # noqa: ARG002
        """Load the step at this address. Return its two vectors."""
        second = builder.add(address, int64(LANES * ITEM_SIZES[self.kind]))
        return [emit.load(builder, self.kind, place) for place in (address, second)]

    def each_step(
        self,
        builder: Any,
        panel: Any,
        stride: Any,
        factors: Any,
        depth: Any,
        body: Callable[[Any, Any], None],
    ) -> None:
        """Emit loops that call body(step, factors for `read`) for `depth` steps from the start of a group."""
        if not self.group_steps:
            with cgutils.for_range(builder, depth) as loop:
                body(loop.index, None)
            return
        steps = int64(self.group_steps)
        some = int64(self.at_a_time)
        with cgutils.for_range(builder, builder.sdiv(depth, steps)) as groups:
            own = self.factors(builder, factors)
            first = builder.mul(groups.index, steps)
            with cgutils.for_range(builder, builder.sdiv(steps, some)) as loop:
                step = builder.add(first, builder.mul(loop.index, some))
                self.some_steps(builder, builder.add(panel, builder.mul(stride, step)), step, own, body)

    def some_steps(
        self,
        builder: Any,  # noqa: ARG002
        place: Any,  # noqa: ARG002
        first: Any,
        factors: Any,
        body: Callable[[Any, Any], None],
    ) -> None:
        """Call body for `at_a_time` steps of a group, which lie at `place`."""
        body(first, factors)

    def unpack(
        self, builder: Any, to: Any, panel: Any, stride: Any, factors: Any, depth: Any, ahead: Any = None
    ) -> None:
        """Store `depth` steps as two vectors each, one step behind the other.

        ahead: an address from which as many bytes are prefetched, a few with each step: a core has few
        buffers for lines that it waits for.
        """

        def step(index: Any, own: Any) -> None:
            source = builder.add(panel, builder.mul(stride, index))
            if ahead is not None:
                emit.prefetch(builder, builder.add(ahead, builder.mul(stride, index)), near=True)
            store_step(builder, to, index, self.read(builder, source, own))

        self.each_step(builder, panel, stride, factors, depth, step)


def step_place(builder: Any, to: Any, index: Any) -> Any:
    """Return the address of an unpacked step."""
    return builder.add(to, builder.mul(index, int64(2 * VECTOR_BYTES)))


def store_step(builder: Any, to: Any, index: Any, vectors: list[Any]) -> None:
    """Store the two vectors of an unpacked step."""
    row = step_place(builder, to, index)
    for vector in vectors:
        emit.store(builder, FLOAT32, row, vector)
        row = builder.add(row, int64(VECTOR_BYTES))


class Bfloat16(Reader):
    """bfloat16; outputs i and i + LANES share an int32, so that a shift and a mask widen both vectors."""

    def __init__(self) -> None:
        super().__init__(BFLOAT16)

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:  # noqa: ARG002
        """Load the step at this address. Return its two vectors."""
        return self.made_of(builder, [emit.load(builder, FLOAT32, address)])

    def made_of(self, builder: Any, stored: list[Any]) -> list[Any]:
        """Return the two vectors of a step whose stored vector is in a register."""
        both = builder.bitcast(stored[0], INTS)
        first = builder.shl(both, emit.constant(16, INTS))
        second = builder.and_(both, emit.constant(0xFFFF0000, INTS))
        return [builder.bitcast(half, VECTOR) for half in (first, second)]


class Bfloat16Pairs(Reader):
    """Pairs of bfloat16, as the dot-product instructions take them."""

    in_pairs = True

    def __init__(self) -> None:
        super().__init__(FLOAT32)

    def made_of(self, builder: Any, stored: list[Any]) -> list[Any]:  # noqa: ARG002
        """Return the two vectors of a step, which are those stored."""
        return stored


class Int8Pairs(Reader):
    """Pairs of int8, which become bfloat16 in units of 1 / INT8_UNIT: exactly."""

    in_pairs = True

    def __init__(self) -> None:
        super().__init__(INT8)

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:
        """Load the step at this address. Return its two vectors."""
        places = address, builder.add(address, int64(PANEL))
        if HAS_HALVES:
            return [_int8_by_float16(builder, place) for place in places]
        return [
            emit.narrow(builder, *super(Int8Pairs, self).read(builder, place, factors)) for place in places
        ]


def _int8_by_float16(builder: Any, address: Any) -> Any:
    """Load PANEL int8. Return twice their values in bfloat16, by way of float16.

    In float16 twice an int8 other than 0 has an exponent field of 16 to 23: a 1 and 4 more bits. bfloat16's
    is larger by 112: 1000 and the same 4 bits. So the sign and the leading 1 stay in place, and the other
    bits move down by 3.
    """
    bits = ir.VectorType(ir.IntType(16), PANEL)
    halves = ir.VectorType(ir.HalfType(), PANEL)
    stored = builder.load(emit.pointer(builder, ir.VectorType(emit.I8, PANEL), address), align=1)
    down, kept, moved = (ir.Constant(bits, [n] * PANEL) for n in (3, 0xC000, 0x07FF))
    single = builder.sext(stored, bits)
    number = builder.bitcast(builder.sitofp(builder.add(single, single), halves), bits)
    rest = builder.and_(builder.lshr(number, down), moved)
    return builder.bitcast(builder.or_(builder.and_(number, kept), rest), VECTOR)
