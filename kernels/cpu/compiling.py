"""Compile the kernels that are not in the cache: at the first start on a CPU, or after an update.

Several processes do it together, each on a core: helpers that this one starts, and those of other engines
that start at the same time. Each takes the next kernel that no other one has claimed. Meanwhile this process
reads the weights.

python -m paged.kernels.cpu.compiling launch.graph.graph linear.linear.linear+6-8    # what a helper runs
"""

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from .launch import code_cache
from .launch.code_cache import SECONDS, missing_kernels, seconds_of
from .launch.compiled_files import claimed
from .target import writable_directory
from .variants import compile_only

logger = logging.getLogger(__name__)

MOST_PROCESSES = 4  # each takes half a gigabyte, and the longest kernel ends no sooner with more
_IMPORTS_S = 2.0  # what a helper imports first takes so long, on one core of Zen 4
_MEASURED_S = 1.0  # kernels that take so long there tell how fast this machine is, and how busy
_POLL_S = 0.1


class Compiled(NamedTuple):
    """What was compiled for the engines of this process, and where the cache of kernels is.

    num_kernels: the number of kernels that were needed. num_compiled: how many of them were not in the cache.
    """

    num_kernels: int
    num_compiled: int
    seconds: float
    directory: Path

    def describe(self) -> str:
        """Describe the compilation in one line."""
        if not self.num_compiled:
            return f"{self.num_kernels} kernels for this CPU were compiled before, in {self.directory}"
        return (
            f"compiled {self.num_compiled} of {self.num_kernels} kernels for this CPU in "
            f"{self.seconds:.1f} s, kept in {self.directory}"
        )


# Shows progress: progress(number, text) is a context, which gives a function of how many are compiled, and of
# the text from now on.
Progress = Callable[[int, str], AbstractContextManager[Callable[[int, str], None]]]


def compile_ahead(progress: Progress | None = None, names: Sequence[str] | None = None) -> Compiled:
    """Compile the kernels among `names` (by default all) that are not in the cache; see `Compilation`.

    Returns what was compiled in this process so far. Raises ImportError if the cache cannot be written.
    """
    Compilation(progress, SECONDS if names is None else names).finish()
    return report()


def report() -> Compiled:
    """Return what was compiled in this process so far."""
    directory = code_cache.directory_of("launch.graph.graph") or writable_directory()
    return Compiled(len(code_cache.needed), sum(_counts), sum(_seconds), directory)


_counts: list[int] = []
_seconds: list[float] = []


class Compilation:
    """Compiles kernels that are not in the cache, in other processes, from construction to `finish`.

    progress: shows the progress; by default, two lines are logged: at the start and at the end.
    """

    def __init__(self, progress: Progress | None, names: Iterable[str]) -> None:
        own = [*names]
        code_cache.needed.update(own)
        self._missing = missing_kernels(own)
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._thread: threading.Thread | None = None
        if not self._missing:
            return
        writable_directory()  # raises before it takes time
        self._started = time.perf_counter()
        self._is_logged = progress is None
        self._progress = progress or _no_progress
        number = min(torch.get_num_threads(), MOST_PROCESSES, len(self._missing))
        self._text = f"compiling {len(self._missing)} kernels for this CPU, once"
        self._is_estimated = False
        self._ended = threading.Event()
        if self._is_logged:
            logger.warning(self._text)
        self._helpers = _start_helpers(number, self._missing)
        code_cache.expected.update(self._missing if self._helpers else ())
        self._thread = threading.Thread(target=self._watch, name="paged-compiling", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        """Show the progress, until all is compiled or the end."""
        with self._progress(len(self._missing), self._text) as update:
            while (left := missing_kernels(self._missing)) and not self._ended.is_set():
                self._estimate(left)
                update(len(self._missing) - len(left), self._text)
                if not self._is_helped():
                    code_cache.expected.difference_update(self._missing)
                self._ended.wait(_POLL_S)
            code_cache.expected.difference_update(self._missing)
            update(len(self._missing) - len(left), self._text)

    def _is_helped(self) -> bool:
        return any(helper.poll() is None for helper in self._helpers)

    def _estimate(self, left: Sequence[str]) -> None:
        """Say how long it takes, once the first kernels tell how fast it goes."""
        done = sum(map(seconds_of, self._missing)) - sum(map(seconds_of, left))
        if self._is_estimated or done < _MEASURED_S:
            return
        self._is_estimated = True
        # The first ones are of the helper that begins with the quick ones.
        slowness = (time.perf_counter() - self._started) / (_IMPORTS_S + done)
        seconds = f"about {slowness * estimate(self._missing, max(1, len(self._helpers))):.0f} s"
        self._text += f": {seconds}"
        if self._is_logged:
            logger.warning("%s in all", seconds)

    def finish(self) -> None:
        """Wait until everything is compiled. Raises ImportError if the cache cannot be written."""
        if self._thread is None:
            return
        try:
            while left := missing_kernels(self._missing):
                if not self._is_helped():
                    work([code_cache.parts(name)[0] for name in left])  # raises what keeps helpers from it
                time.sleep(_POLL_S)
        finally:
            self._ended.set()
            self._thread.join()
            self._thread = None
            for helper in self._helpers:
                helper.kill()
                helper.wait()
        _counts.append(len(self._missing))
        _seconds.append(time.perf_counter() - self._started)
        if self._is_logged:
            logger.warning(report().describe())


@contextmanager
def _no_progress(number: int, text: str) -> Iterator[Callable[[int, str], None]]:  # noqa: ARG001
    yield lambda num_compiled, text: None  # noqa: ARG005


def estimate(names: Sequence[str], num_processes: int) -> float:
    """Estimate the seconds for compiling these kernels on num_processes idle cores of Zen 4."""
    seconds = [*map(seconds_of, names)]
    return _IMPORTS_S + max(*seconds, sum(seconds) / num_processes)


def work(
    names: Sequence[str], *, quickest_first: bool = False, is_wanted: Callable[[], bool] = lambda: True
) -> None:
    """Compile kernels until none of these is missing, and wait for kernels that other processes compile."""
    while missing := missing_kernels(names):
        from .compiled.kernels import compile_kernel

        num_compiled = 0
        for name in reversed(missing) if quickest_first else missing:
            with claimed(name) as is_claimed:
                if is_claimed and is_wanted() and code_cache.holder_of(name) is None:
                    compile_kernel(code_cache.parts(name)[0])
                    num_compiled += 1
        if not is_wanted():
            return
        if not num_compiled:
            time.sleep(_POLL_S)


def _start_helpers(number: int, names: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Start so many processes that compile these kernels."""
    if not sys.executable or getattr(sys, "frozen", False):  # Python is embedded in another program
        number = 0
    # So that they find these modules where this process does.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    order = ("longest", "quickest")
    return [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "paged.kernels.cpu.compiling", order[i % 2], *names],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what fails there fails here too, where it is reported
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        for i in range(number)
    ]


def main(order: str, *names: str) -> None:
    """Help the process that started this one to compile, as long as it lives."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = os.getppid()
    compile_only(names)
    gc.disable()  # what a compiler makes is of use until it ends: a tenth of its time
    # Quick ones let the bar move soon.
    work(names, quickest_first=order == "quickest", is_wanted=lambda: os.getppid() == parent)


if __name__ == "__main__":
    main(*sys.argv[1:])
