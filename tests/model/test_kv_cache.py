"""A cache in another dtype than the model, against transformers with a cache rounded alike; its bytes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from paged import CheckpointError, ConfigError, EngineConfig, LLMEngine, SamplingParams
from paged.simulate.fleet import Fleet, FleetConfig
from tests.support.checkpoints import assert_all_free, checkpoint, new_engine, ragged_prompts, reference

PROMPTS = ragged_prompts([30, 1, 61, 8, 16, 17, 63])
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
LARGEST = {"int8": 127.0, "fp8": 448.0}


def rounded(x: Tensor, dtype: str) -> Tensor:  # [..., num_tokens, head_dim]
    """Round K or V as a cache of this dtype does."""
    if dtype in ("float16", "bfloat16"):
        return x.to(getattr(torch, dtype)).float()
    largest = x.abs().amax(-1, keepdim=True)
    codes = x * (torch.full_like(largest, LARGEST[dtype]) / largest)
    codes = (codes + 0.5).floor() if dtype == "int8" else codes.to(torch.float8_e4m3fn).float()
    return codes * (largest / LARGEST[dtype])


class RoundedCache(DynamicCache):
    """transformers' cache, with K and V rounded to another dtype."""

    dtype = ""

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(rounded(key, self.dtype), rounded(value, self.dtype), *args, **kwargs)


@functools.cache
def expected(name: str, dtype: str) -> list[list[int]]:
    """Return transformers' tokens for PROMPTS with such a cache, one prompt at a time."""
    model = reference(name).model
    generated = []
    for prompt in PROMPTS:
        cache = RoundedCache(config=model.config)
        cache.dtype = dtype
        ids = torch.tensor([prompt])
        tokens = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=20,
            min_new_tokens=20,
        )
        generated.append(tokens[0, len(prompt) :].tolist())
    return generated


def tokens_of(engine: LLMEngine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    outputs = engine.generate(prompts, GREEDY, use_tqdm=False)
    assert_all_free(engine)
    return [output.outputs[0].token_ids for output in outputs]


def test_rounding_changes_tokens():
    """Otherwise the tests below would pass without a cache of that dtype."""
    for name in ("llama", "qwen2-mixed"):
        plain = [reference(name).greedy(prompt, 20)[0] for prompt in PROMPTS]
        assert all(expected(name, dtype) != plain for dtype in ("int8", "fp8"))


@pytest.mark.parametrize("dtype", ["int8", "fp8", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("name", ["llama", "qwen2-mixed"])
def test_transformers_with_a_cache_of_that_dtype(name, backend, dtype):
    """As one batch, in chunks, and then again from cached prefixes."""
    options = {"kv_cache_dtype": dtype, "attention_backend": backend, "block_size": 8}
    engine = new_engine(checkpoint(name), max_num_batched_tokens=24, **options)
    assert tokens_of(engine) == expected(name, dtype)
    assert tokens_of(engine) == expected(name, dtype)
    assert engine.stats().prefix_hit_rate > 0.3


@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_triton_kernels_with_a_cache_of_that_dtype(dtype):
    options = {"kv_cache_dtype": dtype, "attention_backend": "triton"}
    engine = new_engine(checkpoint("llama"), block_size=8, max_num_batched_tokens=24, **options)
    params = SamplingParams(temperature=1e-9, max_tokens=5, n=2)  # the second sample copies a block
    outputs = engine.generate(PROMPTS[:2], params, use_tqdm=False)
    tokens = [completion.token_ids for output in outputs for completion in output.outputs]
    assert tokens == [row[:5] for row in expected("llama", dtype)[:2] for _ in range(2)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("name", ["llama", "qwen2-mixed"])
@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_scales_move_with_their_blocks(backend, name, mode):
    """While requests are preempted and forked. Slots that were not written are NaN."""
    engine = new_engine(
        checkpoint(name),
        kv_cache_dtype="int8",
        attention_backend=backend,
        num_blocks=12 if name == "llama" else 24,
        block_size=8,
        preemption_mode=mode,
        swap_space=None if mode == "recompute" else 0.001,
        watermark=0.0,
    )
    assert tokens_of(engine) == expected(name, "int8")
    stats = engine.stats()
    assert (stats.num_swap_preemptions if mode == "swap" else stats.num_recompute_preemptions) > 0
    engine.add_request("a", PROMPTS[0], GREEDY)
    for _ in range(5):
        engine.step()
    engine.fork("a", "b")
    finished = {}
    while engine.has_unfinished_requests():
        finished |= {output.request_id: output for output in engine.step() if output.finished}
    assert [finished[i].outputs[0].token_ids for i in "ab"] == [expected(name, "int8")[0]] * 2


def test_prefix_files_hold_scales(tmp_path):
    file, options = tmp_path / "prefixes", {"kv_cache_dtype": "int8", "block_size": 8}
    engine = new_engine(checkpoint("llama"), **options)
    engine.generate([PROMPTS[2]], SamplingParams(max_tokens=1), use_tqdm=False)
    engine.save_prefix(file)
    engine = new_engine(checkpoint("llama"), **options)
    assert engine.load_prefix(file) == 7
    (output,) = engine.generate([PROMPTS[2]], GREEDY, use_tqdm=False)
    assert (output.num_cached_tokens, output.outputs[0].token_ids) == (56, expected("llama", "int8")[2])
    with pytest.raises(CheckpointError, match="another model, other weights or another dtype"):
        new_engine(checkpoint("llama"), block_size=8).load_prefix(file)


@pytest.mark.parametrize(("dtype", "bytes_per_head"), [("auto", 64), ("bfloat16", 32), ("int8", 16 + 4)])
@pytest.mark.parametrize(("name", "num_layers"), [("llama", 2), ("qwen2-mixed", 1)])
def test_bytes(name, num_layers, dtype, bytes_per_head):
    """For K and V of 2 heads of 16, in the layers of one group; int8 has a float32 scale per head."""
    engine = new_engine(checkpoint(name), kv_cache_dtype=dtype, num_blocks=10, swap_space=1e-4)
    block_bytes = 16 * 2 * 2 * num_layers * bytes_per_head
    cache = engine.runner.kv_cache
    assert engine.runner.sizes.block_bytes == block_bytes
    assert cache.num_bytes == 10 * block_bytes
    assert cache.num_host_blocks == int(1e-4 * 2**30) // block_bytes
    assert sum(tensor.nbytes for tensor in cache.host.values()) == cache.num_host_blocks * block_bytes
    assert (f"float32 with KV in {dtype} on cpu" in engine.describe()) == (dtype != "auto")


def test_simulator_counts_the_bytes_of_the_engine():
    fleet = FleetConfig(gpu="L4")
    plain, int8 = (
        Fleet(fleet, EngineConfig(model="demo", kv_cache_dtype=dtype, max_num_seqs=10**6))
        for dtype in ("auto", "int8")
    )
    # The demo model has bfloat16 and heads of 64.
    assert int8.num_blocks / plain.num_blocks == pytest.approx(128 / 68, rel=1e-4)
    options = {"model": "demo", "dtype": "bfloat16", "kv_cache_dtype": "float16"}
    for new in (lambda: Fleet(fleet, EngineConfig(**options)), lambda: LLMEngine(**options)):
        with pytest.raises(ConfigError, match="'float16' needs dtype float32, this model's is bfloat16:"):
            new()


def test_fp8_is_refused_on_a_gpu_without_it(monkeypatch):
    monkeypatch.setattr("paged.kernels.gpu.backend.current_target", lambda: "sm_80")
    options = {"attention_backend": "triton", "num_blocks": 8}
    with pytest.raises(
        ConfigError, match=r"kv_cache_dtype 'fp8' is not available here, but 'int8' is: .* is sm_80"
    ):
        new_engine(checkpoint("llama"), kv_cache_dtype="fp8", **options)
    new_engine(checkpoint("llama"), kv_cache_dtype="int8", **options)
    fp8 = EngineConfig(model="demo", kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="'fp8' is not supported on A100-80G; take 'int8'"):
        Fleet(FleetConfig(gpu="A100-80G"), fp8)
    Fleet(FleetConfig(gpu="L4"), fp8)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("llama", "= 1,024 tokens,"), ("qwen2-mixed", "= at least 512 tokens in 2 layer groups,")],
)
def test_the_description_has_the_tokens_that_fit(name, tokens):
    assert f"64 blocks of 16 {tokens}" in new_engine(checkpoint(name), num_blocks=64).describe()
