"""Routing and products of experts by Triton, against the reference and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paged.checkpoints.coded import CodedWeight
from paged.kernels import reference
from paged.kernels.backend import load_kernels
from paged.kernels.checks import TrustedContents
from paged.kernels.codes import (
    PackedCodes,
    PackedExperts,
    coded_linear,
    grouped_coded_linear,
    pack_codes,
    stack_codes,
)
from paged.kernels.routing import ExpertRows, RoutingOptions
from tests.support.coded_weights import coded_weight
from tests.support.error_bounds import U32, assert_product, assert_within
from tests.support.kernel_cases import DEVICE

triton = load_kernels("triton")
on_gpu = pytest.mark.gpu  # the interpreter truncates to bfloat16
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=on_gpu)]

# How many experts there are, and how they are chosen.
ROUTING = [
    (16, RoutingOptions(num_chosen=3, renormalise=True)),
    (8, RoutingOptions(num_chosen=8)),
    (36, RoutingOptions(num_chosen=4, score="softmax_of_chosen")),
    (20, RoutingOptions(num_chosen=4, score="sigmoid", renormalise=True, epsilon=1e-20, scale=2.5)),
    (
        24,
        RoutingOptions(
            num_chosen=4, score="sigmoid", num_groups=6, num_kept_groups=2, group_score="best_two"
        ),
    ),
    (21, RoutingOptions(num_chosen=5, num_groups=3, num_kept_groups=2)),
    (1, RoutingOptions(num_chosen=1, score="sigmoid")),
    (15, RoutingOptions(num_chosen=4, num_groups=5, num_kept_groups=5, renormalise=True, epsilon=1e-6)),
]


def awkward_logits(num_experts: int) -> Tensor:
    """Logits in steps of a quarter, so that rounding decides between none but equal ones."""
    logits = torch.randn(7, num_experts, device=DEVICE).mul(8).round() / 4
    logits[1] = 0
    logits[1, 1::2] = -0.0
    logits[2, ::3] = -torch.inf
    logits[3, num_experts // 2] = torch.nan
    logits[3, -1] = torch.tensor(-(2**22), dtype=torch.int32).view(torch.float32)  # NaN with a sign
    logits[4, 1:] = -torch.inf
    logits[5, num_experts // 3] = torch.inf
    logits[6] *= 2.0**-130  # subnormal
    return logits


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of infinite logits
@pytest.mark.parametrize("with_tensors", [False, True], ids="with_tensors={}".format)
@pytest.mark.parametrize(
    ("num_experts", "options"),
    ROUTING,
    ids=[f"{chosen.num_chosen}-of-{n}-{chosen.score}" for n, chosen in ROUTING],
)
def test_routing_is_that_of_the_reference(num_experts, options, with_tensors):
    """Ties, infinities, NaN and subnormal logits too; the first columns of a wider matrix."""
    logits = torch.full((7, num_experts + 3), torch.nan, device=DEVICE)[:, :num_experts]
    logits.copy_(awkward_logits(num_experts))
    bias, scales = torch.rand(2, num_experts, device=DEVICE) if with_tensors else (None, None)
    experts, weights = triton.route(logits, options, bias, scales)
    assert torch.equal(experts, reference.route(logits, options, bias, scales)[0])
    assert experts.dtype == torch.int32
    wide = (x if x is None else x.double() for x in (bias, scales))
    exact = reference.route(logits.double(), options, *wide)[1]
    finite = exact.isfinite()
    assert torch.equal(finite, weights.isfinite())
    assert_within(weights[finite], exact[finite], (num_experts + 40) * U32 * exact[finite].abs())


def rows_of(counts: list[int], num_tokens: int) -> ExpertRows:
    """Make rows of so many tokens for each expert, as if tokens had chosen any number of them."""
    sources = torch.cat([torch.randperm(num_tokens)[:count].sort().values for count in counts])
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    return ExpertRows(sources.to(DEVICE), torch.empty(0), offsets.to(DEVICE))


# No rows, one, all, and 17: more than a tile's; one expert more than rows; one expert alone.
COUNTS = {
    "none, one and 17": [0, 1, 17, 0, 3],
    "all of one": [0, 0, 33],
    "an expert more than rows": [1, 1, 0, 1, 1],
    "one expert": [5],
}


def company(counts: list[int], num_inputs: int, dtype: torch.dtype) -> tuple[Tensor, ExpertRows]:
    """Make x, a view with NaN behind its rows and in a row that no expert has, and the rows of experts."""
    num_tokens = max(counts)
    memory = torch.randn(num_tokens + 1, num_inputs + 5, device=DEVICE).to(dtype)
    memory[:, num_inputs:] = memory[-1] = torch.nan
    return memory[:, :num_inputs], rows_of(counts, num_tokens)


def assert_products(got: Tensor, x: Tensor, rows: ExpertRows, weight: Tensor, bias: Tensor | None) -> None:
    bounds = rows.offsets.tolist()
    assert len(got) == bounds[-1]
    for expert, own in enumerate(weight):
        mine = slice(bounds[expert], bounds[expert + 1])
        if mine.start < mine.stop:
            assert_product(got[mine], x[rows.sources[mine]], own, None if bias is None else bias[expert])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_products_match_float64(counts, dtype):
    """With sources and then, on their products, without; outputs and inputs fill no tile."""
    x, rows = company(counts, 45, dtype)
    weight = torch.randn(len(counts), 35, 45, device=DEVICE).to(dtype)
    bias = torch.randn(len(counts), 35, device=DEVICE).to(dtype)
    got = triton.grouped_linear(x, weight, rows.offsets, rows.sources, bias)
    assert_products(got, x, rows, weight, bias)
    second = torch.randn(len(counts), 20, 35, device=DEVICE).to(dtype)
    itself = rows._replace(sources=torch.arange(len(got), device=DEVICE))
    assert_products(triton.grouped_linear(got, second, rows.offsets), got, itself, second, None)


CODED = [
    ("mxfp4", (40, 96, 32)),  # the last tile of inputs is half empty
    ("int8", (35, 100, 100)),
    ("int4", (16, 64, 32)),
    ("gptq", (17, 384, 128)),
    ("q4_k units", (24, 512, 32)),
    ("iq4_nl", (16, 96, 32)),
    ("nvfp4", (16, 272, 16)),
    ("q6_k", (16, 512, 16)),
    ("e4m3", (50, 256, 128)),
]


def coded_experts(
    kind: str, shape: tuple[int, int, int], num: int
) -> tuple[list[CodedWeight], PackedExperts]:
    weights = [coded_weight(kind, *shape) for _ in range(num)]
    return weights, stack_codes(map(packed_of, weights), num)


def packed_of(weight: CodedWeight) -> PackedCodes:
    factors = (x if x is None else x.to(DEVICE) for x in weight.factors)
    return pack_codes(weight.codes.to(DEVICE), *factors, table=weight.table)


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    [
        *[pytest.param(*case, torch.float32, id=f"{case[0]} float32") for case in CODED],
        *[pytest.param(*case, torch.float16, id=f"{case[0]} float16") for case in CODED[:3]],
        *[pytest.param(*case, torch.bfloat16, id=f"{case[0]} bfloat16", marks=on_gpu) for case in CODED],
    ],
)
def test_products_of_codes_match_float64(kind, shape, dtype):
    """Of the weights that the format defines, rounded once; also of experts with no rows, one and 17."""
    counts = COUNTS["none, one and 17"]
    x, rows = company(counts, shape[1], dtype)
    weights, packed = coded_experts(kind, shape, len(counts))
    weight = torch.stack([weight.floats().to(DEVICE) for weight in weights]).to(dtype)
    bias = torch.randn(len(counts), shape[0], device=DEVICE).to(dtype) if shape[0] % 2 == 0 else None
    got = grouped_coded_linear(x, packed, rows.offsets, rows.sources, bias)
    assert_products(got, x, rows, weight, bias)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
@pytest.mark.parametrize("options", [RoutingOptions(num_chosen=2), ROUTING[4][1]], ids=["plain", "groups"])
def test_rows_that_pad_a_step_have_no_experts(options):
    """Whatever they hold: no product computes them, and sums read what is in bounds."""
    num_experts, count = 24, torch.tensor([3], dtype=torch.int32, device=DEVICE)
    logits = torch.randn(8, num_experts, device=DEVICE)
    logits[3:] = torch.nan
    experts, weights = triton.route(logits, options, count=count)
    assert torch.equal(experts[:3], triton.route(logits[:3], options)[0])
    assert (experts[3:] == num_experts).all()
    assert torch.equal(experts, reference.route(logits, options, count=count)[0])
    with TrustedContents():
        adapters = torch.ones(8, dtype=torch.int32, device=DEVICE)
        rows = triton.sort_by_expert(experts, num_experts, adapters)
        alone = triton.sort_by_expert(experts[:3], num_experts)
    assert torch.equal(rows.offsets, alone.offsets)
    num_real = 3 * options.num_chosen
    assert rows.adapters.lt(0).tolist() == [row >= num_real for row in range(8 * options.num_chosen)]
    expected = reference.sort_by_expert(experts, num_experts, adapters).adapters
    assert torch.equal(rows.adapters, expected)
    assert torch.equal(rows.sources[:num_real], alone.sources)
    assert rows.places.flatten().sort().values.tolist() == [*range(8 * options.num_chosen)]
    weight = torch.randn(num_experts, 32, 32, device=DEVICE)
    x = torch.randn(8, 32, device=DEVICE)
    with TrustedContents():
        products = triton.grouped_linear(x, weight, rows.offsets, rows.sources)
    of_alone = triton.grouped_linear(x[:3], weight, alone.offsets, alone.sources)
    assert torch.equal(
        triton.sum_experts(products, rows.places, weights)[:3],
        triton.sum_experts(of_alone, alone.places, weights[:3].contiguous()),
    )


@pytest.mark.parametrize("kind", ["numbers", "int8"])
def test_a_row_has_the_same_bits_in_any_company(kind):
    """Alone, and among rows of other tokens, whichever experts these have: after routing, with all sums."""
    num_experts, size = 4, 64
    weights = torch.randn(num_experts, size, size, device=DEVICE)
    _, packed = coded_experts("int8", (size, size, 64), num_experts)

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        experts, shares = triton.route(logits, RoutingOptions(num_chosen=2))
        rows = triton.sort_by_expert(experts, num_experts)
        if kind == "numbers":
            products = triton.grouped_linear(x, weights, rows.offsets, rows.sources)
        else:
            products = grouped_coded_linear(x, packed, rows.offsets, rows.sources)
        return triton.sum_experts(products, rows.places, shares)

    x = torch.randn(22, size, device=DEVICE)
    logits = torch.randn(22, num_experts, device=DEVICE)
    together = layer(x, logits)
    for own in (slice(0, 1), slice(7, 10)):
        assert torch.equal(layer(x[own], logits[own]), together[own])
    others = torch.cat([logits[:9], torch.randn(13, num_experts, device=DEVICE)])
    assert torch.equal(layer(x, others)[:9], together[:9])


def test_unsplit_codes_have_the_bits_of_the_dense_product():
    """The same tiles of inputs in the same order: an expert is a linear layer."""
    counts = [2, 0, 18]
    x, rows = company(counts, 96, torch.float32)
    weights, packed = coded_experts("int4", (64, 96, 32), len(counts))
    got = grouped_coded_linear(x, packed, rows.offsets, rows.sources)
    for expert, weight in enumerate(weights):
        mine = slice(*rows.offsets[expert : expert + 2].tolist())
        dense = packed_of(weight)
        assert torch.equal(got[mine], coded_linear(x[rows.sources[mine]], dense))


def test_rows_of_several_blocks_are_sorted():
    experts = torch.stack([torch.randperm(5)[:4].sort().values for _ in range(1100)]).int().to(DEVICE)
    adapters = torch.randint(-1, 4, (1100,), dtype=torch.int32, device=DEVICE)
    got = triton.sort_by_expert(experts, 5, adapters)
    for own, expected in zip(got, reference.sort_by_expert(experts, 5, adapters), strict=True):
        assert torch.equal(own, expected)


def test_no_tokens_make_no_rows():
    options = RoutingOptions(num_chosen=2)
    experts, weights = triton.route(torch.empty(0, 3, device=DEVICE), options)
    rows = triton.sort_by_expert(experts, 3)
    assert rows.offsets.tolist() == [0, 0, 0, 0]
    x = torch.empty(0, 16, device=DEVICE)
    products = triton.grouped_linear(x, torch.ones(3, 24, 16, device=DEVICE), rows.offsets, rows.sources)
    assert triton.sum_experts(products, rows.places, weights).shape == (0, 24)


def test_wrong_weights_of_experts_are_named():
    _, packed = coded_experts("int8", (16, 64, 32), 2)
    x = torch.randn(3, 64, device=DEVICE)
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"x must have shape \[any, 64\]"):
        grouped_coded_linear(x[:, 1:], packed, offsets)
    with pytest.raises(ValueError, match=r"offsets must have shape \[3\]"):
        grouped_coded_linear(x, packed, offsets[1:])
    with pytest.raises(ValueError, match=r"bias must have shape \[2, 16\]"):
        grouped_coded_linear(x, packed, offsets, None, torch.ones(2, 15, device=DEVICE))
    with pytest.raises(ValueError, match="weight must be contiguous"):
        triton.grouped_linear(x, torch.randn(2, 64, 16, device=DEVICE).mT, offsets)
    if DEVICE == "cpu":  # on a GPU what tensors hold is not checked
        with pytest.raises(ValueError, match="offsets must ascend from 0 to the 3 rows"):
            grouped_coded_linear(x, packed, offsets + 1)
    single = pack_codes(torch.zeros(16, 64, dtype=torch.int8), torch.ones(16, 1))
    double = pack_codes(torch.zeros(16, 64, dtype=torch.int8), torch.ones(16, 2))
    with pytest.raises(ValueError, match="expert 1 must be packed as"):
        stack_codes([single, double], 2)
    for num_experts in (1, 3):
        with pytest.raises(ValueError, match=f"there must be weights of {num_experts} experts, got 2"):
            stack_codes([single, single], num_experts)
