"""What streams notice when an engine process is killed or stopped, and what going on costs."""

from __future__ import annotations

import json
import os
import signal
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import psutil

from benchmarks.server.served import ServerProcess, paged_serve

PROMPT = "def add(a, b):"
ENGINE_PROCESS = "paged.server.engine_process"
STOPPED_AFTER_S = 10.0  # by then the first server runs, and its engine is stopped


class Reader(threading.Thread):
    """Reads a stream, and notes when its events came."""

    def __init__(self, port: int, max_tokens: int, prompt: Any = PROMPT) -> None:
        super().__init__(daemon=True)
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self._request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        self.times: list[float] = []
        self.text = ""
        self.error_at: float | None = None
        self.start()

    def run(self) -> None:
        """Read to the end of the stream, or to its error."""
        with urllib.request.urlopen(self._request) as response:
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self.error_at = time.monotonic()
                    return
                self.times.append(time.monotonic())
                self.text += event["choices"][0]["text"]

    def pause_after(self, moment: float) -> tuple[float, float]:
        """Return the longest time without an event that ended after a moment, and when it ended.

        An error ends the stream; then the pause began at the moment.
        """
        if self.error_at is not None:
            return self.error_at - moment, self.error_at
        gaps = pairwise(self.times)
        return max((end - start, end) for start, end in gaps if end > moment)


@contextmanager
def streams(port: int, num: int, max_tokens: int, prompt: Any = PROMPT) -> Iterator[list[Reader]]:
    """Yield readers of so many streams, all of which have begun. Wait for their ends."""
    readers = [Reader(port, max_tokens, prompt) for _ in range(num)]
    while not all(len(reader.times) > 1 for reader in readers):
        time.sleep(0.01)
    yield readers
    for reader in readers:
        reader.join()


def engines_of(server: ServerProcess) -> list[psutil.Process]:
    """Return the engine processes of a server, by their numbers."""
    children = psutil.Process(server.pid).children()
    return sorted((each for each in children if ENGINE_PROCESS in each.cmdline()), key=lambda each: each.pid)


def measure(model: str, *, num_streams: int, max_tokens: int) -> list[dict[str, Any]]:
    """Kill or stop the first engine amid streams, and compare their texts with those of a run without."""
    terms = (model, num_streams, max_tokens)
    with ThreadPoolExecutor(1) as pool:
        # It is stopped, and computes nothing, while the others are measured.
        stopped = pool.submit(_row, *terms, "stopped, --no-resume", signal.SIGSTOP, "--no-resume")
        time.sleep(STOPPED_AFTER_S)
        rows = [
            _row(*terms, "killed", signal.SIGKILL),
            _row(*terms, "killed, two replicas", signal.SIGKILL, "--replicas", 2),
            _row(*terms, "killed, --no-resume", signal.SIGKILL, "--no-resume"),
        ]
        return [*rows, stopped.result()]


def _row(
    model: str, num_streams: int, max_tokens: int, name: str, number: signal.Signals, *flags: object
) -> dict[str, Any]:
    begun = time.monotonic()
    with paged_serve(model, "--device", "cpu", "--num-threads", 1, *flags) as server:
        start_s = time.monotonic() - begun
        with streams(server.port, 1, max_tokens) as (undisturbed,):
            pass
        with streams(server.port, num_streams, max_tokens) as readers:
            moment = time.monotonic()
            os.kill(engines_of(server)[0].pid, number)
    waits = [reader.pause_after(moment)[0] for reader in readers]
    failed = [reader for reader in readers if reader.error_at is not None]
    assert bool(failed) is ("--no-resume" in flags)
    for reader in readers:
        assert reader in failed or reader.text == undisturbed.text, "a stream is another one"
    return {
        "engine": name,
        "start s": start_s,
        "streams": num_streams,
        "errors": len(failed),
        "median pause s": statistics.median(waits),
        "longest pause s": max(waits),
    }


def measure_catch_up(model: str, num_streams: int, num_tokens: int, max_tokens: int) -> dict[str, Any]:
    """Compare how long all streams take to go on, once a new engine serves, with how long they took to begin.

    No prefix is cached, so that each computes its own prompt, and what came after it. Those that go on first
    get further tokens meanwhile, as those that began first did.
    """
    flags = ["--device", "cpu", "--num-threads", 1, "--no-enable-prefix-caching"]
    with paged_serve(model, *flags) as server:
        begun = time.monotonic()
        prompt = [*range(20, 20 + num_tokens)]
        with streams(server.port, num_streams, max_tokens, prompt) as readers:
            moment = time.monotonic()
            engines_of(server)[0].kill()
            while _is_ready(server.port):
                time.sleep(0.002)
            while not _is_ready(server.port):
                time.sleep(0.01)
            ready_at = time.monotonic()
    begin_s = max(reader.times[0] for reader in readers) - begun
    catch_up_s = max(reader.pause_after(moment)[1] for reader in readers) - ready_at
    return {
        "streams": num_streams,
        "tokens each": num_tokens,
        "all begin s": begin_s,
        "all go on s": catch_up_s,
        "ratio": catch_up_s / begin_s,
    }


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready"):
            return True
    except urllib.error.HTTPError:
        return False
