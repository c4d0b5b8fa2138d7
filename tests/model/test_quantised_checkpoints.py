"""Quantised checkpoints generate what transformers does of the floats that they stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import SamplingParams
from tests.support.checkpoints import Reference, checkpoint, new_engine, ragged_prompts
from tests.support.quantised import (
    Sizes,
    Writer,
    awq,
    compressed,
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

PROMPTS = ragged_prompts([3, 17, 30])
SMALL = 0.02  # around which scales are, so that weights are as large as those of a model
BF16 = torch.bfloat16
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


def of_layers(writer: Writer) -> Callable[[str], Writer | None]:
    """Store all linear layers so, but no head and no embedding."""
    return lambda name: writer if ".layers." in name else None


def mixed(name: str) -> Writer | None:
    """Store attention in fp8, MLPs in NVFP4 and the head in fp8, as ModelOpt may."""
    if "self_attn" in name or name == "lm_head.weight":
        return fp8("scalar", scale=SMALL / 32)
    return nvfp4(SMALL / 16, modelopt=True, scale=1) if ".mlp." in name else None


def in_two_sizes(name: str) -> Writer | None:
    """Store attention in 8 bits and MLPs in 4, with the head in 8, as compressed-tensors may."""
    if "self_attn" in name or name == "lm_head.weight":
        return integers(Sizes(dtype=BF16, scale=SMALL / 16), zeros=True)
    if ".layers.0.mlp.gate" in name:
        return None
    return packed(Sizes(dtype=BF16, scale=SMALL, spread=2), zeros="packed") if ".mlp." in name else None


TWO_SIZES = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "group_0": {
            "targets": ["re:.*self_attn\\..*", "lm_head"],
            "format": "int-quantized",
            "weights": int_group(8, -1, symmetric=False),
            "input_activations": {"num_bits": 8, "type": "int", "dynamic": True},
        },
        "group_1": {
            "targets": ["Linear"],
            "format": "pack-quantized",
            "weights": int_group(4, 32, symmetric=False),
        },
    },
    "ignore": ["re:.*layers\\.0\\.mlp\\.gate_.*"],
}


def modelopt_mixed(directory: Path) -> dict[str, Any]:
    del directory
    layers = {
        **{f"model.layers.{i}.self_attn.{p}_proj": {"quant_algo": "FP8"} for i in (0, 1) for p in "qkvo"},
        **{
            f"model.layers.{i}.mlp.{p}_proj": {"quant_algo": "NVFP4", "group_size": 16}
            for i in (0, 1)
            for p in ("gate", "up", "down")
        },
        "lm_head": {"quant_algo": "FP8"},
    }
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


E4M3 = compressed("float-quantized", float_group(8, "channel"))
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[str], Writer | None]]] = {
    "gptq": ("llama", GPTQ, of_layers(gptq(Sizes(scale=SMALL, spread=2), act_order=True))),
    "gptq-tied-bias": ("llama-tied-bias", GPTQ, of_layers(gptq(Sizes(scale=SMALL), symmetric=True))),
    "awq": ("llama", {**GPTQ, "quant_method": "awq"}, of_layers(awq(Sizes(scale=SMALL, spread=2)))),
    "awq-tied": ("qwen3", {**GPTQ, "quant_method": "awq"}, of_layers(awq(Sizes(scale=SMALL, spread=2)))),
    "compressed-tensors": ("llama", TWO_SIZES, in_two_sizes),
    "compressed-tensors-tied": (
        "qwen3",
        compressed("pack-quantized", int_group(4, -1)),
        of_layers(packed(Sizes(-1, scale=SMALL))),
    ),
    "fp8": (
        "llama",
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        of_layers(fp8((32, 32), name="weight_scale_inv", scale=SMALL / 32)),
    ),
    "fp8-tied": ("qwen3", E4M3, of_layers(fp8("channel", dtype=BF16, scale=SMALL / 32))),
    "mxfp4": (
        "llama",
        compressed("mxfp4-pack-quantized", float_group(4, "group", group_size=32)),
        of_layers(mxfp4(scale=1)),
    ),
    "nvfp4-tied": ("qwen3", NVFP4, of_layers(nvfp4(SMALL / 16, modelopt=True, scale=1))),
    "modelopt-mixed": ("llama", modelopt_mixed(Path()), mixed),
    "gptq-fused": ("phi3", {**GPTQ, "group_size": -1}, of_layers(gptq(Sizes(-1, scale=SMALL, spread=2)))),
    "gptq-permuted": ("glm4", GPTQ, of_layers(gptq(Sizes(scale=SMALL, spread=2), act_order=True))),
}


@functools.cache
def directories(name: str, root: Path) -> tuple[Path, Path]:
    source, config, write = MODELS[name]
    return quantised_checkpoint(checkpoint(source), root / name, config, write)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("quantised")


def greedy(engine, prompts=PROMPTS, max_tokens: int = 8) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [o.outputs[0].token_ids for o in engine.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name, root):
    """In a ragged batch, and alone."""
    of_codes, of_floats = directories(name, root)
    oracle = Reference(of_floats)
    engine = new_engine(of_codes)
    tokens = greedy(engine)
    assert tokens == [oracle.greedy(prompt, 8)[0] for prompt in PROMPTS]
    assert greedy(engine, PROMPTS[1:2]) == tokens[1:2]
