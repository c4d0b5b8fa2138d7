"""Does everything work on a GPU, and how fast? One command, 510 seconds by default.

    python -m benchmarks.gpu                # needs a CUDA or ROCm GPU
    python -m benchmarks.gpu --report       # rewrites benchmarks/README.md from the existing results
    python -m benchmarks.gpu --tiny         # anywhere, in Triton's interpreter: tries out this program
    python -m benchmarks.gpu --sanitize     # NVIDIA's compute-sanitizer instead, which takes its time

Runs the tests of the engine and then of the kernels, compiled; measures the device's ceilings, a large copy
and a large matrix product; runs the engine on nano-vllm's workload, also without a second step in flight and
without CUDA graphs; and times every kernel against its limit and against those of other projects that are
installed (pip install flashinfer-python==0.6.1 conch-triton-kernels==1.3). Each kernel is compared with the
reference on the batch on which it is timed, products with weights in codes with float64. Times are medians
between events, of CUDA graphs where they can be captured, with a cold L2 cache and outputs filled with NaN.

Writes benchmarks/results/<gpu>-<date>.json, pictures (with `pip install 'paged[plots]'`), and
benchmarks/README.md from all results. A section that fails is recorded as an error in the JSON, the others
still run, and the exit code is 1.
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

from benchmarks.gpu import sanitizer
from benchmarks.gpu.comparator_names import NAMES, SLOW, readiness_key
from benchmarks.gpu.gpu_tests import engine_tests, kernel_tests, run_tests
from benchmarks.gpu.report import print_summary, write_report

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parents[1] / "results"
# The most important first: the time may run out.
SECTIONS = [
    "ceilings",
    "engine",
    "decode",
    "skewed",
    "long",
    "quantized",
    "prefill",
    "layers",
    "coded_linear",
    "experts",
]
_TESTS_SHARE = 0.33  # of the budget, at most


def main() -> None:
    """Run the sections, write the result, and exit with 1 if any failed."""
    args = parse_args()
    if args.report:
        print(f"wrote {write_report(args.out or RESULTS)}")
        return
    if args.sanitize:
        sanitizer.main()
    started = time.time()
    deadline = started + args.budget
    found: dict[str, Any] = {"device": None, "sections": {}}
    not_ready: dict[str, str] = {}
    others = None if args.tiny else prepare_comparators()
    if "tests" in args.sections:
        share = 1.0 if args.tiny else _TESTS_SHARE
        found["sections"]["tests"] = tests_section(args.tiny, args.budget * share)
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
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--tiny", "--rehearse", action="store_true", help="small sizes; without a GPU in the interpreter"
    )
    parser.add_argument("--report", action="store_true", help="only rewrite the tables from existing JSON")
    parser.add_argument(
        "--sanitize", action="store_true", help="only run engine tests under memcheck and racecheck"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of results; default benchmarks/results, with --tiny a temporary one"
    )
    parser.add_argument("--budget", type=float, default=510, help="seconds for everything")
    parser.add_argument("--sections", nargs="+", default=["tests", *SECTIONS], choices=["tests", *SECTIONS])
    return parser.parse_args()


def tests_section(tiny: bool, seconds: float) -> dict[str, Any]:
    """Run the tests of the engine, then of the kernels: a section of two rows."""
    print(f"tests, for at most {seconds:.0f} s", flush=True)
    started = time.time()
    rows = []
    num_processes = 1 if tiny else max(1, min(12, (os.cpu_count() or 2) - 2))
    for case, files, share in (
        ("engine tests", engine_tests(tiny), 0.5),
        ("kernel tests", kernel_tests(tiny), 1.0),
    ):
        left = (seconds - (time.time() - started)) * share
        rows.append(row := run_tests(case, files, left, num_processes))
        shown = {name: row[name] for name in ("passed", "failed", "error", "skipped", "unfinished")}
        print(f"  {case}: {shown}", flush=True)
    errors = [f"{row['failures']}\n{row['tail']}" for row in rows if _is_wrong(row)]
    return {"rows": rows, "error": "\n".join(errors) or None, "seconds": time.time() - started}


def _is_wrong(row: dict[str, Any]) -> bool:
    return bool(row["failed"] or row["error"] or not row["passed"])


def prepare_comparators() -> subprocess.Popen[str]:
    """Start a process in which the comparators compile beside the tests; only it dies if one crashes."""
    command = [sys.executable, "-m", "benchmarks.gpu.comparators"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def ready_comparators(process: subprocess.Popen[str], deadline: float) -> dict[str, str]:
    """Return the comparators that must not be tried, with the reasons."""
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
    """Run the sections in a process; when it dies, run the remaining ones in another process."""
    found["limits"] = None
    with tempfile.TemporaryDirectory() as directory:
        events = Path(directory) / "events.jsonl"
        while sections:
            events.write_text("")
            options = {"sections": sections, "tiny": tiny, "deadline": deadline, "not_ready": not_ready}
            options |= {"events": str(events), "limits": found["limits"]}
            command = [sys.executable, "-m", "benchmarks.gpu.worker", json.dumps(options)]
            try:
                # A measurement that runs at the deadline may finish.
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
    """Add the events of a worker to the result. Return the sections that it ended."""
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
    """Write the JSON, the pictures if matplotlib is installed, and the tables."""
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
    """Return the commit that was measured; None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


if __name__ == "__main__":
    main()
