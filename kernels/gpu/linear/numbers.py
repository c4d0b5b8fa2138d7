"""The numbers that codes stand for, in registers."""

from typing import NamedTuple

import triton
import triton.language as tl


class CodeKind(NamedTuple):
    """The format of codes, as constants of a specialisation."""

    NUMBERS: str  # "integers", "e2m1" or "table", of 4 bits; "int8" or "e4m3"
    FIRST: int  # of "integers": what code 0 stands for; the others follow
    TABLE: tuple[int, ...]  # of "table": 16 integers of 8 bits, four in each word
    PER_WORD: int  # codes in 32 bits
    SUB: int  # words of a tile of inputs, and inputs of a tl.dot: those of the i-th codes of these words
    E4M3_SCALES: bool  # scales are e4m3, in the bits of u8
    HAS_E4M3: bool  # the target converts e4m3 by an instruction


@triton.jit
def numbers_of(words, i: tl.constexpr, kind: tl.constexpr):
    """Return the numbers, in float32, of the i-th code in each word."""
    if kind.NUMBERS == "int8":
        numbers = (words << (24 - 8 * i) >> 24).to(tl.float32)
    elif kind.NUMBERS == "e4m3":
        numbers = e4m3_numbers(words >> 8 * i, kind.HAS_E4M3)
    elif kind.NUMBERS == "integers":
        numbers = ((words >> 4 * i & 15) + kind.FIRST).to(tl.float32)
    elif kind.NUMBERS == "e2m1":
        numbers = _e2m1_numbers(words >> 4 * i)
    else:
        numbers = _table_numbers(words >> 4 * i, kind)
    return numbers


@triton.jit
def e4m3_numbers(codes, HAS_E4M3: tl.constexpr):
    """Return float8_e4m3fn numbers, given in the lowest 8 bits, in float32. NaN must not occur."""
    if HAS_E4M3:
        numbers = codes.to(tl.int8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # In float16 the same exponent stands for 2^-8 of it. Subnormal numbers convert exactly.
        bits = (codes & 0x80) << 8 | (codes & 0x7F) << 7
        numbers = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return numbers


@triton.jit
def _e2m1_numbers(codes):
    """Return the numbers, in float32, of float4_e2m1fn in the lowest 4 bits."""
    # In float16 the same exponent stands for 2^-14 of it.
    bits = (codes & 8) << 12 | (codes & 7) << 9
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def _table_numbers(codes, kind: tl.constexpr):
    """Return the integers of 8 bits, in float32, that a table has for the lowest 4 bits."""
    low = tl.where(codes & 4 == 0, kind.TABLE[0], kind.TABLE[1])
    high = tl.where(codes & 4 == 0, kind.TABLE[2], kind.TABLE[3])
    four = tl.where(codes & 8 == 0, low, high)
    return (four << (24 - 8 * (codes & 3)) >> 24).to(tl.float32)
