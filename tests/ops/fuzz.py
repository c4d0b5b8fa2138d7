"""Wrong calls of every launcher: each is a ValueError or TypeError, writes nothing and ends no process.

    python -m tests.ops.fuzz                              # 20,000 wrong calls, a third of each backend
    python -m tests.ops.fuzz --calls 1_000_000
    python -m tests.ops.fuzz --backend numba --seed 1234  # one call again, the one that failed

A call is a seed: it chooses a launcher, a valid call of it and one or two damages (`tests.support.damages`).
A damage may leave a call valid, as other strides do; such a call may be accepted if its result is that of
`kernels.reference`, and is not counted. Calls run in child processes, so that one which ends its process or
never returns is reported like any other. Triton's run in its interpreter, with PAGED_DEBUG=1.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

BACKENDS = "numba", "triton", "torch"
PROGRAM = "-m", "tests.ops.fuzz"  # of a child; a test puts another in its place
CALLS = 20_000
CALLS_IN_CI = 600
LONGEST_S = 60  # of a call
MOST_DEFECTS = 20  # after which a backend's calls end
MOST_CHARACTERS = 2000  # of a message


def main() -> None:
    """Run the calls, print what was found, and exit with 1 if that is anything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--seed", type=int, help="run this call only")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    backends = (args.backend,) if args.backend else BACKENDS
    if args.child:
        run_calls(args.backend, args.seed, args.calls, Path(args.child))
        return
    started = time.perf_counter()
    if args.seed is None:
        reports = run_backends(backends, args.calls)
    else:
        reports = run_backends(backends, 1, args.seed)
    for backend, report in reports.items():
        print(f"{backend}: {report['refused']} calls refused, {report['accepted']} still valid", end="; ")
        print(f"{len(report['defects'])} defects")
        for defect in report["defects"]:
            print(f"  python -m tests.ops.fuzz --backend {backend} --seed {defect}")
    print(f"{time.perf_counter() - started:.0f} s")
    sys.exit(any(report["defects"] for report in reports.values()))


def run_backends(backends: tuple[str, ...], num_calls: int, only: int | None = None) -> dict[str, Any]:
    """Run so many wrong calls in all, all backends at once. Return a report of each."""
    with tempfile.TemporaryDirectory() as folder:
        shares = {backend: -(-num_calls // len(backends)) for backend in backends}
        runs = {backend: _Run(backend, shares[backend], Path(folder) / backend, only) for backend in backends}
        running = list(runs.values())
        while running:
            running = [run for run in running if not run.is_done()]
            time.sleep(0.05)
        return {backend: run.report for backend, run in runs.items()}


class _Run:
    """The calls of one backend, in a child process, and another one after each that ends early."""

    def __init__(self, backend: str, num_calls: int, place: Path, only: int | None) -> None:
        self.backend, self.num_calls, self.place, self.only = backend, num_calls, place, only
        self.report: dict[str, Any] = {"refused": 0, "accepted": 0, "defects": []}
        self._start(0 if only is None else only)

    def _start(self, seed: int) -> None:
        left = self.num_calls - self.report["refused"]
        command = [sys.executable, "-X", "faulthandler", *PROGRAM, "--child", str(self.place)]
        command += ["--backend", self.backend, "--seed", str(seed), "--calls", str(left)]
        environment = {**os.environ, "PAGED_DEBUG": "1", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(command, env=environment, stderr=self._errors)

    def is_done(self) -> bool:
        """Return whether all calls have run. Start another child after one that ended early."""
        if self._process.poll() is None:
            return False
        written = self.place.read_text().splitlines() if self.place.exists() else []
        self._errors.seek(0)
        errors = self._errors.read()
        self._errors.close()
        if not written:
            raise RuntimeError(f"the child for {self.backend} did not start: {errors[-2000:]}")
        found = json.loads(written[-1])
        for name in ("refused", "accepted"):
            self.report[name] += found[name]
        self.report["defects"] += found["defects"]
        if not found["is_running"] and self._process.returncode == 0:
            return True
        status, last = self._process.returncode, found["seed"]
        self.report["defects"].append(f"{last}  # ended the process with {status}: {errors[-600:]}")
        if self.only is not None or len(self.report["defects"]) >= MOST_DEFECTS:
            return True
        self.place.unlink()
        self._start(last + 1)
        return False


def run_calls(backend: str, seed: int, num_calls: int, place: Path) -> None:
    """Run calls from this seed on until so many were refused; write a line of JSON before each call."""
    import torch

    from paged.kernels.backend import load_kernels
    from tests.support.interpreter import remember_builtins

    remember_builtins()
    load_kernels(backend)  # may compile for longer than a call may take
    warnings.simplefilter("ignore")  # of torch, about nested and sparse tensors
    torch.set_num_threads(2)
    found: dict[str, Any] = {"refused": 0, "accepted": 0, "defects": [], "is_running": True}
    with place.open("w", buffering=1) as log:
        while found["refused"] < num_calls and len(found["defects"]) < MOST_DEFECTS:
            log.seek(0)
            log.truncate()
            log.write(json.dumps({**found, "seed": seed}) + "\n")
            faulthandler.dump_traceback_later(LONGEST_S, exit=True)
            outcome = outcome_of(backend, seed)
            if outcome in ("refused", "accepted"):
                found[outcome] += 1
            else:
                found["defects"].append(f"{seed}  # {outcome}")
            seed += 1
        faulthandler.cancel_dump_traceback_later()
        log.write(json.dumps({**found, "seed": seed, "is_running": False}) + "\n")


def outcome_of(backend: str, seed: int) -> str:
    """Make one call. Return "refused", "accepted" if the damages have left it valid, or what is wrong."""
    import torch

    from tests.support.damages import NO_GRAD, Damage, Memory, damaged
    from tests.support.valid_calls import valid_call

    generator = random.Random(seed)
    call = valid_call(backend, generator)
    damages: list[Damage] = []
    while not damages:  # some arguments cannot be damaged in every way
        wrong, damages = damaged(call, generator)
    what = f"{call.name} with {' and '.join(map(str, damages))}"
    memory, other = Memory(), Memory()
    arguments, copies = memory.enclose(wrong), other.enclose(wrong)
    try:
        with torch.set_grad_enabled(all(damage.what != NO_GRAD for damage in damages)):
            result = call.launch(**arguments)
    except (ValueError, TypeError) as error:
        message = str(error)
        if written := memory.changed(()):
            return f"{what} was refused after it had written {written}: {message[:200]}"
        if len(message) > MOST_CHARACTERS:
            return f"{what} was refused in {len(message)} characters"
        return "refused"
    except BaseException as error:
        return f"{what} raised {type(error).__name__}: {str(error)[:200]}"
    if any(damage.is_wrong for damage in damages):
        return f"{what} was accepted"
    if written := memory.changed(call.written):
        return f"{what} wrote to {written}"
    if call.expected is not None:
        try:
            with torch.no_grad():
                expected = call.expected(**copies)
            _assert_same(call, result, expected, arguments, copies)
        except Exception as error:
            return f"{what} was accepted, unlike by the reference: {type(error).__name__}: {str(error)[:200]}"
    return "accepted"


def _assert_same(call: Any, result: Any, expected: Any, arguments: Any, copies: Any) -> None:
    """Raise AssertionError unless results and what was written are close."""
    import torch

    close = {"rtol": 0.03, "atol": 0.03, "equal_nan": True, "check_dtype": False, "check_stride": False}
    if call.name == "token_logprobs":  # equal ones have any order
        result, expected = (result[0], result[2]), (expected[0], expected[2])
    if "cu_seqlens_q" in arguments:  # rows beyond are undefined
        used = int(arguments["cu_seqlens_q"][-1])
        starts = arguments["cu_seqlens_q"].tolist()
        assert starts[0] == 0
        result, expected = result[:used], expected[:used]
    if call.name != "copy_blocks" or result is not None:
        torch.testing.assert_close(result, expected, **close)
    for name in call.written:
        if isinstance(arguments.get(name), torch.Tensor):
            torch.testing.assert_close(arguments[name], copies[name], **close)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
