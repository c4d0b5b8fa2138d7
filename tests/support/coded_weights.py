"""Random weights in codes: with every way in which files store factors, and those of the formats."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged.checkpoints.coded import CodedWeight, Factors

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
IQ4_NL = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))
INTEGERS = tuple(map(float, range(16)))
CENTRED = tuple(map(float, range(-8, 8)))


def coded_weight(kind: str, num_outputs: int, num_inputs: int, group: int) -> CodedWeight:
    """Make a weight with every code and awkward factors: of both signs, subnormal and large."""
    size = num_outputs, num_inputs // group
    scale = torch.randn(size) / 16
    scale.view(-1)[::7] *= 1e-6
    byte = torch.randint(0, 256, (num_outputs, num_inputs), dtype=torch.uint8)
    codes: Tensor = byte & 15
    half = scale.half()
    units = torch.rand(num_outputs, max(1, num_inputs // 256)).half() / 64
    table, factors = {
        "gptq": (INTEGERS, Factors(half, torch.randint(0, 17, size, dtype=torch.uint8))),
        "q4_0": (CENTRED, Factors(half)),
        "q4_1": (INTEGERS, Factors(half, offset=torch.randn(size).half())),
        "int4": (CENTRED, Factors(scale.bfloat16(), offset=torch.randn(size).bfloat16())),
        "q4_k": (INTEGERS, Factors(half.float() * 21, offset=torch.randn(size))),
        "q4_k units": (
            INTEGERS,
            Factors(
                torch.randint(0, 64, size, dtype=torch.uint8),
                offset=torch.randint(0, 64, size, dtype=torch.uint8),
                scale_unit=units,
                offset_unit=-units.flip(0),
            ),
        ),
        "iq4_nl": (IQ4_NL, Factors(half)),
        "mxfp4": (E2M1, Factors(torch.exp2(torch.randint(-127, 4, size).float()).to(torch.float8_e8m0fnu))),
        "nvfp4": (E2M1, Factors(e4m3_of(size), scale_unit=torch.rand(num_outputs, 1) / 448)),
        "int8": (None, Factors(scale.bfloat16())),
        "q8_0": (None, Factors(half)),
        "q6_k": (None, Factors(torch.randint(-128, 128, size, dtype=torch.int8), scale_unit=units)),
        "e4m3": (None, Factors(scale)),
    }[kind]
    if table is None:
        codes = e4m3_of(byte.shape) if kind == "e4m3" else byte.view(torch.int8)
    return CodedWeight(codes, factors, table)


def e4m3_of(size: Sequence[int]) -> Tensor:
    """Make any numbers of e4m3 but NaN, the largest and subnormal ones among them."""
    numbers = torch.randint(0, 254, tuple(size), dtype=torch.uint8)
    return (numbers + (numbers >= 127)).view(torch.float8_e4m3fn)


CODES = ("integers", "e2m1", "iq4_nl", "int8", "float8")
# By what files have them: a float for each group, alone or with a zero or an offset; or two levels.
FACTORS = (
    "float32", "float16", "bfloat16", "float16 and zero", "bfloat16 and zero", "float16 and offset",
    "two levels", "two levels and offset", "float8 in a unit for each output", "float8 and a divisor",
)  # fmt: skip


def is_stored(codes: str, factors: str) -> bool:
    """Return whether there are weights with these codes and factors: zeros and offsets go with integers."""
    return codes in ("integers", "int8") or not ("zero" in factors or "offset" in factors)


def random_coded(codes: str, factors: str, num_rows: int, num_inputs: int, group: int) -> CodedWeight:
    """Make a weight of any numbers, subnormal and negative ones too."""
    shape = num_rows, num_inputs
    table = {"integers": CENTRED, "e2m1": E2M1, "iq4_nl": IQ4_NL}.get(codes)
    if codes == "int8":
        numbers = torch.randint(-128, 128, shape, dtype=torch.int8)
    elif codes == "float8":
        numbers = torch.randint(0, 256, shape, dtype=torch.uint8)
        numbers = torch.where((numbers & 127) == 127, 3, numbers).view(torch.float8_e4m3fn)
    else:
        numbers = torch.randint(0, 16, shape, dtype=torch.uint8)
    return CodedWeight(numbers, _factors(factors, num_rows, num_inputs // group), table)


def _factors(name: str, num_rows: int, num_groups: int) -> Factors:
    groups = num_rows, num_groups
    units = num_rows, num_groups // 2 if num_groups % 2 == 0 else 1
    floats = torch.randn(groups) / 32
    if name in ("float32", "float16", "bfloat16"):
        return Factors(floats.to(getattr(torch, name)))
    if name == "float16 and zero":
        return Factors(floats.abs().half(), zero=torch.randint(0, 16, groups, dtype=torch.uint8))
    if name == "bfloat16 and zero":
        return Factors(floats.abs().bfloat16(), zero=torch.randint(-128, 129, groups, dtype=torch.int16))
    if name == "float16 and offset":
        return Factors(floats.half(), offset=torch.randn(groups).half())
    if name == "two levels":
        return Factors(
            torch.randint(-128, 128, groups, dtype=torch.int8), scale_unit=torch.randn(units).half()
        )
    if name == "two levels and offset":
        scale, offset = torch.randint(0, 64, (2, *groups), dtype=torch.uint8)
        scale_unit, offset_unit = torch.randn(2, *units).half()
        return Factors(scale, offset=offset, scale_unit=scale_unit, offset_unit=offset_unit)
    scale = torch.randint(0, 127, groups, dtype=torch.uint8).view(torch.float8_e4m3fn)
    if name == "float8 and a divisor":
        signed = torch.where(torch.rand(groups) < 0.2, -scale.float(), scale.float()).to(scale.dtype)
        return Factors(signed, scale_divisor=torch.randn(2).repeat_interleave(num_rows // 2)[:, None] * 5000)
    return Factors(scale, scale_unit=torch.rand(num_rows, 1))


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Compare bits, as 0.0 equals -0.0."""
    return x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
