"""What the steps of an engine ask of a GPU that is not here: launches, transfers, and waits of the host.

python -m tests.steps              # the table; needs g++, and TRITON_INTERPRET unset
python -m tests.steps --write      # kernels/gpu/STEPS.md, which the tests compare with
python -m tests.steps beams swap   # only cases with one of these words in their names
python -m tests.steps --json       # for the tests, with random combinations of settings
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.fake_cuda import Event
from tests.support.step_cases import CASES, Case, Step, random_case, run_case

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "kernels" / "gpu" / "STEPS.md"
NUM_RANDOM = 8
KINDS = ("launch", "operation", "replay", "within", "upload", "download", "wait")

README = """# What a step asks of the GPU

Made by `python -m tests.steps --write` on fake devices with torch {version}; a test fails when it is stale.
Each row is the last step of its kind in a run of two requests, with one setting changed from the base case:
the demo's model in bfloat16 on sm_90, sampling with a temperature. Launches are Triton's kernels, operations
are torch's that compute or move something, replays are of CUDA graphs, and "within" are the launches and
operations that these hold. A blocking copy is a transfer and a wait; every other wait reads a
number that the host needs. Log-probabilities beyond 16 MiB, which no case has, come back by copies of their
own, which block. "between" is the time between two steps, "profile" the step that measures memory.

"""


def report(cases: Iterable[Case]) -> dict[str, Any]:
    """Run cases. Return the error of each, if any, its rows, and where it transfers and waits."""
    logging.disable(logging.CRITICAL)
    return {case.name: _report(case) for case in cases}


def _report(case: Case) -> dict[str, Any]:
    try:
        steps = run_case(case)
        rows = {f"{case.name} | {kind}": _last(steps, kind) for kind in case.counted}
    except Exception:  # whatever goes wrong in a case is the case's result
        return {"error": traceback.format_exc(limit=-6), "rows": {}, "launched": {}, "places": []}
    launched = Counter(
        e.name for e in _last(steps, case.counted[-1]) if e.kind in ("launch", "operation", "within")
    )
    return {
        "error": None,
        "rows": {name: [_count(events, kind) for kind in KINDS] for name, events in rows.items()},
        "launched": launched,
        "places": _places(steps),
    }


def _last(steps: Sequence[Step], kind: str) -> list[Event]:
    found = [events for name, events in steps if name == kind]
    assert found, f"no step is {kind!r}: {Counter(name for name, _ in steps)}"
    return found[-1]


def _count(events: Iterable[Event], kind: str) -> int:
    return sum(event.kind == kind for event in events)


def _places(steps: Iterable[Step]) -> list[str]:
    """Return a line for each function that transfers something, or waits for something else."""
    found = set()
    for kind, events in steps:
        when = "between" if kind == "between" else "step"
        for event in events:
            if event.kind in ("upload", "download"):
                found.add(f"| {event.place} | {event.name} {event.kind} | {when} |")
            elif event.kind == "wait" and not event.in_transfer:
                found.add(f"| {event.place} | {event.name} | {when} |")
    return sorted(found)


def rows(reported: dict[str, Any]) -> list[str]:
    """Format the counts of each step as lines of a table."""
    return [
        f"| {name} | " + " | ".join(map(str, counts)) + " |"
        for case in reported.values()
        for name, counts in case["rows"].items()
    ]


def places(reported: dict[str, Any]) -> list[str]:
    """Format where anything transfers or waits as lines of a table."""
    return sorted({line for case in reported.values() for line in case["places"]})


def _layers(reported: dict[str, Any]) -> list[str]:
    """Format what one layer of Qwen3 launches and what the rest of a step does, from models of 2 and of 3."""
    two, three = (Counter(reported[f"model qwen3{layers}"]["launched"]) for layers in ("", ", 3 layers"))
    names = sorted({*two, *three}, key=lambda name: (two[name] - three[name], name))
    numbers = [(name, three[name] - two[name], 3 * two[name] - 2 * three[name]) for name in names]
    total = ("all", sum(layer for _, layer, _ in numbers), sum(others for *_, others in numbers))
    return [f"| {name} | {layer} | {others} |" for name, layer, others in [*numbers, total]]


def table(reported: dict[str, Any]) -> str:
    """Return the text of TABLE."""
    parts = [
        README.format(version=torch.__version__.partition("+")[0]),
        "| case | step | launches | operations | replays | within | uploads | downloads | waits |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
        *rows(reported),
        "\n## A decode step of Qwen3, what its graph holds included\n",
        "| launch or operation | in each layer | besides |",
        "|---|---:|---:|",
        *_layers(reported),
        "\n## Where it transfers and waits\n",
        "In all cases together. A download may be of what an operation needs to know. A staged transfer\n"
        "does not block, but the driver copies it between pageable and pinned memory first.\n",
        "| function | what | when |",
        "|---|---|---|",
        *places(reported),
    ]
    return "\n".join(parts).replace("\n\n\n", "\n\n") + "\n"


def counts_in(text: str) -> dict[tuple[str, str], list[int]]:
    """Return the counts of each case and step in the rows of a table."""
    known = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 2 + len(KINDS) and cells[-1].isdigit():
            known[cells[0], cells[1]] = [*map(int, cells[2:])]
    return known


def errors(reported: dict[str, Any]) -> list[str]:
    """Return the errors of cases that failed."""
    return [f"{name}: {case['error']}" for name, case in reported.items() if case["error"]]


def main() -> None:
    """Run what the command line says."""
    arguments = sys.argv[1:]
    if arguments == ["--json"]:
        cases = [*CASES, *map(random_case, range(NUM_RANDOM))]
        print(json.dumps(report(cases)))
        return
    words = [] if arguments == ["--write"] else arguments
    reported = report(case for case in CASES if not words or any(word in case.name for word in words))
    if failed := errors(reported):
        sys.exit(f"{failed[0]}\n{len(failed)} cases failed")
    if arguments == ["--write"]:
        TABLE.write_text(table(reported))
    else:
        print("\n".join([*rows(reported), "", *places(reported)]) if words else table(reported))


if __name__ == "__main__":
    main()
