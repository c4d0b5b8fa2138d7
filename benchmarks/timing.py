"""Timing: medians of calls; on a GPU between events, with a cold L2 cache and outputs filled with NaN."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paged.kernels.cpu.launch.huge_pages import in_huge_pages


@dataclass(frozen=True)
class Limits:
    """Measured ceilings of a device: bytes/s, read and written, and FLOP/s of a matrix product."""

    bytes_per_s: float
    flops: float

    def seconds(self, moved: int, flops: int) -> float:
        """Return the least time for a kernel that moves and computes this much."""
        return max(moved / self.bytes_per_s, flops / self.flops)


@dataclass(frozen=True)
class Timing:
    """Median times of one call."""

    seconds: float  # on a GPU the replay of a CUDA graph, if it could be captured
    call_seconds: float  # launched from Python; the flush hides some of the host time
    runs: int
    graph: bool


def measure_limits(device: torch.device, dtype: torch.dtype, *, tiny: bool = False) -> Limits:
    """Time a large copy and a large matrix product of random numbers; zeros would run faster.

    The bandwidth of a CPU is the larger of copying and of reading huge pages, since weights lie in huge pages
    and are only read.
    """
    large = device.type == "cuda"
    source = torch.empty(2**14 if tiny else 2**28 if large else 2**27, device=device)
    target = torch.empty_like(source)
    in_huge_pages(source).normal_()
    size = source.numel() * 4
    bandwidth = 2 * size / time_call(lambda: target.copy_(source), device, tiny=tiny).seconds
    if not large:
        read = size / time_call(lambda: torch.dot(source, source), device, tiny=tiny).seconds
        bandwidth = max(bandwidth, read)
    n = 64 if tiny else 8192 if large else 2048
    a, b = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    return Limits(bandwidth, 2 * n**3 / time_call(lambda: a @ b, device, tiny=tiny).seconds)


def time_call(run: Callable[[], Any], device: torch.device, *, tiny: bool = False) -> Timing:
    """Time `run`. If it returns a tensor of floats, assert that the call wrote all of it."""
    if device.type == "cuda":
        return _time_on_gpu(run, device)
    out = None if tiny else run()
    times: list[float] = []
    while sum(times) < (0 if tiny else 0.3) or len(times) < (1 if tiny else 5):
        del out
        started = time.perf_counter()
        out = run()
        times.append(time.perf_counter() - started)
    _assert_written(out)
    return Timing(statistics.median(times), statistics.median(times), len(times), graph=False)


def _time_on_gpu(run: Callable[[], Any], device: torch.device) -> Timing:
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(3):  # kernels that compile on first use compile here
        run()
    torch.cuda.synchronize(device)
    estimate = (time.perf_counter() - started) / 3
    runs = min(50, max(7, int(0.1 / max(estimate, 1e-6))))
    called, out = _between_events(run, runs, device)
    _assert_written(out)
    del out
    try:
        graph, static = _capture(run)
    except RuntimeError:  # a call that reads results back to the host cannot be captured
        torch.cuda.synchronize(device)
        return Timing(called, called, runs, graph=False)

    def replay() -> Any:
        graph.replay()
        return static

    replayed, out = _between_events(replay, runs, device)
    _assert_written(out)
    return Timing(replayed, called, runs, graph=True)


def _capture(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def _between_events(run: Callable[[], Any], runs: int, device: torch.device) -> tuple[float, Any]:
    flush = _flush_buffer(device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    out = None
    for start, end in events:
        if isinstance(out, Tensor) and out.is_floating_point():
            out.fill_(float("nan"))  # the next call is given this memory again
        del out
        # Read, not written: dirty lines would be written back during the measurement.
        flush.sum()
        start.record()
        out = run()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in events) / 1e3, out


@lru_cache
def _flush_buffer(device: torch.device) -> Tensor:
    """Allocate several times the L2 cache of any GPU."""
    return torch.randn(2**27, dtype=torch.float32, device=device)


def _assert_written(out: Any) -> None:
    if isinstance(out, Tensor) and out.is_floating_point():
        assert not out.isnan().any(), "some of the output was not written"


def device_name(device: torch.device) -> str:
    """Name the device for reports."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"
