"""Does every benchmark still run? Each once, with little; nothing is measured.

python -m benchmarks.rehearse               # all, some minutes
python -m benchmarks.rehearse --short       # without the long ones, as CI
python -m benchmarks.rehearse linear moe    # some
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.common import print_json, print_table

FOLDER = Path(__file__).parent
TIMEOUT_S = 900
# Rehearsals that take more than ten seconds: transformers, and engines that are started several times.
LONG = {"models", "peers", "peers.streams", "perplexity", "server", "throughput"}
# Programs that benchmarks start, and what has a test of its own.
NO_BENCHMARKS = {
    "rehearse": "this one",
    "demo.train": "trains the demo for half an hour; even its tokenizer and two steps take minutes",
    "gpu": "tests/benchmarks/test_gpu.py runs it with --tiny",
    "gpu.comparators": "started by gpu",
    "gpu.worker": "started by gpu",
    "models.one_kept_start": "started by models",
    "models.one_llama_cpp_start": "started by models",
    "peers.worker": "started by peers",
    "server.aggressors": "started by server",
    "server.flood": "started by server",
    "server.front_end": "started by server",
    "server.load": "started by server",
    "server.offline": "started by server",
    "server.watched": "started by server",
}


def main() -> None:
    """Run the benchmarks, one on each core at a time; exit with 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--short", action="store_true", help="leave out " + ", ".join(sorted(LONG)))
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="at the same time")
    args = parser.parse_args()
    names = [name for name in args.names or benchmarks() if not (args.short and name in LONG)]
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = [*pool.map(rehearse, names)]
    print_table(rows)
    failed = [row["benchmark"] for row in rows if row["exit code"]]
    print_json({"benchmark": "rehearse", "failed": failed})
    sys.exit(bool(failed))


def programs() -> list[str]:
    """Return the modules here that can be run, by their names behind `benchmarks.`."""
    found = []
    for file in sorted(FOLDER.rglob("*.py")):
        if '\nif __name__ == "__main__":' in file.read_text(encoding="utf-8"):
            parts = file.relative_to(FOLDER).with_suffix("").parts
            found.append(".".join(part for part in parts if part != "__main__"))
    return found


def benchmarks() -> list[str]:
    """Return the programs that are benchmarks."""
    return [name for name in programs() if name not in NO_BENCHMARKS]


def rehearse(name: str) -> dict[str, str | float]:
    """Run a benchmark with --rehearse, and show what it prints if it fails."""
    started = time.perf_counter()
    command = [sys.executable, "-m", f"benchmarks.{name}", "--rehearse"]
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=FOLDER.parent,
            timeout=TIMEOUT_S,
        )
        code, printed = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, printed = 124, str(error)
    seconds = time.perf_counter() - started
    told = f"{name}: {seconds:.0f} s{', failed' if code else ''}"
    # In one call: other threads print, too.
    print(f"{printed[-4000:]}\n{told}\n" if code else f"{told}\n", end="", flush=True)
    return {"benchmark": name, "s": seconds, "exit code": code}


if __name__ == "__main__":
    main()
