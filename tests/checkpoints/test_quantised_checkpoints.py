"""Quantised checkpoints generate what transformers does of the floats that they stand for."""

from __future__ import annotations

import functools
import logging
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged import CheckpointError, ConfigError, SamplingParams
from tests.support.checkpoints import Reference, checkpoint, edit_json, new_engine, ragged_prompts
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


def of_experts(writer: Writer) -> Callable[[str], Writer | None]:
    """Store the projections of experts so."""
    return lambda name: writer if ".experts." in name else None


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


def modelopt_mixed() -> dict[str, Any]:
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


# What published files of hybrids leave in floats: the gates of states, which are as many rows as heads, the
# gates of experts, and often all that makes states.
GATES = r"in_proj_a|in_proj_b|in_proj_ba|mlp\.gate|shared_expert_gate|conv1d"
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}


INT4 = gptq(Sizes(scale=SMALL, spread=2), act_order=True)
INT8 = gptq(Sizes(bits=8, scale=SMALL / 16, spread=2), act_order=True)


def but(names: str, writer: Writer) -> Callable[[str], Writer | None]:
    """Store all linear layers so, but those with these names, a regular expression."""
    skipped = re.compile(rf"\.({names})(\.|$)")
    return lambda name: writer if ".layers." in name and not skipped.search(name) else None


def ignoring(names: str) -> list[str]:
    """Return the entry that leaves these modules in floats, in the lists of compressed-tensors."""
    return [rf"re:.*\.({names})(\..*)?$", "lm_head"]


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
    "modelopt-mixed": ("llama", modelopt_mixed(), mixed),
    "gptq-fused": ("phi3", {**GPTQ, "group_size": -1}, of_layers(gptq(Sizes(-1, scale=SMALL, spread=2)))),
    "gptq-experts": ("olmoe", GPTQ, of_experts(gptq(Sizes(scale=SMALL), symmetric=True))),
    "fp8-experts": (
        "mixtral",
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        of_experts(fp8((32, 32), name="weight_scale_inv", scale=SMALL / 32)),
    ),
    # Qwen3.5-FP8, and Qwen3-Next-FP8, whose inputs are stored by key head.
    "fp8-hybrid": (
        "qwen3_5",
        {**BLOCKS, "modules_to_not_convert": [f"linear_attn.in_proj_{gate}" for gate in "ab"]},
        but(GATES, fp8((32, 32), name="weight_scale_inv", scale=SMALL / 32)),
    ),
    "fp8-hybrid-by-key-head": (
        "qwen3_next",
        {
            **BLOCKS,
            "modules_to_not_convert": ["linear_attn.in_proj_ba", "mlp.gate", "mlp.shared_expert_gate"],
        },
        but(GATES, fp8((32, 32), name="weight_scale_inv", scale=SMALL / 32)),
    ),
    "gptq-hybrid": (
        "qwen3_5",
        {**GPTQ, "dynamic": {"lm_head": {}, "-:.*in_proj_[ab]$": {}, "-:.*out_proj": {}}},
        but(GATES + "|out_proj", gptq(Sizes(scale=SMALL, spread=2), act_order=True)),
    ),
    # Qwen3.5-GPTQ-Int4: all attention and states are floats.
    "gptq-hybrid-mlp": (
        "qwen3_5",
        {**GPTQ, "dynamic": {"lm_head": {}, "-:.*attn.*": {}, "-:.*mtp.*": {}, "+:.*down_proj": {"bits": 8}}},
        lambda name: {"gate_proj": INT4, "up_proj": INT4, "down_proj": INT8}.get(name.split(".")[-2]),
    ),
    "awq-hybrid": (
        "qwen3_5",
        {**GPTQ, "quant_method": "awq", "modules_to_not_convert": ["linear_attn"]},
        but("linear_attn", awq(Sizes(scale=SMALL, spread=2))),
    ),
    "int4-hybrid": (
        "qwen3_5",
        compressed("pack-quantized", int_group(4, 16), ignore=ignoring("in_proj_[ab]")),
        but(GATES, packed(Sizes(16, scale=SMALL, spread=2))),
    ),
    "int8-hybrid": (
        "qwen3_next",
        compressed("int-quantized", int_group(8, -1), ignore=ignoring(GATES)),
        but(GATES, integers(Sizes(-1, scale=SMALL / 16))),
    ),
    "fp8-hybrid-all": ("qwen3_5", E4M3, but("conv1d", fp8("channel", dtype=BF16, scale=SMALL / 32))),
    "int8-conv": (
        "lfm2",
        compressed("int-quantized", int_group(8, -1), ignore=["lm_head"]),
        but("none", integers(Sizes(-1, scale=SMALL / 16))),
    ),
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


def test_the_head_and_the_embedding_may_be_in_codes(tmp_path):
    """A tied table in int8 is multiplied and looked up; a head of its own is not tied."""
    config = compressed("int-quantized", int_group(8, -1), ignore=[])
    config["config_groups"]["group_0"]["targets"] = ["Embedding"]
    table = integers(Sizes(dtype=BF16, scale=SMALL / 16))
    of_codes, of_floats = quantised_checkpoint(
        checkpoint("qwen3"), tmp_path, config, lambda name: table if "embed_tokens" in name else None
    )
    oracle = Reference(of_floats)
    assert greedy(new_engine(of_codes)) == [oracle.greedy(prompt, 8)[0] for prompt in PROMPTS]


def test_stacked_experts_may_be_in_codes_and_are_no_linear_module_in_floats(tmp_path):
    """As in granite-4.0-h-small-FP8, whose experts of a layer are one tensor."""
    config = {**E4M3, "ignore": ignoring("conv1d|router|mamba|self_attn|shared_mlp")}
    rows = fp8("channel", dtype=BF16, scale=SMALL / 32)
    of_codes, of_floats = quantised_checkpoint(
        checkpoint("granitemoehybrid"),
        tmp_path,
        config,
        lambda name: rows if ".0.block_sparse_moe." in name and "router" not in name else None,
    )
    assert greedy(new_engine(of_codes), PROMPTS[:1]) == greedy(new_engine(of_floats), PROMPTS[:1])


def test_a_head_in_floats_is_not_tied_to_an_embedding_in_codes(tmp_path):
    """Whatever config.json says, which often has a default there."""
    config = compressed("pack-quantized", int_group(4, -1), ignore=[])
    config["config_groups"]["group_0"]["targets"] = ["Embedding"]
    table = packed(Sizes(-1, dtype=BF16, scale=SMALL))
    of_codes, of_floats = quantised_checkpoint(
        checkpoint("llama"), tmp_path, config, lambda name: table if "embed_tokens" in name else None
    )
    edit_json(of_codes / "config.json", tie_word_embeddings=True)
    oracle = Reference(of_floats)
    assert greedy(new_engine(of_codes)) == [oracle.greedy(prompt, 8)[0] for prompt in PROMPTS]


def test_the_order_of_inputs_must_be_there(tmp_path):
    """Groups ordered by "group" are in weight_g_idx; by "weight" there is none."""
    plain = compressed("pack-quantized", int_group(4, 32, actorder="weight"))
    writer = packed(Sizes(scale=SMALL))
    directory, _ = quantised_checkpoint(checkpoint("llama"), tmp_path, plain, of_layers(writer))
    new_engine(directory)
    ordered = compressed("pack-quantized", int_group(4, 32, actorder="group"))
    edit_json(directory / "config.json", quantization_config=ordered)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_g_idx, .* are missing from the checkpoint"):
        new_engine(directory)


@pytest.fixture
def copy(tmp_path, root):
    """Copy one of MODELS in codes, to be changed."""

    def make(name: str) -> Path:
        return Path(shutil.copytree(directories(name, root)[0], tmp_path / "model"))

    return make


def change(directory: Path, **changes: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
    """Change tensors of a checkpoint; None removes one."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for key, new in changes.items():
        name = f"model.layers.1.{key.replace('__', '.')}"
        if new is None:
            del tensors[name]
        else:
            tensors[name] = new(tensors.get(name, torch.zeros(3))).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def put(place: tuple[int, ...], value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8)[place] = int(value)
        else:
            tensor[place] = value
        return tensor

    return change


Q = "model.layers.1.self_attn.q_proj"
# Which checkpoint, how it is changed, and what the error names.
DAMAGES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "a scale is NaN": (
        "gptq",
        {"self_attn__q_proj__scales": put((1, 5), math.nan)},
        (f"{Q}.scales is nan at [1, 5], but must be finite",),
    ),
    "a scale is infinite": (
        "gptq",
        {"mlp__down_proj__scales": put((0, 47), -math.inf)},
        ("down_proj.scales is -inf at [0, 47], but must be finite",),
    ),
    "a group does not exist": (
        "gptq",
        {"self_attn__q_proj__g_idx": put((7,), 2)},
        (f"{Q}.g_idx is 2 at [7], but must be from 0 to 1, as there are 2 groups",),
    ),
    "a group is negative": ("gptq", {"self_attn__q_proj__g_idx": put((7,), -3)}, ("g_idx is -3 at [7]",)),
    "g_idx is short": (
        "gptq",
        {"self_attn__q_proj__g_idx": lambda x: x[:-1]},
        (f"{Q}.g_idx has shape [47], but config.json makes it [48]",),
    ),
    "zeros are missing": (
        "gptq",
        {"self_attn__q_proj__qzeros": None},
        (f"{Q}.qzeros is missing from the checkpoint",),
    ),
    "the groups of inputs are missing": (
        "gptq",
        {"self_attn__q_proj__g_idx": None},
        (f"{Q}.g_idx is missing from the checkpoint",),
    ),
    "the groups of inputs are not set": (
        "gptq",
        {"self_attn__q_proj__g_idx": lambda x: -torch.ones_like(x)},
        (f"{Q}.g_idx is -1 at [0], but must be from 0 to 1",),
    ),
    "words are missing": (
        "gptq",
        {"self_attn__q_proj__qweight": lambda x: x[:-1]},
        (f"{Q}.qweight has shape [5, 64], but config.json makes it [6, 64]",),
    ),
    "words are floats": (
        "awq",
        {"self_attn__q_proj__qweight": lambda x: x.float()},
        (f"{Q}.qweight is torch.float32; supported are torch.int32",),
    ),
    "groups are missing": (
        "awq",
        {"self_attn__q_proj__scales": lambda x: x[:1]},
        (f"{Q}.scales has shape [1, 64], but config.json makes it [2, 64]",),
    ),
    "a weight is there twice": (
        "awq",
        {"self_attn__q_proj__weight": lambda _: torch.zeros(64, 48)},
        (f"{Q}.weight is not part of the model",),
    ),
    "an odd rank": (
        "awq",
        {"self_attn__q_proj__qweight": lambda x: x[None]},
        ("qweight has shape [1, 48, 8]",),
    ),
    "a bias that is not 0": (
        "awq",
        {"self_attn__q_proj__bias": lambda _: torch.ones(64)},
        (f"{Q}.bias is not part of the model",),
    ),
    "another shape is said": (
        "compressed-tensors-tied",
        {"self_attn__q_proj__weight_shape": put((0,), 65)},
        (f"{Q}.weight_shape is [65, 48], but config.json makes it [64, 48]",),
    ),
    "NaN in e4m3": (
        "fp8",
        {"self_attn__q_proj__weight": put((3, 9), 0xFF)},
        (f"{Q}.weight is nan at [3, 9], but must be a number",),
    ),
    "a block is missing": (
        "fp8",
        {"self_attn__q_proj__weight_scale_inv": lambda x: x[:, :1]},
        (f"{Q}.weight_scale_inv has shape [2, 1], but config.json makes it [2, 2]",),
    ),
    "a scale is missing": (
        "fp8",
        {"self_attn__q_proj__weight_scale_inv": None},
        (f"{Q}.weight_scale_inv is missing from the checkpoint",),
    ),
    "an exponent is NaN": (
        "mxfp4",
        {"self_attn__q_proj__weight_scale": put((2, 1), 255)},
        (f"{Q}.weight_scale is 255 at [2, 1], but must be less, as 255 stands for NaN",),
    ),
    "a scale in e4m3 is NaN": (
        "nvfp4-tied",
        {"self_attn__q_proj__weight_scale": put((2, 1), 0x7F)},
        (f"{Q}.weight_scale is nan at [2, 1], but must be a number",),
    ),
    "one scale of all is infinite": (
        "nvfp4-tied",
        {"self_attn__q_proj__weight_scale_2": put((), math.inf)},
        (f"{Q}.weight_scale_2 is inf at [], but must be finite",),
    ),
    "floats where a rule says codes": (
        "mxfp4",
        {"self_attn__q_proj__weight_packed": None, "self_attn__q_proj__weight_scale": None}
        | {"self_attn__q_proj__weight": lambda _: torch.zeros(64, 48)},
        (f"{Q}.weight is torch.float32, but target 'Linear' of 'group_0'", "makes it MXFP4"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(damage, copy):
    name, changes, words = DAMAGES[damage]
    directory = copy(name)
    change(directory, **changes)
    with pytest.raises(CheckpointError) as info:
        new_engine(directory)
    assert str(directory / "model.safetensors") in str(info.value) or "missing" in str(info.value)
    for each in words:
        assert each in str(info.value)


def test_codes_where_a_rule_says_floats_are_named(copy):
    directory = copy("awq")
    config = {**GPTQ, "quant_method": "awq", "modules_to_not_convert": ["layers.1.self_attn"]}
    edit_json(directory / "config.json", quantization_config=config)
    words = (
        r"\w_proj\.qweight is torch\.int32, but modules_to_not_convert 'layers\.1\.self_attn' in "
        "quantization_config makes it floats"
    )
    with pytest.raises(CheckpointError, match=words):
        new_engine(directory)


def test_a_divisor_of_zero_is_named(tmp_path):
    config = compressed("nvfp4-pack-quantized", float_group(4, "tensor_group", group_size=16))
    writer = nvfp4(2048.0, modelopt=False, scale=1)
    directory, _ = quantised_checkpoint(checkpoint("llama"), tmp_path, config, of_layers(writer))
    change(directory, mlp__up_proj__weight_global_scale=put((0,), 0.0))
    with pytest.raises(CheckpointError, match=r"scale is 0 at \[0\], but must be finite and not 0"):
        new_engine(directory)


def test_what_is_not_used_is_said(copy, caplog):
    """Scales of activations, of K and of V; a bias of zeros is none."""
    directory = copy("compressed-tensors")
    expected = greedy(new_engine(directory))
    scale = torch.tensor(math.nan)
    unused = {"self_attn__q_proj__input_scale": scale, "self_attn__k_scale": scale}
    unused |= {"self_attn__k_proj__output_scale": scale, "self_attn__v_proj__v_scale": scale}
    change(directory, **{name: lambda _, x=x: x.clone() for name, x in unused.items()})
    change(directory, mlp__up_proj__bias=lambda _: torch.zeros(80))
    caplog.clear()
    with caplog.at_level(logging.INFO, "paged"):
        engine = new_engine(directory)
    assert greedy(engine) == expected
    assert "4 scales of activations, K and V in the checkpoint are not used" in caplog.text
    assert "activations are not quantised" in caplog.text
    assert re.search(r"read the weights: int8 and compressed-tensors 4 bits \(.* GB\)", caplog.text)
    assert "float32 with weights in int8 and compressed-tensors 4 bits on cpu" in engine.describe()
    assert "activations" not in log_of(lambda: new_engine(checkpoint("llama")), caplog)


def log_of(do: Callable[[], object], caplog) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO, "paged"):
        do()
    return str(caplog.text)


def test_quantised_weights_are_not_quantised_again(root):
    directory, _ = directories("gptq", root)
    with pytest.raises(ConfigError, match=r"'int8' .* are quantised by gptq already; leave it out"):
        new_engine(directory, quantization="int8")
