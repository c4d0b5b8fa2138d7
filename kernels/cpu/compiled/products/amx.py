"""Matrix products by AMX, Intel's matrix unit: tiles of 16 rows of 64 bytes, in AMX's own registers.

Tiles of bfloat16 are multiplied and accumulated in float32, several times as fast as vectors of float32.
Every number is a chain of tile products in the order of the depth, and the unit's order within one is
fixed, so a row's bits do not depend on the rows beside it. Subnormal products count as 0.
"""

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ...formats import (
    BF12_PAIRS,
    BFLOAT16_PAIRS,
    CODES4_PAIRS,
    CODES8_PAIRS,
    E4M3_PAIRS,
    INT8_PAIRS,
    PANEL,
)
from ...target import CPU_HAS_TILES, LINE, STEPS, TILE_ROWS, VECTOR_BYTES
from ..simd import emit
from ..simd.emit import fields_type, int64, operation
from ..simd.memory import set_byte
from ..simd.vectors import dispatch, function
from .kinds import READERS
from .reader import Reader

_WIDTH = 4 * PANEL
# The prefetch distance within a weight, half of it in each of two panels. It is short, so that the hardware
# prefetcher, which takes few of the fill buffers, follows.
AHEAD_BYTES = 6 * 1024 + 512

# Numbers of the tiles: accumulators of two groups of rows and both halves of a panel, or of one group and two
# panels; the rows; the halves of a panel.
_SUMS = (0, 1, 2, 3)
_ROWS = (4, 5)
_HALVES = (6, 7)


def emit_tile(builder: Any, name: str, *args: Any) -> None:
    """Call one of LLVM's AMX intrinsics if the CPU has AMX. An int argument is the number of a tile."""
    if not CPU_HAS_TILES:
        return
    values = [ir.Constant(ir.IntType(8), arg) if isinstance(arg, int) else arg for arg in args]
    emit.call(builder, f"llvm.x86.{name}", ir.VoidType(), *values)


@operation(types.void, types.int64)
def configure(builder: Any, address: Any) -> None:
    """Load a tile configuration from `write_settings` (LDTILECFG)."""
    emit_tile(builder, "ldtilecfg", emit.byte_pointer(builder, address))


@operation(types.void)
def release(builder: Any) -> None:
    """Release the tiles (TILERELEASE), so that the OS need not save them on context switches."""
    emit_tile(builder, "tilerelease")


class Block(NamedTuple):
    """A product of a block of rows with one or two panels: C += A B, or C = A B if `at_first` is not 0.

    C [panels, 16 groups, PANEL] is float32; A and B hold pairs of bfloat16.
    """

    c: int
    c_stride: int
    at_first: int
    a: int
    a_stride: int
    b: int
    b_stride: int
    tiles: int  # of the depth


class Supply(NamedTuple):
    """Where a block's weights come from and what to prefetch, with the distances to a second panel."""

    ahead: int  # address of the memory to prefetch
    pace: int  # bytes of it with each tile of the depth; unpacking has a pace of its own
    unpacked: int  # memory for the steps that are unpacked
    factors: int  # of the weight's reader
    factors_far: int
    c_far: int
    b_far: int
    far: int  # of what is prefetched


NO_SUPPLY = Supply(*[0] * len(Supply._fields))


def _block_product(groups: int, panels: int = 1, weight: Reader | None = None) -> Any:
    """Make the product of one or two groups of TILE_ROWS rows and a panel, or of one group and two panels.

    weight: reads B, which is unpacked on the way; None: B is in pairs of bfloat16.
    """

    @operation(types.void, fields_type(Block), fields_type(Supply))
    def block_product(builder: Any, block: Any, supply: Any) -> None:
        c, c_stride, at_first, a, a_stride, b, b_stride, tiles = cgutils.unpack_tuple(builder, block)
        ahead, pace, unpacked, factors, factors_far, c_far, b_far, far = cgutils.unpack_tuple(builder, supply)
        c_group, a_group, b_step = (
            builder.mul(stride, int64(TILE_ROWS)) for stride in (c_stride, a_stride, b_stride)
        )
        sums = []
        for g, p, v in product(range(groups), range(panels), range(2)):
            place = builder.add(c, builder.mul(c_far if p else c_group, int64(g + p)))
            place = builder.add(place, int64(VECTOR_BYTES * v))
            sums.append((_SUMS[2 * (g + p) + v], emit.byte_pointer(builder, place)))
        with builder.if_else(builder.icmp_signed("!=", at_first, int64(0))) as (empty, go_on):
            with empty:
                for tile, _ in sums:
                    emit_tile(builder, "tilezero", tile)
            with go_on:
                for tile, place in sums:
                    emit_tile(builder, "tileloadd64", tile, place, c_stride)
        numbers = [int64(p) for p in range(panels)]
        room = int64(2 * STEPS * _WIDTH)
        if weight is not None:
            distance = AHEAD_BYTES // panels
            brings = []
            for p in numbers:
                places = (b, far), (factors, factors_far), (ahead, far), (unpacked, room)
                at_b, own, next_b, to = (builder.add(place, builder.mul(by, p)) for place, by in places)
                brings.append(
                    _unpack_ahead(builder, weight, at_b, b_stride, tiles, to, own, next_b, distance)
                )
        with cgutils.for_range(builder, tiles) as loop:
            fetched = builder.add(ahead, builder.mul(loop.index, pace))
            if weight is None:
                at_b = builder.add(b, builder.mul(loop.index, b_step))
                stride = b_stride
                places_b = [builder.add(at_b, builder.mul(b_far, p)) for p in numbers]
            else:
                places_b = [bring(loop.index) for bring in brings]
                stride = int64(_WIDTH)
            at_a = builder.add(a, builder.mul(loop.index, int64(LINE)))
            for g in range(groups):
                place = builder.add(at_a, builder.mul(a_group, int64(g)))
                emit_tile(builder, "tileloadd64", _ROWS[g], emit.byte_pointer(builder, place), a_stride)
            for p, place in enumerate(places_b):
                for v, tile in enumerate(_HALVES):
                    half = builder.add(place, int64(VECTOR_BYTES * v))
                    emit_tile(builder, "tileloadd64", tile, emit.byte_pointer(builder, half), stride)
                    for g in range(groups):
                        emit_tile(builder, "tdpbf16ps", _SUMS[2 * (g + p) + v], _ROWS[g], tile)
            if weight is None:
                with cgutils.for_range(builder, builder.udiv(pace, int64(LINE))) as lines:
                    place = builder.add(fetched, builder.mul(lines.index, int64(LINE)))
                    for _ in range(panels):
                        emit.prefetch(builder, place)
                        place = builder.add(place, far)
        for tile, place in sums:
            emit_tile(builder, "tilestored64", tile, place, c_stride)

    return block_product


def _unpack_ahead(
    builder: Any, weight: Reader, b: Any, b_stride: Any, tiles: Any, unpacked: Any, factors: Any, next_b: Any,
    distance: int,
) -> Callable[[Any], Any]:  # fmt: skip
    """Unpack the first tile of the depth. Return bring(step), which emits the unpacking of the next one.

    bring returns the address of the tile it was called for. The two alternate between two buffers, as
    loading a tile right after its bytes were stored would stall. Memory `distance` bytes ahead, in whole
    tiles, is prefetched meanwhile; after the end of this panel, memory from next_b on.
    """
    steps = int64(STEPS)
    size = int64(STEPS * _WIDTH)
    one = int64(1)
    bytes_ = builder.mul(b_stride, steps)
    steps_ahead = builder.udiv(int64(distance), bytes_)

    def unpack(step: Any, place: Any, ahead: Any = None) -> None:
        source = builder.add(b, builder.mul(step, bytes_))
        own = weight.factors_from(builder, factors, builder.mul(step, steps))
        weight.unpack(builder, place, source, b_stride, own, steps, ahead)

    def bring(step: Any) -> Any:
        odd = builder.and_(step, one)
        following = builder.add(step, one)
        last = builder.sub(tiles, one)
        following = builder.select(builder.icmp_signed("<", following, tiles), following, last)
        later = builder.add(following, steps_ahead)
        behind = builder.sub(later, tiles)
        is_behind = builder.icmp_signed(">=", behind, int64(0))
        ahead = builder.add(
            builder.select(is_behind, next_b, b),
            builder.mul(builder.select(is_behind, behind, later), bytes_),
        )
        unpack(following, builder.add(unpacked, builder.mul(builder.xor(odd, one), size)), ahead)
        return builder.add(unpacked, builder.mul(odd, size))

    unpack(int64(0), unpacked)
    return bring


def _of_any_shape(weight: Reader | None) -> Any:
    one, two_groups = (_block_product(groups, 1, weight) for groups in (1, 2))
    two_panels = _block_product(1, 2, weight)

    @function
    def multiply_block(rows, panels, block, supply):
        if panels > 1:
            two_panels(block, supply)
        elif rows > TILE_ROWS:
            two_groups(block, supply)
        else:
            one(block, supply)

    return multiply_block


# multiply_block(kind, rows, panels, block, supply) for weights in pairs; tiles are configured for the rows.
_BY_KIND = {BFLOAT16_PAIRS: _of_any_shape(None)}
_UNPACKED_ON_THE_WAY = INT8_PAIRS, BF12_PAIRS, CODES4_PAIRS, CODES8_PAIRS, E4M3_PAIRS
_BY_KIND.update((kind, _of_any_shape(READERS[kind])) for kind in _UNPACKED_ON_THE_WAY)
multiply_block = dispatch(_BY_KIND)
multiply_pairs = _BY_KIND[BFLOAT16_PAIRS]


@function
def write_settings(settings, first, second):
    """Write a tile configuration for `first` rows in the first group and `second` rows in the second."""
    for at in range(LINE):
        set_byte(settings + at, 0)
    set_byte(settings, 1)
    for tile in range(8):
        set_byte(settings + 16 + 2 * tile, 64)
        set_byte(settings + 48 + tile, STEPS)
    for tile in (0, 1, 4):
        set_byte(settings + 48 + tile, first)
    for tile in (2, 3, 5):
        set_byte(settings + 48 + tile, second)


@function
def configure_rows(settings, rows, panels=1):
    """Configure the tiles for `rows` rows: in two groups of rows, or in one group if there are two panels."""
    write_settings(settings, min(rows, TILE_ROWS), rows if panels > 1 else max(rows - TILE_ROWS, 1))
    configure(settings)
