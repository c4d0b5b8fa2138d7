"""The engine's CUDA path with numbers, on a device that works late: the same tokens as on a plain CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paged.kernels.gpu.target import in_interpreter
from paged.runner.swap_rate import measure_swap_rate
from tests.support.engine_uses import CASES, draws_of_a_gpu
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
        case.use(case.engine(device="cuda", attention_backend="triton")).assert_like(expected)
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
