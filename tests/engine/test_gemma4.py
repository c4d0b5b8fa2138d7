"""What only Gemma 4 has: layers that read K and V of others, and a number for each layer."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged import CheckpointError, EngineConfig, SamplingParams
from paged.architectures.hf_config import read_config
from paged.kernels.cpu.attention.paged_attention import SPLIT_KEYS
from paged.kernels.plain import backend as torch_kernels
from paged.model.decoder import Decoder
from paged.model.layers.attention import Attention
from paged.simulate.fleet import Fleet, FleetConfig
from tests.engine.test_families import run
from tests.engine.test_matches_transformers import assert_matches, greedy
from tests.support.checkpoints import CONFIGS, checkpoint, new_engine, ragged_prompts, random_model, reference

NAMES = ["gemma4", "gemma4-keys-as-values"]


def changed(name, directory, **tensors):
    """Copy a checkpoint, with other tensors of layer 5; __ in a name is a dot."""
    shutil.copytree(checkpoint(name), directory, dirs_exist_ok=True)
    file = directory / "model.safetensors"
    found = load_file(file)
    (norm,) = [name for name in found if name.endswith("layers.5.input_layernorm.weight")]
    layer = norm.removesuffix("input_layernorm.weight")
    found |= {layer + name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(found, file)
    return directory


@pytest.mark.parametrize("name", ["gemma4", "gemma4-vision"])
def test_tensors_that_layers_do_not_use_are_skipped(name, tmp_path, monkeypatch):
    """As those of layers that read K and V of others, in Google's checkpoints."""
    unused = {f"self_attn__{part}__weight": torch.ones(3) for part in ("k_proj", "v_proj", "k_norm")}
    engine = new_engine(changed(name, tmp_path, **unused))
    assert_matches(engine, reference(name), ragged_prompts([30], vocab_size=200), 2, monkeypatch)
    with pytest.raises(CheckpointError, match=r"layers.5.self_attn.x_proj.weight is not part of the model"):
        new_engine(changed(name, tmp_path, self_attn__x_proj__weight=torch.ones(3)))


@pytest.mark.parametrize("scalar", [0.0, float("nan")])
def test_a_layer_s_number_must_be_positive(scalar, tmp_path):
    with pytest.raises(CheckpointError, match="layer_scalar of layer 5 must be"):
        new_engine(changed("gemma4", tmp_path, layer_scalar=torch.tensor([scalar])))


def test_layers_that_write_nothing_compute_output_rows_only(monkeypatch):
    rows, project = {}, Attention.project

    def noted(attention, hidden, *others):
        rows.setdefault(attention.layer, []).append(len(hidden))
        return project(attention, hidden, *others)

    monkeypatch.setattr(Attention, "project", noted)
    engine = new_engine(checkpoint("gemma4"), enforce_eager=True)
    rows.clear()  # of the step at the start
    engine.generate(ragged_prompts([40, 30]), greedy(2), use_tqdm=False)
    assert rows == {layer: [70 if layer < 3 else 2, 2] for layer in range(7)}
    rows.clear()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    engine.generate(ragged_prompts([40], seed=1), params, use_tqdm=False)
    assert {counts[0] for layer, counts in rows.items() if layer > 2} == {40}


@pytest.mark.parametrize("name", NAMES)
def test_recorded_steps_over_a_split(name, tmp_path):
    """Layers with 2 KV heads and with 1 have plans of their own, whose results are merged."""
    config = CONFIGS[name]()
    config.max_position_embeddings = 2 * SPLIT_KEYS + 64
    random_model(config).save_pretrained(tmp_path)
    prompts, found = ragged_prompts([2 * SPLIT_KEYS - 6, SPLIT_KEYS - 3]), []
    for eager in (True, False):
        engine = new_engine(tmp_path, num_blocks=1000, enforce_eager=eager, attention_backend="numba")
        found.append(run(engine, prompts, max_tokens=12)[0])
    assert found[0] == found[1]
    assert sum(graph is not None for graph in engine.runner.graphs._graphs.values()) >= 2


@pytest.mark.parametrize("name", NAMES)
def test_prefix_files_hold_the_blocks_of_all_shapes(name, tmp_path):
    (prompt,) = ragged_prompts([70])
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    engine = new_engine(checkpoint(name))
    (expected,) = engine.generate([prompt], params, use_tqdm=False)
    assert engine.save_prefix(tmp_path / "kv")
    engine = new_engine(checkpoint(name))
    assert engine.load_prefix(tmp_path / "kv")
    (output,) = engine.generate([prompt], params, use_tqdm=False)
    assert (output.num_cached_tokens, output.outputs) == (64, expected.outputs)


@pytest.mark.parametrize("dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_blocks(name, dtype):
    """The simulator counts blocks by them."""
    runner = new_engine(checkpoint(name), kv_cache_dtype=dtype, num_blocks=10).runner
    assert runner.kv_cache.num_bytes == 10 * runner.sizes.block_bytes
    assert runner.kv_cache.tensors["kv"].shape[0] == 1, "parts of several sizes have one plane"
    options = EngineConfig(model=str(checkpoint(name)), kv_cache_dtype=dtype)
    assert Fleet(FleetConfig(gpu="H100"), options).num_blocks


@pytest.mark.parametrize("name", [*NAMES, "gpt2", "llama", "llama-tied-bias", "gpt_neox"])
def test_simulator_counts_the_weights(name):
    """Of matrices and tables: norms and biases are few."""
    config = read_config(checkpoint(name))
    with torch.device("meta"):
        model = Decoder(config, torch_kernels)
    weights = {id(p): p for p in model.parameters() if p.dim() == 2}.values()
    assert config.num_params == sum(p.numel() for p in weights)
