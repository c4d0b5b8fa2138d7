"""GraphPool: what of torch.cuda captures launches into CUDA graphs, and measures what they take."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")


class Cost(NamedTuple):
    """What captures of CUDA graphs have cost: time and memory."""

    num_bytes: int
    seconds: float


class GraphPool:
    """The memory that an engine's CUDA graphs share, and the stream on which graphs are captured.

    A replay of any of the graphs overwrites the results of the last replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handle = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Run compute(), then capture its launches. Return the graph, and the result that each replay
        overwrites.

        compute() runs once before the capture, because the first launch of a kernel compiles and loads it,
        and checks the arguments. If either run raises, nothing is captured.
        """
        compute()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads may use other GPUs meanwhile.
            graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
            try:
                made = compute()
            except BaseException:
                with suppress(RuntimeError):  # of a capture that has failed
                    graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(self._stream)
        return graph, made

    def measure(self, capture: Callable[[], object]) -> Cost:
        """Call a function that captures graphs. Return the time and the memory that it took."""
        free = self._free_bytes()
        started = time.perf_counter()
        capture()
        torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - started
        return Cost(max(0, free - self._free_bytes()), seconds)

    def _free_bytes(self) -> int:
        """Return the free memory, with torch's own reserve for allocations, without the memory of graphs."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return free
