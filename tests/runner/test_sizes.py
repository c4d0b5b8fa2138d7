"""Sizes computed by hand, and the same for the engine and the simulator."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paged import ConfigError, EngineConfig
from paged.architectures.spec import KVShape
from paged.kernels.gpu.attention.config import choose_config
from paged.kernels.gpu.attention.descriptors import loads_by_descriptors
from paged.runner.draft_sizes import draft_sizes
from paged.runner.sizes import Sizes
from paged.simulate.fleet import Fleet, FleetConfig
from paged.simulate.model import read_model
from tests.support.checkpoints import checkpoint, edit_json, new_engine
from tests.support.specs import with_attention

MODEL = read_model("demo")  # 4 layers, hidden 256, MLP 512, 8 heads of 64, 2 of them for K and V, 2048 tokens
BLOCK_BYTES = 16 * 2 * 4 * 2 * 64 * 2


def sizes(device: str = "cuda", **options: Any) -> Sizes:
    return Sizes(EngineConfig(model="demo", **options), MODEL, device, "bfloat16")


@pytest.mark.parametrize(("device", "budget", "space"), [("cuda", 8192, 4), ("cpu", 512, 0)])
def test_defaults_of_a_device(device, budget, space):
    found = sizes(device)
    assert (found.max_num_batched_tokens, found.max_step_tokens, found.max_model_len) == (
        budget,
        budget,
        2048,
    )
    assert (found.block_bytes, found.max_useful_blocks) == (BLOCK_BYTES, 256 * 128)
    assert found.num_host_blocks == space * 2**30 // BLOCK_BYTES
    scheduler = found.new_scheduler(found.new_block_manager(9, found.num_host_blocks))
    assert scheduler.preemption.swap_pays == (found.swap_pays if space else None)


@pytest.mark.parametrize("target", ["", "sm_80", "sm_90", "sm_100", "sm_103", "gfx942"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_are_as_large_as_descriptors_need(target, head_dim, dtype):
    """64 tokens exactly where decodes load by descriptors from blocks of 64."""
    model = with_attention(MODEL, kv=KVShape(2, head_dim, head_dim))
    dtype_of_torch = getattr(torch, dtype)
    found = Sizes(EngineConfig(model="demo"), model, "cuda", dtype, target).block_size
    caches = [torch.empty(2, 64, 2, head_dim, dtype=dtype_of_torch) for _ in range(2)]
    config = choose_config(head_dim, 4, dtype_of_torch, "decode", target or "sm_80")
    assert found == (64 if loads_by_descriptors(*caches, config, dtype_of_torch, target) else 16)
    assert Sizes(EngineConfig(model="demo", block_size=32), model, "cuda", dtype, target).block_size == 32


def test_simulator_takes_the_blocks_of_its_gpu(tmp_path):
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", head_dim=128, dtype="bfloat16")
    fleets = [Fleet(FleetConfig(gpu=gpu), EngineConfig(model=str(tmp_path))) for gpu in ("A100-80G", "H100")]
    assert [fleet.replicas[0].manager.block_size for fleet in fleets] == [16, 64]


def test_options_override_defaults():
    found = sizes(
        max_model_len=33,
        max_num_seqs=3,
        max_num_batched_tokens=7,
        long_prefill_token_threshold=9,
        swap_space=1,
    )
    assert (found.max_model_len, found.max_useful_blocks, found.max_step_tokens) == (33, 9, 7)
    assert found.num_host_blocks == 2**30 // BLOCK_BYTES
    assert sizes(long_prefill_token_threshold=9).max_step_tokens == 9
    assert sizes(preemption_mode="recompute").num_host_blocks == 0


def test_swapping_pays_when_it_takes_less_time_than_recomputing():
    # At 12 GB/s a token's 2 kB take 0.34 µs out and in. At 100 TFLOP/s its 5 million FLOPs take 0.05 µs, and
    # 4,096 more for each token of the sequence make the two equal at 7,000 tokens.
    layers = 4 * (256 * 8 * 64 + 2 * 256 * 2 * 64 + 8 * 64 * 256 + 3 * 256 * 512)
    break_even = (2 * BLOCK_BYTES / 16 / 12e9 * 100e12 - 2 * layers) / (2 * 4 * 8 * 64)
    assert break_even == pytest.approx(7000, rel=0.05)
    assert [sizes().swap_pays(round(break_even * x)) for x in (0.01, 0.99, 1.01)] == [False, False, True]
    assert sizes(preemption_mode="swap").swap_pays(1)
    # Over a link of twice that rate it pays sooner, by twice what linear layers and attention then differ in.
    faster = replace(sizes(), host_bytes_per_s=24e9)
    sooner = (2 * BLOCK_BYTES / 16 / 24e9 * 100e12 - 2 * layers) / (2 * 4 * 8 * 64)
    assert sooner < break_even / 2
    assert [faster.swap_pays(round(sooner * x)) for x in (0.99, 1.01)] == [False, True]


def test_each_row_of_a_mixture_of_experts_takes_longer_to_read():
    """What speculation expects of steps that it has not measured."""
    dense = Sizes(EngineConfig(model="demo"), MODEL, "cpu", "bfloat16")
    times = [dense.relative_step_time(rows) for rows in (1, 5)]
    assert times == [pytest.approx(1 + 1 / 24), pytest.approx(1 + 5 / 24)]
    model = read_model(str(checkpoint("qwen3_moe")))  # 3 of 8 experts in two layers of three
    mixture = Sizes(EngineConfig(model="a mixture"), model, "cpu", "bfloat16")
    expert = 2 * 3 * 48 * 20
    others = model.num_layer_params - 8 * expert
    read = (others + 8 * (1 - (5 / 8) ** 5) * expert) / (others + 3 * expert)
    assert mixture.relative_step_time(5) == pytest.approx(read + 5 / 24)
    # Recomputing multiplies by the experts of a token alone.
    recomputed = 2 * (others + 3 * expert) + model.num_attention_dims
    rate = 2 * mixture.kv_bytes_per_token / (recomputed / 100e9)
    assert [replace(mixture, host_bytes_per_s=rate * x).swap_pays(1) for x in (0.99, 1.01)] == [False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preemption_mode": "swap"}, r"'swap' cannot swap: swap_space 0 GiB \(the default on cpu\)"),
        ({"preemption_mode": "swap", "swap_space": 0}, "swap_space 0 GiB holds no block of .* bytes; raise"),
        ({"swap_space": 1e-9}, "'auto' cannot swap: swap_space 1e-09 GiB holds no block"),
        ({"preemption_mode": "recompute", "swap_space": 8}, "swap_space 8 has no effect with .*'recompute'"),
    ],
    ids=str,
)
def test_swap_options_without_room_for_a_block_are_errors(options, message):
    with pytest.raises(ConfigError, match=message):
        new_engine(checkpoint("llama"), **options)
    assert sizes("cpu", preemption_mode="recompute", swap_space=0).num_host_blocks == 0


def test_simulator_raises_the_errors_of_the_engine():
    for options in ({"max_model_len": 2049}, {"preemption_mode": "swap", "swap_space": 1e-9}):
        with pytest.raises(ConfigError) as of_engine:
            new_engine("demo", dtype="bfloat16", **options)
        with pytest.raises(ConfigError) as of_fleet:
            Fleet(FleetConfig(), EngineConfig(model="demo", **options))
        assert str(of_fleet.value) == str(of_engine.value)


def test_a_token_needs_a_block_in_each_layer_group():
    model = read_model(str(checkpoint("gemma3")))
    assert len(model.layer_groups) == 5
    Sizes(EngineConfig(model="x", num_blocks=5), model, "cpu", "float32")
    with pytest.raises(
        ConfigError, match=r"num_blocks 4 holds no token: .* each of the model's 5 layer groups"
    ):
        Sizes(EngineConfig(model="x", num_blocks=4), model, "cpu", "float32")


@pytest.mark.parametrize(
    ("model", "draft", "longest"),
    [
        ("llama", "llama", 500),  # what the engine serves
        ("qwen2-mixed", "phi3-longrope", 64),  # behind it, all its K and V would be others
        ("phi3-longrope", "phi3-longrope", 500),  # the engine computes them anew
        ("mistral", "llama", 24),  # behind it, the engine drops blocks
        ("qwen2-mixed", "mistral", 500),  # blocks of layers without a window
    ],
)
def test_a_draft_model_drafts_for_as_long_as_it_can(model, draft, longest):
    of_model = read_model(str(checkpoint(model)))
    config = EngineConfig(
        "x", max_model_len=min(500, of_model.max_context), speculative_config={"model": "y"}
    )
    found = Sizes(config, of_model, "cpu", "float32")
    of_draft = read_model(str(checkpoint(draft)))
    short = replace(of_draft, max_position_embeddings=48)  # its own context
    assert draft_sizes(found, short, Path("y")).max_model_len == min(48, longest)
    drafting = draft_sizes(found, of_draft, Path("y"))
    assert drafting.max_model_len == longest
    both = replace(found, draft=drafting)
    assert both.block_bytes == found.block_bytes + drafting.block_bytes
    assert both.blocks_in(2**20) < found.blocks_in(2**20)
