"""Mutation tests of model families, weights in codes and resumed requests: bugs, and the tests that fail.

    python -m tests.model_mutants             # all of them: a table, and exit code 1 if one survives
    python -m tests.model_mutants rope        # only mutants with one of these words in their parts or names
    python -m tests.model_mutants --share 3   # one of SHARES shares; the tests try the first

A mutant replaces one text, which must occur exactly once, by another. Its test runs in a process that imports
the changed module.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is first imported

# What is imported here, the processes of all mutants share.
import psutil  # noqa: F401
import pytest
import safetensors.torch  # noqa: F401
import torch
import triton  # noqa: F401
from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401

from tests.gpu_mutants import plant
from tests.mutants import planted
from tests.support import family_bugs, format_bugs, rank_bugs, resume_bugs

SHARES = 48
MUTANTS = [*family_bugs.MUTANTS, *format_bugs.MUTANTS, *resume_bugs.MUTANTS, *rank_bugs.MUTANTS]


class Failures:
    """A plugin of pytest that notes why tests fail."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.messages.append(str(crash.message if crash else report.longrepr))


def failure(test: str, file: str | None = None, text: str = "") -> str:
    """Return how a test fails if a file of the package has this text; "" if it passes."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_run, args=(there, test, file, text))
    process.start()
    there.close()
    try:
        found: str = here.recv()
    except EOFError as error:
        raise RuntimeError(f"{test} did not run: see above") from error
    process.join()
    return found


def _run(results: Any, test: str, file: str | None, text: str) -> None:
    if file is not None:
        plant(f"paged.{file.replace('/', '.')}", text)
    failures = Failures()
    # Nothing but the test: conftest.py would take as long as most of them.
    options = ["--quiet", "--no-header", "--noconftest", "-p", "no:cacheprovider"]
    # A forked process deletes no temporary files at its end.
    with tempfile.TemporaryDirectory() as directory, open(os.devnull, "w") as nowhere:
        tempfile.tempdir = directory
        printed, sys.stdout = sys.stdout, nowhere
        code = pytest.main([*options, test], plugins=[failures])
        sys.stdout = printed
    if code not in (0, 1):  # no such test, or one that cannot be imported, which says nothing about the bug
        sys.exit(f"pytest ends with exit code {code!r} for {test}")
    if code == 1:
        lines = [line.strip() for message in failures.messages for line in message.splitlines()]
        results.send(next(filter(None, lines), "fails"))
    else:
        results.send("")


def main() -> None:
    """Try every mutant."""
    parser = argparse.ArgumentParser(prog="python -m tests.model_mutants", description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--share", type=int, choices=range(SHARES))
    given = parser.parse_args()
    chosen = [
        m for m in MUTANTS if not given.words or any(word in f"{m.part} {m.name}" for word in given.words)
    ]
    texts = [planted(m.file, m.name, m.old, m.new) for m in chosen]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    torch.set_num_threads(1)  # the models are so small that more would wait for each other

    if given.share is not None:
        chosen, texts = chosen[given.share :: SHARES], texts[given.share :: SHARES]
    else:
        for test in dict.fromkeys(mutant.test for mutant in chosen):
            if wrong := failure(test):
                sys.exit(f"no bug is planted, and {test} fails: {wrong}")
    survivors = []
    for mutant, text in zip(chosen, texts, strict=True):
        before = time.perf_counter()
        found = failure(mutant.test, mutant.file, text)
        survivors += [] if found else [f"{mutant.name} by {mutant.test}"]
        seconds = f"{time.perf_counter() - before:4.1f} s"
        name, test = f"{mutant.part}: {mutant.name}", mutant.test.rpartition("::")[2]
        print(f"{name:64} {seconds}  {test}: {found or 'SURVIVES'}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    sys.exit(f"not caught: {', '.join(survivors)}" if survivors else 0)


if __name__ == "__main__":
    main()
