"""Vectors of float32 for numba, and arithmetic with them.

numba leaves vectorisation to LLVM, whose choices depend on the shape of a loop, and with them the order of a
sum. So these kernels use vectors explicitly. Each function becomes a few instructions where it is called.
"""

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core.datamodel import PrimitiveModel
from numba.extending import register_model

from ... import target
from ...target import LANES
from ...variants import among
from . import emit
from .emit import F32, I32, I64, INTS, VECTOR, operation
from .inner_code import InnerCompiler

# For functions that only kernels call: without checks of divisors and wrappers for Python.
function = njit(
    error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=InnerCompiler
)
# For those that loops call: inlined, they load their constants once.
inlined = njit(
    error_model="numpy",
    no_cpython_wrapper=True,
    no_cfunc_wrapper=True,
    forceinline=True,
    pipeline_class=InnerCompiler,
)


_OTHERS = 1000  # stands for all kinds that a variant is not compiled for


@function
def missing(*_args):
    """Take the place of a function that needs CPU instructions which are missing."""
    raise NotImplementedError("this CPU lacks the instructions for a kernel that was called")


def dispatch(functions: dict[int, Any]) -> Any:
    """Return call(kind, *args), which calls the kind's function; the last function serves all other kinds."""
    # One flat function: of functions that call each other LLVM makes slower code.
    *kinds, last = functions
    lines = [f" if kind == {kind}:\n  return _{kind}(*args)" for kind in kinds]
    scope = {f"_{kind}": own for kind, own in functions.items()}
    exec("\n".join(["def call(kind, *args):", *lines, f" return _{last}(*args)"]), scope)
    return function(scope["call"])


def dispatch_for(kernel: str, functions: dict[int, Any]) -> Any:
    """Do the same as `dispatch`, for the kinds with which a kernel is compiled. Other kinds raise."""
    own = among(kernel, functions)
    return dispatch(own if len(own) == len(functions) else {**own, _OTHERS: missing})


class Vector(types.Type):  # type: ignore[misc]
    """numba's type of LANES float32 in a register."""


vector = Vector("vector")


@register_model(Vector)
class _VectorModel(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, VECTOR)


padded = function(target.padded)


@operation(vector, types.float32)
def splat(builder: Any, x: Any) -> Any:
    """Return a vector with x in every lane."""
    return emit.splat(builder, x)


@operation(vector)
def lane_numbers(builder: Any) -> Any:  # noqa: ARG001
    """Return 0 to LANES - 1."""
    return ir.Constant(VECTOR, [float(lane) for lane in range(LANES)])


@operation(vector, vector, vector)
def add(builder: Any, x: Any, y: Any) -> Any:
    """Return x + y."""
    return builder.fadd(x, y)


@operation(vector, vector, vector)
def subtract(builder: Any, x: Any, y: Any) -> Any:
    """Return x - y."""
    return builder.fsub(x, y)


@operation(vector, vector, vector)
def multiply(builder: Any, x: Any, y: Any) -> Any:
    """Return x y."""
    return builder.fmul(x, y)


@operation(vector, vector, vector)
def divide(builder: Any, x: Any, y: Any) -> Any:
    """Return x / y."""
    return builder.fdiv(x, y)


@operation(vector, vector, vector, vector)
def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x y + z, rounded once."""
    return emit.fma(builder, x, y, z)


@operation(vector, vector, vector)
def greater(builder: Any, x: Any, y: Any) -> Any:
    """Return the greater of x and y; y where x is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@operation(vector, vector, vector, vector, vector)
def where_greater(builder: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
    """Return `yes` where x > y, else `no`."""
    return builder.select(builder.fcmp_ordered(">", x, y), yes, no)


@operation(vector, vector, vector, vector, vector)
def where_from(builder: Any, x: Any, y: Any, yes: Any, no: Any) -> Any:
    """Return `yes` where x >= y, else `no`."""
    return builder.select(builder.fcmp_ordered(">=", x, y), yes, no)


@operation(vector, vector, vector)
def where_nan(builder: Any, x: Any, y: Any) -> Any:
    """Return NaN where x is NaN, else y."""
    return builder.select(builder.fcmp_unordered("uno", x, x), x, y)


@operation(types.int64, vector, vector)
def lanes_from(builder: Any, x: Any, y: Any) -> Any:
    """Return a bitmask of the lanes where x >= y, the first lane in the lowest bit."""
    lanes = builder.bitcast(builder.fcmp_ordered(">=", x, y), ir.IntType(LANES))
    return builder.zext(lanes, I64)


@operation(vector, types.int64, vector, vector)
def where_bits(builder: Any, bits: Any, yes: Any, no: Any) -> Any:
    """Return `yes` where a lane's bit is set, else `no`. The first lane's bit is the lowest."""
    lanes = builder.trunc(bits, ir.IntType(LANES))
    return builder.select(builder.bitcast(lanes, ir.VectorType(ir.IntType(1), LANES)), yes, no)


@operation(types.float32, vector)
def highest(builder: Any, x: Any) -> Any:
    """Return the greatest lane, ignoring NaN."""
    return emit.call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, x)


@operation(types.float32, vector)
def first_lane(builder: Any, x: Any) -> Any:
    """Return the first lane."""
    return builder.extract_element(x, ir.Constant(I32, 0))


@operation(types.float32, vector)
def total(builder: Any, x: Any) -> Any:
    """Add up all lanes, by halves and thus always in the same order."""
    width = LANES
    while width > 1:
        width //= 2
        swapped = [lane ^ width for lane in range(LANES)]
        x = builder.fadd(x, builder.shuffle_vector(x, x, ir.Constant(INTS, swapped)))
    return builder.extract_element(x, ir.Constant(I32, 0))


@operation(vector, vector)
def exp2(builder: Any, x: Any) -> Any:
    """Return 2^x, accurate to a unit in the last place: 0 below -126.5, infinity from 127.5 on, NaN for NaN.

    2^x = 2^n 2^f with n the nearest integer, and 2^f by a polynomial.
    """
    return emit.exp2(builder, x)


@operation(vector, vector)
def silu(builder: Any, x: Any) -> Any:
    """Return x / (1 + e^-x)."""
    return emit.silu(builder, x)


@operation(vector, vector, vector)
def gated_by(builder: Any, x: Any, gate: Any) -> Any:
    """Return x / (1 + e^-gate): x times the sigmoid of the gate."""
    return emit.gated_by(builder, x, gate)


@operation(vector, vector)
def gelu(builder: Any, x: Any) -> Any:
    """Return x Φ(x), where Φ is the normal distribution function."""
    return emit.gelu(builder, x)


@operation(vector, vector)
def exp2_of_negative(builder: Any, x: Any) -> Any:
    """Return 2^x for x from -127 to 0, with fewer instructions than `exp2`."""
    return emit.power_of_two(builder, x, x)


@operation(types.float32, types.int32)
def float_of(builder: Any, bits: Any) -> Any:
    """Return the float32 with these bits."""
    return builder.bitcast(bits, F32)


@operation(types.float32, types.int64)
def float_of_half(builder: Any, bits: Any) -> Any:
    """Return the float16 with these bits."""
    half = builder.bitcast(builder.trunc(bits, ir.IntType(16)), ir.HalfType())
    return builder.fpext(half, F32)


@operation(types.int32, types.float32)
def bits_of(builder: Any, x: Any) -> Any:
    """Return the bits of a float32."""
    return builder.bitcast(x, I32)
