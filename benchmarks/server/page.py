"""Section page: what the page at / costs the engine's steps, opened in several browsers."""

from __future__ import annotations

import http.client
import json
import re
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.server.served import paged_serve

NUM_WATCHERS = 2
SETTLE_S = 1.2  # the figures at /metrics are a second old
PROMPT = "import os\nimport sys\n" * 16
NUM_SAMPLES = 8  # of each request


class Watcher(threading.Thread):
    """Reads /watch as a browser does, and adds up how long the pictures took to make."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._connection = http.client.HTTPConnection("127.0.0.1", port)
        self._connection.request("GET", "/watch")
        self._response = self._connection.getresponse()
        self.num_events = 0
        self.num_bytes = 0
        self.seconds: dict[float, float] = {}  # by the time of each picture
        self.num_requests = 0
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
            self.num_requests = max(self.num_requests, len(picture["requests"]))

    def close(self) -> None:
        """Leave."""
        self._connection.close()


@contextmanager
def load(port: int, num_requests: int, max_tokens: int) -> Iterator[None]:
    """Have as many samples run all the time, each request after the one before."""
    is_over = threading.Event()
    body = {"prompt": PROMPT, "n": NUM_SAMPLES, "max_tokens": max_tokens, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}/v1/completions"

    def run() -> None:
        while not is_over.is_set():
            request = urllib.request.Request(
                url, json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request) as response:
                response.read()

    threads = [threading.Thread(target=run, daemon=True) for _ in range(num_requests // NUM_SAMPLES)]
    for thread in threads:
        thread.start()
    yield
    is_over.set()
    for thread in threads:
        thread.join()


def steps(port: int) -> tuple[float, float]:
    """Return how many steps there were, and how long they took together."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        text = response.read().decode()
    count, total = (
        float(re.search(rf"^paged:step_time_seconds_{name}{{.*}} (\S+)$", text, re.MULTILINE)[1])  # type: ignore[index]
        for name in ("count", "sum")
    )
    return count, total


def measure(model: str, rounds: int, *, num_requests: int, seconds: float) -> dict[str, Any]:
    """Return the mean time of a step without and with watchers, in turns, and their ratio."""
    means: dict[int, list[float]] = {0: [], NUM_WATCHERS: []}
    ratios = []
    share = []
    with paged_serve(model, "--max-num-seqs", 2 * num_requests) as server:
        with load(server.port, num_requests, max_tokens=400):
            for _ in range(rounds):
                for num in means:
                    with ExitStack() as stack:
                        watchers = [Watcher(server.port) for _ in range(num)]
                        for watcher in watchers:
                            stack.callback(watcher.close)
                        time.sleep(SETTLE_S)
                        before = steps(server.port)
                        began = time.monotonic()
                        time.sleep(seconds)
                        after = steps(server.port)
                        means[num].append((after[1] - before[1]) / (after[0] - before[0]))
                        for watcher in watchers:
                            passed = time.monotonic() - began + SETTLE_S
                            assert 0 < watcher.num_events <= 4 * passed + 1, watcher.num_events
                            assert watcher.num_requests >= num_requests, watcher.num_requests
                            share.append(sum(watcher.seconds.values()) / passed)
                ratios.append(means[NUM_WATCHERS][-1] / means[0][-1])
        size = watchers[0].num_bytes / watchers[0].num_events
        taken = statistics.median(watchers[0].seconds.values())
    return {
        "requests": num_requests,
        "step ms": statistics.median(means[0]) * 1e3,
        "watched ms": statistics.median(means[NUM_WATCHERS]) * 1e3,
        "ratio": statistics.median(ratios),
        "wanted": 1.01,
        "a picture ms": taken * 1e3,
        "share of time": statistics.median(share),
        "event bytes": size,
    }
