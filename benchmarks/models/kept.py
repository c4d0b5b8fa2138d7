"""Starts with packed weights that are kept, beside starts without: seconds, memory, speed."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers.process import ROOT
from benchmarks.peers.report import Row

_SCRIPT = Path(__file__).with_name("one_kept_start.py")


def kept_rows(shape: str, directory: str, rounds: int, threads: int, *options: str) -> list[Row]:
    """Return a row for each way of starting, with medians of rounds in which the ways alternate.

    options: of the engine, as name=value.
    """
    found: dict[str, list[dict[str, Any]]] = {"packed": [], "kept": [], "second replica": []}
    with tempfile.TemporaryDirectory(prefix="paged-kept-") as cache:
        first = kept_start(directory, threads, cache, *options, "wait=1")
        for _ in range(rounds):
            found["packed"].append(kept_start(directory, threads, "", *options))
            found["kept"].append(kept_start(directory, threads, cache, *options))
            found["second replica"].append(_beside(directory, threads, cache, *options))
        speeds = kept_start(directory, threads, cache, *options, f"compare={8 * rounds}")
    rows: list[Row] = []
    for way, runs in found.items():
        rows.append(
            {
                "shape": " ".join([shape, *options]),
                "start": way,
                **{key: statistics.median(run[key] for run in runs) for key in ("ready s", "first token s")},
                **{key: statistics.median(run[key] for run in runs) for key in ("peak MiB", "private MiB")},
                "decode": speeds["decode"] if way == "kept" else 1.0,
                "pages": runs[-1]["pages"],
            }
        )
    known = {**first, "shape": rows[0]["shape"], "start": "first", "decode": 1.0}
    return [*rows, {key: known[key] for key in rows[0]}]


def kept_start(directory: str, threads: int, cache: str, *options: str) -> dict[str, Any]:
    """Start an engine in a process of its own. Return what one_kept_start.py prints."""
    process = _process(directory, threads, cache, *options)
    return _result(process)


def _beside(directory: str, threads: int, cache: str, *options: str) -> dict[str, Any]:
    """Start an engine while another one of the same weights runs."""
    with _process(directory, threads, cache, *options, "hold=1") as other:
        assert other.stdout is not None
        other.stdout.readline()
        found = kept_start(directory, threads, cache, *options)
        other.communicate("")
    return found


def _process(directory: str, threads: int, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
    return subprocess.Popen(
        [sys.executable, "-P", str(_SCRIPT), directory, *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate("")
    if process.returncode:
        raise RuntimeError(f"the engine did not start: {process.args}")
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found
