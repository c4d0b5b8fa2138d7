"""x Wᵀ by AMX, Intel's matrix unit: tiles of 16 rows of 64 bytes, whose products are sums in float32.

They hold bfloat16, and are multiplied several times as fast as vectors of float32 are. Where bfloat16 holds
the weight, x in float32 is made of it too: three of these add up to it exactly, so that each product is exact
and what comes out is as good as a sum in float32. Thirds and products too small to be normal count as 0, so
that x below 2^-102 and products below that lose bits; an infinite weight times a finite x may be NaN.

Every number is a chain of products of tiles in the order of the depth, each in the order that the unit has:
the bits of a row do not depend on how many rows are beside it.
"""

import ctypes
import logging
import platform
from itertools import product
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils, config

from .numba_codes import (
    GROUP_BYTES,
    INT4_PAIRS,
    INT8_PAIRS,
    PAIRS,
    PANEL,
    Int4Pairs,
    Int8Pairs,
    Rows,
    group_bytes,
    step_bytes,
    unpack,
)
from .numba_memory import (
    FLOAT32,
    LINE,
    _load,
    _prefetch,
    _store,
    address_of,
    claim,
    item_size,
    load,
    set_byte,
    store_some_as,
)
from .numba_threads import NEXT_THREAD, NEXT_UNIT, Task
from .numba_vectors import (
    _I64,
    _INTS,
    _VECTOR,
    HAS_DOT,
    LANES,
    VECTOR_BYTES,
    _at,
    _call,
    _narrow,
    _operation,
    _same,
    add,
    function,
    multiply,
    silu,
)

logger = logging.getLogger(__name__)

TILE_ROWS = 16  # of 64 bytes
STEPS = 16  # of the depth, in a product of tiles: two inputs each
INPUTS = 2 * STEPS
THIRDS = 3
DEPTH = 128  # steps that panels are gone through at a time, at most: 16 KiB of each
_FEW_ROWS = 64  # of a unit, that go with half of it: they leave little to do while panels come from memory
ROWS_BYTES = 2**20  # of the rows of a unit, or not many more: half of a core's second cache
_LEAST_ROWS, _MOST_ROWS = 32, 256  # of a unit, where there are as many
_WIDTH = 4 * PANEL
BLOCK = 2 * TILE_ROWS

# Which tile is what: sums of two groups of rows and either half of a panel, or of one group and two panels,
# the rows, the halves of panels.
_SUMS, _ROWS, _HALVES = (0, 1, 2, 3), (4, 5), (6, 7)
# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA), as a system call.
_ASK_FOR_TILES = 158, 0x1023, 18


def _cpu_has_tiles() -> bool:
    """Whether what numba compiles for has tiles."""
    features = config.CPU_FEATURES
    if features is None:
        features = llvm.get_host_cpu_features().flatten()
    return HAS_DOT and {"+amx-bf16", "+amx-tile"} <= set(features.split(","))


def _may_use_tiles() -> bool:
    """Whether Linux lets this process use them.

    From then on it lets no thread handle signals on a stack too small for tiles (sigaltstack).
    """
    if platform.system() != "Linux":
        return False
    if ctypes.CDLL(None).syscall(*_ASK_FOR_TILES) == 0:
        return True
    logger.warning("this CPU has AMX, which Linux does not let this process use: it goes without")
    return False


# What is compiled, and kept for other processes, depends on the CPU alone.
_CPU_HAS_TILES = _cpu_has_tiles()
HAS_TILES = _CPU_HAS_TILES and _may_use_tiles()

TILES = Task(
    (
        "x", "panels", "scales", "bias", "out", "x_stride", "num_rows", "depth", "out_features", "num_panels",
        "weight_kind", "out_kind", "gated", "unit_rows", "unit_panels", "thirds", "thirds_stride",
    )
)  # fmt: skip
_RECORD = TILES.record


def scratch_bytes(unit_rows: int, unit_panels: int, thirds: int, thirds_stride: int) -> int:
    """What a thread needs for units of so many rows of x and panels: sums, what is unpacked, and thirds."""
    return LINE + unit_panels * DEPTH * _WIDTH + unit_rows * thirds * (unit_panels * _WIDTH + thirds_stride)


def thirds_of(x_is_wide: bool, in_features: int) -> tuple[int, int]:
    """How many rows a row of x becomes, and their bytes from one to the next where they are kept.

    The stride is no power of two: rows of a tile would share few sets of the first cache.
    """
    return (THIRDS, 2 * in_features + LINE) if x_is_wide else (1, 0)


def rows_of_unit(num_rows: int, num_panels: int, in_features: int, thirds: int, num_threads: int) -> int:
    """As many rows as a core keeps at hand while panels go by, and fewer where threads would have no unit."""
    most = max(_LEAST_ROWS, min(_MOST_ROWS, ROWS_BYTES // (2 * in_features * thirds)))
    while most > _LEAST_ROWS and -(-num_rows // most) * num_panels < 4 * num_threads:
        most = max(_LEAST_ROWS, most // 2)
    equal = -(-num_rows // max(1, -(-num_rows // most)))
    return max(1, min(num_rows, -(-equal // _LEAST_ROWS) * _LEAST_ROWS))


def panels_of_unit(num_rows: int, num_panels: int, unit_rows: int, kind: int, num_threads: int) -> int:
    """Two, for which each tile of rows is read once: the rows of a unit come from the second cache all the
    time, on the same few ways into the first that memory takes. One where threads would be done later than
    with single panels, or where few rows leave all of the time to unpacking.
    """
    if kind != PAIRS and unit_rows <= BLOCK:
        return 1
    blocks = -(-num_rows // unit_rows)
    singles, pairs = (-(-n * blocks // num_threads) for n in (num_panels, -(-num_panels // 2)))
    return 2 if 2 * pairs <= 1.1 * singles else 1


def _do(builder: Any, name: str, *args: Any) -> None:
    """One of LLVM's functions for tiles, where there are any; an int is the number of a tile."""
    if not _CPU_HAS_TILES:
        return
    values = [ir.Constant(ir.IntType(8), arg) if isinstance(arg, int) else arg for arg in args]
    _call(builder, f"llvm.x86.{name}", ir.VoidType(), *values)


def _pointer(builder: Any, address: Any) -> Any:
    return _at(builder, ir.IntType(8), address)


@_operation(types.void, types.int64)
def configure(builder: Any, address: Any) -> None:
    _do(builder, "ldtilecfg", _pointer(builder, address))


@_operation(types.void)
def release(builder: Any) -> None:
    """No tile is in use any more: saving and restoring them would slow the system down."""
    _do(builder, "tilerelease")


def _block_product(groups: int, panels: int = 1, weight: Rows | None = None) -> Any:
    """C += A B for one or two groups of rows and two vectors of a panel each, or one group and two panels.

    C [16 groups, panels * PANEL] is in float32, or 0 at first, A and B are in pairs of bfloat16; the second
    panel is `apart` from the first. Memory that comes next is on its way from `ahead` on, and of the second
    panel `far` behind that, `pace` bytes with each step of tiles. weight: what B is unpacked of on the way,
    for each step of tiles; factors: of its groups.
    """

    @_operation(types.void, *[types.int64] * 14)
    def block_product(
        builder: Any, c: Any, c_stride: Any, at_first: Any, a: Any, a_stride: Any, b: Any, b_stride: Any,
        apart: Any, tiles: Any, ahead: Any, far: Any, pace: Any, unpacked: Any, factors: Any,
    ) -> None:  # fmt: skip
        width, line = ir.Constant(_I64, _WIDTH), ir.Constant(_I64, LINE)
        c_group, a_group, b_step = (
            builder.mul(stride, ir.Constant(_I64, 16)) for stride in (c_stride, a_stride, b_stride)
        )
        places = []
        for g, v in product(range(groups), range(2 * panels)):
            place = builder.add(c, builder.mul(c_group, ir.Constant(_I64, g)))
            place = builder.add(place, ir.Constant(_I64, VECTOR_BYTES * v))
            places.append((_SUMS[2 * g + v], _pointer(builder, place)))
        with builder.if_else(builder.icmp_signed("!=", at_first, ir.Constant(_I64, 0))) as (empty, go_on):
            with empty:
                for tile, _ in places:
                    _do(builder, "tilezero", tile)
            with go_on:
                for tile, place in places:
                    _do(builder, "tileloadd64", tile, place, c_stride)
        with cgutils.for_range(builder, tiles) as loop:
            at_b, stride = builder.add(b, builder.mul(loop.index, b_step)), b_stride
            if weight is not None:
                group = builder.add(factors, builder.mul(loop.index, ir.Constant(_I64, GROUP_BYTES)))
                weight.unpack(builder, unpacked, at_b, b_stride, group, ir.Constant(_I64, STEPS))
                at_b, stride = unpacked, width
            at_a = builder.add(a, builder.mul(loop.index, line))
            for g in range(groups):
                place = builder.add(at_a, builder.mul(a_group, ir.Constant(_I64, g)))
                _do(builder, "tileloadd64", _ROWS[g], _pointer(builder, place), a_stride)
            for p in range(panels):
                for v, tile in enumerate(_HALVES):
                    half = builder.add(at_b, ir.Constant(_I64, VECTOR_BYTES * v))
                    _do(builder, "tileloadd64", tile, _pointer(builder, half), stride)
                    for g in range(groups):
                        _do(builder, "tdpbf16ps", _SUMS[2 * (g + p) + v], _ROWS[g], tile)
                at_b = builder.add(at_b, apart)
            fetched = builder.add(ahead, builder.mul(loop.index, pace))
            with cgutils.for_range(builder, builder.udiv(pace, line)) as lines:
                place = builder.add(fetched, builder.mul(lines.index, line))
                for _ in range(panels):
                    _prefetch(builder, place)
                    place = builder.add(place, far)
        for tile, place in places:
            _do(builder, "tilestored64", tile, place, c_stride)

    return block_product


def _one_or_two(weight: Rows | None = None) -> Any:
    one_group, two_groups = (_block_product(groups, 1, weight) for groups in (1, 2))

    @function
    def multiply_block(rows, *args):
        if rows > TILE_ROWS:
            two_groups(*args)
        else:
            one_group(*args)

    return multiply_block


multiply_pairs, _by_int8, _by_int4 = _one_or_two(), _one_or_two(Int8Pairs()), _one_or_two(Int4Pairs())
_two_panels = _block_product(1, 2)


@_operation(types.void, *[types.int64] * 4)
def _split(builder: Any, source: Any, first: Any, second: Any, third: Any) -> None:
    """INPUTS numbers of float32 as the upper, the middle and the lower 8 bits of what they are made of.

    What is not finite stays that in all three.
    """
    halves = [
        _load(builder, FLOAT32, builder.add(source, ir.Constant(_I64, VECTOR_BYTES * v))) for v in range(2)
    ]
    for to in (first, second, third):
        parts = []
        for v, x in enumerate(halves):
            bits, exponent = builder.bitcast(x, _INTS), _same(0x7F800000, _INTS)
            is_finite = builder.icmp_signed("!=", builder.and_(bits, exponent), exponent)
            upper = builder.bitcast(builder.and_(bits, _same(0xFFFF0000, _INTS)), _VECTOR)
            parts.append(builder.select(is_finite, upper, x))
            halves[v] = builder.select(is_finite, builder.fsub(x, upper), x)
        _store(builder, FLOAT32, to, _narrow(builder, *parts))


@function
def _bring_thirds(args, first, rows, to, stride):
    """Rows of x, each as three of bfloat16."""
    for row in range(rows):
        x, at = args.x + (first + row) * args.x_stride, to + THIRDS * row * stride
        for k in range(args.depth // STEPS):
            place = at + LINE * k
            _split(x + 2 * LINE * k, place, place + stride, place + 2 * stride)


@function
def write_settings(settings, first, second):
    """Tiles for so many rows in either of two groups, to configure."""
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
def configure_rows(settings, rows):
    """Tiles for so many rows, of two groups."""
    write_settings(settings, min(rows, TILE_ROWS), max(rows - TILE_ROWS, 1))
    configure(settings)


@function
def _multiply(args, unit, next_unit, scratch, a, a_stride, configured):
    """The product of a panel or two with rows in bfloat16. Returns what tiles are configured for now."""
    across = -(-args.num_panels // args.unit_panels)
    panel, first = unit % across * args.unit_panels, unit // across * args.unit_rows
    rows, panels = min(args.unit_rows, args.num_rows - first), min(args.unit_panels, args.num_panels - panel)
    kind, stride, c = args.weight_kind, step_bytes(args.weight_kind), scratch + LINE
    width = args.unit_panels * _WIDTH
    unpacked = c + args.unit_rows * args.thirds * width
    block = BLOCK // panels
    num_blocks = -(-rows * args.thirds // block)
    # In equal parts, of whole groups; what a single block needs is unpacked on the way.
    most = DEPTH // 2 if panels > 1 and rows <= _FEW_ROWS else DEPTH
    step = -(-args.depth // (-(-args.depth // most) * STEPS)) * STEPS
    if kind != PAIRS and num_blocks == 1:
        step = args.depth
    pace = -(-stride * STEPS // num_blocks // LINE) * LINE
    far = args.depth * stride
    for start in range(0, args.depth, step):
        depth = min(step, args.depth - start)
        b, b_stride, apart = args.panels + panel * far + start * stride, stride, far
        ahead = b + depth * stride
        if start + depth == args.depth:
            ahead = args.panels + next_unit % across * args.unit_panels * far
        factors = 0
        if kind == INT4_PAIRS:
            factors = args.scales + group_bytes(kind, panel * args.depth + start)
        if kind != PAIRS and num_blocks > 1:
            apart = DEPTH * _WIDTH
            for p in range(panels):
                unpack(kind, unpacked + p * apart, b + p * far, stride, factors, depth)
                if kind == INT4_PAIRS:
                    factors += group_bytes(kind, args.depth)
            b, b_stride = unpacked, _WIDTH
        for row in range(0, rows * args.thirds, block):
            left = min(rows * args.thirds - row, block)
            if left + panels * BLOCK != configured:
                if panels > 1:
                    write_settings(scratch, left, left)
                    configure(scratch)
                else:
                    configure_rows(scratch, left)
                configured = left + panels * BLOCK
            to, x, num_tiles = c + row * width, a + row * a_stride + 4 * start, depth // STEPS
            same = (
                to, width, start == 0, x, a_stride, b, b_stride, apart, num_tiles, ahead, far, pace,
                unpacked, factors,
            )  # fmt: skip
            if panels > 1:
                _two_panels(*same)
            elif kind == PAIRS or num_blocks > 1:
                multiply_pairs(left, *same)
            elif kind == INT8_PAIRS:
                _by_int8(left, *same)
            else:
                _by_int4(left, *same)
            ahead += pace * num_tiles
    for p in range(panels):
        _finish(args, first, rows, panel + p, c + p * _WIDTH)
    return configured


@function
def _finish(args, first, rows, panel, c):
    """What becomes of a panel's sums: scale, bias, gates, and their place in the result."""
    width, size = LANES if args.gated else PANEL, item_size(args.out_kind)
    thirds, stride = args.thirds, args.unit_panels * _WIDTH
    columns = min(width, args.out_features - panel * width)
    to = args.out + (first * args.out_features + panel * width) * size
    scale, bias = args.scales + panel * _WIDTH, args.bias + panel * _WIDTH
    for row in range(rows):
        at = c + thirds * row * stride
        left, right = load(at), load(at + VECTOR_BYTES)
        if thirds > 1:
            left = add(left, add(load(at + stride), load(at + 2 * stride)))
            at += VECTOR_BYTES
            right = add(right, add(load(at + stride), load(at + 2 * stride)))
        if args.weight_kind == INT8_PAIRS:
            left, right = multiply(left, load(scale)), multiply(right, load(scale + VECTOR_BYTES))
        if args.bias:
            left, right = add(left, load(bias)), add(right, load(bias + VECTOR_BYTES))
        if args.gated:
            left = multiply(silu(left), right)
        store_some_as(args.out_kind, to, left, columns)
        if columns > LANES:
            store_some_as(args.out_kind, to + LANES * size, right, columns - LANES)
        to += args.out_features * size


if HAS_TILES:

    @TILES.kernel
    def _tiles_kernel(record):
        args, counters = carray(record, 1, _RECORD)[0], address_of(record)
        scratch = args.scratch + claim(counters + NEXT_THREAD) * args.scratch_size
        thirds = scratch + LINE + (DEPTH + args.unit_rows * args.thirds) * args.unit_panels * _WIDTH
        brought, configured = -1, 0
        unit = claim(counters + NEXT_UNIT)
        while unit < args.num_units:
            across = -(-args.num_panels // args.unit_panels)
            next_unit, block = claim(counters + NEXT_UNIT), unit // across
            first = block * args.unit_rows
            a, a_stride = args.x + first * args.x_stride, args.x_stride
            if args.thirds > 1:
                a, a_stride = thirds, args.thirds_stride
                if block != brought:  # once for all panels that this thread comes to
                    _bring_thirds(args, first, min(args.unit_rows, args.num_rows - first), a, a_stride)
                    brought = block
            configured = _multiply(args, unit, next_unit, scratch, a, a_stride, configured)
            unit = next_unit
        if configured:
            release()
