"""NVIDIA's compute-sanitizer over the engine on tiny shapes, which launches every kernel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck")  # accesses out of bounds, and races in shared memory
# Engine tests of each way to sample, copy, swap and quantise. A tool makes kernels 10 to 100 times slower.
TESTS = [
    *("tests/engine/test_on_gpu.py", "-m", "gpu"),
    *("-k", "results_are_those or every_parameter or smaller_cache"),
]
_FOUND = 86  # the exit code for errors that a tool has found; pytest has others
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_PASSED = re.compile(r"(\d+) passed")
MISSING = (
    "compute-sanitizer is missing: it is neither on PATH nor in bin or compute-sanitizer of $CUDA_HOME or "
    "/usr/local/cuda; install NVIDIA's CUDA toolkit, or put the program on PATH"
)


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, or None."""
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), Path("/usr/local/cuda")]
    folders = [str(home / name) for home in homes for name in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(folders)
    )


def sanitize(program: str, tool: str, tests: list[str]) -> dict[str, Any]:
    """Run pytest under a tool. Return what it has found, and an error if that is anything or nothing ran."""
    started = time.time()
    command = [program, "--tool", tool, "--target-processes", "all", "--error-exitcode", str(_FOUND)]
    command += [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", *tests]
    environment = {**os.environ}
    if tool == "memcheck":
        # An allocation of its own for each tensor: in one of torch's large ones, nothing is out of bounds.
        # There are no CUDA graphs then.
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    summary = _SUMMARY.findall(done.stdout)
    passed = _PASSED.search(done.stdout)
    found = sum(map(int, summary)) if summary else None
    error = None
    if found or done.returncode == _FOUND:
        error = f"{tool} found {found} errors"
    elif done.returncode:
        error = f"the tests ended with exit code {done.returncode}"
    elif found is None:
        error = f"{tool} printed no summary"
    elif not passed:
        error = "no test ran"
    return {
        "case": tool,
        "passed": int(passed.group(1)) if passed else 0,
        "found": found,
        "error": error,
        "seconds": time.time() - started,
        "tail": done.stdout[-6000:] if error else "",
    }


def main() -> None:
    """Run every tool, print what it found, and last a JSON line; exit with 1 if that is anything."""
    from benchmarks.common import print_json

    program = find_sanitizer()
    if program is None:
        sys.exit(MISSING)
    rows = []
    for tool in TOOLS:
        print(f"{tool}: {' '.join(TESTS)}", flush=True)
        rows.append(row := sanitize(program, tool, TESTS))
        told = row["error"] or "nothing found"
        print(f"{row['tail']}\n  {told}; {row['passed']} tests passed in {row['seconds']:.0f} s", flush=True)
    print_json({"benchmark": "gpu --sanitize", "rows": rows})
    sys.exit(any(row["error"] for row in rows))
