"""EngineConnection: one engine process, and the requests that it computes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, cast

from .. import errors
from ..engine.request_spec import closed_error
from ..errors import EngineDeadError, PagedError
from ..requests.request import RequestOutput
from ..scheduler.stats import EngineStats
from ..text.worker import ROOT
from . import frames
from .inbox import Inbox

ENGINE_PROCESS = "paged.server.engine_process"  # the module that it runs
BUFFER_BYTES = 4 * 2**20  # of the socket, as far as the system allows: a step waits while it is full
SOON_S = 0.2  # from the end of a process's socket to its own end
END_S = 5.0  # after which a process that was told to end is killed
SILENT_S = 10.0  # without ten heartbeats a process hangs, and is not just slow

logger = logging.getLogger(__name__)


class ProcessEndError(ChildProcessError):
    """How an engine process ended; logged at that time."""


class SentRequest:
    """A request that an engine process computes, and its outputs. A `RequestHandle`."""

    def __init__(self, connection: EngineConnection, key: int, inbox: Inbox) -> None:
        self._connection = connection
        self._key = key
        self._inbox = inbox

    @property
    def replica(self) -> int:
        """The number of the process."""
        return self._connection.replica

    async def get(self) -> RequestOutput:
        """Return the next output. The one before does not count any more: its reader has done with it."""
        self._inbox.release()
        return await self._inbox.get()

    async def result(self) -> Any:
        """Return what a request for a report on a prompt has found."""
        await self._inbox.wait()
        return self._inbox.result

    def close(self) -> None:
        """Abort the request if it is not finished, and drop what is held of it. From any thread."""
        self._connection.call_in_loop(self._close)

    def _close(self) -> None:
        self._connection.abort(self._key)
        self._inbox.fail(closed_error(self._inbox.request_id))  # to who still waits
        self._inbox.give_back()


class EngineConnection(asyncio.Protocol):
    """A process that runs an engine. It ends when this object's process does. An `EngineReplica`.

    load: tokens of its unfinished requests, prompt and output so far.
    loop: the event loop that reads and writes; None before `attach`.
    heard_at: when it last sent something, on the clock time.monotonic. Heartbeats come every second.
    step: the number of steps begun, as of the last heartbeat.
    on_death: is called in the event loop when the process has ended by itself.
    """

    def __init__(self, start: frames.Start, on_death: Callable[[], None]) -> None:
        self._on_death = on_death
        self.replica = start.replica
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        path = [ROOT, *filter(None, sys.path)]  # so that it finds what this process finds
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", ENGINE_PROCESS, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a library prints is no output of a command
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            )
        self._socket = ours
        self._reader = frames.FrameReader(frames.decode_report)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._is_closed: asyncio.Future[None] | None = None
        self.dead: EngineDeadError | None = None
        self.load = self.step = 0
        self.heard_at = time.monotonic()
        self._stats: EngineStats | None = None  # none before the engine is made
        self._inboxes: dict[int, Inbox] = {}  # of unfinished requests
        self._keys: dict[str, int] = {}  # of these, by id
        self._loads: dict[int, int] = {}
        self._asks = itertools.count(-1, -1)  # below the keys of requests
        self._answers: dict[int, asyncio.Future[EngineStats]] = {}
        with suppress(BrokenPipeError):  # `wait_ready` says why it has ended
            self._socket.sendall(frames.encode(start))

    def wait_ready(self) -> frames.Ready:
        """Wait until the engine is made. Raises the error of `LLMEngine`."""
        while data := self._socket.recv(2**16):
            for report in self._reader.feed(data):
                if isinstance(report, frames.Refused):
                    raise error_of(report)
                if isinstance(report, frames.Ready):  # heartbeats may follow it
                    self._stats = report.stats
                    return report
        raise EngineDeadError(f"{self._name} ended before its engine was made ({self._how_ended()})")

    async def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read and write in this event loop from now on. Raises EngineDeadError."""
        self.check()
        self.loop = loop
        self._is_closed = loop.create_future()
        self.heard_at = time.monotonic()  # what was sent before waits in the socket
        await loop.create_unix_connection(lambda: self, sock=self._socket)

    def begin(
        self, order: frames.Generate | frames.Fork | frames.Embed | frames.ScoreTokens, inbox: Inbox
    ) -> SentRequest:
        """Send a request, whose outputs go to the inbox. Raises EngineDeadError."""
        key = order.key
        self._send(order)
        self._inboxes[key] = inbox
        self._keys[inbox.request_id] = key
        self._loads[key] = len(inbox.token_ids)
        self.load += len(inbox.token_ids)
        inbox.account.join(key, self._hold)
        return SentRequest(self, key, inbox)

    def _send(self, order: frames.Order) -> None:
        self.check()
        assert self._transport is not None
        self._transport.write(frames.encode(order))

    async def ask(self) -> EngineStats:
        """Return the current stats. Raises EngineDeadError."""
        key = next(self._asks)
        answer: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._answers[key] = answer
        try:
            self._send(frames.Ask(key))
            return await answer
        finally:
            del self._answers[key]

    def unfinished(self, request_id: str) -> Inbox | None:
        """Return the inbox of a request; None if it has finished, perhaps unread, or is elsewhere."""
        key = self._keys.get(request_id)
        return None if key is None else self._inboxes[key]

    def abort(self, key: int) -> None:
        """Abort a request whose reader is gone."""
        if self._forget(key) is not None and self.dead is None:
            self._send(frames.Abort(key))

    def end(self, request_id: str) -> None:
        """Abort an unfinished request whose reader waits for its last output."""
        self._send(frames.Abort(self._keys[request_id]))

    @property
    def silent_s(self) -> float:
        """Seconds since it last sent something."""
        return time.monotonic() - self.heard_at

    @property
    def hangs(self) -> bool:
        """Whether heartbeats have not come for SILENT_S."""
        return self.silent_s > SILENT_S

    def check(self) -> None:
        """Raise EngineDeadError if the process has ended."""
        if self.dead is not None:
            raise EngineDeadError(str(self.dead)) from self.dead.__cause__

    def close(self) -> None:
        """End the process, from any thread. Its readers get EngineDeadError."""
        self._shut_down()
        # The process ends when it finds the other end of its socket closed.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._transport is None:
            self._socket.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def aclose(self) -> None:
        """End the process. It is called in the event loop of `attach`; see `close`."""
        self._shut_down()
        if self._is_closed is not None:
            await self._is_closed
        await asyncio.to_thread(self.close)

    def _shut_down(self) -> None:
        self.call_in_loop(partial(self._die, EngineDeadError("the engine was shut down")))

    def call_in_loop(self, function: Callable[[], None]) -> None:
        """Call a function in the event loop: at once if that runs here, otherwise soon."""
        try:
            is_here = self.loop is None or self.loop is asyncio.get_running_loop()
        except RuntimeError:  # none runs on this thread
            is_here = False
        if is_here:
            function()
        elif self.loop is not None:
            with suppress(RuntimeError):  # it is closed, and nothing waits
                self.loop.call_soon_threadsafe(function)

    # Of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read."""
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Hand the outputs of whole frames to their inboxes."""
        self.heard_at = time.monotonic()
        for report in self._reader.feed(data):
            self._take(report)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail all requests, as the process has ended, or has sent what cannot be read."""
        if self._is_closed is not None and not self._is_closed.done():
            self._is_closed.set_result(None)
        if self.dead is None:
            how = self._how_ended()
            cause = ProcessEndError(how if error is None else repr(error))
            self._die(
                _caused(f"{self._name} has ended ({how}); make a new engine, or restart the server", cause)
            )

    def _take(self, report: frames.Report) -> None:
        match report:
            case frames.PromptPlaces(key=key, places=places):
                if (inbox := self._inboxes.get(key)) is not None:
                    inbox.put_prompt(places)
                    self._bound(key, inbox)
            case frames.Outputs(outputs=outputs, embeddings=embeddings, scores=scores):
                for output in outputs:
                    self._put(output)
                for key, result in (*embeddings, *scores):
                    if (inbox := self._forget(key)) is not None:
                        inbox.put_result(result)
            case frames.Heartbeat(step=step, stats=stats):
                self.step = step
                self._stats = stats
            case frames.Answer(key=key, stats=stats):
                self._stats = stats
                if (answer := self._answers.get(key)) is not None and not answer.done():
                    answer.set_result(stats)
            case frames.Refused(key=int() as key):
                if (inbox := self._forget(key)) is not None:
                    inbox.fail(error_of(report))
            case frames.Dead(message=message):
                self._die(_caused(message, ProcessEndError(message)))
            case _:
                raise AssertionError(report)

    def _put(self, output: frames.Output) -> None:
        key = output.key
        inbox = self._forget(key) if output.finished else self._inboxes.get(key)
        if inbox is None:  # its reader is gone
            return
        num = inbox.put(output)
        if not output.finished:
            self._loads[key] += num
            self.load += num
        self._bound(key, inbox)

    def _bound(self, key: int, inbox: Inbox) -> None:
        """End a request whose answer is too large to be held."""
        if (refusal := inbox.refusal()) is not None:
            self.abort(key)
            inbox.refuse(refusal)

    def _hold(self, keys: list[int], is_held: bool) -> None:
        """Pause requests, or let them go on."""
        if self.dead is None:
            self._send(frames.Pause(keys) if is_held else frames.Resume(keys))

    def _forget(self, key: int) -> Inbox | None:
        self.load -= self._loads.pop(key, 0)
        inbox = self._inboxes.pop(key, None)
        if inbox is not None:
            del self._keys[inbox.request_id]
            inbox.account.leave(key)
        return inbox

    def _die(self, error: EngineDeadError) -> None:
        if self.dead is not None:
            return
        self.dead = error
        if error.__cause__ is not None:  # not shut down: at once, as no request may come to find it
            logger.error("%s", error)
        self._stats = None if self._stats is None else self._stats.at_rest()
        # Copies: the garbage collector may run meanwhile, and close unread streams.
        for inbox in [*self._inboxes.values()]:
            inbox.fail(error)
        for answer in [*self._answers.values()]:
            if not answer.done():
                answer.set_exception(error)
        self._inboxes.clear()
        self._keys.clear()
        self._loads.clear()
        self.load = 0
        if self._transport is not None:
            self._transport.abort()
        if error.__cause__ is not None:
            self._on_death()

    @property
    def stats(self) -> EngineStats:
        """The stats as of the last heartbeat, at rest if the process has ended."""
        assert self._stats is not None
        return self._stats

    @property
    def _name(self) -> str:
        return f"engine process {self.replica}"

    def _how_ended(self) -> str:
        try:
            code = self._process.wait(SOON_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # it cannot be used any more
            return "its socket was closed"
        return f"by signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _caused(message: str, cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(message)
    error.__cause__ = cause
    return error


def error_of(refused: frames.Refused) -> Exception:
    """Return the error that an engine process describes."""
    known: Mapping[str, Any] = vars(errors)
    error = known.get(refused.kind)
    if isinstance(error, type) and issubclass(error, PagedError):
        return error(refused.message, param=refused.param)
    return RuntimeError(refused.message)
