"""The processes of several ways, as many alive at once as memory allows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from benchmarks.common import Workload
from benchmarks.peers.process import ENVIRONMENT_OF, Worker, WorkerError

# Types of GGUF files, which llama.cpp makes of the checkpoint for both engines.
GGUF_TYPES = ("Q8_0", "Q4_0", "Q4_K_M")
# The precisions of each system.
PRECISIONS = {
    "paged": ("bfloat16", "float32", "int8", "int4", *GGUF_TYPES),
    "generate": ("bfloat16", "float32"),
    "generate_batch": ("bfloat16", "float32"),
    "openvino": ("bfloat16", "float32", "int8", "int4"),
    "llama_cpp": ("bfloat16", "float32", *GGUF_TYPES),
    "vllm": ("bfloat16", "float32"),
}


@dataclass(frozen=True, order=True)
class Way:
    """A system in one precision."""

    system: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.system}-{self.dtype}"


# Mean distance of a way's tokens from the best, see hf.Judge: tokens at random are 4 away.
TOLERANCES = {
    "float32": 0.0,
    "bfloat16": 0.2,
    "int8": 0.4,
    "Q8_0": 0.4,
    "int4": 1.5,
    "Q4_0": 1.5,
    "Q4_K_M": 1.5,
}
# Bytes of memory per byte of the checkpoint: 2 for float32 weights, 1 for everything else.
ROOM = 3

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
        self.ways = list(ways)
        self.options = options
        self.room = room
        self.environments = environments
        self.left_out: dict[str, str] = {}
        self.load_s: dict[Way, list[float]] = {}  # from the start of the process until it answers
        self._alive: dict[Way, Worker] = {}  # in the order of their last call

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for way in [*self._alive]:
            self.stop(way)

    def prepare(self) -> None:
        """Let peers convert the checkpoint in separate processes, whose memory does not count."""
        for way in [*self.ways]:
            maker = "llama_cpp" if way.dtype in GGUF_TYPES else way.system
            if maker not in ENVIRONMENT_OF:
                continue
            try:
                with self._start(maker) as worker:
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

    def _start(self, system: str) -> Worker:
        return Worker(system, threads=self.options["threads"], environments=self.environments)

    def _load(self, way: Way) -> Worker:
        while self._alive and psutil.virtual_memory().available < self.room:
            self.stop(next(iter(self._alive)))
        started = time.perf_counter()
        worker = self._start(way.system)
        try:
            worker.call("load", dtype=way.dtype, **self.options)
        except WorkerError:
            worker.close()
            raise
        self.load_s.setdefault(way, []).append(time.perf_counter() - started)
        return worker


def prove(fleet: Fleet, small: Workload) -> None:
    """Load every way, warm it up on a small run, and leave it out if its tokens are not the model's."""
    judge = Way("judge", "float32")
    for way, tokens in warm(fleet, small).items():
        gaps = fleet.call(judge, "judge", prompts=small.prompts, tokens=tokens)
        gap = statistics.mean(gaps)
        print(
            f"{way}: {gaps.count(0.0) / len(gaps):.0%} of the tokens are the best, {gap:.4f} away", flush=True
        )
        if gap > TOLERANCES[way.dtype]:
            fleet.leave_out(
                way, f"its tokens are not the model's: {gap:.3f} away from the best, see hf.Judge"
            )
    fleet.stop(judge)


def warm(fleet: Fleet, small: Workload) -> dict[Way, list[list[int]]]:
    """Load every way and run it once. Return the tokens of those that ran."""
    tokens = {}
    for way in [*fleet.ways]:
        run = fleet.call(way, "run", prompts=small.prompts, max_tokens=small.max_tokens)
        if run is not None:
            tokens[way] = run["tokens"]
    return tokens
