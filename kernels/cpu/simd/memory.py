"""Memory for numba's vectors: numbers of any kind in and out, scalars, counters that threads share.

Addresses are plain int64.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from .vectors import (
    _F32,
    _I32,
    _I64,
    _INTS,
    _VECTOR,
    HAS_DOT,
    LANES,
    _at,
    _call,
    _narrow,
    _operation,
    _same,
    _splat,
    function,
    vector,
)

FLOAT32, FLOAT16, BFLOAT16, INT8, FLOAT8 = range(5)  # how numbers are stored; FLOAT8 is e4m3fn
_ITEM_SIZES = (4, 2, 2, 1, 1)
LINE = 64  # bytes that the threads' caches take at a time


def _first_lanes(builder: Any, count: Any) -> Any:
    """A mask of the first `count` lanes, of all where there are more."""
    most = ir.Constant(_I64, LANES)
    fewer = builder.select(builder.icmp_signed("<", count, most), count, most)
    one = builder.insert_element(
        ir.Constant(_INTS, ir.Undefined), builder.trunc(fewer, _I32), ir.Constant(_I32, 0)
    )
    limit = builder.shuffle_vector(one, one, ir.Constant(_INTS, [0] * LANES))
    return builder.icmp_signed("<", ir.Constant(_INTS, [*range(LANES)]), limit)


def _read(builder: Any, bits: int, address: Any, count: Any = None, other: Any = None) -> Any:
    """LANES integers of so many bits; count: only the first so many, and the rest from `other`, or 0."""
    integers = ir.VectorType(ir.IntType(bits), LANES)
    place = _at(builder, integers, address)
    if count is None:
        return builder.load(place, align=1)
    mask, align = _first_lanes(builder, count), ir.Constant(_I32, 1)
    rest = other or ir.Constant(integers, [0] * LANES)
    return _call(builder, f"llvm.masked.load.v{LANES}i{bits}.p0", integers, place, align, mask, rest)


def _write(builder: Any, bits: int, address: Any, integers: Any, count: Any = None) -> None:
    """The lowest so many bits of each of LANES integers; count: only of the first so many."""
    kind = ir.VectorType(ir.IntType(bits), LANES)
    stored = integers if integers.type == kind else builder.trunc(integers, kind)
    place = _at(builder, kind, address)
    if count is None:
        builder.store(stored, place, align=1)
    else:
        mask, align = _first_lanes(builder, count), ir.Constant(_I32, 1)
        name = f"llvm.masked.store.v{LANES}i{bits}.p0"
        _call(builder, name, ir.VoidType(), stored, place, align, mask)


def _load(builder: Any, kind: int, address: Any, count: Any = None) -> Any:
    """LANES numbers stored as `kind`; count: the first so many, and zeros."""
    return _numbers(builder, kind, _read(builder, 8 * _ITEM_SIZES[kind], address, count))


def _numbers(builder: Any, kind: int, stored: Any) -> Any:
    """The numbers that are stored in LANES integers."""
    if kind == FLOAT32:
        return builder.bitcast(stored, _VECTOR)
    if kind == INT8:
        return builder.sitofp(builder.sext(stored, _INTS), _VECTOR)
    if kind == FLOAT16:
        return builder.fpext(builder.bitcast(stored, ir.VectorType(ir.HalfType(), LANES)), _VECTOR)
    wide = builder.zext(stored, _INTS)
    if kind == BFLOAT16:
        return builder.bitcast(builder.shl(wide, _same(16, _INTS)), _VECTOR)
    # e4m3fn: exponent and mantissa go to their places, 120 too low in the exponent, subnormals too.
    magnitude = builder.shl(builder.and_(wide, _same(0x7F, _INTS)), _same(20, _INTS))
    number = builder.fmul(builder.bitcast(magnitude, _VECTOR), _same(2.0**120))
    sign = builder.shl(builder.and_(wide, _same(0x80, _INTS)), _same(24, _INTS))
    return builder.bitcast(builder.or_(builder.bitcast(number, _INTS), sign), _VECTOR)


def _side_by_side(builder: Any, kind: int, first: Any, second: Any) -> Any:
    """LANES numbers from two places in bfloat16, which holds them all: the first of both and so on."""
    if kind != BFLOAT16:
        return _in_pairs(builder, *(_load(builder, kind, place) for place in (first, second)))
    rows = [_read(builder, 16, place, None) for place in (first, second)]
    lanes = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
    both = builder.shuffle_vector(*rows, ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), lanes))
    return builder.bitcast(both, _VECTOR)


def _in_pairs(builder: Any, x: Any, y: Any) -> Any:
    """Numbers that bfloat16 holds as such, in pairs of one of x and one of y."""
    low, high = builder.bitcast(x, _INTS), builder.bitcast(y, _INTS)
    return builder.bitcast(builder.or_(builder.lshr(low, _same(16, _INTS)), high), _VECTOR)


def _store(builder: Any, kind: int, address: Any, x: Any, count: Any = None) -> None:
    """Round to the nearest number of `kind`, ties to even, to INT8 halves up; count: the first so many."""
    bits = _TO_BITS[kind](builder, x)
    _write(builder, 8 * _ITEM_SIZES[kind], address, bits, count)


def _float32_bits(builder: Any, x: Any) -> Any:
    return builder.bitcast(x, _INTS)


def _float16_bits(builder: Any, x: Any) -> Any:
    half = builder.fptrunc(x, ir.VectorType(ir.HalfType(), LANES))
    return builder.bitcast(half, ir.VectorType(ir.IntType(16), LANES))


def _bfloat16_bits(builder: Any, x: Any) -> Any:
    bits = builder.bitcast(x, _INTS)
    odd = builder.and_(builder.lshr(bits, _same(16, _INTS)), _same(1, _INTS))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, _same(0x7FFF, _INTS))), _same(16, _INTS))
    return builder.select(builder.fcmp_unordered("uno", x, x), _same(0x7FC0, _INTS), rounded)


def _int8_bits(builder: Any, x: Any) -> Any:
    """The integers nearest to x that an int8 holds; the lowest for NaN, which has none."""
    whole = _call(builder, f"llvm.floor.v{LANES}f32", _VECTOR, builder.fadd(x, _same(0.5)))
    low, high = _same(-128.0), _same(127.0)
    whole = builder.select(builder.fcmp_ordered(">", whole, low), whole, low)
    return builder.fptosi(builder.select(builder.fcmp_ordered("<", whole, high), whole, high), _INTS)


def _float8_bits(builder: Any, x: Any) -> Any:
    """e4m3fn in the lowest 8 bits; NaN from 480 on."""
    bits = builder.bitcast(x, _INTS)
    magnitude = builder.and_(bits, _same(0x7FFFFFFF, _INTS))
    odd = builder.and_(builder.lshr(magnitude, _same(20, _INTS)), _same(1, _INTS))
    rounded = builder.lshr(builder.add(magnitude, builder.add(odd, _same(0x7FFFF, _INTS))), _same(20, _INTS))
    number = builder.sub(rounded, _same(120 << 3, _INTS))
    # Below 2^-6 they are multiples of 2^-9, to which a sum with 2^14 is rounded.
    shifted = builder.fadd(builder.bitcast(magnitude, _VECTOR), _same(2.0**14))
    subnormal = builder.sub(builder.bitcast(shifted, _INTS), _same((127 + 14) << 23, _INTS))
    is_small = builder.icmp_unsigned("<", magnitude, _same((127 - 6) << 23, _INTS))
    number = builder.select(is_small, subnormal, number)
    is_large = builder.icmp_unsigned(">=", magnitude, _same(0x43F00000, _INTS))
    number = builder.select(is_large, _same(0x7F, _INTS), number)
    return builder.or_(number, builder.and_(builder.lshr(bits, _same(24, _INTS)), _same(0x80, _INTS)))


_TO_BITS = (_float32_bits, _float16_bits, _bfloat16_bits, _int8_bits, _float8_bits)


def _transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """LANES vectors with rows and columns exchanged: blocks of 1, 2, 4, … at a time."""
    step = 1
    while step < LANES:
        low = [i if not i & step else i - step + LANES for i in range(LANES)]
        high = [i + step if not i & step else i + LANES for i in range(LANES)]
        for i in range(LANES):
            if not i & step:
                first, second = rows[i], rows[i + step]
                rows[i] = builder.shuffle_vector(first, second, ir.Constant(_INTS, low))
                rows[i + step] = builder.shuffle_vector(first, second, ir.Constant(_INTS, high))
        step *= 2
    return rows


@_operation(vector, types.int64, types.int64, types.float32)
def _load_first(builder: Any, address: Any, count: Any, other: Any) -> Any:
    rest = builder.bitcast(_splat(builder, other), _INTS)
    return builder.bitcast(_read(builder, 32, address, count, rest), _VECTOR)


def _loaders(kind: int) -> tuple[Any, Any]:
    @_operation(vector, types.int64)
    def load(builder: Any, address: Any) -> Any:
        return _load(builder, kind, address)

    @_operation(vector, types.int64, types.int64)
    def load_some(builder: Any, address: Any, count: Any) -> Any:
        return _load(builder, kind, address, count)

    return load, load_some


def _storers(kind: int) -> tuple[Any, Any]:
    @_operation(types.void, types.int64, vector)
    def store(builder: Any, address: Any, x: Any) -> None:
        _store(builder, kind, address, x)

    @_operation(types.void, types.int64, vector, types.int64)
    def store_some(builder: Any, address: Any, x: Any, count: Any) -> None:
        _store(builder, kind, address, x, count)

    return store, store_some


_LOADERS, _STORERS = [_loaders(kind) for kind in range(5)], [_storers(kind) for kind in range(5)]
(
    (load, _load_some),
    (load_half, _load_some_half),
    (load_bfloat, _load_some_bfloat),
    (load_int8, _load_some_int8),
    (load_float8, _load_some_float8),
) = _LOADERS
(
    (store, _store_some),
    (store_half, _store_some_half),
    (store_bfloat, _store_some_bfloat),
    (store_int8, _store_some_int8),
    (store_float8, _store_some_float8),
) = _STORERS


def some_of(kind: int) -> tuple[Any, Any]:
    """load(address, count) and store(address, x, count) of LANES numbers of a kind, or of the first `count`
    where there are fewer.
    """
    (load_all, load_first), (store_all, store_first) = _LOADERS[kind], _STORERS[kind]

    @function
    def load_up_to(address, count):
        return load_all(address) if count >= LANES else load_first(address, count)

    @function
    def store_up_to(address, x, count):
        if count >= LANES:
            store_all(address, x)
        else:
            store_first(address, x, count)

    return load_up_to, store_up_to


@_operation(types.void, types.int64, types.int64, types.int64, types.int64)
def transpose(builder: Any, to: Any, to_stride: Any, source: Any, stride: Any) -> None:
    """LANES rows of LANES numbers each become columns."""

    def row(address: Any, stride: Any, lane: int) -> Any:
        return builder.add(address, builder.mul(stride, ir.Constant(_I64, lane)))

    rows = [_load(builder, FLOAT32, row(source, stride, lane)) for lane in range(LANES)]
    for lane, column in enumerate(_transpose(builder, rows)):
        _store(builder, FLOAT32, row(to, to_stride, lane), column)


@_operation(types.void, types.int64, vector, vector)
def store_narrow(builder: Any, address: Any, x: Any, y: Any) -> None:
    """The numbers of x and then of y in bfloat16, where HAS_DOT."""
    if HAS_DOT:
        _store(builder, FLOAT32, address, _narrow(builder, x, y))


def _scalar(kind: Any, llvm_kind: ir.Type) -> tuple[Any, Any]:
    @_operation(kind, types.int64)
    def load_scalar(builder: Any, address: Any) -> Any:
        return builder.load(_at(builder, llvm_kind, address))

    @_operation(types.void, types.int64, kind)
    def store_scalar(builder: Any, address: Any, x: Any) -> None:
        builder.store(x, _at(builder, llvm_kind, address))

    return load_scalar, store_scalar


get_byte, set_byte = _scalar(types.int8, ir.IntType(8))
get_float, set_float = _scalar(types.float32, _F32)
get_double, set_double = _scalar(types.float64, ir.DoubleType())
get_int, set_int = _scalar(types.int32, _I32)
get_long, set_long = _scalar(types.int64, _I64)


@_operation(types.int64, types.int64)
def any_set(builder: Any, flags: Any) -> Any:
    """Not 0 where of VECTOR_BYTES bytes one is not 0."""
    found = builder.load(_at(builder, _INTS, flags), align=1)
    lanes = builder.icmp_unsigned("!=", found, _same(0, _INTS))
    return builder.zext(builder.bitcast(lanes, ir.IntType(LANES)), _I64)


@_operation(types.int64, types.voidptr)
def address_of(builder: Any, pointer: Any) -> Any:
    """A pointer as an int64."""
    return builder.ptrtoint(pointer, _I64)


@_operation(types.int64, types.int64)
def claim(builder: Any, address: Any) -> Any:
    """The int64 there, which is then one more: every thread gets another.

    Whoever sees the new number, by this or by `seen`, sees all that was written before it.
    """
    return builder.atomic_rmw("add", _at(builder, _I64, address), ir.Constant(_I64, 1), "acq_rel")


@_operation(types.int64, types.int64)
def seen(builder: Any, address: Any) -> Any:
    """The int64 there, which another thread may have counted just now."""
    return builder.load_atomic(_at(builder, _I64, address), "acquire", 8)


def _prefetch(builder: Any, address: Any, *, write: bool = False, near: bool = False) -> None:
    """Have a cache line on its way, to be read or written; nothing happens where there is no memory.

    What is read comes into the second cache. Into the first it would take the few places that a core has for
    lines on their way there, which the loads of now need. near: do so.
    """
    how = [ir.Constant(_I32, n) for n in (int(write), 3 if write or near else 2, 1)]
    _call(builder, "llvm.prefetch.p0i8", ir.VoidType(), _at(builder, ir.IntType(8), address), *how)


@_operation(types.void, types.int64, types.int64)
def call(builder: Any, function_address: Any, argument: Any) -> Any:
    """A C function of an address, by its own."""
    kind = ir.FunctionType(ir.VoidType(), [_I64])
    builder.call(builder.inttoptr(function_address, kind.as_pointer()), [argument])


@_operation(types.void)
def pause(builder: Any) -> Any:
    """Wait a moment for another thread, which may share this core."""
    if llvm.get_default_triple().startswith("x86_64"):
        _call(builder, "llvm.x86.sse2.pause", ir.VoidType())


@function
def load_up_to(address, count, other):
    """LANES numbers, or where no more than `count` are there these, and then the other."""
    return load(address) if count >= LANES else _load_first(address, count, other)


@function
def item_size(kind):
    """Bytes of a number of that kind."""
    return 4 if kind == FLOAT32 else 2 if kind == FLOAT16 or kind == BFLOAT16 else 1  # noqa: SIM109


@function
def load_as(kind, address):
    """LANES numbers of the kind stored there."""
    if kind == FLOAT32:
        return load(address)
    if kind == BFLOAT16:
        return load_bfloat(address)
    if kind == FLOAT16:
        return load_half(address)
    return load_int8(address) if kind == INT8 else load_float8(address)


@function
def store_as(kind, address, x):
    """LANES numbers, rounded to the kind."""
    if kind == FLOAT32:
        store(address, x)
    elif kind == BFLOAT16:
        store_bfloat(address, x)
    elif kind == FLOAT16:
        store_half(address, x)
    elif kind == INT8:
        store_int8(address, x)
    else:
        store_float8(address, x)


@function
def load_some_as(kind, address, count):
    """The first `count` numbers of the kind stored there, and zeros; all LANES where there are more."""
    if count >= LANES:
        return load_as(kind, address)
    if kind == FLOAT32:
        return _load_some(address, count)
    if kind == BFLOAT16:
        return _load_some_bfloat(address, count)
    if kind == FLOAT16:
        return _load_some_half(address, count)
    return _load_some_int8(address, count) if kind == INT8 else _load_some_float8(address, count)


@function
def store_some_as(kind, address, x, count):
    """The first `count` numbers, rounded to the kind; all LANES where there are more."""
    if count >= LANES:
        store_as(kind, address, x)
    elif kind == FLOAT32:
        _store_some(address, x, count)
    elif kind == BFLOAT16:
        _store_some_bfloat(address, x, count)
    elif kind == FLOAT16:
        _store_some_half(address, x, count)
    elif kind == INT8:
        _store_some_int8(address, x, count)
    else:
        _store_some_float8(address, x, count)
