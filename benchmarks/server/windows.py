"""Whether it would help to wait for more requests before a step begins: batching windows.

The sender holds requests back in place of the engine: a window opens with the first request, and when it ends
all that came meanwhile are sent at once. Times count from a request's arrival at the sender.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from benchmarks.server.served import ServerProcess, paged_serve
from benchmarks.server.timed import first_token_at, median_of, quantile_ms

WINDOWS_MS = (0, 2, 5, 10)
LOADS = (0.1, 0.4, 0.8, 1.2)  # of the requests a second when all come at once
NUM_TOKENS = 16  # of a prompt, and of an output


def measure(model: str, *, num_at_once: int, seconds: float, rounds: int) -> list[dict[str, Any]]:
    """Measure each load with each window, in turns. Figures are medians over the rounds.

    num_at_once: requests by which the engine's capacity is measured. seconds: of arrivals.
    """
    rng = random.Random(0)
    with paged_serve(model, "--device", "cpu", "--num-threads", 1, "--no-enable-prefix-caching") as server:
        for _ in range(2):  # the first warms up
            at_once = asyncio.run(_run(server, rng, [0.0] * num_at_once, 0.0))
        capacity = at_once["tokens/s"] / NUM_TOKENS
        rows = []
        for load in LOADS:
            rate = load * capacity
            found: dict[int, list[dict[str, float]]] = {window: [] for window in WINDOWS_MS}
            for number in range(rounds):
                arrivals = [*accumulate(rng.expovariate(rate) for _ in range(max(2, int(rate * seconds))))]
                first = number % len(WINDOWS_MS)
                for window in WINDOWS_MS[first:] + WINDOWS_MS[:first]:
                    found[window].append(asyncio.run(_run(server, rng, arrivals, window / 1e3)))
            rows += [
                {"requests/s": rate, "of capacity": load, "window ms": window, **median_of(runs)}
                for window, runs in found.items()
            ]
    return rows


def releases(arrivals: Sequence[float], window_s: float) -> list[float]:
    """Return when each request is sent: at the end of the window in which it arrives."""
    times = []
    end = float("-inf")
    for arrival in arrivals:
        if arrival >= end:
            end = arrival + window_s
        times.append(end)
    return times


async def _run(
    server: ServerProcess, rng: random.Random, arrivals: Sequence[float], window_s: float
) -> dict[str, float]:
    before = server.cpu_seconds()
    started = time.monotonic() + 0.1

    async def ask(arrival: float, release: float) -> float:
        prompt = [rng.randrange(3, 4000) for _ in range(NUM_TOKENS)]
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        await asyncio.sleep(started + release - time.monotonic())
        return await first_token_at(server.port, body) - started - arrival

    sent = zip(arrivals, releases(arrivals, window_s), strict=True)
    waited = await asyncio.gather(*(ask(arrival, release) for arrival, release in sent))
    seconds = time.monotonic() - started - arrivals[0]
    return {
        "tokens/s": len(arrivals) * NUM_TOKENS / seconds,
        "first token p50 ms": quantile_ms(waited, 0.5),
        "p95 ms": quantile_ms(waited, 0.95),
        "processor ms each": (server.cpu_seconds() - before) / len(arrivals) * 1e3,
    }
