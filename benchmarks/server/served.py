"""A server in processes of its own: `paged serve`, or any other command that listens on a port."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from benchmarks.server.cores import cpu_seconds

START_TIMEOUT_S = 600.0
_ADDRESS = re.compile(r"served at http://127\.0\.0\.1:(\d+)")


class ServerProcess:
    """A server, for the benchmark that starts it. `port` is where it listens.

    port: None reads it from what `paged serve` prints.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int | None = None,
        cores: tuple[int, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  (closed with the server)
        before = os.sched_getaffinity(0) if cores else None
        if cores:
            os.sched_setaffinity(0, cores)  # which the process inherits
        try:
            self._process = subprocess.Popen(
                command, stdout=self._log, stderr=self._log, env={**os.environ, **(environment or {})}
            )
        finally:
            if before is not None:
                os.sched_setaffinity(0, before)
        self.pid = self._process.pid
        self.port = self._wait(port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(120)  # it may drain
        self._log.close()

    def _wait(self, port: int | None) -> int:
        """Return the port once the server is ready."""
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until and self._process.poll() is None:
            time.sleep(0.2)
            found = _ADDRESS.search(self.said()) if port is None else None
            ready = found is not None if port is None else _answers(port)
            if ready:
                return int(found[1]) if found else port or 0
        raise RuntimeError(f"the server did not start: {self.said()[-2000:]}")

    def cpu_seconds(self) -> float:
        """Return the processor time of the server's processes."""
        return cpu_seconds(self.pid)

    def said(self) -> str:
        """Return what the server has printed."""
        self._log.seek(0)
        return self._log.read()


def paged_serve(model: str, *flags: object, cores: tuple[int, ...] = ()) -> ServerProcess:
    """Start `paged serve` on a free port."""
    command = [sys.executable, "-m", "paged", "serve", model, "--port", "0", *map(str, flags)]
    return ServerProcess(command, cores=cores)


def streamed_tokens(port: int, model: str, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Return the tokens of completions that are streamed, all at once."""

    def read(prompt: list[int]) -> list[int]:
        body = completion(model, prompt, max_tokens) | {"return_token_ids": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        tokens: list[int] = []
        with urllib.request.urlopen(request) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        tokens += choice.get("token_ids") or []
        return tokens

    with ThreadPoolExecutor(len(prompts)) as pool:
        return [*pool.map(read, prompts)]


def completion(model: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Return the body of a streamed, greedy completion of a fixed length."""
    greedy = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    return {"model": model, "prompt": prompt, **greedy}


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False
