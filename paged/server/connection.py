"""EngineConnection: one engine process, and the requests that it computes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, cast

from ..base import errors
from ..base.errors import EngineDeadError, PagedError
from ..scheduler.picture import EnginePicture
from ..scheduler.stats import EngineStats
from . import frames
from .launcher import Launcher
from .router import load_of
from .sent_request import SentRequest

SOON_S = 0.2  # from the end of a process's socket to its own end
END_S = 5.0  # after which a process that was told to end is killed
MOST_UNHEARD_S = 2.0  # between a step that has ended and the heartbeat that tells of it
SILENT_S = 10.0  # without ten heartbeats a process gets no requests, if another one can

logger = logging.getLogger(__name__)


class ProcessEndError(ChildProcessError):
    """The reason why an engine process ended. It is logged when the process ends."""


class Owner(Protocol):
    """The object that starts processes and sends requests to them. Its methods run in the event loop."""

    def on_death(self, connection: EngineConnection) -> None:
        """Take over the requests of a process that ended or was shut down; see `EngineConnection.dead`."""

    def on_end(self, request: SentRequest) -> None:
        """Forget a request that has ended."""

    def on_progress_alone(self, connection: EngineConnection) -> None:
        """Record a step of a process that computes only one request, a suspect."""

    def on_pause_alone(self, connection: EngineConnection) -> None:
        """Record that the only request of a process is paused because its reader is slow."""


class EngineConnection(asyncio.Protocol):
    """The connection to an engine process. The process ends when this one does.

    load: the sum of `load_of` over unfinished requests, for routers.
    loop: the event loop that reads and writes; None before `attach`.
    heard_at: when the process last sent something, by time.monotonic. It sends a heartbeat every second.
    moved_at: when the process was last idle or ended a step.
    step: the number of steps as of the last heartbeat. num_steps: the latest known number of steps.
    requests: the unfinished requests by key.
    is_watched: whether the process computes only a suspect; its steps are then reported to the owner.
    """

    def __init__(self, start: frames.Start, owner: Owner, launcher: Launcher) -> None:
        self.replica = start.replica
        self._owner = owner
        self._socket, self._process = launcher.launch(start)
        self._reader = frames.FrameReader(frames.decode_report)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[bytes] = []  # frames of this turn of the loop
        self._is_closed: asyncio.Future[None] | None = None
        self._ready: asyncio.Future[frames.Ready] | None = None
        self.dead: EngineDeadError | None = None
        self.load = self.num_steps = 0
        self.heard_at = self.moved_at = time.monotonic()
        self._stats: EngineStats | None = None  # none before the engine is made
        self.requests: dict[int, SentRequest] = {}
        self.is_watched = False
        self._loads: dict[int, int] = {}
        self._asks = itertools.count(-1, -1)  # below the keys of requests
        self._answers: dict[int, asyncio.Future[Any]] = {}
        with suppress(BrokenPipeError):  # who waits for `Ready` is told why it has ended
            self._socket.sendall(frames.encode(start))

    def wait_ready(self) -> frames.Ready:
        """Wait until the engine is made. Raises the errors of `LLMEngine`, and EngineDeadError."""
        with suppress(ConnectionResetError):  # it has not read all that was sent
            while data := self._socket.recv(2**16):
                for report in self._reader.feed(data):
                    if isinstance(report, frames.Refused):
                        raise error_of(report)
                    if isinstance(report, frames.Ready):  # heartbeats may follow it
                        self._stats = report.stats
                        return report
        how = self._process.how_ended(SOON_S)
        raise caused(f"{self.name} ended before its engine was made ({how})", ProcessEndError(how))

    async def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read and write in this event loop from now on. Raises EngineDeadError."""
        self.check()
        self.loop = loop
        self._is_closed = loop.create_future()
        self._ready = loop.create_future()
        self.heard_at = self.moved_at = time.monotonic()  # what was sent before waits in the socket
        await loop.create_unix_connection(lambda: self, sock=self._socket)

    async def ready(self) -> frames.Ready:
        """Wait until the engine is made, in the event loop of `attach`. Raises the errors of `LLMEngine`."""
        assert self._ready is not None
        return await self._ready

    def begin(self, request: SentRequest) -> None:
        """Send a request. Raises EngineDeadError, and RequestError if a value cannot be sent."""
        self._send(request.next_order())
        key = request.key
        inbox = request.inbox
        request.connection = self
        request.replica = self.replica
        request.was_sent = True
        self.requests[key] = request
        self._weigh(request, has_output=False)
        inbox.account.join(key, self._hold)

    def _send(self, order: frames.Order) -> None:
        """Send an order with the others of this turn of the loop, as each arrival wakes the process."""
        self.check()
        assert self.loop is not None
        frame = frames.encode(order)
        if not self._unsent:
            self.loop.call_soon(self._flush)
        self._unsent.append(frame)

    def _flush(self) -> None:
        assert self._transport is not None
        if self.dead is None:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def tell(
        self,
        order: frames.Weigh
        | frames.ShareThreads
        | frames.ForgetPrefixes
        | frames.LoadAdapter
        | frames.ForgetAdapter,
    ) -> None:
        """Send an order that concerns no single request. Raises EngineDeadError."""
        self._send(order)

    async def ask(self) -> EngineStats:
        """Return the engine's current stats. Raises EngineDeadError."""
        stats: EngineStats = await self._asked(frames.Ask(next(self._asks)))
        return stats

    async def look(self) -> EnginePicture:
        """Return a picture of the engine's next step, or of an idle engine. Raises EngineDeadError."""
        picture: EnginePicture = await self._asked(frames.Look(next(self._asks)))
        return picture

    async def load_adapter(self, adapter: frames.Adapter) -> str:
        """Have the engine read a LoRA adapter. Return its hash. Raises RequestError and EngineDeadError."""
        found: str = await self._asked(frames.LoadAdapter(next(self._asks), adapter))
        return found

    def load_again(self, adapter: frames.Adapter) -> None:
        """Have the engine read an adapter that others have read. If it cannot, its requests are told."""
        self.tell(frames.LoadAdapter(next(self._asks), adapter))

    async def pin(self, token_ids: list[int], namespace: bytes, *, is_pinned: bool) -> int:
        """Pin cached blocks, or unpin them. Return of how many tokens. Raises as `LLMEngine.pin_prefix`."""
        count: int = await self._asked(frames.Pin(next(self._asks), token_ids, namespace, is_pinned))
        return count

    async def keep_pinned(self, folder: str, most_bytes: int) -> int:
        """Write the pinned prefixes to a folder. Return how many. Raises EngineDeadError."""
        count: int = await self._asked(frames.KeepPinned(next(self._asks), folder, most_bytes))
        return count

    async def _asked(
        self, question: frames.Ask | frames.Look | frames.LoadAdapter | frames.Pin | frames.KeepPinned
    ) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[question.key] = answer
        try:
            self._send(question)
            return await answer
        finally:
            del self._answers[question.key]

    def abort(self, request: SentRequest) -> None:
        """Abort a request that has lost its reader, or that moves to another process."""
        if self._forget(request.key) is not None and self.dead is None:
            self._send(frames.Abort(request.key))

    def end(self, request: SentRequest) -> None:
        """Abort an unfinished request. Its reader still gets a last output."""
        self._send(frames.Abort(request.key))

    def take_requests(self) -> list[SentRequest]:
        """Return and forget the unfinished requests of a process that has ended."""
        return [request for key in sorted(self.requests) if (request := self._forget(key)) is not None]

    @property
    def silent_s(self) -> float:
        """Seconds since the process last sent something."""
        return time.monotonic() - self.heard_at

    @property
    def stuck_s(self) -> float:
        """Seconds since the process was last idle or ended a step."""
        return time.monotonic() - self.moved_at

    @property
    def hangs(self) -> bool:
        """Whether the process has sent no heartbeat for SILENT_S."""
        return self.silent_s > SILENT_S

    def kill(self, why: str) -> None:
        """Kill a process that hangs, and handle it as ended."""
        self._process.kill()
        self._die(caused(f"{self.name} {why}", ProcessEndError(why)))

    def wait_end(self) -> None:
        """Wait at most END_S for the end of the process. If it has not ended, kill it and wait again.

        A process that is stuck in the operating system's kernel is left behind.
        """
        for _ in range(2):
            if self._process.wait(END_S):
                return
            self._process.kill()
        logger.error("%s does not end, although it is killed", self.name)

    def check(self) -> None:
        """Raise EngineDeadError if the process has ended."""
        if self.dead is not None:
            raise EngineDeadError(str(self.dead)) from self.dead.__cause__

    def close(self) -> None:
        """End the process. Any thread may call this. Its readers get EngineDeadError."""
        self._shut_down()
        # The process ends when it finds the other end of its socket closed.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._transport is None:
            self._socket.close()
        self.wait_end()

    async def aclose(self) -> None:
        """Close the connection and end the process, in the event loop of `attach`; see `close`."""
        self._shut_down()
        if self._is_closed is not None:
            await self._is_closed
        await asyncio.to_thread(self.close)

    def _shut_down(self) -> None:
        call_in_loop(self.loop, partial(self._die, EngineDeadError("the engine was shut down")))

    # Of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to read from the process."""
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Pass the outputs in complete frames to their requests."""
        self.heard_at = time.monotonic()
        for report in self._reader.feed(data):
            self._take(report)

    def connection_lost(self, error: Exception | None) -> None:
        """Tell the owner that the process has ended or has sent unreadable data."""
        if self._is_closed is not None and not self._is_closed.done():
            self._is_closed.set_result(None)
        if self.dead is None:
            how = self._process.how_ended(SOON_S)
            cause = ProcessEndError(how if error is None else repr(error))
            self._die(caused(f"{self.name} has ended ({how})", cause))

    def _take(self, report: frames.Report) -> None:
        match report:
            case frames.PromptPlaces(key=key, places=places):
                if (request := self.requests.get(key)) is not None:
                    request.inbox.put_prompt(places)
                    self._bound(request)
            case frames.Begun(step=step, keys=keys):
                for key in keys:
                    if (request := self.requests.get(key)) is not None:
                        request.suspicion.on_begun(step)
            case frames.Outputs(step=step, outputs=outputs, embeddings=embeddings, scores=scores):
                self._on_step(step)
                for output in outputs:
                    self._put(output)
                for key, result in (*embeddings, *scores):
                    if (request := self._finish(key)) is not None:
                        request.inbox.put_result(result)
                if self.is_watched:
                    self._owner.on_progress_alone(self)
            case frames.Heartbeat(step=step, stats=stats, is_busy=is_busy):
                self._on_step(step)
                if not is_busy:
                    self.moved_at = self.heard_at
                self._stats = stats
                if self.is_watched:
                    self._owner.on_progress_alone(self)
            case frames.Ready(stats=stats):
                self._stats = stats
                self.moved_at = self.heard_at
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(report)
            case frames.Refused(key=None):
                self._die(caused(f"{self.name} cannot make its engine: {report.message}", error_of(report)))
            case frames.Answer(key=key, stats=stats):
                self._stats = stats
                self._answer(key, stats)
            case frames.Seen(key=key, picture=picture):
                self._answer(key, picture)
            case frames.AdapterLoaded(key=key, content_hash=content_hash):
                self._answer(key, content_hash)
            case frames.Counted(key=key, count=count):
                self._answer(key, count)
            case frames.Refused(key=int() as key) if (answer := self._answers.get(key)) is not None:
                if not answer.done():
                    answer.set_exception(error_of(report))
            case frames.Refused(key=int() as key):
                if (request := self._finish(key)) is not None:
                    request.inbox.fail(error_of(report))
            case frames.Dead(message=message):
                self._die(caused(message, ProcessEndError(message)))
            case _:
                raise AssertionError(report)

    def _on_step(self, step: int) -> None:
        """Record how many steps there were so far."""
        if step != self.num_steps:
            self.num_steps = step
            self.moved_at = self.heard_at

    @property
    def lived_until(self) -> float:
        """The latest time at which an ended process may have computed something. It may have hung before."""
        return min(time.monotonic(), self.moved_at + MOST_UNHEARD_S)

    def _answer(self, key: int, found: EngineStats | EnginePicture | str | int) -> None:
        if (answer := self._answers.get(key)) is not None and not answer.done():
            answer.set_result(found)

    def _put(self, output: frames.Output) -> None:
        key = output.key
        request = self._finish(key) if output.finished else self.requests.get(key)
        if request is None:  # its reader is gone
            return
        num = request.inbox.put(request.take(output))
        if num and not output.finished:
            self._weigh(request, has_output=True)
            request.suspicion.on_token()
        self._bound(request)

    def _weigh(self, request: SentRequest, *, has_output: bool) -> None:
        load = load_of(request.num_tokens, has_output=has_output)
        self.load += load - self._loads.get(request.key, 0)
        self._loads[request.key] = load

    def _bound(self, request: SentRequest) -> None:
        """End a request whose answer is too large to be held."""
        if (refusal := request.inbox.refusal()) is not None:
            self.abort(request)
            self._owner.on_end(request)
            request.inbox.refuse(refusal)

    def _hold(self, keys: list[int], is_held: bool) -> None:
        """Pause requests, or let them go on."""
        if self.dead is not None:
            return
        self._send(frames.Pause(keys) if is_held else frames.Resume(keys))
        if is_held and self.is_watched:
            assert self.loop is not None
            self.loop.call_soon(self._owner.on_pause_alone, self)  # the account counts its requests now

    def _finish(self, key: int) -> SentRequest | None:
        """Forget a request that has ended."""
        request = self._forget(key)
        if request is not None:
            self._owner.on_end(request)
        return request

    def _forget(self, key: int) -> SentRequest | None:
        self.load -= self._loads.pop(key, 0)
        request = self.requests.pop(key, None)
        if request is not None:
            request.connection = None
            request.inbox.account.leave(key)
        return request

    def _die(self, error: EngineDeadError) -> None:
        if self.dead is not None:
            return
        self.dead = error
        for answer in [*self._answers.values()]:
            if not answer.done():
                answer.set_exception(error)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # perhaps none waits for it any more
        if self._transport is not None:
            self._transport.abort()
        self._owner.on_death(self)

    @property
    def stats(self) -> EngineStats:
        """The stats as of the last heartbeat; totals only if the process has ended."""
        assert self._stats is not None
        return self._stats if self.dead is None else self._stats.at_rest()

    @property
    def name(self) -> str:
        return f"engine process {self.replica}"


def call_in_loop(loop: asyncio.AbstractEventLoop | None, function: Callable[[], None]) -> None:
    """Call a function in an event loop: soon, or at once if this thread runs the loop or there is none."""
    try:
        is_here = loop is None or loop is asyncio.get_running_loop()
    except RuntimeError:  # none runs on this thread
        is_here = False
    if is_here:
        function()
    elif loop is not None:
        with suppress(RuntimeError):  # it is closed, and nothing waits
            loop.call_soon_threadsafe(function)


def caused(message: str, cause: BaseException) -> EngineDeadError:
    """Return the error of a process that ended without being shut down, with its cause."""
    error = EngineDeadError(message)
    error.__cause__ = cause
    return error


def error_of(refused: frames.Refused) -> Exception:
    """Return the error that an engine process described in a frame."""
    known: Mapping[str, Any] = vars(errors)
    error = known.get(refused.kind)
    if isinstance(error, type) and issubclass(error, PagedError):
        return error(refused.message, param=refused.param)
    return RuntimeError(refused.message)
