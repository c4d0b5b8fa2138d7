"""Shards of a model compute the bits of one process: tensor parallelism, with threads for processes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Gemma4TextConfig, LlamaConfig

from paged import ConfigError, SamplingParams
from paged.architectures.hf_config import read_config
from paged.checkpoints.open_file import OpenFile
from paged.kernels.panels import can_pair, pack, pack_bf12
from paged.model.cache.shares import cut_blocks, join_blocks
from paged.model.division import check_shards
from paged.model.part import ModelPart, Shard
from tests.checkpoints.test_quantised_checkpoints import MODELS
from tests.support.checkpoints import (
    CONFIGS,
    SHAPE,
    VOCAB_SIZE,
    assert_all_free,
    checkpoint,
    new_engine,
    ragged_prompts,
    random_model,
)
from tests.support.gguf_models import write_model
from tests.support.quantised import quantised_checkpoint
from tests.support.shards import ShardedModel, assert_same, computed_in_shards, shards_of

SQUARE: dict[str, Any] = {**SHAPE, "hidden_size": 64, "intermediate_size": 128}
# Groups of int4 divide all their inputs.
CONFIGS["llama, tied, wide"] = lambda: LlamaConfig(**{**SQUARE, "tie_word_embeddings": True})
CONFIGS["gemma4, wide"] = lambda: Gemma4TextConfig(
    **{**SQUARE, "num_hidden_layers": 3, "tie_word_embeddings": True},
    layer_types=["sliding_attention", "full_attention", "full_attention"],
    sliding_window=24,
    global_head_dim=64,
    hidden_size_per_layer_input=32,
    vocab_size_per_layer_input=VOCAB_SIZE + 6,
    num_kv_shared_layers=1,
)
INT8 = {"quantization": "int8"}
INT4 = {"quantization": "int4"}
BF16 = {"dtype": "bfloat16"}
SWAP = {"preemption_mode": "swap", "swap_space": 0.01}
# With 2 KV heads two of four shards have the same one.
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 2, {}),
    ("llama", 4, BF16),
    ("llama-tied-bias", 2, {"dtype": "float16"}),
    ("llama-dynamic", 2, {}),
    ("llama, tied, wide", 2, {**BF16, **INT4}),
    ("mistral", 4, {"kv_cache_dtype": "int8", **SWAP}),
    ("qwen3", 2, {"enforce_eager": True}),
    ("phi3", 4, {}),
    ("phi3-longrope", 2, {"kv_cache_dtype": "bfloat16"}),
    ("ministral3", 2, {}),
    ("olmo2", 2, {}),
    ("olmo2", 4, {**BF16, "kv_cache_dtype": "int8"}),
    ("gemma2", 2, {}),
    ("gemma4, wide", 4, {**INT4, "kv_cache_dtype": "int8"}),
    ("gemma4-keys-as-values", 2, {"kv_cache_dtype": "fp8", **SWAP}),
    ("qwen3_5", 2, {}),
    ("qwen3_5", 4, BF16),  # two shards have the same key head
    ("lfm2", 2, {**SWAP, **INT8}),
    ("nemotron_h", 2, {}),
    ("nemotron_h", 4, BF16),  # the groups of norms are of heads of two shards
    ("falcon_h1-norm", 2, {**SWAP, **INT8}),
    ("granitemoehybrid-dense", 4, {}),
    ("gpt2", 2, {}),
    ("gpt2-unscaled", 4, {**BF16, **INT8}),
    ("gpt_neox", 4, {}),
    ("gpt_neox-serial", 2, BF16),
]


@pytest.mark.parametrize(
    ("name", "count", "options"), CASES, ids=[f"{name}-{count}" for name, count, _ in CASES]
)
def test_each_step_has_the_bits_of_one_process(name, count, options):
    """In steps recorded and not, with chunks, swaps, forks, prefix hits and reports."""
    num_groups = len(read_config(checkpoint(name)).layer_groups)
    is_swapped = "swap_space" in options
    num_blocks = (7 if is_swapped else 9) * num_groups
    engine = new_engine(checkpoint(name), num_blocks=num_blocks, max_num_batched_tokens=24, **options)
    prompts = ragged_prompts([1, 30, 61, 8, 33])
    prompts.append(prompts[2][:40])
    params = SamplingParams(max_tokens=24 if is_swapped else 9, temperature=0, ignore_eos=True)
    forked = SamplingParams(max_tokens=5, n=2, seed=1, ignore_eos=True, prompt_logprobs=1)
    with computed_in_shards(engine, shards_of(count)) as sharded:
        results = engine.generate(prompts, [params] * 4 + [forked, params], use_tqdm=False)
        assert_all_free(engine)
    assert any(result.metrics.num_preemptions for result in results) or not is_swapped
    if not engine.model_config.states:  # which have no prefix cache
        _assert_blocks_are_equal(engine, sharded)


def _assert_blocks_are_equal(engine, sharded: ShardedModel) -> None:
    """Compare the cached blocks of one process with those put together of all shards."""
    config = engine.model_config
    block_size = engine.runner.sizes.block_size
    blocks, groups = zip(*engine.block_manager.pool.known_blocks(), strict=True)

    def taken(cache):
        return {name: tensor[:, list(blocks)] for name, tensor in cache.tensors.items()}

    parts = [(sizes.part, taken(cache)) for sizes, cache in zip(sharded.sizes, sharded.caches, strict=True)]
    whole = ModelPart.whole(config.num_layers), taken(engine.runner.kv_cache)
    expected = join_blocks(config, block_size, groups, [whole])
    joined = join_blocks(config, block_size, groups, parts)
    for name, tensor in expected.items():
        assert_same(joined[name], tensor)
    # And divided again, into other parts: stages of shards.
    layers = range(1), range(1, config.num_layers)
    others = [ModelPart(each, config.num_layers, Shard(index, 2)) for each in layers for index in (0, 1)]
    cut = [(part, cut_blocks(config, block_size, groups, part, joined)) for part in others]
    for name, tensor in join_blocks(config, block_size, groups, cut).items():
        assert_same(tensor, expected[name])


# Codes that lie across the cuts: words of several outputs, blocks of rows, and weights that are fused.
IN_CODES = {"awq": 4, "gptq-fused": 2, "fp8": 2, "nvfp4-tied": 2, "gguf": 2}


@pytest.mark.parametrize("name", IN_CODES)
def test_weights_in_codes_have_the_bits_of_one_process(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if name == "gguf":
        model = random_model(LlamaConfig(**SQUARE))
        path = write_model(tmp_path / "model.gguf", model, lambda own: "Q5_0" if "attn_v" in own else "Q8_0")
    else:
        source, config, write = MODELS[name]
        path, _ = quantised_checkpoint(checkpoint(source), tmp_path, config, write)
    engine = new_engine(path)
    with computed_in_shards(engine, shards_of(IN_CODES[name])):
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        engine.generate(ragged_prompts([5, 20]), params, use_tqdm=False)


def test_all_numbers_of_a_weight_decide_whether_it_is_narrowed(tmp_path):
    """AMX adds up narrow ones in another order. Here one number, of the first shard, is not narrow."""
    if not can_pair(torch.float32, 64):
        pytest.skip("this CPU has no AMX: a narrow weight gives the same bits")
    model = random_model(LlamaConfig(**SQUARE)).bfloat16().float()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data[0, 0] = 0.1234567
    model.save_pretrained(tmp_path)
    engine = new_engine(tmp_path)
    with computed_in_shards(engine, shards_of(2)):
        engine.generate(ragged_prompts([5, 20]), SamplingParams(max_tokens=4), use_tqdm=False)


def test_the_whole_weight_decides_whether_12_bits_pay():
    weight = (torch.randn(2**12, 64) / 8).bfloat16()
    panels = pack(weight, pairs=can_pair(torch.bfloat16, 64))
    if pack_bf12(pack((torch.randn(2**13, 64) / 8).bfloat16())).weight.dtype != torch.int16:
        pytest.skip("this CPU has no bf12")
    assert pack_bf12(panels).weight.dtype == torch.bfloat16
    assert pack_bf12(panels, num_shards=2).weight.dtype == torch.int16


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2-unscaled", "gpt_neox"])
def test_a_shard_reads_its_own_slices_only(name):
    """Of tensors that are fused, transposed or interleaved."""
    engine = new_engine(checkpoint(name))
    header = 8 + int.from_bytes((checkpoint(name) / "model.safetensors").read_bytes()[:8], "little")
    whole = engine.runner.model.stored_weights.num_bytes.total()
    read: dict[OpenFile, int] = {}
    read_into = OpenFile.read_into

    def counted(file: OpenFile, memory: memoryview, start: int) -> None:
        read[file] = read.get(file, 0) + len(memory)
        read_into(file, memory, start)

    with mock.patch.object(OpenFile, "read_into", counted):
        sharded = ShardedModel(engine, shards_of(2))
    table = getattr(engine.runner.model, "positions", None)
    both = 0 if table is None else table.num_rows * len(table.row) * 4
    for actual, claimed in zip(read.values(), sharded.bytes_read, strict=True):
        assert actual - header == claimed  # a head that is compared with the embedding is read no further
        assert claimed < both + 0.52 * (whole - both)


def test_sizes_that_do_not_divide_are_refused_with_those_that_do():
    config = read_config(checkpoint("llama"))
    for count in (1, 2, 4):
        check_shards(config, count)
    with pytest.raises(ConfigError, match=r"3 does not divide the 4 query heads; these numbers do: 2, 4$"):
        check_shards(config, 3)
    with pytest.raises(ConfigError, match="8 does not divide the 4 query heads"):
        check_shards(config, 8)


def test_experts_are_refused_by_name():
    config = read_config(checkpoint("qwen3_moe"))
    check_shards(config, 1)
    with pytest.raises(ConfigError, match="Qwen3MoeForCausalLM has experts; pipeline_parallel_size divides"):
        check_shards(config, 2)
