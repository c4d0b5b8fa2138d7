"""GraphPool: captures launches into CUDA graphs, and measures what the graphs take."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")
MOST_DROPPED = 8  # captures that the device ended early: the memory of each stays allocated
# By GPU. cuBLAS keeps a workspace for each stream that it has seen, of 32 MiB on an H100.
_streams: dict[int, torch.cuda.Stream] = {}
_capturing = threading.Lock()  # torch allows one capture at a time in a process


class Cost(NamedTuple):
    """What captures of CUDA graphs have cost: time and memory."""

    num_bytes: int
    seconds: float


class GraphPool:
    """The memory that an engine's CUDA graphs share.

    A replay of any of the graphs overwrites the results of the last replay.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle = torch.cuda.graph_pool_handle()
        self._lost: list[torch.cuda.CUDAGraph] = []  # torch refers to them as long as the process lives

    def renew(self) -> None:
        """Take other memory for further graphs. The last graph that goes frees the memory so far."""
        self._handle = torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Run compute(), then capture its launches. Return the graph, and the result that each replay
        overwrites.

        compute() runs once before the capture, because the first launch of a kernel compiles and loads it,
        and checks the arguments. If either run raises, nothing is captured.

        Raises RuntimeError without a run if MOST_DROPPED captures were dropped before.
        """
        if len(self._lost) >= MOST_DROPPED:
            raise RuntimeError(f"{MOST_DROPPED} captures failed on {self._device}, and no more are tried")
        compute()
        current = torch.cuda.current_stream(self._device)
        stream = self._stream()
        graph = torch.cuda.CUDAGraph()
        with _capturing, torch.cuda.stream(stream):
            stream.wait_stream(current)
            # Other threads may use other GPUs meanwhile.
            graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
            try:
                made = compute()
            except BaseException:
                with suppress(RuntimeError):  # of a capture that has failed
                    self._end(graph)
                raise
            self._end(graph)
            current.wait_stream(stream)
        return graph, made

    def _stream(self) -> torch.cuda.Stream:
        """Return the stream on which all graphs of the device are captured."""
        index = self._index()
        if index not in _streams:
            _streams[index] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return _streams[index]

    def _index(self) -> int:
        index = self._device.index
        return torch.cuda.current_device() if index is None else index

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture. If the device has dropped it, take other memory for the next, and raise."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._lost.append(graph)
            # torch 2.11 would not capture into this pool again, nor free what it has cached.
            with suppress(AttributeError, RuntimeError):  # of other versions, which may have done this
                torch._C._cuda_endAllocateToPool(self._index(), self._handle)
            self.renew()
            raise

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
