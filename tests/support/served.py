"""A server on a loopback port, in a thread of this process, for tests."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from paged import AsyncLLMEngine
from paged.scheduler.stats import EngineStats
from paged.server import launcher
from paged.server.app import new_app, new_metrics_app
from paged.server.engine_client import EngineClient
from paged.server.frames import Start
from paged.server.front_end import FrontEnd
from paged.server.http.listener import Listeners, Server, bind_all, new_event_loop
from paged.server.launcher import LocalLauncher, LocalProcess
from paged.server.options import ServeOptions
from tests.support import unhurried_engine_process

EVENTS = "text/event-stream"
PATIENCE_S = 120.0  # for what comes within a moment where nothing else runs


@dataclass
class Served:
    """A running server."""

    front: FrontEnd
    port: int
    loop: asyncio.AbstractEventLoop
    server: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stats(self) -> EngineStats:
        """Return the stats of the engine as they are now."""
        return asyncio.run_coroutine_threadsafe(self.front.engine.stats(), self.loop).result(PATIENCE_S)

    @property
    def num_requests(self) -> int:
        """How many requests the engine has not finished."""
        stats = self.stats()
        return stats.num_running + stats.num_waiting

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of a response. A body that is no bytes is sent as JSON.

        Of /watch, which has no end, nothing is read.
        """
        given = {} if isinstance(body, bytes | None) else {"content-type": "application/json"}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patience_s)
        try:
            connection.request(method, path, data, {**given, **(headers or {})})
            response = connection.getresponse()
            is_endless = method == "GET" and response.getheader("content-type", "").startswith(EVENTS)
            content = b"" if is_endless else response.read()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, content
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> Any:
        """Return the JSON of a response, which must succeed."""
        status, _, data = self.request("POST", path, body)
        assert status == 200, data
        return json.loads(data)

    def events(self, path: str, **body: Any) -> list[str]:
        """Return the data of all events of a response, however many blank lines are between them."""
        status, headers, data = self.request("POST", path, {**body, "stream": True})
        assert status == 200, data
        assert headers["content-type"].startswith("text/event-stream")
        assert data.endswith(b"\n\n")
        events = [event.strip("\n") for event in data.decode().split("\n\n")]
        return [event.removeprefix("data: ") for event in events if event]


@contextmanager
def serving(
    engine: Any,
    front: Callable[[FrontEnd], Any] = lambda _: None,
    *,
    closes: bool = False,
    **options: Any,
) -> Iterator[Served]:
    """Serve an engine.

    front: changes the front end before it serves.
    closes: whether the engine is shut down at the end, which an EngineClient needs in its event loop.
    """
    started = threading.Event()
    served: list[Served] = []

    async def serve() -> None:
        async with engine if closes else nullcontext():
            await listen()

    async def listen() -> None:
        chosen = ServeOptions(port=0, **options)
        end = FrontEnd(engine, chosen)
        front(end)
        with bind_all(chosen) as listeners:
            await listen_on(end, chosen, listeners)

    async def listen_on(end: FrontEnd, chosen: ServeOptions, listeners: Listeners) -> None:
        server = Server(
            new_app(end),
            chosen,
            on_start=lambda: None,
            on_refusal=end.observers.refused,
            metrics_app=new_metrics_app(end),
        )
        loop = asyncio.get_running_loop()
        served.append(Served(end, listeners.main.getsockname()[1], loop, server))
        serving = loop.create_task(server.listen(*listeners))
        while not server.started:
            await asyncio.sleep(0.001)
        started.set()
        await serving

    def run() -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(PATIENCE_S)
    try:
        yield served[0]
    finally:
        with suppress(RuntimeError):  # it may have ended by itself, and its loop with it
            served[0].loop.call_soon_threadsafe(served[0].server.stop)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@contextmanager
def held(engine: AsyncLLMEngine) -> Iterator[None]:
    """Have an engine of this process compute nothing, so that its requests last as long as the test."""
    go_on = threading.Event()
    call = engine._thread.call(lambda _: go_on.wait(PATIENCE_S))
    try:
        yield
    finally:
        go_on.set()
        call.result()


class UnhurriedLauncher(LocalLauncher):
    """Starts engine processes that `unhurried` slows down."""

    def launch(self, start: Start) -> tuple[socket.socket, LocalProcess]:  # noqa: ARG002
        with mock.patch.object(launcher, "ENGINE_PROCESS", unhurried_engine_process.__name__):
            return launcher.start_process({unhurried_engine_process.WHILE: str(_unhurried())})


@cache
def _unhurried() -> Path:
    """Return the file that slows down the engine processes of this one while it is there."""
    return Path(tempfile.mkdtemp(), "unhurried")


@contextmanager
def unhurried(engine: AsyncLLMEngine | EngineClient, step_s: float = 0.05) -> Iterator[None]:
    """Have each step of an engine take a while, so that no long request ends meanwhile.

    One in other processes was given an UnhurriedLauncher.
    """
    if isinstance(engine, EngineClient):
        assert all(isinstance(each._launcher, UnhurriedLauncher) for each in engine._engines)
        file = _unhurried()
        file.with_suffix(".new").write_text(str(step_s))
        file.with_suffix(".new").rename(file)  # so that nobody reads a part
        try:
            yield
        finally:
            file.unlink()
        return
    runner = engine._thread.call(lambda engine: engine.runner).result()
    execute, is_over = runner.execute, threading.Event()
    runner.execute = lambda schedule: (is_over.wait(step_s), execute(schedule))[1]
    try:
        yield
    finally:
        is_over.set()
        del runner.execute


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it never held"
        time.sleep(0.005)
