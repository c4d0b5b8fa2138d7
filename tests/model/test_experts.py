"""Mixtures of experts: how they are stored, what is refused, and how they behave in company."""

from __future__ import annotations

import gc
import math
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from paged import CheckpointError, SamplingParams, UnsupportedModelError
from paged.architectures.config import TensorNames
from paged.architectures.families.moe import MOST_EXPERTS
from paged.architectures.families.table import ARCHITECTURES
from paged.architectures.hf_config import from_hf
from paged.checkpoints.open_file import OpenFile
from paged.model.weights import loading
from paged.model.weights.loading import open_tensors
from tests.support.checkpoints import CONFIGS, checkpoint, edit_json, new_engine, ragged_prompts, random_model

PROMPTS = ragged_prompts([3, 40, 17])
Tensors = dict[str, Tensor]


def bits(directory: Path, **options: Any) -> list[Any]:
    """Return tokens and log-probabilities, which are equal only if the logits are bitwise equal."""
    engine = new_engine(directory, **options)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    outputs = [o.outputs[0] for o in engine.generate(PROMPTS, params, use_tqdm=False)]
    return [(o.token_ids, [{t: p.logprob for t, p in d.items()} for d in o.logprobs]) for o in outputs]


def rewritten(name: str, directory: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Copy a checkpoint with other tensors."""
    shutil.copytree(checkpoint(name), directory)
    file = directory / "model.safetensors"
    save_file({k: v.contiguous() for k, v in change(load_file(file)).items()}, file)
    return directory


def stacked(tensors: Tensors, gate: str, up: str, down: str) -> Tensors:
    """Put the experts of each layer into stacks, as transformers 5 has them in memory."""
    found: dict[str, dict[int, Tensor]] = {}
    others = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.)(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            others[name.replace("block_sparse_moe", "mlp")] = tensor
        else:
            found.setdefault(f"{match[1]}{match[3]}", {})[int(match[2])] = tensor
    stacks = {name: torch.stack([own[i] for i in range(len(own))]) for name, own in found.items()}
    for name in [name for name in stacks if name.endswith(f".{gate}")]:
        layer = name.removesuffix(gate)
        both = stacks.pop(name), stacks.pop(f"{layer}{up}")
        others[f"{layer}mlp.experts.gate_up_proj"] = torch.cat(both, dim=1)
        others[f"{layer}mlp.experts.down_proj"] = stacks.pop(f"{layer}{down}")
    assert not stacks
    return others


@pytest.mark.parametrize(
    ("name", "parts"),
    [("qwen3_moe", ("gate_proj", "up_proj", "down_proj")), ("mixtral", ("w1", "w3", "w2"))],
)
def test_stacks_and_single_tensors_give_the_same_bits(name, parts, tmp_path):
    directory = rewritten(name, tmp_path / "model", lambda tensors: stacked(tensors, *parts))
    for options in ({}, {"dtype": "bfloat16", "deterministic": True}, {"quantization": "int8"}):
        assert bits(directory, **options) == bits(checkpoint(name), **options)


EXPERT = "model.layers.0.mlp.experts.5.up_proj.weight"


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def with_stack_too(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.mlp.experts.down_proj": torch.zeros(8, 48, 20)}


def with_other_shape(tensors: Tensors) -> Tensors:
    return tensors | {EXPERT: torch.zeros(21, 48)}


def with_short_stack(tensors: Tensors) -> Tensors:
    found = stacked(tensors, "gate_proj", "up_proj", "down_proj")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    return found | {name: found[name][:7]}


def with_wide_stack(tensors: Tensors) -> Tensors:
    found = stacked(tensors, "gate_proj", "up_proj", "down_proj")
    name = "model.layers.0.mlp.experts.down_proj"
    return found | {name: torch.zeros(8, 48, 24)}


DAMAGES: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "missing": (without(EXPERT), f"{EXPERT} is missing from the checkpoint"),
    "both": (
        with_stack_too,
        "experts.down_proj is in model.safetensors too, as model.layers.0.mlp.experts.0.down_pr",
    ),
    "shape": (with_other_shape, f"{EXPERT} has shape [21, 48], but config.json makes it [20, 48]"),
    "short": (with_short_stack, "model.layers.0.mlp.experts.7.gate_proj.weight, "),
    "wide": (with_wide_stack, "down_proj[0] has shape [48, 24], but config.json makes it [48, 20]"),
    "one more": (
        lambda tensors: tensors | {EXPERT.replace(".5.", ".8."): torch.zeros(20, 48)},
        "mlp.experts.8.up_proj.weight is not part of the model that config.json describes",
    ),
    "flat stack": (
        lambda tensors: tensors | {"model.layers.0.mlp.experts.down_proj": torch.zeros(8)},
        "down_proj has shape [8], but must have 3 dimensions, the first of 1 to 4096 experts",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_experts_are_named(damage, tmp_path):
    change, message = DAMAGES[damage]
    directory = rewritten("qwen3_moe", tmp_path / "model", change)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        new_engine(directory)


GRANITE = "model.layers.1.block_sparse_moe.input_linear.weight"
GPT_OSS = "model.layers.1.mlp.experts.gate_up_proj_bias"
GEMMA4 = "model.layers.1.router.per_expert_scale"
# Of families whose experts are stacks alone: the tensor, what becomes of it, and the error.
STACK_DAMAGES: dict[str, tuple[str, str, Callable[[Tensor], Tensor] | None, str]] = {
    "missing": ("granitemoe", GRANITE, None, f"{GRANITE}[0], {GRANITE}[1], {GRANITE}[2] … are missing"),
    "more": ("granitemoe", GRANITE, lambda x: torch.cat([x, x[:1]]), f"{GRANITE}[8] is not part of"),
    "transposed": (
        "granitemoe",
        GRANITE,
        lambda x: x.transpose(1, 2),
        f"{GRANITE}[0] has shape [32, 48], but config.json makes it [24, 64]",
    ),
    "odd": ("granitemoe", GRANITE, lambda x: x[:, 1:], "rows must divide into gate_proj.weight and up_proj"),
    "rank": ("granitemoe", GRANITE, lambda x: x[None], "has shape [1, 8, 48, 64], but must have 3 dim"),
    "bias": ("gpt_oss", GPT_OSS, lambda x: x[:7], f"{GPT_OSS}[7] is missing"),
    "rank of bias": ("gpt_oss", GPT_OSS, lambda x: x[None], "has shape [1, 8, 48], but must have 2 dim"),
    "scale": ("gemma4-experts", GEMMA4, None, f"{GEMMA4} is missing from the checkpoint"),
    "few scales": (
        "gemma4-experts",
        GEMMA4,
        lambda x: x[:7],
        f"{GEMMA4} has shape [7], but config.json makes",
    ),
}


def test_damaged_stacks_are_named(tmp_path):
    for damage, (family, name, change, message) in STACK_DAMAGES.items():

        def changed(tensors: Tensors, name: str = name, change: Any = change) -> Tensors:
            own = tensors.pop(name)
            return tensors if change is None else tensors | {name: change(own)}

        directory = rewritten(family, tmp_path / damage, changed)
        with pytest.raises(CheckpointError, match=re.escape(message)):
            new_engine(directory)


def test_layers_that_predict_further_tokens_are_skipped(tmp_path):
    def with_more(tensors: Tensors) -> Tensors:
        more = {
            k.replace("layers.2.", "layers.3."): v.clone() for k, v in tensors.items() if ".layers.2." in k
        }
        return tensors | more | {"model.layers.3.eh_proj.weight": torch.zeros(48, 96)}

    directory = rewritten("glm4_moe", tmp_path / "model", with_more)
    assert bits(directory) == bits(checkpoint("glm4_moe"))
    edit_json(directory / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"layers\.3\.eh_proj\.weight, .* not part of the model"):
        new_engine(directory)


# The architecture, what its config.json says, and the error.
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "too-many-chosen": (
        "Qwen3Moe",
        {"num_experts_per_tok": 200},
        "num_experts_per_tok 200 must be at most num_exp",
    ),
    "no-experts": ("Mixtral", {"num_local_experts": 0}, "num_local_experts must be from 1 to 4096, got 0"),
    "hostile": ("Qwen3Moe", {"num_experts": 10**9}, "num_experts must be from 1 to 4096, got 1000000000"),
    "hostile-size": (
        "Qwen3Moe",
        {"moe_intermediate_size": 2**30},
        "moe_intermediate_size must be from 1 to 1048576",
    ),
    "hostile-product": (
        "Qwen3Moe",
        {"num_experts": 4096, "num_hidden_layers": 1024},
        f"num_experts 4096 of all layers must be at most {MOST_EXPERTS}, got 4194304",
    ),
    "groups": (
        "Glm4Moe",
        {"n_group": 3, "topk_group": 2},
        "n_routed_experts 128 must be a multiple of n_group 3",
    ),
    "kept": ("Glm4Moe", {"n_group": 2, "topk_group": 3}, "topk_group 3 must be at most n_group 2"),
    "few-kept": (
        "Glm4Moe",
        {"n_group": 64, "topk_group": 2},
        "num_experts_per_tok 8 must be at most the 4 experts in topk_group 2 of n_group 64",
    ),
    "groups-of-one": (
        "Glm4Moe",
        {"n_group": 128, "topk_group": 64},
        "n_group 128 must be at most half of n_routed_experts 128",
    ),
    "none-chosen": (
        "Mixtral",
        {"num_experts_per_tok": 0},
        "num_experts_per_tok must be from 1 to 256, got 0",
    ),
    "softmax-only": (
        "Mixtral",
        {"scoring_func": "tanh"},
        "scoring_func 'tanh' is not supported; 'softmax' is",
    ),
    "greedy-only": (
        "Olmoe",
        {"topk_method": "group_limited"},
        "topk_method 'group_limited' is not supported",
    ),
    "scoring": (
        "Glm4Moe",
        {"scoring_func": "softmax"},
        "scoring_func 'softmax' is not supported; 'sigmoid' is",
    ),
    "method": ("Glm4Moe", {"topk_method": "greedy"}, "topk_method 'greedy' is not supported; 'noaux_tc' is"),
    "activation": ("Qwen3Moe", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
    "layers": (
        "Qwen3Moe",
        {"mlp_only_layers": [99]},
        r"mlp_only_layers must be numbers of layers, got \[99\]",
    ),
    "clip": ("Olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
    "zero-experts": (
        "Mixtral",
        {"zero_expert_num": 4},
        "zero_expert_num 4 is not supported: experts that comp",
    ),
    "hash": ("Mixtral", {"num_hash_layers": 3}, "num_hash_layers 3 is not supported: layers whose tokens"),
    "sparsemixer": ("Phimoe", {}, "architecture 'PhimoeForCausalLM' is not supported"),
    "shared": (
        "MiniMaxM2",
        {"shared_intermediate_size": 64},
        "shared_intermediate_size 64 is not supported; 0 is",
    ),
    "dense-first": (
        "Glm4Moe",
        {"first_k_dense_replace": 3},
        "first_k_dense_replace must be from 0 to 2, got 3",
    ),
    "limit": ("GptOss", {"swiglu_limit": 0}, "swiglu_limit must be above 0 and at most 1000, got 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_configs_are_refused_with_key_and_value(case):
    family, values, message = WRONG[case]
    name = f"{family}ForCausalLM"
    sizes = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 2}
    model_type = ARCHITECTURES[name].model_type if name in ARCHITECTURES else "phimoe"
    hf = {"architectures": [name], "model_type": model_type, "num_attention_heads": 8, **sizes, **values}
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        from_hf(hf)


def test_nan_of_a_router_ends_its_own_request_only(monkeypatch):
    """An embedding of NaN makes all logits of a router NaN: its request fails, and others keep their bits."""
    engine = new_engine(checkpoint("qwen3_moe"))
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in engine.generate(PROMPTS, params, use_tqdm=False)]
    token = next(t for t in range(211) if not any(t in p for p in (*PROMPTS, *expected)))
    model = engine.runner.model
    lookup = type(model.embedding).forward

    def with_nan(module: Any, token_ids: Tensor) -> Tensor:
        rows = lookup(module, token_ids)
        rows[token_ids == token] = math.nan
        return rows

    engine = new_engine(checkpoint("qwen3_moe"), enforce_eager=True)
    monkeypatch.setattr(type(model.embedding), "forward", with_nan)
    found = engine.generate([*PROMPTS, [5, token, 7]], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in found[:3]] == expected
    assert found[3].outputs[0].finish_reason == "error"


def mxfp4_tensors(tensors: Tensors, generator: torch.Generator) -> tuple[Tensors, Tensors]:
    """Return gpt-oss' experts in MXFP4, and in the floats that transformers makes of them."""
    codes = dict(tensors)
    floats = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, num_inputs, num_outputs = tensor.shape
            shape = num_experts, num_outputs, num_inputs // 32
            blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)
            del codes[name]
            codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            floats[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return codes, floats


def test_mxfp4_of_gpt_oss_is_that_of_transformers(tmp_path):
    """In float32 its tokens are those of the floats that the codes stand for."""
    shape = CONFIGS["gpt_oss"]().to_dict() | {"hidden_size": 64, "intermediate_size": 96}
    source = tmp_path / "source"
    random_model(GptOssConfig(**shape)).save_pretrained(source)
    codes, floats = mxfp4_tensors(load_file(source / "model.safetensors"), torch.Generator().manual_seed(0))
    outputs = []
    for name, tensors in (("codes", codes), ("floats", floats)):
        directory = tmp_path / name
        shutil.copytree(source, directory)
        save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")
        if name == "codes":
            kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
            config = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
            edit_json(directory / "config.json", quantization_config=config)
        outputs.append(bits(directory))
    for (tokens, logprobs), (expected, rows) in zip(*outputs, strict=True):
        assert tokens == expected
        for ours, theirs in zip(logprobs, rows, strict=True):
            assert all(abs(ours[token] - theirs[token]) < 1e-4 for token in theirs)
    assert "MXFP4" in new_engine(tmp_path / "codes").describe()


def test_one_matrix_is_converted_at_a_time(monkeypatch):
    """While it is loaded a model takes its final form, a table that stays as it is, and one matrix."""
    read = loading.read_rows
    found: list[weakref.ref[Tensor]] = []
    most = 0

    def watched(*args: Any) -> Tensor:
        nonlocal most
        rows = read(*args)
        if rows.dim() == 2:
            found.append(weakref.ref(rows))
            most = max(most, sum(each() is not None for each in found))
        return rows

    monkeypatch.setattr(loading, "read_rows", watched)
    new_engine(checkpoint("qwen3_moe"), quantization="int8")
    assert len(found) > 2 * 8 * 2
    assert most <= 3


def test_a_file_of_many_small_tensors_is_opened_once(tmp_path, monkeypatch):
    """18,000 of them, as Qwen3-30B-A3B has: its header is read once, and each tensor once."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in range(47)
        for expert in range(128)
        for part in ("gate", "up", "down")
    ]
    file = tmp_path / "model.safetensors"
    save_file({name: torch.full((2, 2), i % 100, dtype=torch.bfloat16) for i, name in enumerate(names)}, file)
    opened = []
    reads = []
    open_file = OpenFile.__init__
    read_into = OpenFile.read_into
    monkeypatch.setattr(OpenFile, "__init__", lambda self, path: opened.append(path) or open_file(self, path))
    monkeypatch.setattr(OpenFile, "read_into", lambda *args: reads.append(args[2]) or read_into(*args))
    with open_tensors(tmp_path, TensorNames()) as sources:
        values = [sources[name].read()[0, 0].item() for name in names]
    assert values == [i % 100 for i in range(len(names))]
    assert opened == [file]
    assert len(names) <= len(reads) <= len(names) + 2


def test_garbage_is_collected_again(tmp_path):
    """Once the tensors of a checkpoint are found, and after an error."""
    file = tmp_path / "model.safetensors"
    save_file({"model.norm.weight": torch.ones(2)}, file)
    with open_tensors(tmp_path, TensorNames()):
        assert gc.isenabled()
    file.write_bytes(b"")
    with pytest.raises(CheckpointError), open_tensors(tmp_path, TensorNames()):
        pass
    assert gc.isenabled()
