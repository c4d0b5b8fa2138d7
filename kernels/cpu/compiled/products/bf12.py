"""bf12: a lossless codec that keeps bfloat16 in 12 bits; `linear.pack_bf12` encodes it."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ...formats import (
    BF12_GROUP,
    BF12_GROUP_BYTES,
    FLOAT32,
    HEAD_BYTES,
    PANEL,
    PART,
    PART_BYTES,
    PARTS,
    TABLE_BYTES,
)
from ...target import LANES, LINE, VECTOR_BYTES
from ..simd import emit
from ..simd.emit import I32, I64, int64
from .reader import Bfloat16, Bfloat16Pairs, Reader, interleave, step_place, store_step

_TOGETHER = 2  # parts of a group that are gone through at a time: with AVX-512 they fill lines


class Bf12(Reader):
    """bfloat16 in 12 bits: the lower byte, and a 4-bit code for the upper byte.

    The numbers of a group have few different signs and exponents, so a table of the 16 most frequent upper
    bytes covers nearly all. The others are exceptions, which are patched in after unpacking. DFloat11 (Zhang
    et al., 2025) does the same with shorter codes of variable length.

    A group's head contains the table, the index of the first exception, the number of exceptions (both
    int64), and zeros up to HEAD_BYTES. Exceptions lie at `factors`, 4 bytes each: 256 times the offset of the
    upper byte in the unpacked group, plus the byte.
    """

    has_scales = False

    def __init__(self, plain: Bfloat16 | Bfloat16Pairs) -> None:
        """plain: the format that groups are unpacked to."""
        super().__init__(plain.kind)
        self.plain = plain
        self.in_pairs = plain.in_pairs
        self.step = 2 * PANEL if plain.in_pairs else PANEL  # numbers
        self.group_steps = self.at_a_time = BF12_GROUP // self.step

    def factors(self, builder: Any, address: Any) -> Any:  # noqa: ARG002
        """Return `address` unchanged: it is the address of the list of exceptions, which all groups share."""
        return address

    def some_steps(
        self, builder: Any, place: Any, first: Any, factors: Any, body: Callable[[Any, Any], None]
    ) -> None:
        """Call body for the steps of a group, with factors from which `read` returns the step's vectors.

        The few groups with exceptions are unpacked to the stack first.
        """
        memory = cgutils.alloca_once(builder, ir.ArrayType(emit.I8, 2 * BF12_GROUP))
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
                to = builder.ptrtoint(memory, I64)
                steps = int64(self.group_steps)
                self.unpack(builder, to, place, None, factors, steps)
                with cgutils.for_range(builder, steps) as loop:
                    step = builder.add(to, builder.mul(loop.index, int64(2 * self.step)))
                    places = [builder.add(step, int64(v * VECTOR_BYTES)) for v in range(vectors)]
                    body(builder.add(first, loop.index), [emit.load(builder, FLOAT32, v) for v in places])

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:  # noqa: ARG002
        """Return the two vectors of a step from its stored vectors, which are passed as `factors`."""
        return self.plain.made_of(builder, factors)

    def _each_part(
        self, builder: Any, group: Any, body: Callable[[Any, list[Any]], None], ahead: Any = None
    ) -> None:
        """Call body(part, its two vectors without exceptions) for each part of a group.

        ahead: the address of another group to prefetch, a few lines at a time and in order, so that the
        hardware prefetcher follows.
        """
        table = builder.load(emit.pointer(builder, _bytes(TABLE_BYTES), group), align=1)
        table = _repeated(builder, table, PART)
        first = builder.add(group, int64(HEAD_BYTES))
        with cgutils.for_range(builder, int64(PARTS // _TOGETHER)) as loop:
            start = builder.mul(loop.index, int64(_TOGETHER * PART_BYTES))
            for i in range(_TOGETHER):
                for at in range(0, _TOGETHER * PART_BYTES, LINE):
                    if ahead is not None and at // PART_BYTES == i:
                        emit.prefetch(builder, builder.add(builder.add(ahead, start), int64(at)))
                index = builder.mul(loop.index, int64(_TOGETHER))
                index = builder.add(index, int64(i))
                source = builder.add(start, int64(PART_BYTES * i))
                body(index, _decode(builder, builder.add(first, source), table))
        if ahead is not None:  # its last line
            emit.prefetch(builder, builder.add(ahead, int64(PARTS * PART_BYTES)))

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
        """Unpack the panel to the format of `plain`; see Reader."""
        parts = int64(PARTS)
        steps = int64(self.group_steps)
        with cgutils.for_range(builder, builder.sdiv(depth, steps)) as groups:
            start = builder.mul(groups.index, int64(BF12_GROUP_BYTES))
            group = builder.add(panel, start)
            first = builder.mul(groups.index, parts)

            def keep(index: Any, part: list[Any], first: Any = first) -> None:
                store_step(builder, to, builder.add(first, index), part)

            self._each_part(builder, group, keep, None if ahead is None else builder.add(ahead, start))
            _patch(builder, step_place(builder, to, first), group, factors)


def _decode(builder: Any, address: Any, table: Any) -> list[Any]:
    """Return a part of a group as two vectors. table: the group's, for every 16 bytes of a vector."""
    width = PART
    lower = builder.load(emit.pointer(builder, _bytes(width), address), align=1)
    place = builder.add(address, int64(width))
    codes = _repeated(builder, builder.load(emit.pointer(builder, _bytes(PANEL), place), align=1), width)
    longs = ir.VectorType(I64, width // 8)
    shifts = ir.Constant(longs, [0] * (width // 16) + [4] * (width // 16))
    codes = builder.bitcast(builder.lshr(builder.bitcast(codes, longs), shifts), _bytes(width))
    codes = builder.and_(codes, ir.Constant(_bytes(width), [15] * width))
    look_up = "avx512.pshuf.b.512" if LANES == 16 else "avx2.pshuf.b"
    upper = emit.call(builder, f"llvm.x86.{look_up}", _bytes(width), table, codes)
    return interleave(builder, lower, upper)


def _patch(builder: Any, place: Any, group: Any, exceptions: Any) -> None:
    """Write the exceptions of a group into the unpacked group at `place`."""
    first, number = (
        builder.load(emit.pointer(builder, I64, group, int64(TABLE_BYTES + at)), align=1) for at in (0, 8)
    )
    with cgutils.for_range(builder, number) as loop:
        at = builder.mul(builder.add(first, loop.index), int64(4))
        exception = builder.load(emit.pointer(builder, I32, exceptions, at))
        where = builder.zext(builder.lshr(exception, ir.Constant(I32, 8)), I64)
        upper = builder.trunc(exception, emit.I8)
        builder.store(upper, emit.pointer(builder, upper.type, place, where))


def _bytes(number: int) -> ir.VectorType:
    return ir.VectorType(emit.I8, number)


def _repeated(builder: Any, x: Any, length: int) -> Any:
    """Repeat the elements of a vector up to this length."""
    places = [i % x.type.count for i in range(length)]
    return builder.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, length), places))
