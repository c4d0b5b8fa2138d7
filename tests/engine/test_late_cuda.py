"""The engine's CUDA path with numbers, on a device that works late: the same tokens as on a plain CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from paged import LLMEngine, SamplingParams, StructuredOutputsParams
from paged.drafting.drafter import Draft
from paged.grammars import grammar_jobs
from paged.kernels.gpu.target import in_interpreter
from paged.requests.request import Request
from paged.runner.model_runner import Pending
from paged.runner.swap_rate import measure_swap_rate
from paged.sampling import structured_outputs
from paged.scheduler.drafts import Drafts
from paged.scheduler.schedule import Schedule
from tests.support.batches import read_back, steps_from_bytes
from tests.support.engine_uses import CASES, WAYS_TO_SAMPLE, Case, Tokens, draws_of_a_gpu, generated, sampled
from tests.support.fake_cuda import lacks
from tests.support.late_cuda import LateCuda, late_cuda

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


def overlapped(
    engine: LLMEngine, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[Tokens, int]:
    """Keep two steps in flight. Return the tokens, and how often there were two."""
    scheduler = engine.scheduler
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, own)
    requests = [*scheduler.waiting()]
    in_flight: deque[tuple[Schedule, Pending]] = deque()
    num_overlaps = 0
    while scheduler.has_unfinished():
        schedule = scheduler.schedule()
        if not schedule.is_empty:
            num_overlaps += len(in_flight)
            plan = read_back(engine.runner.plan(schedule))
            in_flight.append((schedule, engine.runner.launch(plan)))
        if schedule.is_empty or len(in_flight) == 2:
            oldest, pending = in_flight.popleft()
            scheduler.update(oldest, pending.result().tokens)
    return [request.token_ids[request.num_prompt_tokens :] for request in requests], num_overlaps


def test_two_steps_in_flight_give_the_tokens_of_one():
    """What a step does after its launch reads nothing that the next schedule changes."""
    params = [SamplingParams(max_tokens=5, ignore_eos=True, **WAYS_TO_SAMPLE[i]) for i in (0, 1, 2, 5)]
    prompts = [[*range(20 + i, 32 + i)] for i in range(4)]
    case = Case("llama", {"max_num_batched_tokens": 24}, sampled)
    with draws_of_a_gpu():
        expected = generated(case.engine(), prompts, params)
    with late_cuda(seed=11):
        engine = case.engine(device="cuda", attention_backend="triton")
        tokens, num_overlaps = overlapped(engine, prompts, params)
    assert tokens == expected
    assert num_overlaps > 4


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
