"""Section page: what the page at / costs the engine's steps, opened in several browsers."""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
import urllib.request
from contextlib import ExitStack
from typing import Any

from benchmarks.server.cores import Cores, on_core, pin
from benchmarks.server.served import paged_serve

NUM_WATCHERS = 2
NUM_SAMPLES = 8  # of each prompt
PROMPTS = [f"import os\nimport sys\n# {i}\n" for i in range(64)]


class Watcher(threading.Thread):
    """Reads /watch as a browser does, and notes how long the pictures took to make.

    seconds: by the time of each picture.
    most_requests: that a picture had.
    """

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.began = time.monotonic()
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._connection.request("GET", "/watch")
        self._response = self._connection.getresponse()
        self.num_events = 0
        self.num_bytes = 0
        self.seconds: dict[float, float] = {}
        self.most_requests = 0
        self.start()

    def run(self) -> None:
        """Read until the connection is closed."""
        try:
            for line in iter(self._response.readline, b""):
                if line.startswith(b"data: "):
                    self._take(line)
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            return  # closed

    def _take(self, line: bytes) -> None:
        (picture,) = json.loads(line[6:])["engines"]
        self.num_events += 1
        self.num_bytes += len(line)
        if picture is not None:
            self.seconds[picture["time"]] = picture["seconds"]
            self.most_requests = max(self.most_requests, len(picture["requests"]))

    def close(self) -> None:
        """Leave."""
        self._connection.close()


def seconds_of(port: int, num_requests: int, max_tokens: int) -> float:
    """Return how long as many samples take that run together."""
    prompts = PROMPTS[: num_requests // NUM_SAMPLES]
    body = {"prompt": prompts, "n": NUM_SAMPLES, "seed": 1, "max_tokens": max_tokens, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    began = time.monotonic()
    with urllib.request.urlopen(request) as response:
        usage = json.load(response)["usage"]
    assert usage["completion_tokens"] == num_requests * max_tokens, usage
    return time.monotonic() - began


def measure(model: str, cores: Cores, rounds: int, *, num_requests: int, max_tokens: int) -> dict[str, Any]:
    """Return the time of a step without and with watchers, in turns, and the ratio."""
    times: dict[int, list[float]] = {0: [], NUM_WATCHERS: []}
    share = []
    flags = ("--max-num-seqs", num_requests)
    with paged_serve(model, *flags, cores=cores.engine) as server, on_core(cores.beside_engine()):
        if cores.front_end is not None:
            pin(server.pid, (cores.front_end,))
        seconds_of(server.port, num_requests, max_tokens)  # warms up
        for _ in range(rounds):
            for num, found in times.items():
                with ExitStack() as stack:
                    watchers = [Watcher(server.port) for _ in range(num)]
                    for watcher in watchers:
                        stack.callback(watcher.close)
                    found.append(seconds_of(server.port, num_requests, max_tokens))
                    for watcher in watchers:
                        passed = time.monotonic() - watcher.began
                        assert 0 < watcher.num_events <= 4 * passed + 1, watcher.num_events
                        assert watcher.most_requests == num_requests, watcher.most_requests
                        share.append(sum(watcher.seconds.values()) / passed)
    pairs = zip(times[NUM_WATCHERS], times[0], strict=True)
    return {
        "requests": num_requests,
        "step ms": statistics.median(times[0]) / max_tokens * 1e3,
        "watched ms": statistics.median(times[NUM_WATCHERS]) / max_tokens * 1e3,
        "ratio": statistics.median(watched / alone for watched, alone in pairs),
        "aim": 1.01,
        "a picture ms": statistics.median(watcher.seconds.values()) * 1e3,
        "share of time": statistics.median(share),
        "event bytes": watcher.num_bytes / watcher.num_events,
    }
