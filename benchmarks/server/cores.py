"""Which cores the processes of the benchmark run on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class Cores:
    """A core for the front end, one for the client, and the rest for the engine.

    front_end, load: None where there is one core only, or no way to choose: then nothing is pinned.
    engine: empty for the same reason.
    """

    front_end: int | None
    load: int | None
    engine: tuple[int, ...]

    @classmethod
    def here(cls) -> Cores:
        """Choose among the cores that this process may use."""
        usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if len(usable) < 2:
            return cls(None, None, ())
        # With two cores the client shares the front end's only where an engine needs the other one.
        return cls(usable[-1], usable[-2] if len(usable) == 2 else usable[0], tuple(usable[:-1]))

    def beside_engine(self) -> int | None:
        """Return the core of the client while an engine runs: the front end's, as the others compute."""
        return self.front_end


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process and of those that it started, so far."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Run this process on one core within the context; do nothing without any."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    pin(os.getpid(), (core,))
    try:
        yield
    finally:
        pin(os.getpid(), tuple(before))


def pin(pid: int, cores: tuple[int, ...]) -> None:
    """Move all threads of a process to these cores; do nothing without any."""
    if cores:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)
