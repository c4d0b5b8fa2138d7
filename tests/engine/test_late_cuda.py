"""The engine's CUDA path with numbers, on a device that works late: the same tokens as on a plain CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from paged import LLMEngine, SamplingParams
from paged.kernels.gpu.target import in_interpreter
from tests.support.checkpoints import checkpoint
from tests.support.fake_cuda import lacks
from tests.support.late_cuda import LateCuda, late_cuda

SEEDS = range(8)
pytestmark = pytest.mark.skipif(
    lacks() is not None or not in_interpreter(),
    reason=lacks() or "a GPU is here: kernels are not interpreted",
)


def _penultimate(_tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Ban the likeliest token."""
    return logits.index_fill(0, logits.argmax(), -torch.inf)


WAYS_TO_SAMPLE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"seed": 1, "logprobs": 2, "prompt_logprobs": 1},
    {"seed": 2, "top_p": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"seed": 3, "logit_bias": {7: 3.0}, "min_tokens": 3, "stop_token_ids": [9]},
    {"temperature": 0.0, "logits_processors": [_penultimate]},
    {"temperature": 0.0, "dry_multiplier": 4.0, "dry_sequence_breakers": ()},
]


def _sampled(engine: LLMEngine) -> Any:
    """Sample in every way at once, with a shared prefix and a fork of a prompt for two samples."""
    params = [SamplingParams(max_tokens=3, ignore_eos=True, **way) for way in WAYS_TO_SAMPLE]
    params.append(SamplingParams(max_tokens=3, ignore_eos=True, n=2, seed=5))
    prompts = [[*range(10, 29), i] for i in range(len(params))]
    outputs = engine.generate(prompts, params, use_tqdm=False)
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def _preempted(engine: LLMEngine) -> Any:
    """Run more requests than fit in the cache; some of them are swapped out and in again."""
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.0)
    outputs = engine.generate([[i] * 14 for i in range(3)], params, use_tqdm=False)
    assert engine.stats().num_swap_preemptions, "no request was swapped out"
    return [output.outputs[0].token_ids for output in outputs]


SWAPPING = {"block_size": 8, "num_blocks": 7, "preemption_mode": "swap", "swap_space": 0.01}
CASES: dict[str, tuple[str, dict[str, Any], Callable[[LLMEngine], Any]]] = {
    "sampling": ("qwen3", {}, _sampled),
    "swapping in int8": ("llama", {**SWAPPING, "kv_cache_dtype": "int8"}, _preempted),
    "swapping with windows": ("qwen2-mixed", {**SWAPPING, "num_blocks": 14}, _preempted),
}


@pytest.mark.parametrize("case", CASES)
def test_same_tokens_as_on_a_cpu(case):
    model, options, use = CASES[case]
    options = {"num_blocks": 64, "max_model_len": 40, "skip_tokenizer_init": True, **options}
    options = {"dtype": "float32", "attention_backend": "triton", "preemption_mode": "recompute", **options}
    expected = use(LLMEngine(str(checkpoint(model)), device="cpu", **options))
    with late_cuda(seed=0) as gpu:
        assert use(LLMEngine(str(checkpoint(model)), device="cuda", **options)) == expected
    assert gpu.num_late > 100, "the host has waited for nothing"


# What the stand-in shows


def _wrong(use: Callable[[LateCuda], bool]) -> int:
    """Return with how many seeds a use of the device gives wrong numbers."""
    wrong = 0
    for seed in SEEDS:
        with late_cuda(seed) as gpu:
            wrong += not use(gpu)
    return wrong


@pytest.mark.parametrize("waits", [True, False])
def test_download_is_read_after_its_event(waits):
    def use(_gpu: LateCuda) -> bool:
        numbers = torch.arange(4, device="cuda").to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        if waits:
            event.synchronize()
        return numbers.tolist() == [0, 1, 2, 3]

    assert (_wrong(use) == 0) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_buffer_is_written_again_after_its_event(waits):
    def use(_gpu: LateCuda) -> bool:
        buffer, event, uploaded = torch.zeros(3).pin_memory(), torch.cuda.Event(), []
        for number in (1.0, 2.0):
            if waits:
                event.synchronize()
            buffer.fill_(number)
            uploaded.append(buffer.to("cuda", non_blocking=True))
            event.record()
        return [tensor.tolist()[0] for tensor in uploaded] == [1.0, 2.0]

    assert (_wrong(use) == 0) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_streams_wait_for_each_other_by_events(waits):
    def use(_gpu: LateCuda) -> bool:
        numbers, copies = torch.zeros(3, device="cuda"), torch.cuda.Stream()
        numbers.add_(5)
        if waits:
            copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            copied = numbers.to("cpu", non_blocking=True)
        copies.synchronize()
        return copied.tolist() == [5.0] * 3

    assert (_wrong(use) == 0) == waits


def test_pageable_memory_may_change_after_an_upload():
    def use(_gpu: LateCuda) -> bool:
        buffer = torch.ones(3)
        uploaded = buffer.to("cuda", non_blocking=True)
        buffer.zero_()
        return uploaded.tolist() == [1.0] * 3

    assert _wrong(use) == 0
