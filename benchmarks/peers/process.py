"""The parent's end of worker.py: start the process of a system, call it, and end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-peers"
# The environment of `make peers` that a system needs; the others use this one.
ENVIRONMENT_OF = {"openvino": "openvino", "llama_cpp": "llama-cpp", "vllm": "vllm"}
LONGEST_CALL_S = 3600.0


class WorkerError(Exception):
    """A system is not installed, refused a call, or died; the message is the reason."""


def interpreter(system: str, environments: Path = ENVIRONMENTS) -> str:
    """Return the Python that has a system. Raises WorkerError, which says how to install it."""
    name = ENVIRONMENT_OF.get(system)
    if name is None:
        return sys.executable
    if not (environments / name / ".installed").exists():
        raise WorkerError(f'no environment {environments / name}: make peers PEERS="{name}"')
    return str(environments / name / "bin" / "python")


class Worker:
    """A process with one system."""

    def __init__(self, system: str, *, threads: int, environments: Path = ENVIRONMENTS) -> None:
        command = [interpreter(system, environments), "-m", "benchmarks.peers.worker", system]
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed with the worker)
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": str(threads),
                "TOKENIZERS_PARALLELISM": "false",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, name: str, **arguments: Any) -> Any:
        """Send one call and return its answer. Raises WorkerError."""
        self.send(name, **arguments)
        return self.receive()

    def send(self, name: str, **arguments: Any) -> None:
        """Send one call."""
        assert self.process.stdin is not None
        try:
            print(json.dumps({"call": name, **arguments}), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise WorkerError(self._last_words()) from None

    def receive(self) -> Any:
        """Wait for the answer to the last call. Raises WorkerError."""
        assert self.process.stdout is not None
        timer = threading.Timer(LONGEST_CALL_S, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            raise WorkerError(self._last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["value"]

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdout.close()
        try:
            self.process.stdin.close()
            self.process.wait(timeout=20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.log.close()

    def _last_words(self) -> str:
        code = self.process.wait()
        self.log.seek(0)
        said = [line.strip() for line in self.log if line.strip()]
        return f"its process ended with exit code {code}: {said[-1] if said else 'it said nothing'}"
