"""Random weights in codes, with every way in which files store factors."""

from __future__ import annotations

import torch
from torch import Tensor

from paged.model.weights.coded import CodedWeight, Factors

INTEGERS = tuple(float(code - 8) for code in range(16))
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
IQ4_NL = (
    -127.0,
    -104.0,
    -83.0,
    -65.0,
    -49.0,
    -35.0,
    -22.0,
    -10.0,
    1.0,
    13.0,
    25.0,
    38.0,
    53.0,
    69.0,
    89.0,
    113.0,
)
CODES = ("integers", "e2m1", "iq4_nl", "int8", "float8")
# By what files have them: a float for each group, alone or with a zero or an offset; or two levels.
FACTORS = (
    "float32", "float16", "bfloat16", "float16 and zero", "bfloat16 and zero", "float16 and offset",
    "two levels", "two levels and offset", "float8 in a unit for each output",
)  # fmt: skip


def is_stored(codes: str, factors: str) -> bool:
    """Return whether there are weights with these codes and factors: zeros and offsets go with integers."""
    return codes in ("integers", "int8") or not ("zero" in factors or "offset" in factors)


def random_coded(codes: str, factors: str, num_rows: int, num_inputs: int, group: int) -> CodedWeight:
    """Make a weight of any numbers, subnormal and negative ones too."""
    shape = num_rows, num_inputs
    table = {"integers": INTEGERS, "e2m1": E2M1, "iq4_nl": IQ4_NL}.get(codes)
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
    return Factors(scale, scale_unit=torch.rand(num_rows, 1))


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Compare bits, as 0.0 equals -0.0."""
    return x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
