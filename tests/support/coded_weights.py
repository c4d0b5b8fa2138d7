"""Weights in codes of every kind, with awkward factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged.model.weights.coded import CodedWeight, Factors

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
INTEGERS = tuple(range(16))
CENTRED = tuple(range(-8, 8))


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
