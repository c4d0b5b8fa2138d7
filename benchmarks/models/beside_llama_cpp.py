"""The first token of a GGUF file: a second start of this engine, beside `import torch` and llama.cpp."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import gguf_path
from benchmarks.models.kept import kept_start
from benchmarks.peers.process import ROOT, Worker, WorkerError, interpreter
from benchmarks.peers.report import Row

TYPE = "Q8_0"
NUM_TOKENS = 1024  # of the KV cache, as one_kept_start.py has
_SCRIPT = Path(__file__).with_name("one_llama_cpp_start.py")


def gguf_rows(shape: str, directory: str, rounds: int, threads: int) -> list[Row]:
    """Return a row for each way of starting, with medians of rounds in which the ways alternate.

    Empty, with the reason on the terminal, where llama.cpp, which also writes the file, is not installed.
    """
    try:
        python = interpreter("llama_cpp")
        with Worker("llama_cpp", threads=threads) as worker:
            worker.call("prepare", **_options(directory, threads))
    except WorkerError as error:
        print(f"left out: the first token of a GGUF file; {error}", flush=True)
        return []
    file = str(gguf_path(directory, TYPE))
    found: dict[str, list[dict[str, Any]]] = {"paged, second start": [], "import torch": [], "llama.cpp": []}
    with tempfile.TemporaryDirectory(prefix="paged-kept-") as cache:
        kept_start(file, threads, cache, "wait=1")
        for _ in range(rounds):
            found["paged, second start"].append(kept_start(file, threads, cache))
            found["import torch"].append(_import_torch(threads))
            found["llama.cpp"].append(_llama_cpp_start(python, directory, threads))
    return [
        {
            "shape": f"{shape} {TYPE}",
            "start": way,
            **{key: statistics.median(run[key] for run in runs) for key in ("ready s", "first token s")},
            "peak MiB": statistics.median(run["peak MiB"] for run in runs),
        }
        for way, runs in found.items()
    ]


def _import_torch(threads: int) -> dict[str, Any]:
    started = time.perf_counter()
    script = "import torch; from benchmarks.common import peak_rss_mib; print(peak_rss_mib())"
    peak = float(_run([sys.executable, "-c", script], threads))
    seconds = time.perf_counter() - started
    return {"ready s": seconds, "first token s": seconds, "peak MiB": peak}


def _llama_cpp_start(python: str, directory: str, threads: int) -> dict[str, Any]:
    """Start llama.cpp in a process of its own."""
    arguments = [directory, TYPE, str(threads), str(NUM_TOKENS)]
    found: dict[str, Any] = json.loads(_run([python, str(_SCRIPT), *arguments], threads).splitlines()[-1])
    return found


def _run(command: list[str], threads: int) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _options(directory: str, threads: int) -> dict[str, Any]:
    sizes = {"num_requests": 1, "num_tokens": NUM_TOKENS, "longest": NUM_TOKENS}
    return {"model": directory, "dtype": TYPE, "threads": threads, **sizes}
