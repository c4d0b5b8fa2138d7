"""SIMD for numba: vectors of float32, and arithmetic with them.

numba leaves it to LLVM to find vectors in scalar loops. What a kernel gains from that changes with its
shape, and with it the order of a sum, so these kernels say what is a vector. Addresses are plain int64.
Each function becomes a few instructions of LLVM where it is called.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, config
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, register_model


def _lanes() -> int:
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 16
    return 8 if features.get("avx2") else 4


LANES = _lanes()
VECTOR_BYTES = 4 * LANES


def _has(feature: str, lanes: int = 16) -> bool:
    """Whether what numba compiles for has vectors of so many lanes, and that."""
    if config.CPU_FEATURES is not None:  # told to compile for another CPU
        return lanes == LANES and f"+{feature}" in config.CPU_FEATURES.split(",")
    return lanes == LANES and bool(llvm.get_host_cpu_features().get(feature))


HAS_DOT = _has("avx512bf16")  # vectors of bfloat16 are multiplied, in pairs that are added up
HAS_LOOKUP = _has("avx512bw") or _has("avx2", 8)  # of all bytes of a vector, in tables of 16
HAS_HALVES = HAS_DOT and _has("avx512fp16")  # vectors of float16 are made of integers

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VECTOR, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """bfloat16, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_BFLOAT = _BFloat()


# Called by kernels alone: without Python's checks of divisors, and what Python would call them by.
function = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
# The same where loops call it: what it needs of constants is then loaded once.
inlined = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)


class Vector(types.Type):  # type: ignore[misc]
    """LANES numbers of float32 in a register."""


vector = Vector("vector")


@register_model(Vector)
class _VectorModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _VECTOR)


def _same(value: float, kind: ir.VectorType = _VECTOR) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def _at(builder: Any, kind: ir.Type, address: Any, *offsets: Any) -> Any:
    for offset in offsets:
        address = builder.add(address, offset)
    return builder.inttoptr(address, kind.as_pointer())


def _call(builder: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """One of LLVM's own functions."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _splat(builder: Any, x: Any) -> Any:
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), x, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(_INTS, [0] * LANES))


def _operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """An intrinsic from what emits it: emit(builder, *values)."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            value = emit(builder, *args)
            return context.get_dummy_value() if result is types.void else value

        # numba counts the parameters of what it is given.
        names = ", ".join(f"a{i}" for i in range(len(arguments)))
        scope: dict[str, Any] = {"signature": result(*arguments), "codegen": codegen}
        exec(f"def {emit.__name__}(context, {names}): return signature, codegen", scope)
        return intrinsic(scope[emit.__name__])

    return decorate


@_operation(vector, types.float32)
def splat(builder: Any, x: Any) -> Any:
    """x in every lane."""
    return _splat(builder, x)


@_operation(vector)
def lane_numbers(builder: Any) -> Any:  # noqa: ARG001
    """0 to LANES - 1."""
    return ir.Constant(_VECTOR, [float(lane) for lane in range(LANES)])


@_operation(vector, vector, vector)
def add(builder: Any, x: Any, y: Any) -> Any:
    """x + y."""
    return builder.fadd(x, y)


@_operation(vector, vector, vector)
def subtract(builder: Any, x: Any, y: Any) -> Any:
    """x - y."""
    return builder.fsub(x, y)


@_operation(vector, vector, vector)
def multiply(builder: Any, x: Any, y: Any) -> Any:
    """x y."""
    return builder.fmul(x, y)


def _fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return _call(builder, f"llvm.fma.v{LANES}f32", _VECTOR, x, y, z)


def _dot(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """z and in each lane the products of two bfloat16 of x and y, whose bits these vectors are.

    What is below float32's normal numbers counts as 0, whatever the thread is set to.
    """
    pairs = ir.VectorType(_BFLOAT, 2 * LANES)
    factors = builder.bitcast(x, pairs), builder.bitcast(y, pairs)
    return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _VECTOR, z, *factors)


def _narrow(builder: Any, x: Any, y: Any) -> Any:
    """All lanes of x and then of y in bfloat16, as the bits of a vector."""
    pairs = ir.VectorType(_BFLOAT, 2 * LANES)
    return builder.bitcast(_call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", pairs, y, x), _VECTOR)


def _twice(builder: Any, x: Any, first: int) -> Any:
    """Half of the lanes from the first on, each twice."""
    lanes = [first + lane // 2 for lane in range(LANES)]
    return builder.shuffle_vector(x, x, ir.Constant(_INTS, lanes))


@_operation(vector, vector, vector, vector)
def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z, rounded once."""
    return _fma(builder, x, y, z)


@_operation(vector, vector, vector)
def greater(builder: Any, x: Any, y: Any) -> Any:
    """The greater of both, y where x is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@_operation(vector, vector, vector, vector, vector)
def where_greater(builder: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
    """`yes` where x > y, else `no`."""
    return builder.select(builder.fcmp_ordered(">", x, y), yes, no)


@_operation(vector, vector, vector, vector, vector)
def where_from(builder: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
    """`yes` where x >= y, else `no`."""
    return builder.select(builder.fcmp_ordered(">=", x, y), yes, no)


@_operation(vector, vector, vector)
def where_nan(builder: Any, x: Any, y: Any) -> Any:
    """NaN where x is, else y."""
    return builder.select(builder.fcmp_unordered("uno", x, x), x, y)


@_operation(types.int64, vector, vector)
def lanes_from(builder: Any, x: Any, y: Any) -> Any:
    """A bit for each lane, the first one lowest: whether x >= y."""
    lanes = builder.bitcast(builder.fcmp_ordered(">=", x, y), ir.IntType(LANES))
    return builder.zext(lanes, _I64)


@_operation(types.float32, vector)
def highest(builder: Any, x: Any) -> Any:
    """The greatest lane; NaN is passed over."""
    return _call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", _F32, x)


@_operation(types.float32, vector)
def first_lane(builder: Any, x: Any) -> Any:
    """What is in the first lane."""
    return builder.extract_element(x, ir.Constant(_I32, 0))


def _of_rows(builder: Any, rows: list[Any], combine: Callable[[Any, Any], Any]) -> Any:
    """What the lanes of each of LANES vectors come to, by halves as in `total`: one in every lane."""
    width = LANES
    while width > 1:
        width //= 2
        half = len(rows) // 2
        # A block of 2 width lanes of one is followed by that of the other: its first half, its second half.
        places = [
            lane // width % 2 * LANES + lane // (2 * width) * 2 * width + lane % width
            for lane in range(LANES)
        ]
        low, high = (ir.Constant(_INTS, [place + first for place in places]) for first in (0, width))
        pairs = [*zip(rows[:half], rows[half:], strict=True)]
        rows = [
            combine(builder.shuffle_vector(*pair, low), builder.shuffle_vector(*pair, high)) for pair in pairs
        ]
    return rows[0]


@_operation(types.float32, vector)
def total(builder: Any, x: Any) -> Any:
    """All lanes added up, by halves: always in the same order."""
    width = LANES
    while width > 1:
        width //= 2
        swapped = [lane ^ width for lane in range(LANES)]
        x = builder.fadd(x, builder.shuffle_vector(x, x, ir.Constant(_INTS, swapped)))
    return builder.extract_element(x, ir.Constant(_I32, 0))


@_operation(vector, vector)
def exp2(builder: Any, x: Any) -> Any:
    """2^x to a unit in the last place, 0 where x is below -126.5, infinite from 127.5 on; NaN stays NaN.

    2^x = 2^n 2^f with n the nearest integer, and 2^f by a polynomial.
    """
    return _exp2(builder, x)


def _exp2(builder: Any, x: Any) -> Any:
    low = _same(-127.0)
    number = builder.select(builder.fcmp_ordered(">", x, low), x, low)  # NaN has no integer
    number = builder.select(builder.fcmp_ordered("<", number, _same(128.0)), number, _same(128.0))
    return _power(builder, number, builder.select(builder.fcmp_unordered("uno", x, x), x, number))


@_operation(vector, vector)
def silu(builder: Any, x: Any) -> Any:
    """x / (1 + e^-x)."""
    return _silu(builder, x)


def _silu(builder: Any, x: Any) -> Any:
    power = _exp2(builder, builder.fmul(x, _same(-1.4426950408889634)))
    return builder.fdiv(x, builder.fadd(_same(1.0), power))


@_operation(vector, vector)
def exp2_of_negative(builder: Any, x: Any) -> Any:
    """The same of -127 to 0, in fewer instructions."""
    return _power(builder, x, x)


def _power(builder: Any, number: Any, x: Any) -> Any:
    """2 to the power of x, which is the number, of -127 to 128, or NaN.

    Numbers as large as _NEAREST are integers, so that its sum with another is the nearest one's, the lowest
    bits of which are the exponent's.
    """
    shifted = builder.fadd(number, _same(_NEAREST))
    rest = builder.fsub(x, builder.fsub(shifted, _same(_NEAREST)))
    power = _same(_POWERS[-1])
    for coefficient in _POWERS[-2::-1]:
        power = _fma(builder, power, rest, _same(coefficient))
    exponent = builder.shl(builder.bitcast(shifted, _INTS), _same(23, _INTS))
    return builder.fmul(power, builder.bitcast(exponent, _VECTOR))


_NEAREST = 1.5 * 2**23 + 127.0
# Of the powers of f in 2^f for |f| <= 1/2: rounded to float32 their relative error is 2^-28 at most. The
# first two are what float32 has of 1 and ln 2, the others the best beside these (Remez).
_POWERS = (1.0, 0.6931471805599453, 0.240226476, 0.0555035959, 0.00961851756, 0.00133909585,
           0.000153243151)  # fmt: skip


@_operation(types.float32, types.int32)
def float_of(builder: Any, bits: Any) -> Any:
    """The float32 of these bits."""
    return builder.bitcast(bits, _F32)


@_operation(types.int32, types.float32)
def bits_of(builder: Any, x: Any) -> Any:
    """The bits of a float32."""
    return builder.bitcast(x, _I32)
