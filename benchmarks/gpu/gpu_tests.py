"""Run the tests that need a GPU, in several processes, since compiling takes most of the time."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# These compile for absent GPUs; CI runs them.
_NOT_HERE = ("test_aot.py", "test_aot_variants.py")
_PYTEST = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
_RESULT = re.compile(r"^(\S.*) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*\[ *\d+%\]")
_COLLECTED = re.compile(r"collected (\d+) items?")


def run_tests(case: str, files: list[str], seconds: float, num_processes: int) -> dict[str, Any]:
    """Run these files for at most so many seconds. Unfinished tests are counted, not failures."""
    deadline = time.time() + seconds
    if num_processes == 1:
        shards = [files]
    else:
        with ThreadPoolExecutor(num_processes) as pool:
            ids = spread([test for tests in pool.map(collect, files) for test in tests])
        shards = [ids[i::num_processes] for i in range(min(num_processes, len(ids)))]
    logs = run_shards(shards, deadline)
    found = [match.groups() for log in logs for line in log.splitlines() if (match := _RESULT.match(line))]
    collected = sum(int(match.group(1)) for log in logs if (match := _COLLECTED.search(log)))
    wrong = [log for log in logs if "FAILED" in log or "ERROR" in log or not _COLLECTED.search(log)]
    return {
        "case": case,
        "ran": sum(r not in ("SKIPPED", "ERROR") for _, r in found),
        **{
            name: sum(r == name.upper() for _, r in found)
            for name in ("passed", "failed", "error", "skipped")
        },
        "unfinished": collected - len(found),
        "failures": sorted(test for test, result in found if result in ("FAILED", "ERROR")),
        "tail": "\n".join(log[-1500:] for log in wrong)[:6000],
    }


def spread(ids: list[str]) -> list[str]:
    """Order tests so that each function has run once before any runs for a second time: time may run out."""
    seen = Counter[str]()

    def num_before(test: str) -> int:
        function = test.partition("[")[0]
        seen[function] += 1
        return seen[function]

    return sorted(ids, key=num_before)


def run_shards(shards: list[list[str]], deadline: float) -> list[str]:
    """Run pytest on all shards at once, until the deadline. Return their output."""
    # Threads of all these processes on every core would wait for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(shards or [1])))}
    with tempfile.TemporaryDirectory() as directory:
        running = []
        for i, tests in enumerate(shards):
            path = Path(directory, f"{i}.log")
            with path.open("w") as log:
                command = [*_PYTEST, "-v", "--color=no", *tests]
                options = {"cwd": ROOT, "env": environment, "stdout": log, "stderr": subprocess.STDOUT}
                running.append(subprocess.Popen(command, **options))
        for process in running:
            try:
                process.wait(max(0.0, deadline - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return [Path(directory, f"{i}.log").read_text() for i in range(len(running))]


def engine_tests(tiny: bool) -> list[str]:
    """Return the files outside of kernel tests with a test marked `gpu`, or one of these."""
    if tiny:
        test = "tests/engine/test_on_gpu.py::test_results_are_those_of_a_cpu"
        return [f"{test}[{place}-a grammar]" for place in ("cuda", "cpu")]
    return [file for file in _test_files() if not _is_of_kernels(file) and "pytest.mark.gpu" in _text(file)]


def kernel_tests(tiny: bool) -> list[str]:
    """Return the files with tests of kernels, the longest last."""
    if tiny:
        return ["tests/ops/test_add.py"]
    files = [file for file in _test_files() if _is_of_kernels(file) and Path(file).name not in _NOT_HERE]
    return sorted(files, key=lambda file: "test_attention_variants" in file)


def _test_files() -> list[str]:
    return [str(file.relative_to(ROOT)) for file in sorted((ROOT / "tests").rglob("test_*.py"))]


def _text(file: str) -> str:
    return (ROOT / file).read_text()


def _is_of_kernels(file: str) -> bool:
    return Path(file).parent in (Path("tests", "ops"), Path("tests", "ops", "gpu"))


def collect(file: str) -> list[str]:
    """Return the ids of a file's tests; outside kernel tests only those marked `gpu`."""
    chosen = [] if _is_of_kernels(file) else ["-m", "gpu"]
    command = [*_PYTEST, "--collect-only", "-q", *chosen, file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "::" in line]
