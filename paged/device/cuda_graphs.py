"""GraphPool: what of torch.cuda captures launches into CUDA graphs, and measures what they take."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")


class Cost(NamedTuple):
    """What captures have taken."""

    num_bytes: int
    seconds: float


class GraphPool:
    """The memory that the graphs of an engine share, and the stream on which they are captured.

    Results of a replay are overwritten by the next one, of whichever graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handle = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Run compute(), then capture what it launches. Return the graph, and the tensors of its replays.

        It runs once before, because the first launch of a kernel compiles and loads it, and its first call
        checks its arguments. An exception of either is raised, and nothing is captured then.
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
        """Return what a function takes that captures graphs."""
        free = self._free_bytes()
        started = time.perf_counter()
        capture()
        torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - started
        return Cost(max(0, free - self._free_bytes()), seconds)

    def _free_bytes(self) -> int:
        """Return the free memory, what torch keeps for later allocations included, but not that of graphs."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info(self._device)[0]
        return free
