"""A client that takes little time itself, in a process of its own. Its connections stay open.

The process reads one JSON line for each load, `Load`, and answers each with one, `Outcome`. It checks every
status, and counts events; the last body of each load goes back to the caller, who checks it.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import IO, Any, Self

END_OF_CHUNKS = b"\r\n0\r\n\r\n"
EVENT = b"data: "


@dataclass(frozen=True)
class Load:
    """Requests to send.

    bodies: of the requests, used in turn.
    num_connections: how many requests are open at once.
    hold: leave all requests open once each has answered, until a load without it closes them.
    """

    port: int
    path: str
    bodies: list[dict[str, Any]]
    num_requests: int
    num_connections: int
    hold: bool = False


@dataclass
class Outcome:
    """What came back.

    first_s: seconds from sending to the first event or to the body, of each request.
    num_events: server-sent events, [DONE] among them.
    body: of the last response to end; of a stream, all its bytes.
    """

    seconds: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    num_events: int = 0
    first_s: list[float] = field(default_factory=list)
    body: str = ""


class LoadProcess:
    """The process, for the benchmark that starts it."""

    def __init__(self, core: int | None = None) -> None:
        command = [sys.executable, "-m", "benchmarks.server.load", *([] if core is None else [str(core)])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)

    def run(self, load: Load) -> Outcome:
        """Send requests, and wait for all responses. Every one must have status 200."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asdict(load)), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the client has ended"
        outcome = Outcome(**json.loads(line))
        assert outcome.statuses == {"200": load.num_requests}, outcome
        return outcome


class _Connection(asyncio.Protocol):
    """One connection, which sends a request whenever the one before is answered."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._received: list[bytes] = []
        self._is_stream = False
        self._missing: int | None = None  # bytes of the body that are to come; None before the head
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._run.on_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._missing is None:
            head, end, rest = (b"".join(self._received) + data).partition(b"\r\n\r\n")
            if not end:
                self._received.append(data)
                return
            self._begin(head.lower())
            data = rest
            if not data:
                return
        if len(self._received) == 0:
            self._run.outcome.first_s.append(time.perf_counter() - self._sent_at)
            if self._run.load.hold:
                self._run.on_held()
        self._received.append(data)
        if self._is_stream:
            if b"".join(self._received[-2:]).endswith(END_OF_CHUNKS):
                self._end()
        else:
            assert self._missing is not None
            self._missing -= len(data)
            if self._missing <= 0:
                self._end()

    def _begin(self, head: bytes) -> None:
        self._status = head[9:12].decode()
        self._is_stream = b"transfer-encoding: chunked" in head
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        self._missing = int(length or 0)
        self._received = []

    def _send(self) -> None:
        self._received = []
        self._missing = None
        request = self._run.next_request()
        if request is not None:
            self._sent_at = time.perf_counter()
            self.transport.write(request)

    def _end(self) -> None:
        self._run.on_response(self._status, b"".join(self._received))
        self._send()


class _Run:
    """One load."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.outcome = Outcome()
        self._statuses = Counter[str]()
        self._requests = [_request(load, body) for body in load.bodies]
        self._num_sent = self._num_held = 0
        self.done = asyncio.get_running_loop().create_future()

    def next_request(self) -> bytes | None:
        """Return the bytes of the next request; None after the last one."""
        if self._num_sent == self.load.num_requests:
            return None
        self._num_sent += 1
        return self._requests[self._num_sent % len(self._requests)]

    def on_response(self, status: str, body: bytes) -> None:
        """Count a response."""
        self._statuses[status] += 1
        self.outcome.num_events += body.count(EVENT)
        if self._statuses.total() == self.load.num_requests:
            self.outcome.body = body.decode()
            self._finish()

    def on_held(self) -> None:
        """Count a response that has begun and stays open."""
        self._num_held += 1
        if self._num_held == self.load.num_requests:
            self._statuses["200"] = self._num_held
            self._finish()

    def on_lost(self, error: Exception | None) -> None:
        """Fail if a connection closes while responses are missing."""
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed a connection"))

    def _finish(self) -> None:
        self.outcome.statuses = dict(self._statuses)
        if not self.done.done():
            self.done.set_result(None)

    async def run(self) -> list[_Connection]:
        """Send all requests and wait. Return the connections."""
        loop = asyncio.get_running_loop()
        started = time.perf_counter()
        connections = []
        for _ in range(min(self.load.num_connections, self.load.num_requests)):
            address = "127.0.0.1", self.load.port
            _, connection = await loop.create_connection(lambda: _Connection(self), *address)
            connections.append(connection)
        await self.done
        self.outcome.seconds = time.perf_counter() - started
        return connections


def _request(load: Load, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {load.path} HTTP/1.1\r\nhost: 127.0.0.1:{load.port}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


async def _serve(lines: IO[str]) -> None:
    held: list[_Connection] = []
    while line := await asyncio.to_thread(lines.readline):
        load = Load(**json.loads(line))
        for connection in held:
            connection.transport.abort()
        run = _Run(load)
        connections = await run.run()
        held = connections if load.hold else []
        if not load.hold:
            for connection in connections:
                connection.transport.close()
        print(json.dumps(asdict(run.outcome)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(sys.argv[1])})
    asyncio.run(_serve(sys.stdin))
