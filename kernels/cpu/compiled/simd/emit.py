"""Emitters: functions that add LLVM instructions at the position of a `builder`.

`operation` turns an emitter into a function that numba code, and so a kernel, can call.
Vectors have LANES elements; addresses are int64.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...formats import BFLOAT16, FLOAT16, FLOAT32, INT8, ITEM_SIZES
from ...target import LANES

I8 = ir.IntType(8)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32 = ir.FloatType()
# float32, int32
VECTOR = ir.VectorType(F32, LANES)
INTS = ir.VectorType(I32, LANES)


class _BFloat(ir.Type):  # type: ignore[misc]
    """bfloat16, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_BFLOAT = _BFloat()


def fields_type(record: type) -> types.Type:
    """Return numba's type for a NamedTuple whose fields are all int64."""
    return types.NamedUniTuple(types.int64, len(record._fields), record)  # type: ignore[attr-defined]


def int64(number: int) -> ir.Constant:
    """Return an int64 constant."""
    return ir.Constant(I64, number)


def constant(value: float, kind: ir.VectorType = VECTOR) -> ir.Constant:
    """Return a vector with this value in every lane."""
    return ir.Constant(kind, [value] * LANES)


def pointer(builder: Any, kind: ir.Type, address: Any, *offsets: Any) -> Any:
    """Convert an address plus byte offsets to a pointer to this type."""
    for offset in offsets:
        address = builder.add(address, offset)
    return builder.inttoptr(address, kind.as_pointer())


def byte_pointer(builder: Any, address: Any) -> Any:
    """Convert an address to a pointer to bytes."""
    return pointer(builder, I8, address)


def call(builder: Any, name: str, result: ir.Type, *args: Any) -> Any:
    """Call one of LLVM's intrinsics."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def splat(builder: Any, x: Any) -> Any:
    """Return a vector with x in every lane."""
    first = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), x, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(INTS, [0] * LANES))


def operation(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate an emitter, emit(builder, *values), so that numba code can call it."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            value = emit(builder, *args)
            return context.get_dummy_value() if result is types.void else value

        # numba inspects the parameters of the function, so it needs one of its own for each number of them.
        names = ", ".join(f"a{i}" for i in range(len(arguments)))
        scope: dict[str, Any] = {"signature": result(*arguments), "codegen": codegen}
        exec(f"def {emit.__name__}(context, {names}): return signature, codegen", scope)
        return intrinsic(scope[emit.__name__])

    return decorate


def fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return call(builder, f"llvm.fma.v{LANES}f32", VECTOR, x, y, z)


def dot(builder: Any, x: Any, y: Any, z: Any) -> Any:
    """Add to each lane of z the dot product of the two bfloat16 in x and in y (VDPBF16PS).

    Subnormal numbers count as 0, regardless of the thread's floating-point settings.
    """
    pairs = ir.VectorType(_BFLOAT, 2 * LANES)
    factors = builder.bitcast(x, pairs), builder.bitcast(y, pairs)
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, z, *factors)


def narrow(builder: Any, x: Any, y: Any) -> Any:
    """Round x and then y to bfloat16, and join them in one vector."""
    pairs = ir.VectorType(_BFLOAT, 2 * LANES)
    return builder.bitcast(call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", pairs, y, x), VECTOR)


def exp2(builder: Any, x: Any) -> Any:
    low = constant(-127.0)
    number = builder.select(builder.fcmp_ordered(">", x, low), x, low)  # NaN has no integer
    number = builder.select(builder.fcmp_ordered("<", number, constant(128.0)), number, constant(128.0))
    return power_of_two(builder, number, builder.select(builder.fcmp_unordered("uno", x, x), x, number))


def silu(builder: Any, x: Any) -> Any:
    return gated_by(builder, x, x)


def gated_by(builder: Any, x: Any, gate: Any) -> Any:
    """Return x / (1 + e^-gate)."""
    power = exp2(builder, builder.fmul(gate, constant(-1.4426950408889634)))
    return builder.fdiv(x, builder.fadd(constant(1.0), power))


def gelu(builder: Any, x: Any) -> Any:
    """Return x Φ(x), where Φ is the normal distribution function."""
    size = call(builder, f"llvm.fabs.v{LANES}f32", VECTOR, x)
    tail = exp2(builder, _polynomial(builder, size, _LOG2_TAIL))
    is_above = builder.fcmp_ordered(">", x, constant(0.0))
    return builder.fmul(x, builder.select(is_above, builder.fsub(constant(1.0), tail), tail))


def _polynomial(builder: Any, x: Any, coefficients: Sequence[float]) -> Any:
    """Return the sum of coefficients times powers of x, from 1 on."""
    result = constant(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        result = fma(builder, result, x, constant(coefficient))
    return result


# log2 Φ(-t) by powers of t >= 0: Φ is off by 2^-24 at most. Least squares with weights that even out the
# error of t Φ(-t) up to 6; beyond, the sum falls on, and Φ is 0 from 11 on.
_LOG2_TAIL = (-1.0, -1.15110767, -0.459182769, -0.0525846146, 0.00720532704, -0.000255236228,
              -0.000133536378, 2.75789462e-05, -1.79325605e-06)  # fmt: skip


def power_of_two(builder: Any, number: Any, x: Any) -> Any:
    """Return 2^x.

    number: x clamped to the range -127 to 128; any number in that range where x is NaN.

    Float32 numbers as large as _NEAREST are integers, so adding _NEAREST rounds to the nearest integer and
    puts the result's exponent into the lowest bits.
    """
    shifted = builder.fadd(number, constant(_NEAREST))
    rest = builder.fsub(x, builder.fsub(shifted, constant(_NEAREST)))
    power = _polynomial(builder, rest, _POWERS)
    exponent = builder.shl(builder.bitcast(shifted, INTS), constant(23, INTS))
    return builder.fmul(power, builder.bitcast(exponent, VECTOR))


_NEAREST = 1.5 * 2**23 + 127.0
# Of the powers of f in 2^f for |f| <= 1/2: rounded to float32 their relative error is 2^-28 at most. The
# first two are what float32 has of 1 and ln 2, the others the best beside these (Remez).
_POWERS = (1.0, 0.6931471805599453, 0.240226476, 0.0555035959, 0.00961851756, 0.00133909585,
           0.000153243151)  # fmt: skip


def _first_lanes(builder: Any, count: Any) -> Any:
    """Return a mask of the first `count` lanes; of all if there are fewer."""
    most = int64(LANES)
    fewer = builder.select(builder.icmp_signed("<", count, most), count, most)
    one = builder.insert_element(
        ir.Constant(INTS, ir.Undefined), builder.trunc(fewer, I32), ir.Constant(I32, 0)
    )
    limit = builder.shuffle_vector(one, one, ir.Constant(INTS, [0] * LANES))
    return builder.icmp_signed("<", ir.Constant(INTS, [*range(LANES)]), limit)


def read(builder: Any, bits: int, address: Any, count: Any = None, other: Any = None) -> Any:
    """Load LANES integers of `bits` bits.

    count: load only the first `count` lanes. The other lanes come from `other`, or are 0.
    """
    integers = ir.VectorType(ir.IntType(bits), LANES)
    place = pointer(builder, integers, address)
    if count is None:
        return builder.load(place, align=1)
    mask = _first_lanes(builder, count)
    align = ir.Constant(I32, 1)
    rest = other or ir.Constant(integers, [0] * LANES)
    return call(builder, f"llvm.masked.load.v{LANES}i{bits}.p0", integers, place, align, mask, rest)


def _write(builder: Any, bits: int, address: Any, integers: Any, count: Any = None) -> None:
    """Store the lowest `bits` bits of LANES integers. count: store only the first `count`."""
    kind = ir.VectorType(ir.IntType(bits), LANES)
    stored = integers if integers.type == kind else builder.trunc(integers, kind)
    place = pointer(builder, kind, address)
    if count is None:
        builder.store(stored, place, align=1)
    else:
        mask = _first_lanes(builder, count)
        align = ir.Constant(I32, 1)
        name = f"llvm.masked.store.v{LANES}i{bits}.p0"
        call(builder, name, ir.VoidType(), stored, place, align, mask)


def load(builder: Any, kind: int, address: Any, count: Any = None) -> Any:
    """Load LANES numbers stored as `kind`.

    count: load only the first `count` lanes. The other lanes are 0.
    """
    return to_float32(builder, kind, read(builder, 8 * ITEM_SIZES[kind], address, count))


def to_float32(builder: Any, kind: int, stored: Any) -> Any:
    """Widen LANES stored numbers to float32."""
    if kind == FLOAT32:
        return builder.bitcast(stored, VECTOR)
    if kind == INT8:
        return builder.sitofp(builder.sext(stored, INTS), VECTOR)
    if kind == FLOAT16:
        return builder.fpext(builder.bitcast(stored, ir.VectorType(ir.HalfType(), LANES)), VECTOR)
    if kind == BFLOAT16:
        return builder.bitcast(builder.shl(builder.zext(stored, INTS), constant(16, INTS)), VECTOR)
    return builder.fmul(builder.fpext(e4m3_as_float16(builder, stored), VECTOR), constant(2.0**8))


def e4m3_as_float16(builder: Any, stored: Any) -> Any:
    """Widen e4m3fn numbers to float16, in units of 2^-8.

    The shifted bits are the float16 of the number in this unit, also for subnormal numbers. Widened to a
    subnormal float32, they would take a CPU a hundred times as long.
    """
    bits = ir.VectorType(ir.IntType(16), stored.type.count)
    # The sign bit is copied to the bit beside it, which is the exponent's highest.
    wide = builder.shl(builder.sext(stored, bits), ir.Constant(bits, [7] * bits.count))
    halves = builder.and_(wide, ir.Constant(bits, [0xBFFF] * bits.count))
    return builder.bitcast(halves, ir.VectorType(ir.HalfType(), bits.count))


def load_pairs(builder: Any, kind: int, first: Any, second: Any) -> Any:
    """Load LANES numbers from each of two addresses as pairs of bfloat16. bfloat16 must hold them exactly."""
    if kind != BFLOAT16:
        return pairs(builder, *(load(builder, kind, place) for place in (first, second)))
    rows = [read(builder, 16, place, None) for place in (first, second)]
    lanes = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
    both = builder.shuffle_vector(*rows, ir.Constant(ir.VectorType(ir.IntType(32), 2 * LANES), lanes))
    return builder.bitcast(both, VECTOR)


def pairs(builder: Any, x: Any, y: Any) -> Any:
    """Make pairs of bfloat16, each of a lane of x and a lane of y. bfloat16 must hold the numbers exactly."""
    low = builder.bitcast(x, INTS)
    high = builder.bitcast(y, INTS)
    return builder.bitcast(builder.or_(builder.lshr(low, constant(16, INTS)), high), VECTOR)


def store(builder: Any, kind: int, address: Any, x: Any, count: Any = None) -> None:
    """Store numbers rounded to `kind`. Ties round to even, for INT8 up.

    count: store only the first `count` lanes.
    """
    bits = _TO_BITS[kind](builder, x)
    _write(builder, 8 * ITEM_SIZES[kind], address, bits, count)


def _float32_bits(builder: Any, x: Any) -> Any:
    return builder.bitcast(x, INTS)


def _float16_bits(builder: Any, x: Any) -> Any:
    half = builder.fptrunc(x, ir.VectorType(ir.HalfType(), LANES))
    return builder.bitcast(half, ir.VectorType(ir.IntType(16), LANES))


def _bfloat16_bits(builder: Any, x: Any) -> Any:
    bits = builder.bitcast(x, INTS)
    odd = builder.and_(builder.lshr(bits, constant(16, INTS)), constant(1, INTS))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, constant(0x7FFF, INTS))), constant(16, INTS))
    return builder.select(builder.fcmp_unordered("uno", x, x), constant(0x7FC0, INTS), rounded)


def _int8_bits(builder: Any, x: Any) -> Any:
    """Return the nearest integers of an int8; the lowest for NaN."""
    whole = call(builder, f"llvm.floor.v{LANES}f32", VECTOR, builder.fadd(x, constant(0.5)))
    low = constant(-128.0)
    high = constant(127.0)
    whole = builder.select(builder.fcmp_ordered(">", whole, low), whole, low)
    return builder.fptosi(builder.select(builder.fcmp_ordered("<", whole, high), whole, high), INTS)


def _float8_bits(builder: Any, x: Any) -> Any:
    """Round to e4m3fn, in the lowest 8 bits; NaN from 480 on."""
    bits = builder.bitcast(x, INTS)
    magnitude = builder.and_(bits, constant(0x7FFFFFFF, INTS))
    odd = builder.and_(builder.lshr(magnitude, constant(20, INTS)), constant(1, INTS))
    rounded = builder.lshr(
        builder.add(magnitude, builder.add(odd, constant(0x7FFFF, INTS))), constant(20, INTS)
    )
    number = builder.sub(rounded, constant(120 << 3, INTS))
    # Numbers below 2^-6 are multiples of 2^-9; adding 2^14 rounds to these.
    shifted = builder.fadd(builder.bitcast(magnitude, VECTOR), constant(2.0**14))
    subnormal = builder.sub(builder.bitcast(shifted, INTS), constant((127 + 14) << 23, INTS))
    is_small = builder.icmp_unsigned("<", magnitude, constant((127 - 6) << 23, INTS))
    number = builder.select(is_small, subnormal, number)
    is_large = builder.icmp_unsigned(">=", magnitude, constant(0x43F00000, INTS))
    number = builder.select(is_large, constant(0x7F, INTS), number)
    return builder.or_(number, builder.and_(builder.lshr(bits, constant(24, INTS)), constant(0x80, INTS)))


_TO_BITS = (_float32_bits, _float16_bits, _bfloat16_bits, _int8_bits, _float8_bits)


def transpose(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose LANES vectors, exchanging blocks of 1, 2, 4, … lanes."""
    step = 1
    while step < LANES:
        low = [i if not i & step else i - step + LANES for i in range(LANES)]
        high = [i + step if not i & step else i + LANES for i in range(LANES)]
        for i in range(LANES):
            if not i & step:
                first, second = rows[i], rows[i + step]
                rows[i] = builder.shuffle_vector(first, second, ir.Constant(INTS, low))
                rows[i + step] = builder.shuffle_vector(first, second, ir.Constant(INTS, high))
        step *= 2
    return rows


def prefetch(builder: Any, address: Any, *, write: bool = False, near: bool = False) -> None:
    """Prefetch a cache line for reading or writing. Invalid addresses are ignored.

    Lines for reading go to the L2 cache, because prefetching to the L1 would use the core's few line fill
    buffers, which current loads need.

    near: whether to prefetch to the L1 nevertheless.
    """
    how = [ir.Constant(I32, n) for n in (int(write), 3 if write or near else 2, 1)]
    call(builder, "llvm.prefetch.p0i8", ir.VoidType(), pointer(builder, I8, address), *how)
