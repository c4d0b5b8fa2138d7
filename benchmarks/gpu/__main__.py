"""Everything a GPU has to prove, in one command and under nine minutes.

    python -m benchmarks.gpu                # needs a CUDA or ROCm GPU
    python -m benchmarks.gpu --report       # remakes benchmarks/README.md from the results that are there
    python -m benchmarks.gpu --tiny         # anywhere, in Triton's interpreter: tries out this program

The tests of the kernels, compiled; the device's ceilings, a large copy and a large matrix product; every
kernel against its limit and against other people's, whichever are installed (pip install
flashinfer-python==0.6.1 conch-triton-kernels==1.3); the engine on nano-vllm's workload. Each kernel is proven
right on the batch that it is timed on. Times are medians between events, of CUDA graphs where they can be
captured, with a cold L2 cache and outputs that were NaN before.

Writes benchmarks/results/<gpu>-<date>.json, pictures (with `pip install 'paged[plots]'`), and from all
results there benchmarks/README.md. A section that fails is an error in the JSON, the others go on, and the
exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.comparator_names import NAMES, SLOW, readiness_key
from benchmarks.gpu.gpu_tests import run_tests, test_files
from benchmarks.gpu.report import print_summary, write_report

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parents[1] / "results"
# In the order of what one wants to know first: the time may run out.
SECTIONS = ["ceilings", "decode", "skewed", "long", "quantized", "cascade", "prefill", "layers", "engine"]
_TESTS_SHARE = 0.33  # of the budget, at most


def main() -> None:
    """Run the sections, write what was found, and fail if any of them did."""
    args = parse_args()
    if args.report:
        print(f"wrote {write_report(args.out or RESULTS)}")
        return
    started = time.time()
    deadline = started + args.budget
    found: dict[str, Any] = {"device": None, "sections": {}}
    not_ready: dict[str, str] = {}
    others = None if args.tiny else prepare_comparators()
    if "tests" in args.sections:
        found["sections"]["tests"] = tests_section(args.tiny, args.budget * _TESTS_SHARE)
    if others is not None:
        not_ready = ready_comparators(others, started + args.budget * _TESTS_SHARE)
    run_workers([name for name in args.sections if name in SECTIONS], found, args.tiny, deadline, not_ready)
    if found["device"] is None:
        sys.exit("no section ran")
    result = {
        "benchmark": "gpu",
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": commit(),
        # In the interpreter times mean nothing, and neither do ratios of them.
        "meaningful": not args.tiny and found["device"]["kind"] == "cuda",
        "seconds": time.time() - started,
        **found,
    }
    if args.out is None and not result["meaningful"]:
        args.out = Path(tempfile.mkdtemp(prefix="paged-gpu-"))
    write_result(result, args.out or RESULTS)
    print_summary(result)
    sys.exit(any(section["error"] for section in result["sections"].values()))


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes; without a GPU in the interpreter")
    parser.add_argument("--report", action="store_true", help="only remake the tables from existing JSON")
    parser.add_argument("--out", type=Path, help="where results go; benchmarks/results, with --tiny nowhere")
    parser.add_argument("--budget", type=float, default=510, help="seconds for all of it")
    parser.add_argument("--sections", nargs="+", default=["tests", *SECTIONS], choices=["tests", *SECTIONS])
    return parser.parse_args()


def tests_section(tiny: bool, seconds: float) -> dict[str, Any]:
    """The tests as a section of one row."""
    print(f"tests, for at most {seconds:.0f} s", flush=True)
    started = time.time()
    row = run_tests(test_files(tiny), seconds, 1 if tiny else max(1, min(12, (os.cpu_count() or 2) - 2)))
    shown = {name: row[name] for name in ("passed", "failed", "error", "skipped", "unfinished")}
    print(f"  {shown}", flush=True)
    failed = row["failed"] + row["error"] or not row["passed"]
    error = f"{row['failures']}\n{row['tail']}" if failed else None
    return {"rows": [row], "error": error, "seconds": time.time() - started}


def prepare_comparators() -> subprocess.Popen[str]:
    """Let other people's kernels compile beside the tests, and crash where they crash nobody else."""
    command = [sys.executable, "-m", "benchmarks.gpu.comparators"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def ready_comparators(process: subprocess.Popen[str], deadline: float) -> dict[str, str]:
    """Which of them are not to be tried, and why."""
    try:
        told = process.communicate(timeout=max(1.0, deadline - time.time()))[0]
        why = f"crashed on a small batch, exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        told = process.communicate()[0]
        why = "did not compile in time"
    lines = [json.loads(line) for line in told.splitlines() if line.startswith('{"comparator"')]
    known = {line["comparator"]: None if line["ready"] else "; ".join(line["reasons"]) for line in lines}
    keys = [readiness_key(name, head_dim) for name in NAMES if name not in SLOW for head_dim in (128, 64)]
    return {key: reason for key in keys if (reason := known.get(key, why)) is not None}


def run_workers(
    sections: list[str], found: dict[str, Any], tiny: bool, deadline: float, not_ready: dict[str, str]
) -> None:
    """Run the sections in a process, and what it leaves undone when it dies in another one."""
    found["limits"] = None
    with tempfile.TemporaryDirectory() as directory:
        events = Path(directory) / "events.jsonl"
        while sections:
            events.write_text("")
            options = {"sections": sections, "tiny": tiny, "deadline": deadline, "not_ready": not_ready}
            options |= {"events": str(events), "limits": found["limits"]}
            command = [sys.executable, "-m", "benchmarks.gpu.worker", json.dumps(options)]
            try:
                # What is in the middle of something at the deadline may finish it.
                done = subprocess.run(command, cwd=ROOT, timeout=max(5.0, deadline + 15 - time.time()))
                how = f"the process ended with exit code {done.returncode}"
            except subprocess.TimeoutExpired:
                how = "the time ran out"
            ended = read_events(events.read_text().splitlines(), found)
            if found["device"] is None:
                return
            sections = [name for name in sections if name not in ended]
            if sections:
                lost = found["sections"].setdefault(sections[0], {"rows": []})
                lost |= {"error": how, "seconds": 0.0}
                sections = sections[1:]


def read_events(lines: list[str], found: dict[str, Any]) -> set[str]:
    """Add what a worker told to what was found; the sections that it ended."""
    ended = set()
    for event in map(json.loads, lines):
        if "device" in event:
            found["device"] = event["device"]
            continue
        section = found["sections"].setdefault(event["section"], {"rows": []})
        if "row" in event:
            section["rows"].append(event["row"])
            if event["section"] == "ceilings":
                found["limits"] = {name: event["row"][name] for name in ("bytes_per_s", "flops")}
        else:
            section |= {"error": event["error"], "seconds": event["seconds"]}
            ended.add(event["section"])
    return ended


def write_result(result: dict[str, Any], out: Path) -> None:
    """The JSON, the pictures if somebody can paint them, and the tables."""
    out.mkdir(parents=True, exist_ok=True)
    gpu = re.sub(r"[^a-z0-9]+", "-", result["device"]["name"].lower()).strip("-")
    path = out / f"{gpu}-{result['date'][:10]}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")
    try:
        from benchmarks.plots import paint
    except ImportError as error:
        print(f"no pictures: {error}; pip install 'paged[plots]'")
    else:
        for picture in paint(result, path):
            print(f"wrote {picture}")
    print(f"wrote {write_report(out)}")


def commit() -> str | None:
    """What was measured; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    main()
