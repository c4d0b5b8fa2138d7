"""The engine's CUDA path with numbers, on a device that works late: the same tokens as on a plain CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paged import LLMEngine, SamplingParams, StructuredOutputsParams
from paged.drafting.drafter import Draft
from paged.engine import engine as engine_module
from paged.grammars import grammar_jobs
from paged.kernels.gpu.target import in_interpreter
from paged.kernels.seats import SEAT, StepTensors
from paged.requests.request import Request
from paged.runner.batches.seats import SeatedBatches
from paged.runner.swap_rate import measure_swap_rate
from paged.sampling import structured_outputs
from paged.scheduler.drafts import Drafts
from tests.support.batches import steps_from_bytes
from tests.support.engine_uses import CASES, Case, draws_of_a_gpu, generated, sampled
from tests.support.fake_cuda import lacks
from tests.support.late_cuda import LateCuda, late_cuda
from tests.support.step_cases import CHANGES

SEEDS = range(8)
pytestmark = pytest.mark.skipif(
    lacks() is not None or not in_interpreter(),
    reason=lacks() or "a GPU is here: kernels are not interpreted",
)


@pytest.mark.parametrize("name", CASES)
def test_same_results_as_on_a_cpu(name):
    case = CASES[name]
    with draws_of_a_gpu():
        expected = case.use(case.engine())
    with late_cuda(seed=[*CASES].index(name)) as gpu:
        engine = case.engine(device="cuda", attention_backend="triton")
        with steps_from_bytes():
            case.use(engine).assert_like(expected)
    assert gpu.num_late > 20, "the host has waited for nothing"


@pytest.mark.parametrize(("mode", "is_measured"), [("auto", True), ("swap", False)])
def test_swapping_is_measured_where_it_may_not_pay(mode, is_measured):
    options = {"device": "cuda", "attention_backend": "triton", "preemption_mode": mode}
    with late_cuda(seed=3):
        engine = CASES["swapping with windows"].engine(**options)
        rate = measure_swap_rate(engine.runner, iter([10.0, 10.5]).__next__)
    # All 14 blocks, out and in.
    assert rate == (2 * 14 * engine.runner.sizes.block_bytes / 0.5 if is_measured else None)
    assert bool(engine.scheduler.preemption.swap_pays.__self__.host_bytes_per_s) == is_measured


# Steps in flight

OPTIONS = {"max_num_batched_tokens": 16, "block_size": 8, "max_num_seqs": 3}
# Every second token is 7, if each step knows the last one.
OF_THE_LAST_TOKEN = {
    "temperature": 0.0, "repetition_penalty": 1e6, "repetition_penalty_last_n": 1, "logit_bias": {7: 90.0},
    "max_tokens": 8, "ignore_eos": True,
}  # fmt: skip
NEED_TOKENIZER = {"structured_outputs", "bad_words of one token", "bad_words of several tokens", "stop"}


def random_requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Return prompts, and parameters that change several fields of SamplingParams at once."""
    rng = random.Random(seed)
    names = sorted(CHANGES.keys() - NEED_TOKENIZER - {"best_of", "dry_sequence_breakers"})
    rng.shuffle(names)
    requests = []
    for i in range(4):
        changed = {name: value for change in names[i::4][:2] for name, value in CHANGES[change].items()}
        most = rng.randint(changed.get("min_tokens", 2), 5)
        given = {"max_tokens": most, "seed": i, "ignore_eos": True, "dry_sequence_breakers": (), **changed}
        prompt = [rng.randint(5, 90) for _ in range(rng.randint(1, 12))]
        requests.append((prompt, SamplingParams(**given)))
    if seed == 2:
        requests[0] = ([5], SamplingParams(**OF_THE_LAST_TOKEN))
    return requests


class SpendingTokens(SeatedBatches):
    """Takes from a seat the token that it computes: what is read twice, or before it is drawn, is -1."""

    def unpack(self, step: Any) -> StepTensors:
        made = super().unpack(step)
        self.last_tokens.index_fill_(0, step.rows.tensor[: step.num_logits, SEAT].long(), -1)
        return made


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 7])  # each depth, few blocks and many, with graphs and without
def test_steps_in_flight_of_the_same_requests_give_the_tokens_of_a_cpu(seed, monkeypatch):
    """With one, two and three of them, whatever is sampled, while some requests end early."""
    monkeypatch.setattr(grammar_jobs, "SLOW_S", 60.0)  # else a busy machine has late masks
    monkeypatch.setattr(structured_outputs, "ASKED_S", 60.0)
    monkeypatch.setattr("paged.runner.batches.seats.SeatedBatches", SpendingTokens)
    depth = 1 + seed % 3
    overlaps = Case("lfm2" if seed == 5 else "llama", OPTIONS, sampled)  # which keeps states
    prompts, params = zip(*random_requests(seed), strict=True)
    with draws_of_a_gpu():
        expected = overlaps.engine().generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(engine_module, "_steps_in_flight", lambda *_: depth)
    num_blocks = 6 if seed % 4 == 3 else 64
    with late_cuda(seed) as gpu:
        sizes = [3] if seed % 4 == 1 else [4]  # graphs of all decodes, or of none
        options = {"num_blocks": num_blocks, "cudagraph_capture_sizes": sizes}
        engine = overlaps.engine(device="cuda", attention_backend="triton", **options)
        most = watch_depth(engine)
        with steps_from_bytes():
            outputs = engine.generate(prompts, params, use_tqdm=False)
        engine.scheduler.check()
    assert most() == depth or num_blocks < 64  # where blocks are short none is scheduled ahead
    assert gpu.num_late > 20, "the host has waited for nothing"
    assert bool(gpu.num_replays) == (seed % 4 == 1)
    for output, wanted, own in zip(outputs, expected, params, strict=True):
        assert [s.token_ids for s in output.outputs] == [s.token_ids for s in wanted.outputs], own
        assert [s.finish_reason for s in output.outputs] == [s.finish_reason for s in wanted.outputs]
        for sample, other in zip(output.outputs, wanted.outputs, strict=True):
            assert len(sample.logprobs or ()) == len(other.logprobs or ())


def watch_depth(engine: LLMEngine) -> Callable[[], int]:
    """Return a function that tells how many steps have been in flight at once with the same request."""
    most, begin_step = 0, engine.scheduler._running.begin_step

    def watched() -> None:
        nonlocal most
        begin_step()
        most = max(most, *(1 + request.num_pending for request in engine.scheduler.running))

    engine.scheduler._running.begin_step = watched
    return lambda: most


class Replay:
    """Guesses answers, by the parameters of their requests; every third token is wrong."""

    def __init__(self, answers: dict[str, list[int]]) -> None:
        self._answers = answers

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        return [self._guess(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _guess(self, request: Request, limit: int) -> Draft:
        at = request.num_output_tokens
        right = self._answers[str(request.inputs.params)][at : at + limit]
        return Draft([token + 1 if i % 3 == 2 else token for i, token in enumerate(right, at)])


def test_drafts_with_every_edit_of_logits_give_the_tokens_of_a_plain_cpu(monkeypatch):
    """The device counts what it draws behind right drafts, before the host knows which are right."""
    # Else a busy machine has late masks, behind which nothing is guessed.
    monkeypatch.setattr(grammar_jobs, "SLOW_S", 60.0)
    monkeypatch.setattr(structured_outputs, "ASKED_S", 60.0)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 2.0, "logprobs": 1},
        {"temperature": 0.0, "dry_multiplier": 4.0, "bad_words": ["def f"], "min_tokens": 3},
        {"temperature": 0.0, "structured_outputs": StructuredOutputsParams(regex="[0-9]+,[a-z]+")},
    ]
    params = [SamplingParams(max_tokens=6, ignore_eos=True, **way) for way in ways]
    prompts = [[20 + i, 21, 22] * 2 for i in range(len(ways))]
    case = Case("demo", {}, sampled)
    with draws_of_a_gpu():
        expected = generated(case.engine(), prompts, params)
    with late_cuda(seed=12):
        engine = case.engine(device="cuda", attention_backend="triton")
        answers = {str(own): tokens for own, tokens in zip(params, expected, strict=True)}
        engine.scheduler.drafts = Drafts(Replay(answers), 3, 4096, 64)
        with steps_from_bytes():
            assert generated(engine, prompts, params) == expected
    assert engine.stats().num_accepted_tokens >= 2 * len(ways)


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
