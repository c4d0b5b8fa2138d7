"""Mixtures of experts: routing, grouped products and their sums."""

import math

import pytest
import torch
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from paged.kernels import reference
from paged.kernels.backend import load_kernels
from paged.kernels.expert_panels import ExpertPanels, grouped_panel_linear
from paged.kernels.panels import linear, pad
from paged.kernels.routing import RoutingOptions
from paged.model.weights.coded_panels import PANEL_FORMS
from tests.support.checkpoints import CONFIGS
from tests.support.error_bounds import U32, assert_product, assert_within, unit_roundoff
from tests.support.kernel_cases import DEVICE, IMPLEMENTATIONS, on_cpu

BACKENDS = [pytest.param("numba", marks=on_cpu), "torch", "triton"]


def awkward_logits(num_experts: int) -> Tensor:
    """Random logits, then ties, infinities, subnormal and huge ones, and rows with a NaN."""
    x = torch.randn(12, num_experts)
    x[1] = x[1].round()
    x[2] = 1.0
    x[3] = 0.0
    x[3, 1::2] = -0.0
    x[4, 2] = math.inf
    x[5] = -math.inf
    x[6, 1:] = -math.inf
    x[7] *= 1e-40
    x[8] *= 1e30
    x[9, 3] = math.nan
    x[10] = math.nan
    x[11] = 20 + torch.arange(num_experts) % 2  # the sigmoid is 1 of all
    return x


def every_options() -> list[RoutingOptions]:
    """Each value of every switch, in few combinations."""
    renormalised = {"renormalise": True, "scale": 1.7}
    return [
        RoutingOptions(num_chosen=num_chosen, score=score, **groups, **more)
        for score in ("softmax", "sigmoid", "softmax_of_chosen")
        for num_chosen, groups in (
            (3, {}),
            (2, {"num_groups": 4, "num_kept_groups": 2}),
            (4, {"num_groups": 2, "num_kept_groups": 1, "group_score": "best_two"}),
        )
        for more in ({}, renormalised, {**renormalised, "epsilon": 1e-6}, {**renormalised, "epsilon": 1e-20})
    ]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of infinite logits, in the interpreter
@pytest.mark.parametrize("name", BACKENDS)
def test_routing_is_that_of_the_reference(name):
    """The same experts, and weights that are off by the roundings of e^x and a sum at most."""
    kernels = load_kernels(name)
    torch.manual_seed(0)
    for num_experts in (8, 36, 128):
        logits = awkward_logits(num_experts).to(DEVICE)
        for i, options in enumerate(every_options()):
            if name == "triton" and i % 5:  # the interpreter is slow
                continue
            bias = torch.randn(num_experts, device=DEVICE) if i % 2 else None
            scales = torch.rand(num_experts, device=DEVICE) if i % 3 == 0 else None
            experts, weights = kernels.route(logits, options, bias, scales)
            expected, exact = reference.route(logits.double().float(), options, bias, scales)
            if bias is None or options.score == "sigmoid":  # else scores that differ in their last bits
                assert torch.equal(experts, expected), options
            assert ((experts >= 0) & (experts < num_experts)).all()
            assert (experts.diff(dim=1) > 0).all()
            same = (experts == expected).all(1)
            torch.testing.assert_close(weights[same], exact[same], rtol=2e-6, atol=1e-37, equal_nan=True)
            assert weights[10].isnan().all()
            alone = kernels.route(logits[3:4].contiguous(), options, bias, scales)
            assert torch.equal(alone[1], weights[3:4])


def routers() -> dict[str, tuple[type, str, RoutingOptions]]:
    softmax = RoutingOptions(num_chosen=3, renormalise=True)
    of_chosen = RoutingOptions(num_chosen=3, score="softmax_of_chosen")
    glm = RoutingOptions(
        num_chosen=3,
        score="sigmoid",
        num_groups=4,
        num_kept_groups=2,
        group_score="best_two",
        renormalise=True,
        epsilon=1e-20,
        scale=1.5,
    )
    return {
        "qwen3_moe": (Qwen3MoeTopKRouter, "qwen3_moe", softmax),
        "granitemoe": (GraniteMoeTopKRouter, "granitemoe", of_chosen),
        "gpt_oss": (GptOssTopKRouter, "gpt_oss", of_chosen),
        "glm4_moe": (Glm4MoeTopkRouter, "glm4_moe", glm),
        "minimax_m2": (
            MiniMaxM2TopKRouter,
            "minimax_m2",
            RoutingOptions(num_chosen=3, score="sigmoid", renormalise=True),
        ),
        "gemma4": (Gemma4TextRouter, "gemma4-experts", softmax),
    }


@pytest.mark.parametrize("name", routers())
def test_reference_routes_as_transformers(name):
    """A router whose weight is the identity chooses by its input. torch breaks ties in any way."""
    make, config, options = routers()[name]
    config = CONFIGS[config]()
    config.hidden_size = 8
    router = make(config)
    bias = 0.1 * torch.randn(8)
    scales = None
    x = torch.cat([torch.randn(200, 8), awkward_logits(8)[6:9]])
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.zero_()
        if name == "gemma4":
            router.proj.weight.copy_(torch.eye(8))
            router.scale.fill_(1.0)
            scales = 1 + torch.rand(8)
            router.per_expert_scale.copy_(scales)
            logits = router.norm(x) * 8**-0.5
            _, theirs, chosen = router(x)
        else:
            router.weight.copy_(torch.eye(8))
            logits = x.nan_to_num(neginf=-1e30)
            if name == "glm4_moe":
                router.e_score_correction_bias.copy_(bias)
            _, theirs, chosen = router(logits, *((bias,) if name == "minimax_m2" else ()))
    uses_bias = options.score == "sigmoid"
    experts, weights = reference.route(logits, options, bias if uses_bias else None, scales)
    order = chosen.argsort(dim=1)
    same = (chosen.gather(1, order) == experts).all(1)
    assert same[:200].all()
    torch.testing.assert_close(weights[same], theirs.gather(1, order)[same])


# Rows of each expert: some have none; all have one; one has all; one expert more than rows.
COUNTS = {
    "ragged": (3, 0, 1, 70, 17),
    "one-has-all": (0, 0, 9, 0, 0),
    "one-row": (0, 0, 0, 0, 1),
    "none": (0, 0, 0, 0, 0),
    "each-one": (1, 1, 1, 1, 0),
}


def rows_of(counts: tuple[int, ...]) -> tuple[Tensor, Tensor, int]:
    offsets = torch.tensor([0, *counts]).cumsum(0).int()
    num_rows = int(offsets[-1])
    num_tokens = num_rows // 2 + 1
    sources = torch.randint(num_tokens, (num_rows,))
    return offsets.to(DEVICE), sources.to(DEVICE), num_tokens


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_grouped_product_matches_float64(name, dtype, counts):
    kernels = load_kernels(name)
    offsets, sources, num_tokens = rows_of(counts)
    x = torch.randn(num_tokens, 40, dtype=dtype, device=DEVICE)
    weight = torch.randn(5, 24, 40, dtype=dtype, device=DEVICE)
    bias = torch.randn(5, 24, dtype=dtype, device=DEVICE)
    out = kernels.grouped_linear(x, weight, offsets, sources, bias)
    sorted_out = kernels.grouped_linear(x[sources], weight, offsets, None, bias)
    assert torch.equal(out, sorted_out)
    for expert, own in enumerate(weight):
        mine = slice(int(offsets[expert]), int(offsets[expert + 1]))
        assert_product(out[mine], x[sources[mine]], own, bias[expert])


@on_cpu
@pytest.mark.parametrize("form", PANEL_FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_have_the_bits_of_a_product_by_their_expert_alone(form, dtype):
    """In every weight form, whatever other rows there are: with gates, padded panels, wide inputs."""
    torch.manual_seed(0)
    for num_inputs, num_outputs, gated in ((64, 40, False), (64, 24, True), (1024, 96, True)):
        weights = (torch.randn(5, num_outputs, num_inputs) / math.sqrt(num_inputs)).to(dtype)
        panels = [PANEL_FORMS[form](weight, gated=gated).panels for weight in weights]
        biases = [pad(torch.randn(num_outputs), gated=gated) for _ in panels]
        experts = ExpertPanels(panels, biases)
        for counts in COUNTS.values():
            offsets, sources, num_tokens = rows_of(counts)
            x = torch.randn(num_tokens, num_inputs).to(dtype)
            out = grouped_panel_linear(x, experts, offsets, sources)
            for expert, (own, bias) in enumerate(zip(panels, biases, strict=True)):
                mine = slice(int(offsets[expert]), int(offsets[expert + 1]))
                assert torch.equal(out[mine], linear(x[sources[mine]], own, bias))


@on_cpu
def test_experts_that_are_not_packed_alike_are_refused():
    form = PANEL_FORMS[None]
    panels = [form(torch.randn(n, 32)).panels for n in (16, 16, 24)]
    with pytest.raises(
        ValueError, match=r"packed alike, got .24, 32.* for expert 2 and .16, 32.* for expert 0"
    ):
        ExpertPanels(panels)
    with pytest.raises(ValueError, match="at least one expert"):
        ExpertPanels([])
    with pytest.raises(ValueError, match="offsets must ascend from 0 to the 3 rows"):
        grouped_panel_linear(torch.randn(3, 32), ExpertPanels(panels[:2]), torch.tensor([0, 2, 2]).int())


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("num_experts", [1, 7, 300], ids="num_experts={}".format)
def test_sorting_is_stable(name, num_experts):
    experts = torch.stack([torch.randperm(num_experts)[:4].sort().values for _ in range(50)]).int()
    adapters = torch.randint(-1, 3, (50,), dtype=torch.int32)
    sort = load_kernels(name).sort_by_expert
    assert sort(experts.to(DEVICE), num_experts).adapters is None
    rows = sort(experts.to(DEVICE), num_experts, adapters.to(DEVICE))
    for ours, expected in zip(rows, reference.sort_by_expert(experts, num_experts, adapters), strict=True):
        assert torch.equal(ours.cpu(), expected)
    flat = experts.flatten()
    order = rows.places.cpu().flatten().argsort()
    assert torch.equal(flat[order], flat.sort(stable=True).values)
    slots = [
        adapter * num_experts + expert if adapter >= 0 else -1
        for adapter, chosen in zip(adapters.tolist(), experts.tolist(), strict=True)
        for expert in chosen
    ]
    assert rows.adapters.tolist() == [slots[pair] for pair in order]


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
@pytest.mark.parametrize("beside", [None, "shared", "gated"])
def test_sums_match_float64(name, dtype, beside):
    places = torch.randperm(40, device=DEVICE).view(10, 4)
    x = torch.randn(40, 37, dtype=dtype, device=DEVICE)
    weights = torch.rand(10, 4, device=DEVICE)
    shared = None if beside is None else torch.randn(10, 37, dtype=dtype, device=DEVICE)
    gate = torch.randn(10, 1, device=DEVICE) if beside == "gated" else None
    in_double = [None if y is None else y.double() for y in (shared, gate)]
    exact = reference.sum_experts(x.double(), places, weights.double(), *in_double)
    got = load_kernels(name).sum_experts(x, places, weights, shared, gate)
    spread = reference.sum_experts(x.double().abs(), places, weights.double())
    spread = spread + (0 if shared is None else shared.double().abs())
    assert_within(got, exact, unit_roundoff(dtype) * exact.abs() + 8 * U32 * spread)


@pytest.mark.parametrize(("name", "dtype"), IMPLEMENTATIONS)
def test_clamped_swiglu_matches_float64(name, dtype):
    x = (6 * torch.randn(5, 74)).to(dtype).to(DEVICE)
    x[0, 3] = math.nan
    exact = reference.clamped_swiglu(x.double(), 7.0, 1.702)
    got = load_kernels(name).clamped_swiglu(x, 7.0, 1.702)
    assert got[0, 3].isnan()
    exact[0, 3] = got[0, 3] = 0
    gate = x.double()[:, :37].abs().clamp(max=20).nan_to_num()
    assert_within(got, exact, (unit_roundoff(dtype) + (2 * gate + 8) * U32) * exact.abs())


@pytest.mark.parametrize("name", BACKENDS)
def test_options_that_cannot_choose_are_refused(name):
    route = load_kernels(name).route
    logits = torch.randn(2, 6, device=DEVICE)
    wrong = {
        "num_chosen must be between 1 and 6, got 7": {"num_chosen": 7},
        "the number of experts must be a multiple of num_groups, got 6 and 4": {"num_groups": 4},
        "num_chosen must be between 1 and 2, got 3": {"num_chosen": 3, "num_groups": 3},
        "num_kept_groups must be between 1 and 2, got 3": {"num_groups": 2, "num_kept_groups": 3},
        "score must be one of softmax, sigmoid, softmax_of_chosen, got 'tanh'": {"score": "tanh"},
    }
    for message, options in wrong.items():
        with pytest.raises(ValueError, match=message):
            route(logits, RoutingOptions(**{"num_chosen": 2, **options}))
