"""Compile the kernels that are not in the cache: at the first start on a CPU, or after an update.

Several processes do it together, each on a core: this one, helpers that it starts, and other engines that
start at the same time. Each takes the next kernel that no other one has claimed.

python -m paged.kernels.cpu.compiling    # what a helper runs
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from .launch import code_cache
from .launch.code_cache import SECONDS, missing_kernels
from .target import writable_directory

logger = logging.getLogger(__name__)

MOST_PROCESSES = 4  # each takes half a gigabyte, and the longest kernel ends no sooner with more
_POLL_S = 0.1


class Compiled(NamedTuple):
    """What was compiled when this process loaded the kernels, and where the cache is.

    num_compiled: those of num_kernels that were not in the cache.
    """

    num_kernels: int
    num_compiled: int
    seconds: float
    directory: Path

    def describe(self) -> str:
        """Return a line about it."""
        if not self.num_compiled:
            return f"{self.num_kernels} kernels for this CPU were compiled before, in {self.directory}"
        return (
            f"compiled {self.num_compiled} of {self.num_kernels} kernels for this CPU in "
            f"{self.seconds:.1f} s, kept in {self.directory}"
        )


# Shows progress: progress(number, text) is a context, which gives a function of how many are compiled.
Progress = Callable[[int, str], AbstractContextManager[Callable[[int], None]]]
_reports: list[Compiled] = []


def compile_ahead(progress: Progress | None = None) -> Compiled:
    """Compile the kernels that are not in the cache. Only the first call of a process does anything.

    progress: by default, lines in the log at the start and the end.

    Raises ImportError if the cache cannot be written.
    """
    if not _reports:
        missing = missing_kernels()
        started = time.perf_counter()
        directory = code_cache.directory_of(next(iter(SECONDS))) or writable_directory()
        if missing:
            _compile(missing, progress)
        seconds = time.perf_counter() - started
        _reports.append(Compiled(len(SECONDS), len(missing), seconds, directory))
        if missing and progress is None:
            logger.warning(_reports[0].describe())
    return _reports[0]


def _compile(missing: list[str], progress: Progress | None) -> None:
    num_processes = min(torch.get_num_threads(), MOST_PROCESSES, len(missing))
    seconds = _estimate(missing, num_processes)
    text = f"compiling {len(missing)} kernels for this CPU, once: about {seconds:.0f} s"
    if progress is None:
        logger.warning(text)
        progress = _no_progress
    with _helpers(num_processes - 1), progress(len(missing), text) as update, _watched(missing, update):
        _work()


@contextmanager
def _no_progress(number: int, text: str) -> Iterator[Callable[[int], None]]:  # noqa: ARG001
    yield lambda num_compiled: None  # noqa: ARG005


@contextmanager
def _watched(missing: list[str], update: Callable[[int], None]) -> Iterator[None]:
    """Call update(number of kernels compiled) again and again while the block runs, and at its end."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_S):
            update(len(missing) - len(missing_kernels()))

    thread = threading.Thread(target=watch, name="paged-compiling", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    update(len(missing))


def _estimate(missing: list[str], num_processes: int) -> float:
    seconds = [SECONDS[name] for name in missing]
    return max(*seconds, sum(seconds) / num_processes, 1.0)


def _work(*, quickest_first: bool = False, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Compile kernels until none is missing, and wait for those that other processes compile."""
    from .compiled.kernels import compile_kernel

    while missing := missing_kernels():
        num_compiled = 0
        for name in reversed(missing) if quickest_first else missing:
            with code_cache.claimed(name) as is_claimed:
                if is_claimed and is_wanted() and code_cache.directory_of(name) is None:
                    compile_kernel(name)
                    num_compiled += 1
        if not is_wanted():
            return
        if not num_compiled:
            time.sleep(_POLL_S)


@contextmanager
def _helpers(number: int) -> Iterator[None]:
    """Let so many other processes compile too. They end with the block."""
    if not sys.executable or getattr(sys, "frozen", False):  # Python is embedded in another program
        number = 0
    # So that they find these modules where this process does.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    processes = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "paged.kernels.cpu.compiling"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what fails there fails here too, where it is reported
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(number)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    """Help the process that started this one, as long as it lives."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = os.getppid()
    # The other one has begun with the kernels that take longest. Quick ones let its bar move soon.
    _work(quickest_first=True, is_wanted=lambda: os.getppid() == parent)


if __name__ == "__main__":
    main()
