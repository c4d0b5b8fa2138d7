"""SIMD for numba: vectors of float32, and arithmetic with them.

numba leaves it to LLVM to find vectors in scalar loops. What a kernel gains from that changes with its
shape, and with it the order of a sum, so these kernels say what is a vector. Addresses are plain int64.
Each function becomes a few instructions of LLVM where it is called.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core.datamodel import PrimitiveModel
from numba.extending import register_model

from . import emit
from .emit import F32, I32, I64, INTS, VECTOR, has_feature, operation
from .emit import LANES as LANES

VECTOR_BYTES = 4 * LANES

HAS_DOT = has_feature("avx512bf16")  # vectors of bfloat16 are multiplied, in pairs that are added up
HAS_LOOKUP = has_feature("avx512bw") or has_feature("avx2", 8)  # of all bytes of a vector, in tables of 16
HAS_HALVES = HAS_DOT and has_feature("avx512fp16")  # vectors of float16 are made of integers


# Called by kernels alone: without Python's checks of divisors, and what Python would call them by.
function = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
# The same where loops call it: what it needs of constants is then loaded once.
inlined = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True)


@function
def missing(*_args):
    """Stand in for a function that this CPU lacks instructions for."""
    raise NotImplementedError("this CPU lacks the instructions for a kernel that was called")


def _either(own: int, chosen: Any, others: Any) -> Any:
    @function
    def call(kind, *args):
        if kind == own:
            chosen(*args)
        else:
            others(kind, *args)

    return call


def dispatch(functions: dict[int, Any]) -> Any:
    """Return call(kind, *args), which calls the function of that kind; the last one takes all other kinds."""
    (*others, last) = functions.values()

    @function
    def call(_kind, *args):
        last(*args)

    for kind, own in reversed([*zip(functions, others, strict=False)]):
        call = _either(kind, own, call)
    return call


class Vector(types.Type):  # type: ignore[misc]
    """LANES numbers of float32 in a register."""


vector = Vector("vector")


@register_model(Vector)
class _VectorModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, VECTOR)


@operation(vector, types.float32)
def splat(builder: Any, x: Any) -> Any:
    """x in every lane."""
    return emit.splat(builder, x)


@operation(vector)
def lane_numbers(builder: Any) -> Any:  # noqa: ARG001
    """0 to LANES - 1."""
    return ir.Constant(VECTOR, [float(lane) for lane in range(LANES)])


@operation(vector, vector, vector)
def add(builder: Any, x: Any, y: Any) -> Any:
    """x + y."""
    return builder.fadd(x, y)


@operation(vector, vector, vector)
def subtract(builder: Any, x: Any, y: Any) -> Any:
    """x - y."""
    return builder.fsub(x, y)


@operation(vector, vector, vector)
def multiply(builder: Any, x: Any, y: Any) -> Any:
    """x y."""
    return builder.fmul(x, y)


@operation(vector, vector, vector, vector)
def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """x y + z, rounded once."""
    return emit.fma(builder, x, y, z)


@operation(vector, vector, vector)
def greater(builder: Any, x: Any, y: Any) -> Any:
    """The greater of both, y where x is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@operation(vector, vector, vector, vector, vector)
def where_greater(builder: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
    """`yes` where x > y, else `no`."""
    return builder.select(builder.fcmp_ordered(">", x, y), yes, no)


@operation(vector, vector, vector, vector, vector)
def where_from(builder: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
    """`yes` where x >= y, else `no`."""
    return builder.select(builder.fcmp_ordered(">=", x, y), yes, no)


@operation(vector, vector, vector)
def where_nan(builder: Any, x: Any, y: Any) -> Any:
    """NaN where x is, else y."""
    return builder.select(builder.fcmp_unordered("uno", x, x), x, y)


@operation(types.int64, vector, vector)
def lanes_from(builder: Any, x: Any, y: Any) -> Any:
    """A bit for each lane, the first one lowest: whether x >= y."""
    lanes = builder.bitcast(builder.fcmp_ordered(">=", x, y), ir.IntType(LANES))
    return builder.zext(lanes, I64)


@operation(types.float32, vector)
def highest(builder: Any, x: Any) -> Any:
    """The greatest lane; NaN is passed over."""
    return emit.call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, x)


@operation(types.float32, vector)
def first_lane(builder: Any, x: Any) -> Any:
    """What is in the first lane."""
    return builder.extract_element(x, ir.Constant(I32, 0))


@operation(types.float32, vector)
def total(builder: Any, x: Any) -> Any:
    """All lanes added up, by halves: always in the same order."""
    width = LANES
    while width > 1:
        width //= 2
        swapped = [lane ^ width for lane in range(LANES)]
        x = builder.fadd(x, builder.shuffle_vector(x, x, ir.Constant(INTS, swapped)))
    return builder.extract_element(x, ir.Constant(I32, 0))


@operation(vector, vector)
def exp2(builder: Any, x: Any) -> Any:
    """2^x to a unit in the last place, 0 where x is below -126.5, infinite from 127.5 on; NaN stays NaN.

    2^x = 2^n 2^f with n the nearest integer, and 2^f by a polynomial.
    """
    return emit.exp2(builder, x)


@operation(vector, vector)
def silu(builder: Any, x: Any) -> Any:
    """x / (1 + e^-x)."""
    return emit.silu(builder, x)


@operation(vector, vector)
def exp2_of_negative(builder: Any, x: Any) -> Any:
    """The same of -127 to 0, in fewer instructions."""
    return emit.power_of_two(builder, x, x)


@operation(types.float32, types.int32)
def float_of(builder: Any, bits: Any) -> Any:
    """The float32 of these bits."""
    return builder.bitcast(bits, F32)


@operation(types.int32, types.float32)
def bits_of(builder: Any, x: Any) -> Any:
    """The bits of a float32."""
    return builder.bitcast(x, I32)
