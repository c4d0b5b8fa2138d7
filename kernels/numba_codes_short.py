"""How bfloat16 in 12 bits comes into registers: see `numba_short`, which makes it."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from .numba_codes import (
    PANEL,
    SHORT_GROUP_BYTES,
    SHORT_HEAD_BYTES,
    SHORT_STEP_BYTES,
    SHORT_STEPS,
    TABLE_BYTES,
    Rows,
    _step_place,
    _store_step,
)
from .numba_memory import BFLOAT16, FLOAT32, _load, _prefetch
from .numba_vectors import _I32, _I64, _VECTOR, VECTOR_BYTES, _at, _call


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
