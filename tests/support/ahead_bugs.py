"""Seeded bugs of steps in flight of the same requests, in the form of `tests.mutants.MUTANTS`.

python -m tests.support.ahead_bugs [WORD ...]    # plant each, and run worlds and tests until one fails
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.mutants import copy_project, planted, run

CURRENT = "test_texts_of_the_bugs_are_current"
# File: (name, old, new).
MUTANTS = {
    "scheduler/ahead": [
        ("pending tokens are not counted", "request.num_pending += 1", "pass"),
        ("pending tokens stay counted", "request.num_pending -= 1", "pass"),
        ("a failed step leaves pending tokens", "request.num_pending = 0", "pass"),
        ("the end of an output is not known ahead", "if end >= request.ahead_until or (", "if ("),
        ("longrope's change of all K and V is not known ahead", "inputs.long_from is not None", "False"),
        ("those that follow their text go ahead", "request.ahead_until = 0", "request.ahead_until = 2**40"),
        (
            "blocks are registered beyond known tokens",
            "min(end - 1, request.num_tokens)",
            "end - 1",
        ),
        ("a pending token's place is the one before", "starts.append(end - 1)", "starts.append(end - 2)"),
        (
            "the tokens of a step in between are forgotten",
            "num_pending < num_in_flight and not self._is_in_newest(request)",
            "False",
        ),
        ("steps do not drain", "self._drains = self._manager.pool.num_steps_in_flight > 0", "pass"),
        ("a drain never ends", "self._drains and self._manager.pool", "self._drains or self._manager.pool"),
        ("decodes that wait are spread over steps", "gathers = any(self._has_waiting)", "gathers = False"),
    ],
    "scheduler/preemption": [
        (
            "requests with steps in flight are preempted for blocks",
            "if self.drain is not None and self.drain():\n                return False",
            "pass",
        ),
        (
            "requests with steps in flight are preempted for others",
            "if all(victim.is_settled for victim in victims):",
            "if True:",
        ),
    ],
    "requests/request": [
        (
            "pending tokens do not keep from preemption",
            "return self.ready and not self.num_pending",
            "return self.ready",
        ),
    ],
    "scheduler/scheduler": [
        (
            "the token of a request that ended in flight is appended",
            "                dropped.append(row)\n                continue\n",
            "                dropped.append(row)\n",
        ),
        ("a dropped row is reported", "gone = {*dropped}", "gone = set()"),
        ("a fork shares blocks that are still computed", "request.num_pending == num_unsure == 1", "True"),
    ],
    "scheduler/running": [
        (
            "a block is copied where a pending token is not written",
            "end - 1 if request.num_pending else request.num_computed_tokens",
            "request.num_computed_tokens",
        ),
        (
            "a seat is given away in flight",
            "(self._kept[-1] if self._kept else self._free).append(seat)",
            "self._free.append(seat)",
        ),
    ],
    "blocks/pool": [
        (
            "a block is given away in flight",
            "if step > self._steps_ended:",
            "if step > self._steps_ended + 1:",
        ),
    ],
    "runner/plan": [
        (
            "the sampler misses the tokens that were pending",
            "min(starts[row], self._editing[seat]) if self.with_pending else starts[row]",
            "starts[row]",
        ),
    ],
}
WORLDS = """
import sys
from tests.simulation import World, run_world
for seed in range(150):
    if World(seed).runs_ahead:
        try:
            run_world(seed)
        except AssertionError as error:
            sys.exit(f"world {seed}: {str(error).split('): ', 1)[1]}")
"""
TESTS = ["tests/scheduler/test_ahead.py", "tests/engine/test_steps_ahead.py"]


def failure(folder: Path) -> str:
    """Return what fails in a copy of the project, its last line; "" if nothing does."""
    said = run(folder, "-c", WORLDS)
    if said == "":
        said = run(folder, "-m", "pytest", "-qx", "--deselect", f"{TESTS[0]}::{CURRENT}", *TESTS)
    return "it takes too long" if said is None else said.strip().rpartition("\n")[2]


def main() -> None:
    """Plant every bug, or those with one of the given words in their names."""
    survivors = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_project(folder)
        for file, bugs in MUTANTS.items():
            target = folder / "paged" / f"{file}.py"
            sound = target.read_text()
            for bug, old, new in bugs:
                if len(sys.argv) == 1 or any(word in bug for word in sys.argv[1:]):
                    target.write_text(planted(file, bug, old, new))
                    found = failure(folder)
                    survivors += [] if found else [bug]
                    print(f"{bug:60} {found[:120] or 'SURVIVES'}", flush=True)
            target.write_text(sound)
    sys.exit(f"not caught: {', '.join(survivors)}" if survivors else 0)


if __name__ == "__main__":
    main()
