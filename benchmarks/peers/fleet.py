"""The processes of several ways, as many alive at once as memory allows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.peers.process import ENVIRONMENT_OF, Worker, WorkerError

# The precisions of each system. llama.cpp calls them F32, BF16, Q8_0 and Q4_0.
PRECISIONS = {
    "paged": ("bfloat16", "float32", "int8", "int4"),
    "generate": ("bfloat16", "float32"),
    "generate_batch": ("bfloat16", "float32"),
    "openvino": ("bfloat16", "float32", "int8", "int4"),
    "llama_cpp": ("bfloat16", "float32", "int8", "int4"),
    "vllm": ("bfloat16", "float32"),
}


@dataclass(frozen=True, order=True)
class Way:
    """A system in one precision."""

    system: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.system}-{self.dtype}"


ALL_WAYS = [Way(system, dtype) for system, dtypes in PRECISIONS.items() for dtype in dtypes]


def ways_named(names: Iterable[str]) -> list[Way]:
    """Return the ways of these names. The name of a system stands for all its precisions.

    Raises ValueError for an unknown name.
    """
    chosen: list[Way] = []
    for name in names:
        found = [way for way in ALL_WAYS if name in (way.system, str(way))]
        if not found:
            known = f"{', '.join(PRECISIONS)}, or one with its precision such as {ALL_WAYS[0]}"
            raise ValueError(f"no way is called {name!r}; there are {known}")
        chosen += [way for way in found if way not in chosen]
    return chosen


class Fleet:
    """Loaded ways. A way that fails is left out from then on, with the reason.

    options: the `Options` of all ways, without dtype.
    room: bytes that must be free before a way is loaded; the least recently used way is stopped first.
    """

    def __init__(self, ways: list[Way], options: dict[str, Any], room: float, environments: Path) -> None:
        self.ways, self.options, self.room, self.environments = list(ways), options, room, environments
        self.left_out: dict[str, str] = {}
        self._alive: dict[Way, Worker] = {}  # in the order of their last call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for way in [*self._alive]:
            self.stop(way)

    def prepare(self) -> None:
        """Let peers convert the checkpoint in separate processes, whose memory does not count."""
        for way in [way for way in self.ways if way.system in ENVIRONMENT_OF]:
            try:
                with self._start(way) as worker:
                    worker.call("prepare", dtype=way.dtype, **self.options)
            except WorkerError as error:
                self.leave_out(way, str(error))

    def call(self, way: Way, name: str, **arguments: Any) -> Any:
        """Call one way, loading it if necessary. Return None if it failed."""
        try:
            worker = self._alive.pop(way, None) or self._load(way)
            self._alive[way] = worker
            return worker.call(name, **arguments)
        except WorkerError as error:
            self.leave_out(way, str(error))
            return None

    def leave_out(self, way: Way, reason: str) -> None:
        """Leave a way out, with the reason."""
        self.stop(way)
        if way in self.ways:
            self.ways.remove(way)
        self.left_out[str(way)] = reason
        print(f"left out {way}: {reason}", flush=True)

    def stop(self, way: Way) -> None:
        """End the process of a way, if there is one."""
        if (worker := self._alive.pop(way, None)) is not None:
            worker.close()

    def _start(self, way: Way) -> Worker:
        return Worker(way.system, threads=self.options["threads"], environments=self.environments)

    def _load(self, way: Way) -> Worker:
        while self._alive and psutil.virtual_memory().available < self.room:
            self.stop(next(iter(self._alive)))
        worker = self._start(way)
        try:
            worker.call("load", dtype=way.dtype, **self.options)
        except WorkerError:
            worker.close()
            raise
        return worker
