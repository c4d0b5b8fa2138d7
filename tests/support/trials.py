"""Trials: whether tests notice a change of the product, each in a process that imports what is changed.

What looks for a bug is a test or files of tests; `worlds 0 16` of the simulation; or `step case`: what a case
of `tests.steps` asks of a fake GPU, compared with `kernels/gpu/STEPS.md`.
"""

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from tests.support.planting import Change, plant

TIME_LIMIT_S = 120  # for one look: a bug may make a loop endless
LATE = f"not done after {TIME_LIMIT_S} s"
MEMORY_LIMIT = 12 * 2**30
CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGFPE, -signal.SIGABRT}
FORK = multiprocessing.get_context("fork")


class Trial(NamedTuple):
    """A change, None for none, and what looks for it until one finds it."""

    name: str
    looks: tuple[str, ...]
    change: Change | None


class Result(NamedTuple):
    """What was found of a trial; "" if nothing was."""

    trial: Trial
    found: str
    seconds: float


def results(trials: Sequence[Trial], num_jobs: int) -> Iterator[Result]:
    """Make trials, several at once. Their results come as they are found."""
    on_gpu = [trial for trial in trials if trial.looks[0].startswith("step ")]
    for chosen in ([trial for trial in trials if trial not in on_gpu], on_gpu):
        workers = dict[Any, Any]()
        for job in range(min(num_jobs, len(chosen))):
            here, there = FORK.Pipe(duplex=False)
            workers[here] = FORK.Process(target=_work, args=(chosen[job::num_jobs], chosen is on_gpu, there))
            workers[here].start()
            there.close()
        while workers:
            for pipe in wait([*workers]):
                try:
                    yield pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    process = workers.pop(pipe)
                    process.join()
                    if process.exitcode:
                        raise RuntimeError("a process of trials has failed: see above") from None


def _work(trials: Sequence[Trial], on_gpu: bool, there: Connection) -> None:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ.pop("TRITON_INTERPRET", None)  # which Triton reads when it is first imported
    os.environ.update({} if on_gpu else {"TRITON_INTERPRET": "1"})
    # What is imported here, the processes of all trials share.
    import psutil  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config  # noqa: F401

    if on_gpu:
        from tests.support.fake_cuda import load_guard

        load_guard()
    torch.set_num_threads(1)  # the models are so small that more would wait for each other
    for trial in trials:
        begun = time.perf_counter()
        found = _outcome(trial)
        there.send(Result(trial, found, time.perf_counter() - begun))


def _outcome(trial: Trial) -> str:
    here, there = FORK.Pipe(duplex=False)
    # A forked process deletes no temporary files at its end.
    with tempfile.TemporaryDirectory() as folder:
        process = FORK.Process(target=_look_for, args=(trial, folder, there))
        process.start()
        there.close()
        try:
            while (found := here.recv() if here.poll(TIME_LIMIT_S) else LATE) is None:
                pass  # the next look begins
        except EOFError:
            found = None
        if found == LATE:
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    if found is None and process.exitcode in CRASHES:
        return f"the process ends by signal {-process.exitcode}"
    if found is None:  # killed for memory, or there is no such test: that says nothing about the bug
        raise RuntimeError(f"{trial.name}: no result, exit code {process.exitcode}")
    return str(found)


def _look_for(trial: Trial, folder: str, there: Connection) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    tempfile.tempdir = folder
    if trial.change is not None:
        plant(trial.change)
    found = ""
    for look in trial.looks:
        there.send(None)
        kind, _, which = look.partition(" ")
        run = {"worlds": _worlds, "step": _step}.get(kind)
        with open(os.devnull, "w") as no, contextlib.redirect_stdout(no), contextlib.redirect_stderr(no):
            found = run(which) if run else _pytest(look)
        if found:
            break
    there.send(found)


def _worlds(seeds: str) -> str:
    from tests.simulation import run_world

    for seed in range(*map(int, seeds.split())):
        try:
            run_world(seed)
        except Exception as error:
            return f"world {seed}: {str(error).split('): ', 1)[-1]}"
    return ""


def _step(case: str) -> str:
    from tests import steps

    (chosen,) = (known for known in steps.CASES if known.name == case)
    reported, kept = steps.report([chosen]), steps.TABLE.read_text()
    errors = [error.strip().splitlines()[-1] for error in steps.errors(reported)]
    changed = [line for line in steps.rows(reported) + steps.places(reported) if line not in kept]
    return next(iter(errors + changed), "")


class _Failures:
    """A plugin of pytest that notes how the first test fails."""

    def __init__(self) -> None:
        self.first = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.first:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(crash.message if crash else report.longrepr).strip()
            self.first = f"{report.nodeid.rpartition('::')[2]}: {why.partition(chr(10))[0]}"


def _pytest(tests: str) -> str:
    import pytest

    failures = _Failures()
    # Nothing but the tests: conftest.py would take as long as most of them.
    options = ["--quiet", "--no-header", "--noconftest", "-x", "-p", "no:cacheprovider"]
    code = pytest.main([*options, *tests.split("\n")], plugins=[failures])
    if code == pytest.ExitCode.INTERRUPTED:
        return "a file of tests cannot be imported"
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        sys.exit(f"pytest ends with exit code {code!r} for {tests}")
    return failures.first
