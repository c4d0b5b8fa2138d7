"""Files of LoRA adapters: every key of PEFT's config, GGUF files, and what is no adapter of a model."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file

from paged.architectures.gguf_paths import GGUF_KEY
from paged.architectures.hf_config import read_config
from paged.base.errors import PagedError
from paged.checkpoints.adapter_files import read_adapter, with_names_of_transformers
from paged.checkpoints.gguf.adapter import read_gguf_adapter
from paged.checkpoints.lora_adapter import NEUTRAL_OF_PEFT, READ, _matching
from paged.engine.model_text import read_model
from paged.kernels.backend import load_kernels
from paged.model.decoder import Decoder
from paged.model.layers.linear import Linear
from paged.model.lora import LoraSlots, check_adapter, shapes_of, slot_bytes
from paged.options.config import EngineConfig
from tests.support.checkpoints import checkpoint, edit_json
from tests.support.gguf_adapters import write_adapter
from tests.support.images import seeing
from tests.support.lora_adapters import TARGETS, adapter, adapter_of, by_expert

# Values that are not the default, of keys that say how an adapter was trained.
OTHERS = {
    "task_type": "CAUSAL_LM",
    "inference_mode": True,
    "target_modules": ["q_proj"],
    "lora_dropout": 0.1,
    "fan_in_fan_out": True,
    "layers_to_transform": [0],
    "layers_pattern": "layers",
    "qalora_group_size": 32,
    "ensure_weight_tying": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


def written_by_peft(config):
    return {key: sorted(v) if isinstance(v, set) else v for key, v in config.to_dict().items()}


def test_every_key_of_peft_is_read_neutral_or_refused(folder, tmp_path):
    """A key that PEFT adds is refused until it is looked at: it may change what an adapter computes."""
    model = read_config(checkpoint("llama"))
    path = adapter(folder, "llama", 0)
    plain = read_adapter(str(path), model)
    (tmp_path / "adapter_model.safetensors").write_bytes((path / "adapter_model.safetensors").read_bytes())
    own = json.loads((path / "adapter_config.json").read_text())
    defaults = written_by_peft(LoraConfig())
    assert len(defaults) > 30
    assert not (NEUTRAL_OF_PEFT | READ) - {*defaults, "runtime_config", "auto_mapping"}
    for key in [*defaults, "unheard_of"]:
        other = OTHERS.get(key, "other")
        (tmp_path / "adapter_config.json").write_text(json.dumps({**own, key: defaults.get(key)}))
        if key not in READ:  # the default changes nothing
            assert read_adapter(str(tmp_path), model).parts.keys() == plain.parts.keys()
        (tmp_path / "adapter_config.json").write_text(json.dumps({**own, key: other}))
        if key not in NEUTRAL_OF_PEFT:
            with pytest.raises(PagedError, match=rf"adapter_config.json: {key} "):
                read_adapter(str(tmp_path), model)
            continue
        found = read_adapter(str(tmp_path), model)
        for name, part in plain.parts.items():
            assert torch.equal(part.b, found.parts[name].b), key


def test_patterns_match_the_names_that_they_match_in_peft():
    patterns = ("", "q_proj", "^q_proj", "^model.layers.0.q_proj", r"layers\.1\..*", "k|q", ".*", "1.q_proj")
    for pattern in patterns:
        for module in (
            "q_proj",
            "model.layers.0.q_proj",
            "model.layers.1.q_proj",
            "model.layers.11.q_proj",
            "q",
        ):
            numbers = {pattern: 5, "nowhere": 6}
            expected = numbers.get(get_pattern_key(numbers, module), 4)
            assert _matching(numbers, module, Path(), 4) == expected, (pattern, module)


# Models whose rows llama.cpp has in another order: alternating halves, by part, value heads; factors.
CONVERTED = ("llama", "gpt_neox", "qwen3_5", "lfm2", "falcon_h1")


@pytest.mark.parametrize("model", CONVERTED)
def test_gguf_adapters_are_those_of_peft(model, folder, tmp_path):
    targets = list(TARGETS.get(model, ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")))
    ranks = {targets[0]: 5}
    config = {"r": 3, "lora_alpha": 6, "rank_pattern": ranks, "alpha_pattern": {targets[0]: 10}}
    path = adapter_of(model, folder / f"{model}-gguf", {**config, "target_modules": targets})
    # llama.cpp has one alpha for all, and divides it by each matrix's own rank.
    edit_json(path / "adapter_config.json", alpha_pattern={targets[0]: 6})
    sizes = read_config(checkpoint(model))
    expected = read_adapter(str(path), sizes).parts
    file = write_adapter(tmp_path / "adapter.gguf", model, path, 6.0)
    found = read_adapter(str(file), sizes).parts
    assert len(found) > 4
    assert found.keys() == expected.keys()
    for name, part in expected.items():
        torch.testing.assert_close(found[name], part, rtol=1e-6, atol=0)
    unscaled = read_gguf_adapter(write_adapter(tmp_path / "unscaled.gguf", model, path, 0.0), sizes)
    for name, part in found.items():
        torch.testing.assert_close(unscaled.parts[name].b * 6 / len(part.a), part.b)


STACKED = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj"]}
STACKED["target_parameters"] = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def stacked(folder):
    return adapter_of("qwen3_moe", folder / "stacked", STACKED)


def test_experts_are_the_same_in_stacks_and_alone_and_in_gguf_files(stacked, tmp_path):
    sizes = read_config(checkpoint("qwen3_moe"))
    expected = read_adapter(str(stacked), sizes).parts
    apart = by_expert(stacked, "qwen3_moe", tmp_path / "apart")
    file = write_adapter(tmp_path / "adapter.gguf", "qwen3_moe", apart, 6.0)
    for path in (apart, file):
        found = read_adapter(str(path), sizes).parts
        assert found.keys() == expected.keys()
        for name, part in expected.items():
            torch.testing.assert_close(found[name], part, rtol=1e-6, atol=0)


# Tensors and keys of an adapter of experts that are wrong.
WRONG_STACKS = {
    "half": (
        lambda name, x: x[:-1] if "experts.lora_A" in name else x,
        {},
        "rank 3 .* each of the 8 experts",
    ),
    "rows": (lambda name, x: x[:-1] if "layer.lora_B" in name else x, {}, "rows of 2 matrices"),
    "few": (lambda name, x: x[:, :-3] if "experts.lora_B" in name else x, {}, "must have the rank 3"),
    "rank": (lambda _, x: x, {"rank_pattern": {"down_proj": 6}}, "rank 6 .*experts.down_proj"),
    "targets": (
        lambda _, x: x,
        {"target_parameters": ["down_proj"]},
        "name 1 weights of experts in",
    ),
    "names": (lambda _, x: x, {"target_parameters": [1]}, "target_parameters must be a list of names"),
}


@pytest.mark.parametrize("name", WRONG_STACKS)
def test_wrong_stacks_are_named(name, stacked, tmp_path):
    change, keys, message = WRONG_STACKS[name]
    tensors = load_file(stacked / "adapter_model.safetensors")
    changed = {key: change(key, x).contiguous() for key, x in tensors.items()}
    save_file(changed, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((stacked / "adapter_config.json").read_bytes())
    edit_json(tmp_path / "adapter_config.json", **keys)
    with pytest.raises(PagedError, match=message) as error:
        read_adapter(str(tmp_path), read_config(checkpoint("qwen3_moe")))
    assert str(tmp_path) in str(error.value)


def renamed(old, new):
    return lambda tensors: {name.replace(old, new): x for name, x in tensors.items()}


def test_an_adapter_of_peft_is_refused_where_the_multipliers_of_weights_are_unknown(folder, tmp_path):
    """GGUF files of Falcon-H1 do not tell them; those of Granite tell theirs."""
    sizes = read_config(checkpoint("falcon_h1"))
    path = adapter_of("falcon_h1", folder / "keys", {"r": 3, "target_modules": ["k_proj"]})
    hf = json.loads((checkpoint("falcon_h1") / "config.json").read_text())
    for architecture, fails in (("falcon-h1", True), ("granite", False)):
        (tmp_path / "config.json").write_text(json.dumps({**hf, GGUF_KEY: architecture}))
        named = with_names_of_transformers(sizes, tmp_path)
        if fails:
            with pytest.raises(PagedError, match="factors that it does not tell, and an adapter of PEFT"):
                read_adapter(str(path), named)
        else:
            assert read_adapter(str(path), named).parts
    file = write_adapter(tmp_path / "adapter.gguf", "falcon_h1", path, 6.0)
    assert read_adapter(str(file), with_names_of_transformers(sizes, tmp_path)).parts


# alpha, metadata and tensors of a GGUF file of a small Llama.
WRONG_GGUF = {
    "a model": (8.0, {"general.type": "model"}, None, "general.type is 'model'"),
    "another kind": (8.0, {"adapter.type": "control_vector"}, None, "adapter.type is 'control_vector'"),
    "alpha": ("8", {}, None, "adapter.lora.alpha must be"),
    "negative": (-1.0, {}, None, "adapter.lora.alpha must be"),
    "infinite": (float("inf"), {}, None, "adapter.lora.alpha must be finite"),
    "alora": (8.0, {"adapter.alora.invocation_tokens": "x"}, None, "adapter.alora.invocation_tokens is not"),
    "family": (8.0, {"general.architecture": "qwen2"}, None, "for models of Qwen2ForCausalLM"),
    "unknown": (8.0, {"general.architecture": "x"}, None, "general.architecture 'x' is not supported"),
    "half": (8.0, {}, lambda t: dict([*t.items()][:1]), "is there without its other matrix"),
    "embedding": (
        8.0,
        {},
        renamed("blk.0.attn_q", "token_embd"),
        "token_embd.weight.lora_a is not supported",
    ),
    "bias": (8.0, {}, renamed("attn_q.weight", "attn_q.bias"), "attn_q.bias.lora_a is not supported"),
    "norm": (8.0, {}, renamed("attn_q", "attn_norm"), "has no slots|no such linear layer"),
    "elsewhere": (8.0, {}, renamed("blk.0", "blk.7"), "blk.7|layers.7"),
    "nan": (8.0, {}, lambda t: {name: x * torch.nan for name, x in t.items()}, "not finite"),
    "shape": (8.0, {}, lambda t: {n: x[:-1] if n.endswith("b") else x for n, x in t.items()}, "of shape"),
    "none": (8.0, {}, lambda _: {}, "would change nothing"),
}


@pytest.fixture(scope="module")
def of_queries(folder):
    return adapter_of("llama", folder / "queries", {"r": 3, "target_modules": ["q_proj"]})


@pytest.mark.parametrize("name", WRONG_GGUF)
def test_wrong_gguf_adapters_are_named(name, of_queries, tmp_path):
    alpha, more, edit, message = WRONG_GGUF[name]
    path = tmp_path / "adapter.gguf"
    write_adapter(path, "llama", of_queries, alpha, more=more, edit=edit or (lambda tensors: tensors))
    with pytest.raises(PagedError, match=message) as error:
        checked(str(path), "llama")
    assert re.search(r"adapter.gguf|adapters0|tmp", str(error.value))


def checked(path, model):
    """Read an adapter, and check it against a model without weights."""
    directory = seeing(model.removesuffix(" with images")) if "with" in model else checkpoint(model)
    config = read_config(directory)
    if config.placeholders:
        config, _ = read_model(EngineConfig(str(directory)), directory)
    with torch.device("meta"):
        decoder = Decoder(config, load_kernels("torch"))
    found = read_adapter(path, with_names_of_transformers(config, directory))
    check_adapter(found, shapes_of(decoder, None), 64)
    return found


# Names that adapters of a model give, and what is said of each.
REFUSED = {
    ("qwen3_5", "model.layers.0.linear_attn.conv1d"): "no slots",
    ("qwen3_5", "model.layers.0.linear_attn.A_log"): "no slots",
    ("qwen3_5", "model.layers.0.linear_attn.dt_bias"): "no slots",
    ("qwen3_5", "model.embed_tokens"): "no slots",
    ("qwen3_5", "lm_head"): "no slots",
    ("qwen3_moe", "model.layers.0.mlp.experts.0.gate_proj"): "experts have slots only where",
    (
        "qwen3_moe",
        "model.layers.0.mlp.experts.base_layer",
    ): r"\[\] name 0 weights of experts",
    ("qwen3_moe", "model.layers.0.mlp.gate"): r"is \[8, 48\], but its lora_A",
    ("gemma3-vision", "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"): "not loaded",
    ("gemma3-vision", "model.multi_modal_projector.linear"): "not loaded|does not have",
    ("mistral3 with images", "model.vision_tower.transformer.layers.0.attention.q_proj"): "a part for images",
    ("gemma4 with images", "model.embed_vision.embedding_projection"): "a part for images",
    ("gemma3-vision", "model.layers.0.mlp.lower_proj"): "no slots",
    ("gemma3-vision", "models.layers.0.mlp.down_proj"): "does not have",
    ("llama", "transformer.h.0.attn.c_attn"): "no slots",
}


NAMED_TWICE = ("gemma3-vision", "gemma4-vision", "mistral-vision", "qwen3_5-vision", "llama")


@pytest.mark.parametrize("model", NAMED_TWICE)
def test_an_adapter_of_the_text_part_has_the_names_of_either_model(model, of_queries, tmp_path):
    (tmp_path / "adapter_config.json").write_bytes((of_queries / "adapter_config.json").read_bytes())
    size = read_config(checkpoint(model)).hidden_size
    found = []
    for start in ("model.", "model.language_model.", "language_model.model."):
        module = f"base_model.model.{start}layers.1.mlp.gate_proj"
        pair = torch.ones(3, size), torch.ones(80, 3)
        tensors = {f"{module}.lora_{kind}.weight": each for kind, each in zip("AB", pair, strict=True)}
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        found.append(checked(str(tmp_path), model))
    wanted = ("model.layers.1.mlp.gate_proj", found[0].digest)
    assert {(*each.parts, each.digest) for each in found} == {wanted}


@pytest.mark.parametrize(("model", "module"), REFUSED)
def test_adapters_of_what_is_no_linear_layer_are_refused(model, module, of_queries, tmp_path):
    names = [f"base_model.model.{module}.lora_{kind}.weight" for kind in "AB"]
    save_file(
        dict(zip(names, (torch.ones(3, 48), torch.ones(64, 3)), strict=True)),
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_bytes((of_queries / "adapter_config.json").read_bytes())
    with pytest.raises(PagedError, match=REFUSED[model, module]) as error:
        checked(str(tmp_path), model)
    assert module in str(error.value)


@pytest.mark.parametrize("targets", [None, ["o_proj", "experts"]])
def test_slots_take_the_memory_that_is_planned(targets):
    config = read_config(checkpoint("qwen2_moe"))
    with torch.device("meta"):
        decoder = Decoder(config, load_kernels("torch"))
    slots = LoraSlots(decoder, num_slots=3, max_rank=8, targets=targets, device=torch.device("meta"))
    layers = [each.lora for each in decoder.modules() if isinstance(each, Linear) and each.lora is not None]
    assert sum(each.a.nbytes + each.b.nbytes for each in layers) == 3 * slot_bytes(decoder, 8, targets)
    assert any(".experts." in name for name in slots.shapes) == (targets is not None)
    assert any(".shared_expert" in name for name in slots.shapes) == (targets is None)
