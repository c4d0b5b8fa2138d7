"""Checkpoints of every layout load; damaged ones are refused with the name of what is wrong."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged import CheckpointError, ConfigError, LLMEngine, SamplingParams, UnsupportedModelError
from paged.architectures.config import DEMO
from paged.architectures.generation_config import read_eos_token_ids
from paged.architectures.hf_config import read_config
from paged.checkpoints import stored
from paged.checkpoints.model_directory import resolve
from paged.checkpoints.safetensors_file import SafetensorsFile
from paged.checkpoints.stored import FloatFormat, StoredTensor
from tests.support.checkpoints import (
    CONFIGS,
    Reference,
    checkpoint,
    edit_json,
    new_engine,
    ragged_prompts,
    random_model,
    reference,
)
from tests.support.specs import windows

PROMPTS = ragged_prompts([5, 30])


@pytest.fixture
def copy(tmp_path):
    """Copy the "llama" checkpoint, to be changed."""
    directory = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), directory)
    return directory


def generated(directory: Path, **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    engine = new_engine(directory, **options)
    return [o.outputs[0].token_ids for o in engine.generate(PROMPTS, params, use_tqdm=False)]


def expected(name: str) -> list[list[int]]:
    return [reference(name).greedy(prompt, 8)[0] for prompt in PROMPTS]


def load_raises(directory: Path, *named: str, error: type[Exception] = CheckpointError) -> str:
    """Load a checkpoint. Return the message of the error, which must contain all of `named`."""
    with pytest.raises(error) as info:
        LLMEngine(str(directory), skip_tokenizer_init=True, num_blocks=4, dtype="float32", device="cpu")
    message = str(info.value)
    for name in named:
        assert name in message
    return message


def test_sharded_checkpoint(tmp_path):
    random_model(CONFIGS["llama"]()).save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert generated(tmp_path) == expected("llama")


def test_bfloat16_checkpoint_computes_in_the_dtype_asked_for(tmp_path):
    random_model(CONFIGS["llama"]()).to(torch.bfloat16).save_pretrained(tmp_path)
    oracle = Reference(tmp_path)  # computes the rounded weights in float32
    assert generated(tmp_path) == [oracle.greedy(prompt, 8)[0] for prompt in PROMPTS]
    engine = new_engine(tmp_path, dtype="bfloat16")
    weight = engine.runner.model.embedding.form.weight
    assert engine.runner.kv_cache.tensors["kv"].dtype == weight.dtype == torch.bfloat16
    # bfloat16 is too coarse for equal tokens; only check that it runs.
    assert all(len(tokens) == 8 for tokens in generated(tmp_path, dtype="bfloat16"))


def test_checkpoint_of_transformers_4(tmp_path):
    """Rope settings and dtype have their old names, and buffers were saved."""
    shutil.copytree(checkpoint("llama-llama3"), tmp_path, dirs_exist_ok=True)
    scaling = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    theta = scaling.pop("rope_theta")
    edit_json(
        tmp_path / "config.json",
        rope_parameters=None,
        dtype=None,
        torch_dtype="float32",
        rope_theta=theta,
        rope_scaling=scaling,
    )
    file = tmp_path / "model.safetensors"
    old_buffers = {
        f"model.layers.{i}.self_attn.rotary_emb.{buffer}": torch.ones(8)
        for i in range(2)
        for buffer in ("inv_freq", "cos_cached", "sin_cached")
    }
    save_file(load_file(file) | old_buffers, file)
    assert generated(tmp_path) == expected("llama-llama3")


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_old_checkpoints_of_gpt2(prefix, tmp_path):
    """Without the head's prefix, with a head that is the embedding, and with masks."""
    shutil.copytree(checkpoint("gpt2"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = {prefix + name.removeprefix("transformer."): x for name, x in load_file(file).items()}
    masks = {f"{prefix}h.{i}.attn.bias": torch.ones(1, 1, 8, 8) for i in range(2)}
    masks |= {f"{prefix}h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}
    save_file(tensors | masks | {"lm_head.weight": tensors[f"{prefix}wte.weight"].clone()}, file)
    assert generated(tmp_path) == expected("gpt2")


def test_old_checkpoints_of_gpt_neox(tmp_path):
    """With masks of a dtype that no parameter has, keys of config.json from before transformers 5."""
    shutil.copytree(checkpoint("gpt_neox"), tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", rope_parameters=None, rotary_pct=0.6, rotary_emb_base=10000)
    file = tmp_path / "model.safetensors"
    tensors, layers = load_file(file), [f"gpt_neox.layers.{i}.attention." for i in range(2)]
    assert "embed_out.weight" in tensors
    masks = {f"{layer}bias": torch.ones(1, 1, 8, 8, dtype=torch.bool) for layer in layers}
    masks |= {f"{layer}masked_bias": torch.tensor(-1e9) for layer in layers}
    masks |= {f"{layer}rotary_emb.inv_freq": torch.ones(6) for layer in layers}
    save_file(tensors | masks, file)
    assert generated(tmp_path) == expected("gpt_neox")
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")  # as transformers calls it now
    save_file(tensors, file)
    assert generated(tmp_path) == expected("gpt_neox")


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "gemma4", "gpt_neox"])
def test_checkpoints_of_the_model_without_its_head(name, tmp_path):
    """Qwen3-Embedding names its tensors so. A head may be there too."""
    shutil.copytree(checkpoint(name), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = {re.sub(r"^(model|gpt_neox)\.", "", key): x for key, x in load_file(file).items()}
    assert not any(key.startswith("model.") for key in tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    assert generated(tmp_path) == expected(name)
    save_file(tensors | {"layers.0.self_attn.rotary.bias": torch.ones(3)}, file)
    load_raises(tmp_path, "layers.0.self_attn.rotary.bias is not part of the model")


def test_missing_head_is_named_with_what_to_do(copy):
    file = copy / "model.safetensors"
    save_file({key: x for key, x in load_file(file).items() if key != "lm_head.weight"}, file)
    load_raises(
        copy, "lm_head.weight is missing from the checkpoint; tie_word_embeddings true in config.json"
    )
    edit_json(copy / "config.json", tie_word_embeddings=True)
    assert len(new_engine(copy).encode(PROMPTS)) == 2


def test_names_with_and_without_a_prefix_are_of_one_tensor(copy):
    file = copy / "model.safetensors"
    save_file(load_file(file) | {"norm.weight": torch.ones(48)}, file)
    load_raises(copy, "norm.weight is in model.safetensors too, as ")


def test_names_of_a_family_are_in_errors(tmp_path):
    shutil.copytree(checkpoint("gpt2"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors, name = load_file(file), "transformer.h.1.attn.c_proj.weight"
    save_file({key: x for key, x in tensors.items() if key != name}, file)
    load_raises(tmp_path, f"{name} is missing")
    save_file(tensors | {name: torch.ones(3)}, file)
    load_raises(tmp_path, f"{name} has shape [3], but config.json makes it [80, 80]")
    save_file(tensors | {"transformer.h.1.attn.q_attn.weight": torch.ones(3)}, file)
    load_raises(tmp_path, "transformer.h.1.attn.q_attn.weight is not part of the model")
    save_file(tensors | {"transformer.wqe.weight": torch.ones(3)}, file)
    load_raises(tmp_path, "transformer.wqe.weight is not part of the model")


def test_positions_end_where_their_table_does():
    with pytest.raises(ConfigError, match="max_model_len 513 is more than the 512 of the model"):
        new_engine(checkpoint("gpt2"), max_model_len=513)
    engine = new_engine(checkpoint("gpt2"), max_model_len=512)
    params = SamplingParams(temperature=0.0, max_tokens=99, ignore_eos=True)
    (output,) = engine.generate(ragged_prompts([508]), params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_old_name_of_the_rope_type(tmp_path):
    shutil.copytree(checkpoint("llama-linear"), tmp_path, dirs_exist_ok=True)
    edit_json(
        tmp_path / "config.json",
        rope_parameters=None,
        rope_theta=10000.0,
        rope_scaling={"type": "linear", "factor": 4.0},
    )
    assert generated(tmp_path) == expected("llama-linear")


def test_tied_checkpoint_may_carry_its_head(tmp_path):
    shutil.copytree(checkpoint("qwen3"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert generated(tmp_path) == expected("qwen3")


def test_head_of_its_own_is_not_tied(tmp_path):
    """transformers goes by the tensors too, where config.json says otherwise."""
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    assert generated(tmp_path) == expected("llama")


def test_every_parameter_is_loaded(monkeypatch):
    """Every row of every weight: torch.empty gives NaN in tests."""
    weights: list[torch.Tensor] = []

    class Watched(FloatFormat):
        def weight(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
            weights.extend(tensors.values())
            return tensors["weight"]

    monkeypatch.setattr(stored, "FloatFormat", Watched)
    for name in CONFIGS:
        weights.clear()
        model = new_engine(checkpoint(name)).runner.model
        assert len(weights) == sum(module.role is not None for module in model.loadables())
        assert all(x.isfinite().all() for x in (*weights, *model.parameters()))


def edit_header(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = directory / "model.safetensors"
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


def set_entry(**values: Any) -> Callable[[Path], None]:
    return lambda d: edit_header(d, lambda header: header["model.norm.weight"].update(values))


def set_metadata(metadata: Any) -> Callable[[Path], None]:
    return lambda d: edit_header(d, lambda header: header.update(__metadata__=metadata))


def move_tensors(by: int) -> Callable[[Path], None]:
    """Move all tensors by this many bytes; the first one forward only."""

    def move(header: dict[str, Any]) -> None:
        for name, entry in header.items():
            if name != "__metadata__" and entry["data_offsets"][0] + by >= 0:
                entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]

    def damage(directory: Path) -> None:
        edit_header(directory, move)
        if by > 0:
            append_bytes(directory)

    return damage


def append_bytes(directory: Path) -> None:
    with (directory / "model.safetensors").open("ab") as file:
        file.write(bytes(8))


def weights_directory(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()


# Damage to a sound checkpoint, and what the error must then name.
def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def truncate_header(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:200])


def empty_file(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"")


def change_tensors(**changes: Callable[[torch.Tensor], torch.Tensor] | None) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        file = directory / "model.safetensors"
        tensors = load_file(file)
        for name, new in changes.items():
            name = name.replace("__", ".")
            if new is None:
                del tensors[name]
            else:
                tensors[name] = new(tensors.get(name, torch.zeros(3)))
        save_file(tensors, file)

    return change


def rewrite_header(edit: Callable[[dict[str, Any]], str]) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        file = directory / "model.safetensors"
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = edit(json.loads(content[8 : 8 + length])).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + length :])

    return change


def doubled(header: dict[str, Any]) -> str:
    entry = json.dumps(header["model.norm.weight"])
    return json.dumps(header)[:-1] + f', "model.norm.weight": {entry}}}'


def shifted(header: dict[str, Any]) -> str:
    entry = header["model.norm.weight"]
    entry["data_offsets"] = [entry["data_offsets"][0], entry["data_offsets"][1] - 4]
    return json.dumps(header)


def of_integers(header: dict[str, Any]) -> str:
    header["model.norm.weight"]["dtype"] = "I32"
    return json.dumps(header)


def set_config(**values: Any) -> Callable[[Path], None]:
    return lambda directory: edit_json(directory / "config.json", **values)


def pickled(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    torch.save({}, directory / "pytorch_model.bin")


def index_of(shard: Any) -> Callable[[Path], None]:
    """Replace the file of weights by an index that names another."""

    def change(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        index = {"weight_map": {"model.norm.weight": shard}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def moved_to(*names: str) -> Callable[[Path], None]:
    """Rename the file of weights. Further names are of copies."""

    def change(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / names[0])
        for name in names[1:]:
            shutil.copy(directory / names[0], directory / name)

    return change


def only_gguf(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "model.gguf")
    (directory / "config.json").unlink()


def pointer(name: str) -> Callable[[Path], Any]:
    text = "version https://git-lfs.example/spec/v1\noid sha256:0123\nsize 12345\n"
    return lambda directory: (directory / name).write_text(text)


NORM = "model.norm.weight"
DAMAGES: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "no-config": (lambda d: (d / "config.json").unlink(), ("config.json", "does not exist")),
    "config-not-json": (lambda d: (d / "config.json").write_text("{"), ("config.json", "not JSON")),
    "config-not-object": (lambda d: (d / "config.json").write_text("[]"), ("config.json", "object")),
    "no-weights": (
        lambda d: (d / "model.safetensors").unlink(),
        ("model.safetensors does not exist, nor model.safetensors.index.json", "only safetensors are read"),
    ),
    "pickle": (pickled, ("pytorch_model.bin", "pickle", "safetensors")),
    "truncated": (truncate, ("model.safetensors", "truncated", "model.norm.weight")),
    "truncated-header": (truncate_header, ("model.safetensors", "truncated")),
    "empty": (empty_file, ("model.safetensors", "truncated")),
    "header-not-json": (rewrite_header(lambda _: "{x"), ("model.safetensors", "damaged header")),
    "header-not-object": (rewrite_header(lambda _: "[1]"), ("model.safetensors", "damaged header")),
    "duplicate-key": (rewrite_header(doubled), ("model.safetensors", NORM, "twice")),
    "offsets-disagree": (rewrite_header(shifted), ("model.safetensors", NORM)),
    "integer-weights": (rewrite_header(of_integers), ("model.safetensors", NORM, "int32")),
    "missing-tensor": (change_tensors(model__norm__weight=None), (NORM, "missing")),
    "extra-tensor": (change_tensors(model__extra__weight=lambda t: t), ("model.extra.weight", "not part")),
    "wrong-shape": (change_tensors(model__norm__weight=lambda t: t[:-1].clone()), (NORM, "[47]", "[48]")),
    "wrong-rank": (change_tensors(model__norm__weight=lambda t: t[None]), (NORM, "[1, 48]", "[48]")),
    "index-outside": (index_of("../model.safetensors"), ("outside",)),
    "index-of-no-file": (
        index_of(5),
        ("weight_map must have the name of a file for 'model.norm.weight', got 5",),
    ),
    "lost-shard": (
        index_of("model-00001-of-00002.safetensors"),
        ("model-00001-of-00002.safetensors does not exist, and model.safetensors.index.json says",),
    ),
    "lost-index": (
        moved_to("model-00001-of-00001.safetensors"),
        ("nor model.safetensors.index.json", "; model-00001-of-00001.safetensors is there: fetch the index"),
    ),
    "lost-index-of-two": (
        moved_to("model-1.safetensors", "model-2.safetensors"),
        ("; model-1.safetensors is there: fetch the index of these 2 files",),
    ),
    "authors-layout": (
        moved_to("consolidated.safetensors"),
        ("; consolidated.safetensors is there, in its author's own layout",),
    ),
    "variant": (
        moved_to("model.fp16.safetensors"),
        ("; model.fp16.safetensors is there, a variant: rename it to model.safetensors",),
    ),
    "config-names-no-file": (
        set_config(transformers_weights="other.safetensors"),
        ("other.safetensors does not exist, and config.json names it",),
    ),
    "config-names-a-file-elsewhere": (
        set_config(transformers_weights="../model/model.safetensors"),
        ("config.json: transformers_weights must name a file of its own directory",),
    ),
    "config-names-a-pickle": (
        set_config(transformers_weights="pytorch_model.bin"),
        ("transformers_weights must name a safetensors file or its index, got 'pytorch_model.bin'",),
    ),
    "gguf": (
        lambda d: (d / "model.safetensors").rename(d / "model-Q4_K_M.gguf"),
        ("model-Q4_K_M.gguf: is truncated or no GGUF file",),
    ),
    "gguf-alone": (only_gguf, ("model.gguf: is truncated or no GGUF file",)),
    "adapter": (
        lambda d: (d / "config.json").rename(d / "adapter_config.json"),
        ("config.json does not exist", "has a LoRA adapter"),
    ),
    "pointer": (pointer("model.safetensors"), ("model.safetensors", "Git LFS", "`git lfs pull`")),
    "config-pointer": (pointer("config.json"), ("config.json", "Git LFS", "`git lfs pull`")),
    "config-more-layers": (set_config(num_hidden_layers=3), ("model.layers.2.", "missing")),
    "config-fewer-layers": (set_config(num_hidden_layers=1), ("model.layers.1.", "not part")),
    "config-other-vocabulary": (set_config(vocab_size=212), ("[211, 48]", "[212, 48]")),
    "config-bias": (set_config(attention_bias=True), ("q_proj.bias", "missing")),
    "heads-do-not-divide": (set_config(num_attention_heads=3), ("config.json", "num_attention_heads 3")),
    "odd-head-dim": (set_config(head_dim=15), ("config.json", "head_dim", "15")),
    "vocabulary-of-zero": (set_config(vocab_size=0), ("config.json", "vocab_size")),
    "size-is-text": (set_config(hidden_size="48"), ("config.json", "hidden_size")),
    "size-is-a-bool": (set_config(num_key_value_heads=True), ("config.json",)),
    "beyond-every-ceiling": (set_config(intermediate_size=10**12), ("config.json", "intermediate_size")),
    "a-trillion-layers": (set_config(num_hidden_layers=10**12), ("config.json", "num_hidden_layers")),
    "disagrees-hugely": (set_config(hidden_size=2**17, intermediate_size=2**20), ("config.json",)),
    "window-of-zero": (
        set_config(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=0),
        ("sliding_window",),
    ),
    "another-model-type": (set_config(model_type="gemma2"), ("model_type", "gemma2", "llama")),
    "rope-factor-nan": (
        set_config(rope_parameters={"rope_type": "linear", "factor": math.nan, "rope_theta": 1e4}),
        ("factor", "nan"),
    ),
    "rope-theta-negative": (
        set_config(rope_parameters={"rope_type": "default", "rope_theta": -1.0}),
        ("rope_theta", "-1.0"),
    ),
    "bytes-behind-the-last-tensor": (append_bytes, ("model.safetensors", "tensors take")),
    "gap-between-tensors": (move_tensors(8), ("begins at byte 8",)),
    "overlapping-tensors": (move_tensors(-8), ("begins at byte",)),
    "shape-of-text": (set_entry(shape=["48"]), ("damaged header", "['48']")),
    "offsets-of-text": (set_entry(data_offsets=["0", "192"]), ("damaged header", "'192'")),
    "metadata-of-numbers": (set_metadata({"format": 1}), ("damaged header", "__metadata__")),
    "weights-are-a-directory": (weights_directory, ("model.safetensors does not exist",)),
    "eos-is-text": (
        lambda d: edit_json(d / "generation_config.json", eos_token_id="2"),
        ("generation_config.json", "eos_token_id"),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_refused_and_named(damage, copy):
    change, named = DAMAGES[damage]
    change(copy)
    assert str(copy) in load_raises(copy, *named)


ROPE_TYPES = ("default", "linear", "dynamic", "llama3")
UNSUPPORTED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "architecture": (
        {"architectures": ["MambaForCausalLM"]},
        ("MambaForCausalLM", "paged models"),
    ),
    "no-architecture": (
        {"architectures": None},
        ("architectures is missing", "model_type is 'llama'", "paged models"),
    ),
    "rope": (
        {"rope_parameters": {"rope_type": "ntk", "factor": 2.0, "rope_theta": 1e4}},
        ("ntk", *ROPE_TYPES),
    ),
    "old-rope": (
        {"rope_parameters": None, "rope_scaling": {"type": "ntk", "factor": 2.0}},
        ("ntk", *ROPE_TYPES),
    ),
    "partial-rotary": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        ("partial_rotary_factor",),
    ),
    "quantized": (
        {"quantization_config": {"quant_method": "hqq"}},
        ("quantization_config", "hqq", "supported are gptq, awq"),
    ),
    "activation": ({"hidden_act": "gelu"}, ("gelu", "silu")),
}


@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_unsupported_feature_is_named_with_what_is_supported(feature, copy):
    values, named = UNSUPPORTED[feature]
    edit_json(copy / "config.json", **values)
    load_raises(copy, *named, error=UnsupportedModelError)


def test_nothing_is_loaded_before_all_headers_are_checked(copy, monkeypatch):
    truncate(copy)
    monkeypatch.setattr(StoredTensor, "copy_to", lambda *_: pytest.fail("a tensor was read"))
    load_raises(copy, "truncated")


def test_revisions_reach_the_hub(monkeypatch):
    asked = []

    def snapshot_download(model, **options):
        asked.append((model, options["revision"]))
        return checkpoint("llama") if model == "org/model" else DEMO

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=[]))
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    options = {"skip_tokenizer_init": False, "num_blocks": 8}
    new_engine("org/model", tokenizer="org/words", revision="v1", tokenizer_revision="v2", **options)
    assert asked == [("org/model", "v1"), ("org/words", "v2")]
    asked.clear()
    with pytest.raises(
        CheckpointError, match=r"revision 'v3' names a version on the hub, but .* is a directory"
    ):
        new_engine("org/model", tokenizer=str(DEMO), tokenizer_revision="v3", **options)
    with pytest.raises(CheckpointError, match=r"revision 'v1' .* but demo is a directory"):
        new_engine("demo", revision="v1")


@pytest.mark.parametrize("model", ["/no/such/directory", "./nowhere", "a/b/c", "bad\0name"], ids=ascii)
def test_missing_model_is_named(model):
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve(model)


def test_file_instead_of_a_directory_is_refused(copy):
    with pytest.raises(CheckpointError, match="give the directory"):
        resolve(str(copy / "model.safetensors"))


def test_eos_ids_come_from_generation_config_before_config(tmp_path):
    edit_json(tmp_path / "config.json", eos_token_id=2)
    assert read_eos_token_ids(tmp_path) == {2}
    edit_json(tmp_path / "generation_config.json", eos_token_id=[3, 5])
    assert read_eos_token_ids(tmp_path) == {3, 5}
    edit_json(tmp_path / "generation_config.json", eos_token_id=0)
    assert read_eos_token_ids(tmp_path) == {0}


def test_config_reads_each_layers_window():
    assert windows(read_config(checkpoint("mistral"))) == (24, 24)
    assert windows(read_config(checkpoint("qwen2-mixed"))) == (24, None)
    assert windows(read_config(checkpoint("qwen2"))) == (None, None)


def test_header_names_every_shape():
    with SafetensorsFile(checkpoint("llama") / "model.safetensors") as file:
        assert file.tensors["model.embed_tokens.weight"].shape == [211, 48]
        assert "__metadata__" not in file.tensors
