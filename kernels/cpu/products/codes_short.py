"""How bfloat16 in 12 bits comes into registers: see `cpu.linear.short`, which makes it."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ..simd import emit
from ..simd.emit import I32, I64, VECTOR, int64
from ..simd.memory import LINE
from ..simd.numbers import FLOAT32
from ..simd.vectors import LANES, VECTOR_BYTES
from .codes import (
    PANEL,
    SHORT_GROUP,
    SHORT_GROUP_BYTES,
    SHORT_HEAD_BYTES,
    SHORT_PART,
    SHORT_PART_BYTES,
    SHORT_PARTS,
    TABLE_BYTES,
    Halves,
    Pairs,
    Rows,
    step_place,
    store_step,
)

_TOGETHER = 2  # parts of a group that are gone through at a time: with AVX-512 they fill lines


class _Short(Rows):
    """bfloat16 in 12 bits each: the lower 8, and 4 that stand for the upper 8.

    Those of a group that are near each other in size have few signs and exponents: a table of the 16 upper
    halves that are most frequent has nearly all of them. The others are put in their places after that, so
    that all come out as they were. In the manner of DFloat11 (Zhang et al., 2025), whose codes are shorter
    and of many lengths.

    In front of a group are its table, where its exceptions begin and their number, as int64, and zeros up to
    SHORT_HEAD_BYTES. Exceptions are at `factors`, 4 bytes each: the place of the upper half in the group as
    it comes out, times 256, and that.
    """

    def __init__(self, plain: Halves | Pairs, step: int) -> None:
        """plain: what they become, of `step` numbers a step."""
        super().__init__(plain.kind)
        self.plain, self.in_pairs, self.step = plain, plain.in_pairs, step
        self.group_steps = self.at_a_time = SHORT_GROUP // step

    def factors(self, builder: Any, address: Any) -> Any:  # noqa: ARG002
        """The exceptions of all groups."""
        return address

    def some_steps(
        self, builder: Any, place: Any, first: Any, factors: Any, body: Callable[[Any, Any], None]
    ) -> None:
        """See Rows; what `read` takes is what would be stored for the step.

        A group with exceptions is unpacked for itself; most have none.
        """
        memory = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), 2 * SHORT_GROUP))
        memory.align = VECTOR_BYTES
        number = builder.load(emit.pointer(builder, I64, place, int64(TABLE_BYTES + 8)), align=1)
        is_whole = builder.icmp_signed("==", number, int64(0))
        vectors = self.step // (2 * LANES)  # of a step

        def pass_on(index: Any, part: list[Any]) -> None:
            step = builder.add(first, builder.mul(index, int64(2 // vectors)))
            for at in range(0, 2, vectors):
                body(builder.add(step, int64(at // vectors)), part[at : at + vectors])

        with builder.if_else(is_whole) as (whole, other):
            with whole:
                self._each_part(builder, place, pass_on)
            with other:
                to, steps = builder.ptrtoint(memory, I64), int64(self.group_steps)
                self.unpack(builder, to, place, None, factors, steps)
                with cgutils.for_range(builder, steps) as loop:
                    step = builder.add(to, builder.mul(loop.index, int64(2 * self.step)))
                    places = [builder.add(step, int64(v * VECTOR_BYTES)) for v in range(vectors)]
                    body(builder.add(first, loop.index), [emit.load(builder, FLOAT32, v) for v in places])

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:  # noqa: ARG002
        """See Rows."""
        return self.plain.made_of(builder, factors)

    def _each_part(
        self, builder: Any, group: Any, body: Callable[[Any, list[Any]], None], ahead: Any = None
    ) -> None:
        """body(number of the part, what becomes of that but for exceptions) for each of a group.

        ahead: have the memory of another group on its way, a few lines at a time in their order, which the
        CPU's own fetching follows.
        """
        table = builder.load(emit.pointer(builder, _bytes(TABLE_BYTES), group), align=1)
        table = _repeated(builder, table, SHORT_PART)
        first = builder.add(group, int64(SHORT_HEAD_BYTES))
        with cgutils.for_range(builder, int64(SHORT_PARTS // _TOGETHER)) as loop:
            start = builder.mul(loop.index, int64(_TOGETHER * SHORT_PART_BYTES))
            for i in range(_TOGETHER):
                for at in range(0, _TOGETHER * SHORT_PART_BYTES, LINE):
                    if ahead is not None and at // SHORT_PART_BYTES == i:
                        emit.prefetch(builder, builder.add(builder.add(ahead, start), int64(at)))
                index = builder.mul(loop.index, int64(_TOGETHER))
                index = builder.add(index, int64(i))
                source = builder.add(start, int64(SHORT_PART_BYTES * i))
                body(index, _lengthened(builder, builder.add(first, source), table))
        if ahead is not None:  # what is left of it
            emit.prefetch(builder, builder.add(ahead, int64(SHORT_PARTS * SHORT_PART_BYTES)))

    def unpack(
        self,
        builder: Any,
        to: Any,
        panel: Any,
        stride: Any,  # noqa: ARG002
        factors: Any,
        depth: Any,
        ahead: Any = None,
    ) -> None:
        """See Rows; what they become lies as it did before it was shortened."""
        parts, steps = int64(SHORT_PARTS), int64(self.group_steps)
        with cgutils.for_range(builder, builder.sdiv(depth, steps)) as groups:
            start = builder.mul(groups.index, int64(SHORT_GROUP_BYTES))
            group, first = builder.add(panel, start), builder.mul(groups.index, parts)

            def keep(index: Any, part: list[Any], first: Any = first) -> None:
                store_step(builder, to, builder.add(first, index), part)

            self._each_part(builder, group, keep, None if ahead is None else builder.add(ahead, start))
            _mend(builder, step_place(builder, to, first), group, factors)


class ShortPairs(_Short):
    """Of Pairs."""

    def __init__(self) -> None:
        super().__init__(Pairs(), 2 * PANEL)


class ShortHalves(_Short):
    """Of Halves."""

    def __init__(self) -> None:
        super().__init__(Halves(), PANEL)


def _lengthened(builder: Any, address: Any, table: Any) -> list[Any]:
    """A part of a group; table: the group's, for any 16 bytes of a vector."""
    width = SHORT_PART
    lower = builder.load(emit.pointer(builder, _bytes(width), address), align=1)
    place = builder.add(address, int64(width))
    codes = _repeated(builder, builder.load(emit.pointer(builder, _bytes(PANEL), place), align=1), width)
    longs = ir.VectorType(I64, width // 8)
    shifts = ir.Constant(longs, [0] * (width // 16) + [4] * (width // 16))
    codes = builder.bitcast(builder.lshr(builder.bitcast(codes, longs), shifts), _bytes(width))
    codes = builder.and_(codes, ir.Constant(_bytes(width), [15] * width))
    look_up = "avx512.pshuf.b.512" if LANES == 16 else "avx2.pshuf.b"
    upper = emit.call(builder, f"llvm.x86.{look_up}", _bytes(width), table, codes)
    vectors = []
    for half in (0, 8):
        parts = range(width // 16)
        places = [16 * part + half + i + of for part in parts for i in range(8) for of in (0, width)]
        both = builder.shuffle_vector(lower, upper, ir.Constant(ir.VectorType(I32, width), places))
        vectors.append(builder.bitcast(both, VECTOR))
    return vectors


def _mend(builder: Any, place: Any, group: Any, exceptions: Any) -> None:
    """Put the exceptions of a group where they belong; see _Short."""
    first, number = (
        builder.load(emit.pointer(builder, I64, group, int64(TABLE_BYTES + at)), align=1) for at in (0, 8)
    )
    with cgutils.for_range(builder, number) as loop:
        at = builder.mul(builder.add(first, loop.index), int64(4))
        exception = builder.load(emit.pointer(builder, I32, exceptions, at))
        where = builder.zext(builder.lshr(exception, ir.Constant(I32, 8)), I64)
        upper = builder.trunc(exception, ir.IntType(8))
        builder.store(upper, emit.pointer(builder, upper.type, place, where))


def _bytes(number: int) -> ir.VectorType:
    return ir.VectorType(ir.IntType(8), number)


def _repeated(builder: Any, x: Any, length: int) -> Any:
    """The elements of a vector, again and again."""
    places = [i % x.type.count for i in range(length)]
    return builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, length), places))
