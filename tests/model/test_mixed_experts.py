"""Each expert's gate, up and down may be stored in another format: the tokens are those of the floats."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from paged import SamplingParams
from paged.kernels.backend import load_kernels
from paged.model.weights.forms import EachExpert, PlainWeight
from paged.model.weights.joined_form import JoinedForm
from tests.support.checkpoints import Reference, checkpoint, new_engine, ragged_prompts
from tests.support.quantised import (
    Sizes,
    Writer,
    awq,
    float_group,
    fp8,
    gptq,
    int_group,
    integers,
    mxfp4,
    nvfp4,
    packed,
    quantised_checkpoint,
)

PROMPTS = ragged_prompts([3, 17])
SMALL = 0.02
BF16 = torch.bfloat16
EXPERTS = [f"model.layers.{layer}.mlp.experts.{expert}" for layer in (0, 1) for expert in range(8)]
Chosen = Mapping[str, str]  # the kind of each projection of an expert, by its module


class Mixture(NamedTuple):
    """Formats that one method of quantisation may mix: a writer of each kind, and config.json's words."""

    kinds: dict[str, Writer | None]
    config: Callable[[Chosen], dict[str, Any]]


def of_kind(chosen: Chosen, *kinds: str) -> list[str]:
    return [module for module, kind in chosen.items() if kind in kinds]


GROUPS = {
    "int4": ("pack-quantized", int_group(4, 32)),
    "int4-channel": ("pack-quantized", int_group(4, -1, symmetric=False)),
    "int8": ("int-quantized", int_group(8, -1)),
    "fp8": ("float-quantized", float_group(8, "channel")),
    "mxfp4": ("mxfp4-pack-quantized", float_group(4, "group", group_size=32)),
    "nvfp4": ("nvfp4-pack-quantized", float_group(4, "tensor_group", group_size=16)),
}


def compressed_tensors(chosen: Chosen) -> dict[str, Any]:
    groups = {
        kind: {"targets": [f"re:{re.escape(each)}$" for each in of_kind(chosen, kind)], "format": stored}
        | {"weights": weights}
        for kind, (stored, weights) in GROUPS.items()
    }
    ignored = ["lm_head", *of_kind(chosen, "floats")]
    return {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": groups,
        "ignore": ignored,
    }


def auto_round(chosen: Chosen) -> dict[str, Any]:
    others = {each: {"bits": 8} for each in of_kind(chosen, "8 bits")}
    others |= {each: {"bits": 16, "data_type": "fp"} for each in of_kind(chosen, "floats")}
    common = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    return {**common, "bits": 4, "group_size": 32, "extra_config": others}


def modelopt(chosen: Chosen) -> dict[str, Any]:
    layers = {each: {"quant_algo": "FP8"} for each in of_kind(chosen, "fp8")}
    layers |= {each: {"quant_algo": "NVFP4", "group_size": 16} for each in of_kind(chosen, "nvfp4")}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


GPTQ = {"bits": 4, "group_size": 32}
OF_4_BITS = Sizes(scale=SMALL, spread=2)
MIXTURES = {
    "compressed-tensors": Mixture(
        {
            "floats": None,
            "int4": packed(Sizes(dtype=BF16, scale=SMALL)),
            "int4-channel": packed(Sizes(-1, dtype=BF16, scale=SMALL, spread=2), zeros="packed"),
            "int8": integers(Sizes(dtype=BF16, scale=SMALL / 16)),
            "fp8": fp8("channel", dtype=BF16, scale=SMALL / 32),
            "mxfp4": mxfp4(scale=1),
            "nvfp4": nvfp4(16 / SMALL, modelopt=False, scale=1),
        },
        compressed_tensors,
    ),
    "auto-round": Mixture(
        {"floats": None, "4 bits": gptq(OF_4_BITS), "8 bits": gptq(Sizes(bits=8, scale=SMALL / 16))},
        auto_round,
    ),
    "gptq": Mixture(  # an order of inputs of its own, or none
        {"ordered": gptq(OF_4_BITS, act_order=True), "in order": gptq(OF_4_BITS)},
        lambda _: {"quant_method": "gptq", "desc_act": True, "sym": False, **GPTQ},
    ),
    "awq": Mixture(
        {"floats": None, "awq": awq(OF_4_BITS)},
        lambda chosen: {"quant_method": "awq", "modules_to_not_convert": of_kind(chosen, "floats"), **GPTQ},
    ),
    "fp8": Mixture(
        {"floats": None, "fp8": fp8((32, 32), name="weight_scale_inv", scale=SMALL / 32)},
        lambda chosen: {
            "quant_method": "fp8",
            "weight_block_size": [32, 32],
            "modules_to_not_convert": of_kind(chosen, "floats"),
        },
    ),
    "modelopt": Mixture(
        {"floats": None, "fp8": fp8("scalar", scale=SMALL / 32)}
        | {"nvfp4": nvfp4(SMALL / 16, modelopt=True, scale=1)},
        modelopt,
    ),
}


def choose(kinds: list[str], seed: int) -> Chosen:
    """Choose a kind for each projection of the experts; half of the experts have one for gate and up."""
    random_choice = random.Random(seed)
    chosen = {}
    for expert in EXPERTS:
        gate, up, down = random_choice.choices(kinds, k=3)
        up = random_choice.choice([gate, up])
        chosen |= {f"{expert}.gate_proj": gate, f"{expert}.up_proj": up, f"{expert}.down_proj": down}
    return chosen


def greedy(engine: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return [o.outputs[0].token_ids for o in engine.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("method", MIXTURES)
def test_tokens_are_those_of_transformers(method, tmp_path):
    """With the CPU kernels and torch, together and alone."""
    kinds, config = MIXTURES[method]
    chosen = choose([*kinds], seed=len(method))
    of_codes, of_floats = quantised_checkpoint(
        checkpoint("olmoe"),
        tmp_path,
        config(chosen),
        lambda name: kinds.get(chosen.get(name.removesuffix(".weight"), "")),
    )
    oracle = Reference(of_floats)
    expected = [oracle.greedy(prompt, 6)[0] for prompt in PROMPTS]
    for backend in ("numba", "torch"):
        assert greedy(new_engine(of_codes, attention_backend=backend)) == expected
    assert all(map(len, greedy(new_engine(of_codes, dtype="bfloat16"))))


class Gated(PlainWeight):
    """A weight whose product is silu(gate) * up."""

    gated = True

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        gate, up = super().__call__(x, bias).chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("gated", [(0,), (1,), (0, 2), (0, 1, 2)], ids=str)
def test_whichever_experts_are_gated_the_products_are_alike(gated):
    """Whether the first is, the last or several; with rows for some experts only."""
    kernels = load_kernels("torch")
    weights = torch.randn(3, 8, 4)
    forms = [
        Gated(each) if i in gated else JoinedForm([(PlainWeight(half), 4) for half in each.chunk(2)])
        for i, each in enumerate(weights)
    ]
    experts = forms[0].of_experts(forms, None, kernels)
    expected = EachExpert([*map(Gated, weights)], None, kernels)
    assert experts.gated
    x = torch.randn(5, 4)
    for bounds in ([0, 2, 4, 5], [0, 0, 5, 5], [0, 5, 5, 5], [0, 0, 0, 5]):
        offsets = torch.tensor(bounds, dtype=torch.int32)
        torch.testing.assert_close(experts(x, offsets, None), expected(x, offsets, None))
