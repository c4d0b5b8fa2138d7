"""Connections that send a byte a second: when they are closed, and how long /health takes meanwhile.

python -m benchmarks.server.slow_heads PORT NUM      opens them, and prints when and how each was closed
"""

from __future__ import annotations

import asyncio
import http.client
import json
import subprocess
import sys
import time
from collections import Counter
from typing import Any

from benchmarks.server.served import paged_serve
from benchmarks.server.timed import quantile_ms
from paged.server.http.listener import allow_many_connections

HEAD = b"GET /health HTTP/1.1\r\nx-padding: "
PROBE_S = 0.02  # between two /health


def measure(model: str, *, num_connections: int, head_timeout_s: float) -> list[dict[str, Any]]:
    """Measure /health of an idle engine, alone and while such connections are open."""
    flags = ["--device", "cpu", "--num-threads", 1, "--head-timeout-s", head_timeout_s]
    with paged_serve(model, *flags) as server:
        _probe(server.port, time.monotonic() + 1.0)  # warm-up
        alone = _probe(server.port, time.monotonic() + head_timeout_s)
        command = [
            sys.executable,
            "-m",
            "benchmarks.server.slow_heads",
            str(server.port),
            str(num_connections),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as slow:
            assert slow.stdout is not None
            slow.stdout.readline()  # all are open
            beside = _probe(server.port, time.monotonic() + head_timeout_s)
            closed: dict[str, Any] = json.loads(slow.stdout.readline())
    assert sum(closed["answers"].values()) == num_connections, closed
    return [
        _row(0, alone, first_s=0.0, last_s=0.0, answers={}),
        _row(num_connections, beside, **closed),
    ]


def _row(
    num: int, waited: list[float], *, first_s: float, last_s: float, answers: dict[str, int]
) -> dict[str, Any]:
    return {
        "slow connections": num,
        "/health": len(waited),
        "p50 ms": quantile_ms(waited, 0.5),
        "p99 ms": quantile_ms(waited, 0.99),
        "longest ms": max(waited) * 1e3,
        "first closed s": first_s,
        "last closed s": last_s,
        "answers": " ".join(f"{num}x{answer}" for answer, num in answers.items()),
    }


def _probe(port: int, until: float) -> list[float]:
    """Return how long each /health took, each over a connection of its own."""
    waited = []
    while (begun := time.monotonic()) < until:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        connection.close()
        waited.append(time.monotonic() - begun)
        time.sleep(PROBE_S)
    return waited


async def _send_slowly(port: int, num: int) -> None:
    """Open connections within a second, and print, once all are closed, how long each was open."""
    open_s: list[float] = []
    answers = Counter[str]()

    async def connect(i: int) -> None:
        await asyncio.sleep(i / num)  # so that bytes come evenly
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        opened = time.monotonic()
        sending = asyncio.create_task(_drip(writer))
        answer = await reader.read()
        open_s.append(time.monotonic() - opened)
        answers[answer[9:12].decode() or "closed"] += 1
        sending.cancel()
        writer.close()

    connecting = [asyncio.create_task(connect(i)) for i in range(num)]
    await asyncio.sleep(1.0)
    print("all are open", flush=True)
    await asyncio.gather(*connecting)
    print(json.dumps({"first_s": min(open_s), "last_s": max(open_s), "answers": answers}), flush=True)


async def _drip(writer: asyncio.StreamWriter) -> None:
    sent = 0
    while True:
        writer.write(HEAD[sent : sent + 1] or b"x")
        sent += 1
        await asyncio.sleep(1.0)


if __name__ == "__main__":
    allow_many_connections()
    asyncio.run(_send_slowly(*map(int, sys.argv[1:])))
