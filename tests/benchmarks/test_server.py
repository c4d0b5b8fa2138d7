"""benchmarks.server: its quick form, which checks responses and counts, and proves no speed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from benchmarks.server.cores import Cores

ROOT = Path(__file__).parents[2]


def test_the_quick_form_measures_all_of_it():
    command = [sys.executable, "-m", "benchmarks.server", "--quick"]
    command += [word for name in ("front-end", "engine") for word in ("--section", name)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    names = [row["front end alone"] for row in found["front_end"]]
    assert {"completions", "chats", "responses", "messages", "events of messages"} < {*names}
    assert found["idle"]["idle streams"] == 50
    assert found["engine"]["streams"] == 8
    assert min(found["engine"]["tokens/s of generate"], found["engine"]["tokens/s over HTTP"]) > 0


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be chosen here")
@pytest.mark.parametrize(
    ("usable", "expected"),
    [
        ({3}, Cores(None, None, ())),
        ({0, 1}, Cores(1, 0, (0,))),
        ({2, 4, 5, 7}, Cores(7, 2, (2, 4, 5))),
    ],
    ids=str,
)
def test_processes_have_cores_of_their_own(monkeypatch, usable, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)
    assert Cores.here() == expected
