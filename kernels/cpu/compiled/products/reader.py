"""Readers: they load one step of a weight's panel from memory into two vector registers.

A panel holds PANEL outputs. A step is one input of all of them, in formats with pairs two neighbouring
inputs, side by side as bfloat16. Quantised weights are dequantised by the same instructions wherever a step
is read, so a product has the same bits whether each register tile does so or `unpack` did it once for many.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from ...formats import BFLOAT16, FLOAT32, INT8, ITEM_SIZES, PANEL
from ...target import LANES, VECTOR_BYTES
from ..simd import emit
from ..simd.emit import I32, INTS, VECTOR, int64


class Reader:
    """Reads panels with one number per output and step, stored as `kind`, and widens them to float32."""

    in_pairs = False
    has_scales = True  # a factor for each output, which products are multiplied by
    group_steps = 0  # steps that have something in common, which `factors` loads; 0 without such groups
    at_a_time = 1  # steps of a group that `some_steps` loads together

    def __init__(self, kind: int) -> None:
        self.kind = kind

    def factors_from(self, builder: Any, factors: Any, step: Any) -> Any:  # noqa: ARG002
        """Return the factors from this step on."""
        return factors

    def factors(self, builder: Any, address: Any) -> Any:  # noqa: ARG002
        """Load the factors that `read` needs, once per group."""
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
        """Call body for `at_a_time` steps of a group, which are stored at `place`."""
        body(first, factors)

    def unpack(
        self, builder: Any, to: Any, panel: Any, stride: Any, factors: Any, depth: Any, ahead: Any = None
    ) -> None:
        """Store `depth` steps as two vectors each, one step after the other.

        ahead: an address from which the same number of bytes is prefetched. A few are prefetched with each
            step, because a core has few line fill buffers.
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
    """Reads bfloat16. Outputs i and i + LANES share an int32; a shift and a mask widen both vectors."""

    def __init__(self) -> None:
        super().__init__(BFLOAT16)

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:  # noqa: ARG002
        """Load the step at this address. Return its two vectors."""
        return self.made_of(builder, [emit.load(builder, FLOAT32, address)])

    def made_of(self, builder: Any, stored: list[Any]) -> list[Any]:
        """Convert a step's stored vector, which is in a register, to two vectors."""
        both = builder.bitcast(stored[0], INTS)
        first = builder.shl(both, emit.constant(16, INTS))
        second = builder.and_(both, emit.constant(0xFFFF0000, INTS))
        return [builder.bitcast(half, VECTOR) for half in (first, second)]


class Bfloat16Pairs(Reader):
    """Reads pairs of bfloat16, in the order that dot-product instructions need."""

    in_pairs = True

    def __init__(self) -> None:
        super().__init__(FLOAT32)

    def made_of(self, builder: Any, stored: list[Any]) -> list[Any]:  # noqa: ARG002
        """Return a step's two stored vectors unchanged, since they need no conversion."""
        return stored


class Int8Pairs(Reader):
    """Reads pairs of int8 from -127 to 127 as bfloat16.

    A byte holds a sign and a magnitude. One instruction looks up 64 magnitudes in a table of 128 bytes and
    returns the lower bytes of their bfloat16; a second one returns the upper bytes. Bytes are stored in
    `INT8_ORDER`, so that interleaving lower and upper bytes gives the two vectors.
    """

    in_pairs = True

    def __init__(self) -> None:
        super().__init__(INT8)

    def read(self, builder: Any, address: Any, factors: Any) -> list[Any]:  # noqa: ARG002
        """Load the step at this address. Return its two vectors."""
        bytes_ = ir.VectorType(emit.I8, 2 * PANEL)
        stored = builder.load(emit.pointer(builder, bytes_, address), align=1)
        lower, upper = (_look_up_magnitudes(builder, table, stored) for table in _MAGNITUDES)
        signs = builder.and_(stored, ir.Constant(bytes_, [0x80] * bytes_.count))
        return interleave(builder, lower, builder.or_(upper, signs))


# Of the lower and of the upper byte of 0 to 127 in bfloat16.
_MAGNITUDES = np.arange(128, dtype=np.float32).view(np.uint8).reshape(-1, 4)[:, 2:].T.tolist()


def _look_up_magnitudes(builder: Any, table: list[int], codes: Any) -> Any:
    """Look up the lower 7 bits of each byte in a table of 128 bytes."""
    halves = (ir.Constant(codes.type, table[at : at + 64]) for at in (0, 64))
    first, second = halves
    return emit.call(builder, "llvm.x86.avx512.vpermi2var.qi.512", codes.type, first, codes, second)


def interleave(builder: Any, lower: Any, upper: Any) -> list[Any]:
    """Interleave lower and upper bytes. Return two vectors: of the first and last 8 of each 16 bytes."""
    width = lower.type.count
    vectors = []
    for half in (0, 8):
        places = [
            16 * part + half + i + of for part in range(width // 16) for i in range(8) for of in (0, width)
        ]
        both = builder.shuffle_vector(lower, upper, ir.Constant(ir.VectorType(I32, width), places))
        vectors.append(builder.bitcast(both, VECTOR))
    return vectors
