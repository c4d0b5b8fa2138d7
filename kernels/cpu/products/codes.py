"""How the rows of a weight's panel come into registers: two vectors for a step of the depth.

A step is an input, of weights in pairs two: then a number of a vector is two of bfloat16. Quantised weights
become floating point on the way, always by the same instructions, so that a product has the same bits whether
they do so in each tile or once for many.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ..simd import emit
from ..simd.emit import INTS, VECTOR, int64
from ..simd.memory import item_size
from ..simd.numbers import BFLOAT16, FLOAT32, INT8, ITEM_SIZES
from ..simd.vectors import HAS_HALVES, LANES, VECTOR_BYTES, function

# How a panel is stored, after the kinds of single numbers.
INT4, HALVES, PAIRS, INT8_PAIRS, INT4_PAIRS, SHORT_PAIRS, SHORT_HALVES = range(5, 12)
PANEL = 2 * LANES  # outputs
GROUP = 32  # inputs that share a scale and a zero in int4
GROUP_BYTES = 2 * PANEL * ITEM_SIZES[BFLOAT16]  # of these
INT4_STEPS = 8  # of int4 in pairs, that lie in a vector
# Of bfloat16 in 12 bits: numbers of a group, and of a part of it, which becomes two vectors; bytes of a part,
# and of what a group has in front of them, so that a step has a whole number of bytes.
SHORT_GROUP, SHORT_PART, SHORT_PART_BYTES = 1024, 2 * PANEL, 3 * PANEL
SHORT_PARTS, TABLE_BYTES, SHORT_HEAD_BYTES = SHORT_GROUP // SHORT_PART, 16, 32 if LANES == 16 else 64
SHORT_GROUP_BYTES = SHORT_HEAD_BYTES + SHORT_PARTS * SHORT_PART_BYTES
INT8_UNIT = 2.0 if HAS_HALVES else 1.0  # what 1 in int8 becomes in pairs: see `_int8_by_halves`


class Rows:
    """Numbers that are stored as `kind`."""

    in_pairs = False
    group_steps = 0  # of the depth, that have factors in common; none have where it is 0
    group_bytes = 0  # of these, that lie elsewhere
    at_a_time = 1  # steps of a group

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def factors(self, builder: Any, address: Any) -> Any:  # noqa: ARG002
        """What those of a group have in common."""
        return None

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:  # noqa: ARG002
        """A step's."""
        return [emit.load(builder, self.kind, place) for place in self._halves(builder, address)]

    def _halves(self, builder: Any, address: Any) -> list[Any]:
        return [address, builder.add(address, int64(LANES * ITEM_SIZES[self.kind]))]

    def each_step(
        self,
        builder: Any,
        panel: Any,
        stride: Any,
        factors: Any,
        depth: Any,
        body: Callable[[Any, Any], None],
    ) -> None:
        """body(number of the step, factors for `read`) for all of the depth, from the start of a group on."""
        if not self.group_steps:
            with cgutils.for_range(builder, depth) as loop:
                body(loop.index, None)
            return
        steps, size = int64(self.group_steps), int64(self.group_bytes)
        some = int64(self.at_a_time)
        with cgutils.for_range(builder, builder.sdiv(depth, steps)) as groups:
            own = self.factors(builder, builder.add(factors, builder.mul(groups.index, size)))
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
        """`at_a_time` of a group, that lie at `place`, for `each_step`."""
        body(first, factors)

    def unpack(
        self, builder: Any, to: Any, panel: Any, stride: Any, factors: Any, depth: Any, ahead: Any = None
    ) -> None:
        """So many steps as two vectors each, one behind the other.

        ahead: have as much memory on its way from there, a little with each step: a core has few places for
        lines that it waits for.
        """

        def step(index: Any, own: Any) -> None:
            source = builder.add(panel, builder.mul(stride, index))
            if ahead is not None:
                emit.prefetch(builder, builder.add(ahead, builder.mul(stride, index)), near=True)
            store_step(builder, to, index, self.read(builder, source, own))

        self.each_step(builder, panel, stride, factors, depth, step)


def step_place(builder: Any, to: Any, index: Any) -> Any:
    return builder.add(to, builder.mul(index, int64(2 * VECTOR_BYTES)))


def store_step(builder: Any, to: Any, index: Any, vectors: list[Any]) -> None:
    row = step_place(builder, to, index)
    for vector in vectors:
        emit.store(builder, FLOAT32, row, vector)
        row = builder.add(row, int64(VECTOR_BYTES))


class Halves(Rows):
    """bfloat16, of an output of either half of the panel side by side: float32 is a shift away."""

    def __init__(self) -> None:
        super().__init__(BFLOAT16)

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:  # noqa: ARG002
        """See Rows."""
        return self.made_of(builder, [emit.load(builder, FLOAT32, address)])

    def made_of(self, builder: Any, stored: list[Any]) -> list[Any]:
        """A step's, of the vector that is stored for it."""
        both = builder.bitcast(stored[0], INTS)
        first = builder.shl(both, emit.constant(16, INTS))
        second = builder.and_(both, emit.constant(0xFFFF0000, INTS))
        return [builder.bitcast(half, VECTOR) for half in (first, second)]


class Pairs(Rows):
    """Two of bfloat16 side by side."""

    in_pairs = True

    def __init__(self) -> None:
        super().__init__(FLOAT32)

    def made_of(self, builder: Any, stored: list[Any]) -> list[Any]:  # noqa: ARG002
        """A step's, of the vectors that are stored for it."""
        return stored


class Int8Pairs(Rows):
    """Two of int8 in units of 1 / INT8_UNIT, all of which bfloat16 can hold."""

    in_pairs = True

    def __init__(self) -> None:
        super().__init__(INT8)

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:
        """See Rows."""
        places = address, builder.add(address, int64(PANEL))
        if HAS_HALVES:
            return [_int8_by_halves(builder, place) for place in places]
        return [
            emit.narrow(builder, *super(Int8Pairs, self).read(builder, place, factors)) for place in places
        ]


def _int8_by_halves(builder: Any, address: Any) -> Any:
    """PANEL numbers of int8, twice as large, in bfloat16.

    As float16 those that are not 0 have an exponent field of 16 to 23, 16 and what 4 bits hold; bfloat16's is
    112 larger, 128 and the same 4 bits: so sign and leading bit stay in place, and the others move down by 3.
    """
    bits, halves = ir.VectorType(ir.IntType(16), PANEL), ir.VectorType(ir.HalfType(), PANEL)
    stored = builder.load(emit.pointer(builder, ir.VectorType(ir.IntType(8), PANEL), address), align=1)
    down, kept, moved = (ir.Constant(bits, [n] * PANEL) for n in (3, 0xC000, 0x07FF))
    single = builder.sext(stored, bits)
    number = builder.bitcast(builder.sitofp(builder.add(single, single), halves), bits)
    rest = builder.and_(builder.lshr(number, down), moved)
    return builder.bitcast(builder.or_(builder.and_(number, kept), rest), VECTOR)


@function
def whole_steps(kind):
    """Parts of the depth that panels are gone through in have multiples of so many steps."""
    if kind == SHORT_PAIRS:
        return SHORT_GROUP // (2 * PANEL)
    return SHORT_GROUP // PANEL if kind == SHORT_HALVES else GROUP


@function
def step_bytes(kind):
    """What a panel has for a step of the depth."""
    if kind == INT4:
        return LANES
    if kind == INT4_PAIRS:
        return 2 * LANES
    if kind in (SHORT_PAIRS, SHORT_HALVES):
        return SHORT_GROUP_BYTES // whole_steps(kind)
    if kind in (HALVES, INT8_PAIRS):
        return 2 * PANEL
    return 4 * PANEL if kind == PAIRS else item_size(kind) * PANEL


@function
def group_bytes(kind, steps):
    """What panels of int4 have of factors for so many steps of the depth; nothing of other kinds."""
    if kind == INT4:
        return steps // GROUP * GROUP_BYTES
    return 2 * steps // GROUP * GROUP_BYTES if kind == INT4_PAIRS else 0
