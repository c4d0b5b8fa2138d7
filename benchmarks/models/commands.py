"""How long a command takes, beside the imports that it cannot do without: whole processes, in turns."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.peers.process import ROOT
from benchmarks.peers.report import Row


class Run(NamedTuple):
    """A process: seconds until it ended, those of all its cores, and the most memory of one process.

    peak_mib is no less than that of this process, which Linux counts for what it starts.
    """

    seconds: float
    core_seconds: float
    peak_mib: float


GENERATE = ("-m", "paged", "generate", "def fibonacci(n):", "--temperature", "0.9", "--max-tokens", "1")
# What is measured, and what it is compared with.
PAIRS = {
    "first token of the demo, second start": (GENERATE, ("-c", "import torch")),
    "paged --help": (("-m", "paged", "--help"), ("-c", "import typer, rich.console, rich.panel, rich.table")),
}


def run(arguments: Sequence[str], threads: int, cache: str | None = None) -> Run:
    """Run Python with these arguments. cache: where compiled kernels are; None: where they always are.

    Raises CalledProcessError if it fails.
    """
    own = {} if cache is None else {"NUMBA_CACHE_DIR": cache}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-P", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads), **own},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Run(seconds, cores, used.ru_maxrss / 1024)


def command_rows(rounds: int, threads: int) -> list[Row]:
    """Return a row for each pair, with medians, and one for the first start of a fresh clone."""
    run(GENERATE, threads)  # compiles, and fills the file cache
    rows = [_pair_row(name, rounds, threads) for name in PAIRS]
    with tempfile.TemporaryDirectory() as cache:
        first = run(GENERATE, threads, cache)
    return [*rows, _row("text of the demo, first start of a fresh clone", first)]


def _pair_row(name: str, rounds: int, threads: int) -> Row:
    ours, base = PAIRS[name]
    runs: dict[Sequence[str], list[Run]] = {ours: [], base: []}
    for round_ in range(rounds):
        for arguments in [ours, base][:: 1 if round_ % 2 else -1]:
            runs[arguments].append(run(arguments, threads))
    own, other = (Run(*map(statistics.median, zip(*runs[each], strict=True))) for each in (ours, base))
    more = {"more s": own.seconds - other.seconds, "more core s": own.core_seconds - other.core_seconds}
    return {**_row(name, own), "beside": base[-1], **more}


def _row(name: str, own: Run) -> Row:
    """Return the cells that every row has; a table's rows have the same ones."""
    measured = {"what": name, "s": own.seconds, "core s": own.core_seconds, "peak MiB": own.peak_mib}
    return {**measured, "beside": "", "more s": "", "more core s": ""}
