"""Readers of quantised weights: codes, and factors for groups of inputs.

A weight is number * scale + summand in float32: one fused multiply-add, in pairs rounded once more to
bfloat16. `products.factors` makes scales and summands of a weight's stored factors, once for a part of a
panel: little work, which leaves one format of factors to the readers.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from ...formats import (
    EXPANDED_HEAD_BYTES,
    FLOAT8,
    FLOAT32,
    GROUP_BYTES,
    GROUP_SHIFT_AT,
    INT8,
    PANEL,
    TABLE_SIZE,
)
from ...target import LANES, VECTOR_BYTES
from ..simd import emit
from ..simd.emit import F32, I32, I64, INTS, VECTOR, int64
from .reader import Reader

PAIR_STEPS = 8  # steps of Codes4Pairs in a vector
_I16 = ir.IntType(16)
_IS_ARM = llvm.get_default_triple().startswith(("aarch64", "arm64"))


class Codes(Reader):
    """Reads a panel of codes. `numbers` loads the numbers that the codes stand for.

    `factors` is the address of the factors from `expand_factors`, alone or with the address of one group's
    factors.
    """

    has_scales = False

    def __init__(self, kind: int, *, pairs: bool = False) -> None:
        super().__init__(kind)
        self.in_pairs = pairs

    def factors_from(self, builder: Any, factors: Any, step: Any) -> Any:
        """Return the factors from this step on. The step must be the first of a group."""
        group = builder.lshr(step, _group_shift(builder, factors))
        first = builder.add(factors, int64(EXPANDED_HEAD_BYTES))
        return factors, builder.add(first, builder.mul(group, int64(GROUP_BYTES)))

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
        if not isinstance(factors, tuple):
            factors = self.factors_from(builder, factors, int64(0))
        head, start = factors
        shift = _group_shift(builder, head)
        table = self.table(builder, head)
        some = int64(self.at_a_time)
        with cgutils.for_range(builder, builder.lshr(depth, shift)) as groups:
            place = builder.add(start, builder.mul(groups.index, int64(GROUP_BYTES)))
            own = table, self.factors(builder, place)
            first = builder.shl(groups.index, shift)
            with cgutils.for_range(builder, builder.udiv(builder.shl(int64(1), shift), some)) as loop:
                step = builder.add(first, builder.mul(loop.index, some))
                self.some_steps(builder, builder.add(panel, builder.mul(stride, step)), step, own, body)

    def table(self, builder: Any, head: Any) -> Any:  # noqa: ARG002
        """Load the table in which `numbers` looks up codes."""
        return None

    def factors(self, builder: Any, address: Any) -> list[tuple[Any, Any]]:
        """Load the scale and the summand for each vector of a step."""
        scales, summands = (
            [
                emit.load(builder, FLOAT32, builder.add(address, int64(VECTOR_BYTES * (2 * i + half))))
                for half in range(2)
            ]
            for i in range(2)
        )
        halves = zip(scales, summands, strict=True)
        if not self.in_pairs:
            return [*halves]
        return [
            (_twice(builder, scale, first), _twice(builder, summand, first))
            for scale, summand in halves
            for first in (0, LANES // 2)
        ]

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:
        """Load the step at this address. Return its two vectors."""
        table, own = factors
        numbers = zip(self.numbers(builder, address, table), own, strict=True)
        floats = [emit.fma(builder, number, *factor) for number, factor in numbers]
        if not self.in_pairs:
            return floats
        return [emit.narrow(builder, *floats[:2]), emit.narrow(builder, *floats[2:])]

    def numbers(self, builder: Any, address: Any, table: Any) -> list[Any]:
        """Load a step's numbers as vectors: two, of half of the outputs each; four if inputs are in pairs."""
        raise NotImplementedError


class Codes8(Codes):
    """Reads 8-bit codes, which are the numbers themselves."""

    def __init__(self, *, pairs: bool = False) -> None:
        super().__init__(INT8, pairs=pairs)

    def numbers(self, builder: Any, address: Any, table: Any) -> list[Any]:  # noqa: ARG002
        """Load the numbers of a step."""
        places = (builder.add(address, int64(LANES * i)) for i in range(2 + 2 * self.in_pairs))
        return [emit.load(builder, INT8, place) for place in places]


class E4m3(Codes):
    """Reads numbers in e4m3fn, in units of E4M3_UNIT."""

    def __init__(self, *, pairs: bool = False) -> None:
        super().__init__(FLOAT8, pairs=pairs)

    def numbers(self, builder: Any, address: Any, table: Any) -> list[Any]:  # noqa: ARG002
        """Load the numbers of a step."""
        places = (builder.add(address, int64(PANEL * i)) for i in range(1 + self.in_pairs))
        return [number for place in places for number in e4m3_numbers(builder, place)]


def e4m3_numbers(builder: Any, address: Any) -> list[Any]:
    """Load PANEL numbers in e4m3fn as two vectors, in units of E4M3_UNIT."""
    stored = builder.load(emit.pointer(builder, ir.VectorType(emit.I8, PANEL), address), align=1)
    halves = emit.e4m3_as_float16(builder, stored)
    parts = (ir.Constant(INTS, [*range(first, first + LANES)]) for first in (0, LANES))
    return [builder.fpext(builder.shuffle_vector(halves, halves, part), VECTOR) for part in parts]


class Codes4(Codes):
    """Reads 4-bit codes by a table. A byte holds the codes of outputs i and i + LANES."""

    def __init__(self, *, pairs: bool = False) -> None:
        super().__init__(INT8, pairs=pairs)

    def table(self, builder: Any, head: Any) -> Any:
        """Load the table: its address and its vectors."""
        places = (builder.add(head, int64(VECTOR_BYTES * i)) for i in range(TABLE_SIZE // LANES))
        return head, [emit.load(builder, FLOAT32, place) for place in places]

    def numbers(self, builder: Any, address: Any, table: Any) -> list[Any]:
        """Load the numbers of a step."""
        codes = builder.zext(emit.read(builder, 8, address), INTS)
        return [look_up(builder, table, codes, 4 * half) for half in range(2)]


class Codes4Pairs(Codes4):
    """Reads 4-bit codes of pairs of inputs, stored in an order that needs few instructions. The table is in
    bfloat16.

    A vector holds PAIR_STEPS steps for a quarter of the outputs. An output has two adjacent int32, one for
    each input of a step. Their lower halves hold 4 bits for each even step, lowest first, and their upper
    halves 4 bits for each odd step, so that one instruction looks up the numbers of two steps.
    """

    at_a_time = PAIR_STEPS

    def __init__(self) -> None:
        super().__init__(pairs=True)

    def table(self, builder: Any, head: Any) -> Any:
        """Load the table as bfloat16, twice, since the instruction takes a 5-bit index."""
        wide = builder.bitcast(emit.load(builder, FLOAT32, head), INTS)
        narrow = builder.trunc(builder.lshr(wide, emit.constant(16, INTS)), ir.VectorType(_I16, LANES))
        places = [i % LANES for i in range(2 * LANES)]
        return builder.shuffle_vector(narrow, narrow, ir.Constant(ir.VectorType(I32, 2 * LANES), places))

    def some_steps(
        self, builder: Any, place: Any, first: Any, factors: Any, body: Callable[[Any, Any], None]
    ) -> None:
        """Call body for PAIR_STEPS steps, with factors that include each quarter's numbers."""
        table, own = factors
        places = [builder.add(place, int64(VECTOR_BYTES * quarter)) for quarter in range(4)]
        codes = [emit.read(builder, 32, quarter) for quarter in places]
        for step in range(0, PAIR_STEPS, 2):
            both = [_look_up_two(builder, table, quarter, 2 * step) for quarter in codes]
            even = [builder.shl(x, emit.constant(16, INTS)) for x in both]
            odd = [builder.and_(x, emit.constant(0xFFFF0000, INTS)) for x in both]
            for i, bits in enumerate((even, odd)):
                numbers = [builder.bitcast(x, VECTOR) for x in bits]
                body(builder.add(first, int64(step + i)), (numbers, own))

    def numbers(self, builder: Any, address: Any, table: Any) -> list[Any]:  # noqa: ARG002
        """Return the numbers of a step that `some_steps` looked up."""
        found: list[Any] = table
        return found


def _look_up_two(builder: Any, table: Any, codes: Any, first: int) -> Any:
    """Look up the 4 bits from `first` on of both halves of each int32."""
    index = builder.lshr(codes, emit.constant(first, INTS)) if first else codes
    found = emit.call(
        builder, "llvm.x86.avx512.permvar.hi.512", table.type, table, builder.bitcast(index, table.type)
    )
    return builder.bitcast(found, INTS)


def look_up(builder: Any, table: Any, codes: Any, first: int) -> Any:
    """Look up the 4 bits at bit position `first` of each int32."""
    address, vectors = table
    index = builder.lshr(codes, emit.constant(first, INTS)) if first else codes
    if LANES == TABLE_SIZE:  # the instruction takes the lowest 4 bits
        return emit.call(builder, "llvm.x86.avx512.permvar.sf.512", VECTOR, vectors[0], index)
    if 2 * LANES == TABLE_SIZE:  # it takes the lowest 3
        low, high = (emit.call(builder, "llvm.x86.avx2.permps", VECTOR, half, index) for half in vectors)
        fourth = builder.shl(codes, emit.constant(28 - first, INTS))
        is_high = builder.icmp_signed("<", fourth, emit.constant(0, INTS))
        return builder.select(is_high, high, low)
    index = builder.and_(index, emit.constant(TABLE_SIZE - 1, INTS))
    if _IS_ARM:
        return _look_up_bytes(builder, vectors, index)
    found = ir.Constant(VECTOR, ir.Undefined)
    for i in range(LANES):
        lane = ir.Constant(I32, i)
        place = builder.shl(builder.zext(builder.extract_element(index, lane), I64), int64(2))
        number = builder.load(emit.pointer(builder, F32, address, place))
        found = builder.insert_element(found, number, lane)
    return found


def _look_up_bytes(builder: Any, vectors: list[Any], index: Any) -> Any:
    """Look up in 64 bytes at once. The bytes of number i begin at 4 i."""
    bytes_ = ir.VectorType(emit.I8, 16)
    places = builder.mul(index, emit.constant(0x04040404, INTS))
    places = builder.add(places, emit.constant(0x03020100, INTS))
    tables = [builder.bitcast(x, bytes_) for x in vectors]
    found = emit.call(
        builder, "llvm.aarch64.neon.tbl4.v16i8", bytes_, *tables, builder.bitcast(places, bytes_)
    )
    return builder.bitcast(found, VECTOR)


def _group_shift(builder: Any, head: Any) -> Any:
    return builder.load(emit.pointer(builder, I64, head, int64(GROUP_SHIFT_AT)))


def _twice(builder: Any, x: Any, first: int) -> Any:
    """Return LANES / 2 lanes from the first on, each twice."""
    lanes = [first + lane // 2 for lane in range(LANES)]
    return builder.shuffle_vector(x, x, ir.Constant(INTS, lanes))
