"""Products and lookups of weights in codes by Triton, against float64 of the numbers that formats define."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paged.checkpoints.coded import CodedWeight, Factors
from paged.kernels.codes import PackedCodes, can_pack_codes, coded_linear, pack_codes, take_coded_rows
from paged.kernels.gpu.attention.config import FAMILIES
from paged.kernels.gpu.linear.config import linear_config, row_count, split_tiles
from tests.support.coded_weights import coded_weight
from tests.support.error_bounds import assert_product
from tests.support.kernel_cases import DEVICE


def on_device(weight: CodedWeight) -> CodedWeight:
    factors = Factors(*(x if x is None else x.to(DEVICE) for x in weight.factors))
    return replace(weight, stored=weight.codes.to(DEVICE), factors=factors)


def packed(weight: CodedWeight) -> PackedCodes:
    assert can_pack_codes(weight.codes, weight.factors.scale, weight.table)
    return pack_codes(weight.codes, *weight.factors, table=weight.table)


# Kind, outputs, inputs, inputs of a group, and rows: groups of every size, and all inputs; ragged tiles of
# inputs, outputs and rows; one split and several.
CASES = [
    ("gptq", (40, 256, 32), 3),
    ("q4_0", (33, 96, 32), 18),
    ("q4_1", (16, 160, 32), 2),
    ("q4_k", (16, 256, 32), 5),
    ("q4_k units", (24, 512, 32), 5),
    ("iq4_nl", (16, 96, 32), 4),
    ("mxfp4", (40, 96, 32), 17),
    ("nvfp4", (16, 272, 16), 7),
    ("int4", (16, 64, 32), 2),
    ("int8", (35, 100, 100), 66),
    ("q8_0", (16, 96, 32), 3),
    ("q6_k", (16, 256, 16), 3),
    ("e4m3", (50, 256, 128), 2),
    ("gptq", (17, 384, 128), 33),
    ("gptq", (16, 144, 144), 1),
    ("int8", (16, 192, 64), 2),
    ("q4_0", (16, 240, 48), 2),
    ("e4m3", (35, 200, 200), 17),
]
EVERY_KIND = CASES[:13]
on_gpu = pytest.mark.gpu  # the interpreter truncates to bfloat16
PRODUCTS = [
    *[pytest.param(*case, torch.float32, id=f"{case} float32") for case in CASES],
    *[pytest.param(*case, torch.float16, id=f"{case} float16") for case in CASES[::4]],
    *[pytest.param(*case, torch.bfloat16, id=f"{case} bfloat16", marks=on_gpu) for case in CASES],
]


@pytest.mark.parametrize(("kind", "shape", "num_rows", "dtype"), PRODUCTS)
def test_products_match_float64(kind, shape, num_rows, dtype):
    """Of the weight that the format defines, rounded once; NaN beside the rows, and in one, stays there."""
    weight = on_device(coded_weight(kind, *shape))
    memory = torch.randn(num_rows + 1, shape[1] + 3, device=DEVICE).to(dtype)
    x = memory[:, :-3]
    memory[:, -3:] = memory[-1] = torch.nan
    bias = torch.randn(shape[0], device=DEVICE).to(dtype) if num_rows % 2 else None
    out_dtype = torch.float32 if num_rows % 3 else None
    got = coded_linear(x, packed(weight), bias, out_dtype)
    assert got.dtype == (out_dtype or dtype)
    assert_product(got[:-1], x[:-1], weight.floats().to(dtype), bias)
    assert got[-1].isnan().all()


@pytest.mark.parametrize(("kind", "shape"), [case[:2] for case in EVERY_KIND], ids=str)
def test_rows_are_those_of_the_format(kind, shape):
    weight = on_device(coded_weight(kind, *shape))
    indices = torch.tensor([shape[0] - 1, 3, 3], device=DEVICE)
    dtype = torch.float16 if kind == "q4_1" else torch.float32
    rows = take_coded_rows(packed(weight), indices, dtype)
    assert torch.equal(rows, weight.floats()[indices].to(dtype))


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(x, marks=on_gpu) for x in (torch.float16, torch.bfloat16))],
    ids=str,
)
def test_a_row_has_the_same_bits_in_any_batch(dtype):
    """Whether splits of the inputs are added by one program or by a kernel of their own."""
    num_inputs = 4096 if DEVICE == "cuda" else 256  # 8 splits, or 4 in the interpreter
    weight = packed(on_device(coded_weight("int8", 16, num_inputs, 64)))
    x = torch.randn(513, num_inputs, device=DEVICE).to(dtype)
    bias = torch.randn(16, device=DEVICE).to(dtype)
    company = coded_linear(x, weight, bias)
    for rows in (slice(0, 1), slice(7, 24), slice(100, 165)):
        assert torch.equal(coded_linear(x[rows], weight, bias), company[rows])


def test_splits_follow_from_the_weight_alone():
    """Each has as many tiles; a GPU is filled by few rows, if each split has 512 inputs then."""
    for num_outputs, num_inputs, expected in [
        (4096, 4096, 4),
        (4096, 14336, 4),
        (1024, 4096, 8),
        (28672, 4096, 1),
        (2048, 512, 1),
    ]:
        assert -(-num_inputs // 128 // split_tiles(num_outputs, num_inputs // 128, 128, "sm_90")) == expected
    for target in ("sm_80", "gfx942"):
        assert split_tiles(4096, 32, 128, target) == split_tiles(4096, 32, 128, "sm_90")


@pytest.mark.parametrize("target", FAMILIES)
def test_every_target_has_tiles_for_every_batch(target):
    for dtype in (torch.float32, torch.bfloat16):
        for num_rows in (1, 16, 17, 64, 65, 512, 513, 10**6):
            config = linear_config(dtype, row_count(num_rows), target)
            assert config.BLOCK_M >= 16
    with pytest.raises(ValueError, match=r"made for sm_80, .*, this is sm_75"):
        linear_config(torch.bfloat16, "few", "sm_75")


def test_wrong_inputs_are_named():
    weight = packed(on_device(coded_weight("gptq", 16, 64, 32)))
    x = torch.randn(2, 64, device=DEVICE)
    with pytest.raises(ValueError, match=r"x must have shape \[any, 64\]"):
        coded_linear(x[:, 1:], weight)
    with pytest.raises(ValueError, match="x must be one of"):
        coded_linear(x.double(), weight)
    with pytest.raises(ValueError, match="x must be contiguous in its last dimension"):
        coded_linear(torch.randn(64, 2, device=DEVICE).T, weight)
    with pytest.raises(ValueError, match=r"bias must have shape \[16\]"):
        coded_linear(x, weight, torch.ones(15, device=DEVICE))
    with pytest.raises(ValueError, match=r"out_dtype must be None, torch\.float32"):
        coded_linear(x, weight, None, torch.float16)
    with pytest.raises(ValueError, match=r"indices must be torch\.int64"):
        take_coded_rows(weight, torch.zeros(1, device=DEVICE), torch.float32)
    if DEVICE == "cpu":  # on a GPU what tensors hold is not checked
        with pytest.raises(ValueError, match="indices must be between 0 and 15"):
            take_coded_rows(weight, torch.tensor([16]), torch.float32)
    codes = torch.zeros(4, 48, dtype=torch.uint8)
    with pytest.raises(ValueError, match="the inputs of a group must be a multiple"):
        pack_codes(codes, torch.ones(4, 2), table=tuple(range(16)))
    with pytest.raises(ValueError, match="table must hold 16 integers of 8 bits"):
        pack_codes(codes, torch.ones(4, 1), table=tuple(i / 3 for i in range(16)))
    with pytest.raises(ValueError, match=r"codes must be one of torch\.int8, torch\.float8_e4m3fn"):
        pack_codes(codes, torch.ones(4, 1))
