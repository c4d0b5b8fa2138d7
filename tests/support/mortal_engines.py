"""Engines in this process that stand for engine processes, and end at chosen frames.

What the front end does when a process ends is so tested many times within a second.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from paged import LLMEngine
from paged.engine.request_spec import RequestSpec
from paged.server import engine_process, frames, supervised_engine
from paged.server.connection import EngineConnection, caused
from paged.server.engine_process import EngineServer, Link
from paged.server.launcher import LocalLauncher
from paged.server.preparations import Preparations

CAUSES = ("killed", "raised", "hung")
HEARTBEAT_S = 0.05
HUNG_S = 0.2
LEAVING = "leaves"  # begins the ids of requests whose readers leave


class _NoGarbage:
    """In place of the collector's settings, which are for a process of its own."""

    def collect(self, *, is_idle: bool) -> bool:
        return is_idle


class _MortalServer(EngineServer):
    def end(self, code: int) -> None:  # noqa: ARG002
        self.loop.stop()


class _MortalLink(Link):
    """A link that ends once a request is there that is fatal."""

    def __init__(self, ours: socket.socket, life: MortalProcess) -> None:
        super().__init__(ours)
        self._life = life

    def send(self, report: frames.Report) -> None:
        if self._life.is_fatal:
            self._life.kill()
        else:
            with suppress(OSError):  # it is closed
                super().send(report)


class MortalProcess:
    """One life of an engine. An `EngineProcess`.

    limit: the frames that it sends; None: it does not end by itself.
    cause: of its end, drawn when it is there.
    """

    pid = -1

    def __init__(self, engines: MortalEngines, ours: socket.socket) -> None:
        self.limit = engines.next_limit()
        self.cause: str | None = None
        self._engines = engines
        self._engine: LLMEngine | None = None
        self._ours = ours
        self._thread = threading.Thread(target=self.run, daemon=True)
        self._thread.start()

    @property
    def is_fatal(self) -> bool:
        """Whether it computes a request that ends it."""
        return self._engine is not None and self._engines.is_fatal(self._engine)

    def run(self) -> None:
        """Serve until the front end, or the life, has ended."""
        engines = self._engines
        link = _MortalLink(self._ours, self)
        orders = link.orders()
        start = next(orders, None)
        if start is None:
            return
        assert isinstance(start, frames.Start)
        with engines.locks[start.replica]:  # one life after the other
            engine = self._engine = engines.engines[start.replica]
            engine.reset_prefix_cache()
            server = _MortalServer(engine, start.stream_interval_s, link, orders)
            server._preparations = engines.preparations
            link.send(server.ready)
            server.run()

    def draw(self, most: int) -> int:
        """Draw after how many bytes the last ones are cut off."""
        return self._engines.random.randrange(most)

    def draw_cause(self) -> str:
        """Draw how it ends."""
        return self._engines.random.choices(CAUSES, (6, 3, 1))[0]

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the life. Return whether it has ended."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._ours.close()
        return True

    def how_ended(self, timeout_s: float) -> str:
        """Return how the life ended, as of a process that was killed."""
        if not self.wait(timeout_s):
            self.kill()
            return "its socket was closed"
        return "by signal SIGKILL"

    def kill(self) -> None:
        """End it at once."""
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RDWR)


class _MortalConnection(EngineConnection):
    """A connection to a life, which ends when so much of what it sent was received."""

    def data_received(self, data: bytes) -> None:
        life = self._process
        assert isinstance(life, MortalProcess)
        if life.cause is not None:  # what an ended process had not sent
            return
        if life.limit is None or len(data) < 2:
            super().data_received(data)
            return
        life.limit -= 1
        cut = life.draw(len(data)) if life.limit < 0 else len(data)
        super().data_received(data[:cut])
        # A request that is alone at two ends is taken for the cause. A process with requests that stay gets
        # none before its end is noticed.
        may_blame = any(
            each.suspicion.is_alone and each.suspicion.num_deaths_alone for each in self.requests.values()
        )
        stay = [each for each in self.requests.values() if not each.request_id.startswith(LEAVING)]
        if life.limit >= 0 or may_blame or not stay or self.dead is not None:
            super().data_received(data[cut:])
            return
        life.cause = life.draw_cause()
        if life.cause == "raised":
            self._die(caused("a step that fails", RuntimeError("it fails")))
        if life.cause != "hung":
            life.kill()
        else:  # it says nothing, until it is killed
            assert self.loop is not None
            self.loop.call_later(HUNG_S, self.kill, "hangs")


class MortalEngines:
    """Engines in the place of processes.

    mean_frames: that a life has on average; None: it does not end by itself.
    is_fatal: whether the life of this engine ends now, whatever its length.
    """

    def __init__(self, engines: list[LLMEngine], seed: int, mean_frames: int | None) -> None:
        self.engines = engines
        self.locks = [threading.Lock() for _ in engines]
        self.lives: list[MortalProcess] = []
        self.preparations = Preparations[RequestSpec](2)
        self.is_fatal: Callable[[LLMEngine], bool] = lambda _: False
        self.mean_frames = mean_frames
        self.random = random.Random(seed)

    def next_limit(self) -> int | None:
        mean = self.mean_frames
        return None if mean is None else int(self.random.expovariate(1 / mean))

    def launch(self) -> tuple[socket.socket, MortalProcess]:
        """Begin a life, in place of `LocalLauncher.launch`."""
        theirs, ours = socket.socketpair()
        life = MortalProcess(self, ours)
        self.lives.append(life)
        return theirs, life

    @contextmanager
    def installed(self) -> Iterator[MortalEngines]:
        """Let clients begin lives in place of processes."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalLauncher, "launch", lambda *_: self.launch())
            patch.setattr(supervised_engine, "EngineConnection", _MortalConnection)
            patch.setattr(engine_process, "Garbage", _NoGarbage)
            patch.setattr(engine_process, "HEARTBEAT_S", HEARTBEAT_S)
            patch.setattr(engine_process, "WHOLE_S", 0.02)
            patch.setattr(supervised_engine, "FIRST_PAUSE_S", 0.0)
            yield self


def processes(client: Any) -> list[Any]:
    """Return the present processes of a client."""
    return [replica.connection._process for replica in client._supervisor.replicas]
