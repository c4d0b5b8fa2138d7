"""Damaged and hostile checkpoints: each loads, or is refused by one readable line.

    python -m tests.strangers                          # 100,000 of them
    python -m tests.strangers --count 2000
    python -m tests.strangers --seed 1234              # one again, the one that failed
    python -m tests.strangers --files config.json      # only this file is damaged

A seed fixes which file of which small checkpoint is damaged, and how (`tests/support/mutations.py`): bytes,
JSON structure and values, hostile templates and tokenizers, FIFOs, links and other special files. Each is
loaded under watch (`tests/support/watched_load.py`). It must load, or end in a CheckpointError,
UnsupportedModelError or ConfigError: one printable line of at most 500 characters that names the file or its
directory. It must take little memory and time, open nothing outside its directory, start no process but
paged's own, and run no code.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, Queue
from threading import Thread
from typing import Any

COUNT = 100_000
# Waits of a second without news of a checkpoint, or of a new process. Not a time, as this process may be
# stopped as well.
PATIENCE, START_PATIENCE = 40, 120


@dataclass
class Report:
    """What came of all checkpoints so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[int, str] = field(default_factory=dict)  # by seed
    slowest: tuple[float, int] = (0.0, 0)  # seconds, seed
    largest: tuple[int, int] = (0, 0)  # bytes, seed

    @property
    def count(self) -> int:
        """The number of checkpoints."""
        return self.outcomes.total()

    def add(self, result: dict[str, Any]) -> None:
        """Record one checkpoint."""
        seed = result["seed"]
        self.outcomes[result["outcome"]] += 1
        if result["findings"]:
            self.findings[seed] = f"{result['done']}: {'; '.join(result['findings'])}"
        self.slowest = max(self.slowest, (result["s"], seed))
        self.largest = max(self.largest, (result["bytes"], seed))


def _run_seeds(seeds: range, only: Sequence[str], report: Callable[[dict[str, Any]], None]) -> None:
    """Load the checkpoints of these seeds, in as few processes as they leave alive."""
    while seeds:
        last = _run_process(seeds, only, report)
        seeds = range(0) if last is None else range(last + seeds.step, seeds.stop, seeds.step)


def _run_process(seeds: range, only: Sequence[str], report: Callable[[dict[str, Any]], None]) -> int | None:
    """Load checkpoints in one process. Return the seed that ended it, or None if all were loaded."""
    numbers = map(str, (seeds.start, seeds.stop, seeds.step))
    command = [sys.executable, "-m", "tests.support.watched_load", *numbers, *only]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines: Queue[str] = Queue()
    reader = Thread(target=lambda: [*map(lines.put, process.stdout), lines.put("")], daemon=True)  # type: ignore[arg-type]
    reader.start()
    begun: dict[str, Any] | None = None
    started, fault = time.perf_counter(), "ended the process"
    waits = START_PATIENCE
    while True:
        try:
            line = lines.get(timeout=1)
        except Empty:
            waits -= 1
            if waits == 0:
                fault = f"took more than {PATIENCE} s"
                process.kill()
            continue
        if not line:
            break
        message, waits = json.loads(line), PATIENCE
        if "outcome" in message:
            report(message)
            begun = None
        else:
            begun, started = message, time.perf_counter()
    code = process.wait()
    reader.join()
    process.stdout.close()
    if begun is None:
        if code:
            raise RuntimeError(f"{' '.join(command)} ended with exit code {code} between two checkpoints")
        return None
    finding = f"{fault} (exit code {code})"
    report({**begun, "outcome": fault, "findings": [finding], "s": time.perf_counter() - started, "bytes": 0})
    return int(begun["seed"])


def run(
    seeds: range,
    processes: int,
    only: Sequence[str] = (),
    on_result: Callable[[Report], None] | None = None,
) -> Report:
    """Load the checkpoints of these seeds. Return what came of them.

    only: the files that may be damaged; by default any.
    """
    report = Report()

    def add(result: dict[str, Any]) -> None:
        report.add(result)
        if on_result is not None:
            on_result(report)

    with ThreadPoolExecutor(processes) as pool:
        for done in [pool.submit(_run_seeds, seeds[i::processes], only, add) for i in range(processes)]:
            done.result()
    return report


def main() -> None:
    """Load many damaged checkpoints, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, help="load this checkpoint only")
    parser.add_argument("--files", nargs="*", default=[], help="damage only these")
    args = parser.parse_args()
    if args.seed is not None:
        args.first_seed, args.count, args.processes = args.seed, 1, 1
    started = time.perf_counter()

    def show(report: Report) -> None:
        if sys.stderr.isatty():
            passed = time.perf_counter() - started
            line = f"{report.count:,} checkpoints, {len(report.findings)} findings, {passed:,.0f} s"
            print(f"\r{line}\r", end="", file=sys.stderr)

    seeds = range(args.first_seed, args.first_seed + args.count)
    report = run(seeds, args.processes, args.files, show)
    for seed, finding in sorted(report.findings.items()):
        print(f"seed {seed}: {finding}")
    for outcome, count in report.outcomes.most_common():
        print(f"{count:9,}  {outcome}")
    (slow_s, slow), (num_bytes, large) = report.slowest, report.largest
    print(f"slowest: {slow_s:.2f} s (seed {slow}); most memory: {num_bytes / 2**20:.0f} MiB (seed {large})")
    passed = time.perf_counter() - started
    print(f"{report.count:,} checkpoints, {len(report.findings)} findings, {passed:,.0f} s")
    sys.exit(1 if report.findings else 0)


if __name__ == "__main__":
    main()
