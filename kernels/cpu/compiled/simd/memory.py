"""Memory access for numba: vectors of any kind of number, scalars, counters that threads share.

Addresses are int64.
"""

from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types

from ...formats import BFLOAT16, FLOAT8, FLOAT16, FLOAT32, INT8
from ...target import HAS_DOT, LANES
from . import emit
from .emit import F32, I8, I32, I64, INTS, VECTOR, int64, operation
from .vectors import dispatch, function, vector


@operation(vector, types.int64, types.int64, types.float32)
def _load_first(builder: Any, address: Any, count: Any, other: Any) -> Any:
    rest = builder.bitcast(emit.splat(builder, other), INTS)
    return builder.bitcast(emit.read(builder, 32, address, count, rest), VECTOR)


def _loaders(kind: int) -> tuple[Any, Any]:
    @operation(vector, types.int64)
    def load(builder: Any, address: Any) -> Any:
        return emit.load(builder, kind, address)

    @operation(vector, types.int64, types.int64)
    def load_some(builder: Any, address: Any, count: Any) -> Any:
        return emit.load(builder, kind, address, count)

    return load, load_some


def _storers(kind: int) -> tuple[Any, Any]:
    @operation(types.void, types.int64, vector)
    def store(builder: Any, address: Any, x: Any) -> None:
        emit.store(builder, kind, address, x)

    @operation(types.void, types.int64, vector, types.int64)
    def store_some(builder: Any, address: Any, x: Any, count: Any) -> None:
        emit.store(builder, kind, address, x, count)

    return store, store_some


# By kind: of LANES numbers, and of the first `count`.
LOADERS = [_loaders(kind) for kind in range(5)]
STORERS = [_storers(kind) for kind in range(5)]
(load, _), (store, _) = LOADERS[FLOAT32], STORERS[FLOAT32]


def some_of(kind: int) -> tuple[Any, Any]:
    """Return load(address, count) and store(address, x, count) for one kind of number.

    Both access LANES numbers, or only the first `count` if that is fewer.
    """
    (load_all, load_first), (store_all, store_first) = LOADERS[kind], STORERS[kind]

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


@operation(types.void, types.int64, types.int64, types.int64, types.int64)
def transpose(builder: Any, to: Any, to_stride: Any, source: Any, stride: Any) -> None:
    """Transpose a block of LANES x LANES numbers in memory."""

    def row(address: Any, stride: Any, lane: int) -> Any:
        return builder.add(address, builder.mul(stride, int64(lane)))

    rows = [emit.load(builder, FLOAT32, row(source, stride, lane)) for lane in range(LANES)]
    for lane, column in enumerate(emit.transpose(builder, rows)):
        emit.store(builder, FLOAT32, row(to, to_stride, lane), column)


@operation(types.void, types.int64, vector, vector)
def store_narrow(builder: Any, address: Any, x: Any, y: Any) -> None:
    """Store x and then y as bfloat16. Needs HAS_DOT."""
    if HAS_DOT:
        emit.store(builder, FLOAT32, address, emit.narrow(builder, x, y))


def _scalar(kind: Any, llvm_kind: ir.Type) -> tuple[Any, Any]:
    @operation(kind, types.int64)
    def load_scalar(builder: Any, address: Any) -> Any:
        return builder.load(emit.pointer(builder, llvm_kind, address))

    @operation(types.void, types.int64, kind)
    def store_scalar(builder: Any, address: Any, x: Any) -> None:
        builder.store(x, emit.pointer(builder, llvm_kind, address))

    return load_scalar, store_scalar


get_byte, set_byte = _scalar(types.int8, I8)
get_float, set_float = _scalar(types.float32, F32)
get_double, set_double = _scalar(types.float64, ir.DoubleType())
get_int, set_int = _scalar(types.int32, I32)
get_long, set_long = _scalar(types.int64, I64)
_, set_short = _scalar(types.int16, ir.IntType(16))


@operation(types.int64, types.int64)
def get_four(builder: Any, address: Any) -> Any:
    """Load an unsigned 4-byte integer from any address."""
    found = builder.load(emit.pointer(builder, I32, address), align=1)
    return builder.zext(found, I64)


@operation(types.int64, types.int64)
def get_eight(builder: Any, address: Any) -> Any:
    """Load 8 bytes from any address."""
    return builder.load(emit.pointer(builder, I64, address), align=1)


@operation(types.int64, types.int64)
def any_set(builder: Any, flags: Any) -> Any:
    """Return a non-zero number if any of VECTOR_BYTES bytes is not 0."""
    found = builder.load(emit.pointer(builder, INTS, flags), align=1)
    lanes = builder.icmp_unsigned("!=", found, emit.constant(0, INTS))
    return builder.zext(builder.bitcast(lanes, ir.IntType(LANES)), I64)


@operation(types.int64, types.voidptr)
def address_of(builder: Any, pointer: Any) -> Any:
    """Return a pointer as an int64."""
    return builder.ptrtoint(pointer, I64)


@operation(types.int64, types.int64)
def claim(builder: Any, address: Any) -> Any:
    """Atomically increment the int64 at an address. Return its old value, which no other thread gets.

    A thread that reads the new value with `claim` or `seen` also sees all writes before it.
    """
    return builder.atomic_rmw("add", emit.pointer(builder, I64, address), int64(1), "seq_cst")


@operation(types.void, types.int64)
def release(builder: Any, address: Any) -> None:
    """Atomically decrement the int64 at an address. The counterpart of `claim`."""
    builder.atomic_rmw("sub", emit.pointer(builder, I64, address), int64(1), "seq_cst")


@operation(types.int64, types.int64)
def seen(builder: Any, address: Any) -> Any:
    """Atomically read the int64 at an address, which other threads may be incrementing."""
    return builder.load_atomic(emit.pointer(builder, I64, address), "seq_cst", 8)


@operation(types.void, types.int64, types.int64)
def call(builder: Any, function_address: Any, argument: Any) -> Any:
    """Call the C function at function_address with one int64 argument."""
    kind = ir.FunctionType(ir.VoidType(), [I64])
    builder.call(builder.inttoptr(function_address, kind.as_pointer()), [argument])


@operation(types.void, types.int64, types.int64, types.int64, types.int64, types.int64)
def system_call(builder: Any, syscall: Any, number: Any, first: Any, second: Any, third: Any) -> Any:
    """Make a system call with three arguments, followed by zeros.

    syscall: the address of the C function syscall.
    """
    kind = ir.FunctionType(I64, [I64] * 7)
    args = [number, first, second, third, *[int64(0)] * 3]
    builder.call(builder.inttoptr(syscall, kind.as_pointer()), args)


@operation(types.void)
def pause(builder: Any) -> Any:
    """Pause briefly (PAUSE), so that another thread on the same core can run."""
    if llvm.get_default_triple().startswith("x86_64"):
        emit.call(builder, "llvm.x86.sse2.pause", ir.VoidType())


@function
def load_up_to(address, count, other):
    """Load LANES float32. Lanes beyond the first `count` come from `other`."""
    return load(address) if count >= LANES else _load_first(address, count, other)


@function
def item_size(kind):
    """Return the size of a number of this kind in bytes."""
    return 4 if kind == FLOAT32 else 2 if kind == FLOAT16 or kind == BFLOAT16 else 1  # noqa: SIM109


_ORDER = (FLOAT32, BFLOAT16, FLOAT16, INT8, FLOAT8)
# load_as(kind, address) loads LANES numbers of that kind; store_as(kind, address, x) rounds them to it.
load_as, _load_first_as = (dispatch({kind: LOADERS[kind][i] for kind in _ORDER}) for i in range(2))
store_as, _store_first_as = (dispatch({kind: STORERS[kind][i] for kind in _ORDER}) for i in range(2))


@function
def load_some_as(kind, address, count):
    """Load LANES numbers of this kind. Lanes beyond the first `count` are 0."""
    return load_as(kind, address) if count >= LANES else _load_first_as(kind, address, count)


@function
def store_some_as(kind, address, x, count):
    """Store LANES numbers rounded to this kind, or only the first `count` if that is fewer."""
    if count >= LANES:
        store_as(kind, address, x)
    else:
        _store_first_as(kind, address, x, count)
