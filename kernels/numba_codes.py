"""How the rows of a weight's panel come into registers: two vectors for a step of the depth.

A step is an input, of weights in pairs two: then a number of a vector is two of bfloat16. Quantised weights
become floating point on the way, always by the same instructions, so that a product has the same bits whether
they do so in each tile or once for many.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .numba_memory import _ITEM_SIZES, BFLOAT16, FLOAT32, INT8, _load, _prefetch, _read, _store, item_size
from .numba_vectors import (
    _I32,
    _I64,
    _INTS,
    _VECTOR,
    HAS_DOT,
    HAS_HALVES,
    LANES,
    VECTOR_BYTES,
    _at,
    _call,
    _fma,
    _narrow,
    _operation,
    _same,
    _twice,
    function,
)

# How a panel is stored, after the kinds of single numbers.
INT4, HALVES, PAIRS, INT8_PAIRS, INT4_PAIRS, SHORT_PAIRS = range(5, 11)
PANEL = 2 * LANES  # outputs
GROUP = 32  # inputs that share a scale and a zero in int4
GROUP_BYTES = 2 * PANEL * _ITEM_SIZES[BFLOAT16]  # of these
INT4_STEPS = 8  # of int4 in pairs, that lie in a vector
# Of bfloat16 in 12 bits: steps of a group, what it has in front of them, and bytes of a step.
SHORT_STEPS, TABLE_BYTES, SHORT_HEAD_BYTES, SHORT_STEP_BYTES = 16, 16, 32, 3 * PANEL
SHORT_GROUP_BYTES = SHORT_HEAD_BYTES + SHORT_STEPS * SHORT_STEP_BYTES
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
        return [_load(builder, self.kind, place) for place in self._halves(builder, address)]

    def _halves(self, builder: Any, address: Any) -> list[Any]:
        return [address, builder.add(address, ir.Constant(_I64, LANES * _ITEM_SIZES[self.kind]))]

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
        steps, size = ir.Constant(_I64, self.group_steps), ir.Constant(_I64, self.group_bytes)
        some = ir.Constant(_I64, self.at_a_time)
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
                _prefetch(builder, builder.add(ahead, builder.mul(stride, index)))
            _store_step(builder, to, index, self.read(builder, source, own))

        self.each_step(builder, panel, stride, factors, depth, step)


def _step_place(builder: Any, to: Any, index: Any) -> Any:
    return builder.add(to, builder.mul(index, ir.Constant(_I64, 2 * VECTOR_BYTES)))


def _store_step(builder: Any, to: Any, index: Any, vectors: list[Any]) -> None:
    row = _step_place(builder, to, index)
    for vector in vectors:
        _store(builder, FLOAT32, row, vector)
        row = builder.add(row, ir.Constant(_I64, VECTOR_BYTES))


class Halves(Rows):
    """bfloat16, of an output of either half of the panel side by side: float32 is a shift away."""

    def __init__(self) -> None:
        super().__init__(BFLOAT16)

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:  # noqa: ARG002
        """See Rows."""
        both = _read(builder, 32, address)
        first = builder.shl(both, _same(16, _INTS))
        second = builder.and_(both, _same(0xFFFF0000, _INTS))
        return [builder.bitcast(half, _VECTOR) for half in (first, second)]


class Pairs(Rows):
    """Two of bfloat16 side by side."""

    in_pairs = True

    def __init__(self) -> None:
        super().__init__(FLOAT32)


class Int8Pairs(Rows):
    """Two of int8 in units of 1 / INT8_UNIT, all of which bfloat16 can hold."""

    in_pairs = True

    def __init__(self) -> None:
        super().__init__(INT8)

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:
        """See Rows."""
        places = address, builder.add(address, ir.Constant(_I64, PANEL))
        if HAS_HALVES:
            return [_int8_by_halves(builder, place) for place in places]
        return [_narrow(builder, *super(Int8Pairs, self).read(builder, place, factors)) for place in places]


def _int8_by_halves(builder: Any, address: Any) -> Any:
    """PANEL numbers of int8, twice as large, in bfloat16.

    As float16 those that are not 0 have an exponent field of 16 to 23, 16 and what 4 bits hold; bfloat16's is
    112 larger, 128 and the same 4 bits: so sign and leading bit stay in place, and the others move down by 3.
    """
    bits, halves = ir.VectorType(ir.IntType(16), PANEL), ir.VectorType(ir.HalfType(), PANEL)
    stored = builder.load(_at(builder, ir.VectorType(ir.IntType(8), PANEL), address), align=1)
    down, kept, moved = (ir.Constant(bits, [n] * PANEL) for n in (3, 0xC000, 0x07FF))
    single = builder.sext(stored, bits)
    number = builder.bitcast(builder.sitofp(builder.add(single, single), halves), bits)
    rest = builder.and_(builder.lshr(number, down), moved)
    return builder.bitcast(builder.or_(builder.and_(number, kept), rest), _VECTOR)


class ShortPairs(Rows):
    """Two of bfloat16 in 12 bits each: the lower 8, and 4 that stand for the upper 8.

    Those of a group that are near each other in size have few signs and exponents: a table of the 16 upper
    halves that are most frequent has nearly all of them. The others are put in their places after that, so
    that all come out as they were. In the manner of DFloat11 (Zhang et al., 2025), whose codes are shorter
    and of many lengths.

    In front of a group are its table, where its exceptions begin and their number, as int64. They are at
    `factors`, 4 bytes each: the place of the upper half in the group as it comes out, times 256, and that.
    """

    in_pairs = True
    group_steps = at_a_time = SHORT_STEPS

    def __init__(self) -> None:
        super().__init__(BFLOAT16)

    def factors(self, builder: Any, address: Any) -> Any:  # noqa: ARG002
        """The exceptions of all groups."""
        return address

    def some_steps(
        self, builder: Any, place: Any, first: Any, factors: Any, body: Callable[[Any, Any], None]
    ) -> None:
        """See Rows; a group is unpacked for itself, and `read` takes where a step of it is."""
        kind = ir.ArrayType(ir.IntType(8), SHORT_STEPS * 2 * VECTOR_BYTES)
        memory = cgutils.alloca_once(builder, kind)
        memory.align = VECTOR_BYTES
        to, steps = builder.ptrtoint(memory, _I64), ir.Constant(_I64, SHORT_STEPS)
        stride = ir.Constant(_I64, SHORT_GROUP_BYTES // SHORT_STEPS)
        self.unpack(builder, to, place, stride, factors, steps)
        with cgutils.for_range(builder, steps) as loop:
            body(builder.add(first, loop.index), _step_place(builder, to, loop.index))

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:  # noqa: ARG002
        """See Rows."""
        behind = builder.add(factors, ir.Constant(_I64, VECTOR_BYTES))
        return [_load(builder, FLOAT32, place) for place in (factors, behind)]

    def unpack(
        self, builder: Any, to: Any, panel: Any, stride: Any, factors: Any, depth: Any, ahead: Any = None
    ) -> None:
        """See Rows; a step is SHORT_GROUP_BYTES / SHORT_STEPS from the next on average.

        Of the lines `ahead` a third is left to the CPU's own fetching of neighbours: to ask for all is
        quicker with a few rows and slower with 32.
        """
        steps = ir.Constant(_I64, SHORT_STEPS)
        with cgutils.for_range(builder, builder.sdiv(depth, steps)) as groups:
            first = builder.mul(groups.index, steps)
            group = builder.add(panel, builder.mul(stride, first))
            table = builder.load(_at(builder, _bytes(TABLE_BYTES), group), align=1)
            table = _repeated(builder, table, 2 * PANEL)
            with cgutils.for_range(builder, steps) as loop:
                index = builder.add(first, loop.index)
                if ahead is not None:
                    _prefetch(builder, builder.add(ahead, builder.mul(stride, index)))
                source = builder.add(group, builder.mul(loop.index, ir.Constant(_I64, SHORT_STEP_BYTES)))
                source = builder.add(source, ir.Constant(_I64, SHORT_HEAD_BYTES))
                _store_step(builder, to, index, _lengthened(builder, source, table))
            _mend(builder, _step_place(builder, to, first), group, factors)


def _lengthened(builder: Any, address: Any, table: Any) -> list[Any]:
    """A step of what ShortPairs are; table: the group's, for any 16 bytes of a vector."""
    width = 2 * PANEL
    lower = builder.load(_at(builder, _bytes(width), address), align=1)
    place = builder.add(address, ir.Constant(_I64, width))
    codes = _repeated(builder, builder.load(_at(builder, _bytes(PANEL), place), align=1), width)
    longs = ir.VectorType(_I64, width // 8)
    shifts = ir.Constant(longs, [0] * (width // 16) + [4] * (width // 16))
    codes = builder.bitcast(builder.lshr(builder.bitcast(codes, longs), shifts), _bytes(width))
    codes = builder.and_(codes, ir.Constant(_bytes(width), [15] * width))
    upper = _call(builder, "llvm.x86.avx512.pshuf.b.512", _bytes(width), table, codes)
    vectors = []
    for half in (0, 8):
        places = [16 * part + half + i + of for part in range(4) for i in range(8) for of in (0, width)]
        both = builder.shuffle_vector(lower, upper, ir.Constant(ir.VectorType(_I32, width), places))
        vectors.append(builder.bitcast(both, _VECTOR))
    return vectors


def _mend(builder: Any, place: Any, group: Any, exceptions: Any) -> None:
    """Put the exceptions of a group where they belong; see ShortPairs."""
    first, number = (
        builder.load(_at(builder, _I64, group, ir.Constant(_I64, TABLE_BYTES + at)), align=1) for at in (0, 8)
    )
    with cgutils.for_range(builder, number) as loop:
        at = builder.mul(builder.add(first, loop.index), ir.Constant(_I64, 4))
        exception = builder.load(_at(builder, _I32, exceptions, at))
        where = builder.zext(builder.lshr(exception, ir.Constant(_I32, 8)), _I64)
        upper = builder.trunc(exception, ir.IntType(8))
        builder.store(upper, _at(builder, upper.type, place, where))


def _bytes(number: int) -> ir.VectorType:
    return ir.VectorType(ir.IntType(8), number)


def _repeated(builder: Any, x: Any, length: int) -> Any:
    """The elements of a vector, again and again."""
    places = [i % x.type.count for i in range(length)]
    return builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(_I32, length), places))


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
            at = builder.add(address, ir.Constant(_I64, 2 * LANES * half))
            scale = _load(builder, BFLOAT16, at)
            zero = _load(builder, BFLOAT16, builder.add(at, ir.Constant(_I64, 2 * PANEL)))
            values.append((scale, _fma(builder, _same(-self.offset), scale, zero)))
        return values

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:
        """See Rows."""
        codes = builder.zext(_read(builder, 8, address), _INTS)
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
        places = [builder.add(place, ir.Constant(_I64, VECTOR_BYTES * quarter)) for quarter in range(4)]
        codes = [_read(builder, 32, quarter) for quarter in places]
        for step in range(self.at_a_time):
            numbers = [_from_16(builder, quarter, 4 * step) for quarter in codes]
            body(builder.add(first, ir.Constant(_I64, step)), (numbers, factors))

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:  # noqa: ARG002
        """See Rows."""
        quarters = [_fma(builder, number, *own) for number, own in zip(*factors, strict=True)]
        return [_narrow(builder, *quarters[:2]), _narrow(builder, *quarters[2:])]


def _from_16(builder: Any, codes: Any, first: int) -> Any:
    """16 and what 4 bits of an int32 hold, from the first on, which become the upper ones of a mantissa."""
    up = 19 - first
    move, by = (builder.shl, up) if up > 0 else (builder.lshr, -up)
    bits = builder.and_(move(codes, _same(by, _INTS)), _same(15 << 19, _INTS))
    return builder.bitcast(builder.or_(bits, _same(0x41800000, _INTS)), _VECTOR)


def _dequantized(builder: Any, codes: Any, half: int, scale: Any, least: Any) -> Any:
    bits = builder.and_(builder.lshr(codes, _same(4 * half, _INTS)), _same(15, _INTS))
    return _fma(builder, builder.sitofp(bits, _VECTOR), scale, least)


def _unpacker(rows: Rows) -> Any:

    @_operation(types.void, *[types.int64] * 5)
    def unpack(builder: Any, *args: Any) -> None:
        rows.unpack(builder, *args)

    return unpack


_unpack_int4 = _unpacker(Int4())
_unpack_int8_pairs = _unpack_int4_pairs = _unpack_short_pairs = _unpack_int4
if HAS_DOT:  # elsewhere nothing is in pairs
    _unpack_int8_pairs, _unpack_int4_pairs = _unpacker(Int8Pairs()), _unpacker(Int4Pairs())
    _unpack_short_pairs = _unpacker(ShortPairs())


@function
def unpacked_kind(kind):
    """What `unpack` makes of a panel: the same where it can do no more than the product itself."""
    if kind == INT4:
        return FLOAT32
    return PAIRS if kind > PAIRS else kind


@function
def unpack(kind, to, panel, stride, factors, depth):
    """So many steps of a quantised or short panel, in two vectors each."""
    if kind == INT4:
        _unpack_int4(to, panel, stride, factors, depth)
    elif kind == INT8_PAIRS:
        _unpack_int8_pairs(to, panel, stride, factors, depth)
    elif kind == INT4_PAIRS:
        _unpack_int4_pairs(to, panel, stride, factors, depth)
    else:
        _unpack_short_pairs(to, panel, stride, factors, depth)


@function
def step_bytes(kind):
    """What a panel has for a step of the depth."""
    if kind == INT4:
        return LANES
    if kind == INT4_PAIRS:
        return 2 * LANES
    if kind == SHORT_PAIRS:
        return SHORT_GROUP_BYTES // SHORT_STEPS
    if kind in (HALVES, INT8_PAIRS):
        return 2 * PANEL
    return 4 * PANEL if kind == PAIRS else item_size(kind) * PANEL


@function
def group_bytes(kind, steps):
    """What panels of int4 have of factors for so many steps of the depth; nothing of other kinds."""
    if kind == INT4:
        return steps // GROUP * GROUP_BYTES
    return 2 * steps // GROUP * GROUP_BYTES if kind == INT4_PAIRS else 0
