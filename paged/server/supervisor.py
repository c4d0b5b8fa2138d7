"""Supervisor: the engine processes of a client, and the requests that go through them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..base.errors import (
    EngineDeadError,
    PagedError,
    QueueFullError,
    RequestError,
    RequestKillsEngineError,
    RequestTimeoutError,
    UsageError,
)
from ..requests.request import TIMEOUT_MESSAGE
from ..scheduler.stats import EngineStats
from . import frames
from .connection import EngineConnection, call_in_loop, caused
from .deaths import MOST_DEATHS_ALONE, Death
from .launcher import Launcher
from .restart_terms import RestartTerms
from .router import choose_among, new_router
from .sent_request import SentRequest
from .supervised_engine import SupervisedEngine, next_pause

LOOK_S = 1.0  # between two looks for processes that hang
MOST_TESTS_S = 10.0  # in which suspects run alone, one after the other, after one was found
LEAVE_S = 0.05  # between two looks for requests that have to end where they are

logger = logging.getLogger(__name__)


class Supervisor:
    """Engines in separate processes, which are replaced when they end, and all unfinished requests.

    A request waits here while no process can take it. If two processes die while computing a request, the
    request becomes a suspect: it is computed alone until it has run longer than before. If two more processes
    die during that time, the request fails as the cause, and none of these deaths counts as a restart.

    removed: the last stats of removed engines, by number.
    """

    def __init__(
        self,
        starts: Iterable[frames.Start],
        router: str,
        terms: RestartTerms,
        max_waiting: int | None,
        launcher: Launcher,
    ) -> None:
        self._router_name = router
        self._terms = terms
        self._max_waiting = max_waiting
        self._launcher = launcher
        self._keys = itertools.count()
        self._requests: dict[str, SentRequest] = {}  # the unfinished ones by id
        self._alone: SentRequest | None = None
        self._waiting: dict[SentRequest, None] = {}  # of these, those that no process has, in order
        self._loop: asyncio.AbstractEventLoop | None = None
        self._attached: asyncio.Future[Any] | None = None
        self._replacing: dict[SupervisedEngine, asyncio.Task[None]] = {}
        self._resizing = asyncio.Lock()
        self._resizes: set[asyncio.Task[None]] = set()
        self._new: list[SupervisedEngine] = []  # those that are to join `replicas` once all serve
        self._looked_at = time.monotonic()
        self._is_closed = False
        self.replicas: list[SupervisedEngine] = []
        self.removed: dict[int, EngineStats] = {}
        try:
            for start in starts:
                self.replicas.append(SupervisedEngine(start, self, launcher))
        except BaseException:
            self.close()
            raise

    def wait_ready(self) -> list[frames.Ready]:
        """Wait until all engines are made. Raises the errors of `LLMEngine`, and EngineDeadError."""
        ready = [replica.wait_ready(self._terms.max_restarts) for replica in self.replicas]
        self._router = new_router(self._router_name, ready[0].block_size)
        return ready

    async def attach(self) -> None:
        """Bind the supervisor to the running event loop. Raises UsageError if it is bound to another loop."""
        loop = asyncio.get_running_loop()
        if self._attached is None:
            self._loop = loop
            attaching = (replica.connection.attach(loop) for replica in self.replicas)
            self._attached = asyncio.gather(*attaching)
            loop.call_later(LOOK_S, _look, weakref.ref(self))
        elif self._loop is not loop:
            raise UsageError("an EngineClient serves one event loop, that of its first call")
        if not self._attached.done():
            await asyncio.shield(self._attached)

    # Requests

    def next_key(self) -> int:
        """Return a new number that identifies a request in frames."""
        return next(self._keys)

    def unfinished(self, request_id: str) -> SentRequest | None:
        """Return the request with this id; None if it has finished, perhaps unread."""
        return self._requests.get(request_id)

    def choose(self, token_ids: Sequence[int]) -> SupervisedEngine | None:
        """Return an engine for a prompt; None if all are being replaced or compute a suspect alone."""
        replicas = [each for each in self.replicas if self._is_open(each) and not each.is_leaving]
        if not replicas:
            return None
        # A process that hangs gets requests only if all do.
        fit = [replica for replica in replicas if replica.is_fit] or replicas
        loads = [each.connection.load if each in fit else None for each in self.replicas]
        return self.replicas[choose_among(self._router, token_ids, loads)]

    def _is_open(self, replica: SupervisedEngine) -> bool:
        """Return whether a process may have requests of any kind."""
        is_taken = self._alone is not None and self._alone.connection is replica.connection
        return replica.is_up and not is_taken

    def begin(self, request: SentRequest, replica: SupervisedEngine | None) -> None:
        """Send a new request to an engine, or queue it until one is available.

        Raises RequestError if a value cannot be sent, QueueFullError if max_waiting requests are already
        waiting, and EngineDeadError.
        """
        self.check()
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use by an unfinished request")
        if replica is not None and self._is_open(replica):
            replica.connection.begin(request)
        else:
            most = self._max_waiting
            if most is not None and len(self._waiting) >= most:
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait for an engine process, and max_waiting is {most}; "
                    "try again later"
                )
            self._wait(request)
        self._requests[request.request_id] = request

    def fork(self, request: SentRequest, parent: SentRequest) -> None:
        """Send the fork of a request to the process that computes the request."""
        if parent.connection is None:
            self.begin(request, None)
        else:
            self.begin(request, self.replicas[parent.replica])

    def abort(self, request: SentRequest) -> None:
        """Abort a request that has lost its reader."""
        if request.connection is not None:
            request.connection.abort(request)
        self._forget(request)

    def end(self, request_id: str) -> None:
        """Abort an unfinished request, if it exists. Its reader still gets a last output."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.connection is not None:
            request.connection.end(request)
            return
        self._forget(request)
        if isinstance(request.order, frames.Generate):
            request.inbox.put(request.aborted())
        else:
            request.inbox.fail(RequestError(f"request {request_id!r} was aborted"))

    def _wait(self, request: SentRequest) -> None:
        self._waiting[request] = None
        request.has_waited = True
        if (left_s := request.left_s) is not None:
            assert self._loop is not None
            request.timer = self._loop.call_later(left_s, self._expire, request)

    def _expire(self, request: SentRequest) -> None:
        self._fail(request, RequestTimeoutError(TIMEOUT_MESSAGE))

    def _fail(self, request: SentRequest, error: PagedError) -> None:
        self._forget(request)
        # One for each reader: those that raise the same error would add to its traceback.
        own = type(error)(str(error))
        own.__cause__ = error.__cause__
        request.inbox.fail(own)

    def _dispatch(self) -> None:
        """Send waiting requests to the processes that can have them."""
        suspect = self._next_suspect() if self._alone is None else None
        quarantine = None if suspect is None else self._quarantine()
        if suspect is not None and quarantine is not None:
            self._set_alone(suspect)
            quarantine.connection.is_watched = True
            self._resume(suspect, quarantine)
        for request in [*self._waiting]:
            if request not in self._waiting or request.is_suspect:
                continue
            replica = self._place_of(request)
            if replica is not None and replica is not quarantine:
                self._resume(request, replica)

    def _next_suspect(self) -> SentRequest | None:
        """Return the request to compute alone next: the one that died alone before, or else died soonest.

        What ends processes does so soon after it comes, and the requests that run long wait for it alone. One
        whose reader is slow would compute nothing.
        """
        suspects = [each for each in self._waiting if each.is_suspect and not each.inbox.account.is_paused]
        return min(suspects, key=_order_of_suspects, default=None)

    def _set_alone(self, request: SentRequest | None) -> None:
        """Note which request is computed alone from now on."""
        if self._alone is not None:
            self._alone.suspicion.is_alone = False
            for replica in self.replicas:
                replica.connection.is_watched = False
        self._alone = request
        if request is not None:
            request.suspicion.is_alone = True

    def _quarantine(self) -> SupervisedEngine | None:
        """Return an engine without requests for a suspect; None until its requests have been moved."""
        fit = [each for each in self.replicas if each.is_fit and not each.is_leaving]
        if not fit:
            return None
        fewest = min(fit, key=lambda each: len(each.connection.requests))
        if fewest.connection.requests and len(fit) == len(self.replicas):  # none will come that is empty
            for key in sorted(requests := fewest.connection.requests):
                self._move(requests[key])
        return None if fewest.connection.requests else fewest

    def _place_of(self, request: SentRequest) -> SupervisedEngine | None:
        """Return an engine that can have a waiting request, if any; for a fork, the engine of its parent."""
        if request.follows is None:
            return self.choose(request.inbox.token_ids)
        parent = self._requests.get(request.follows)
        if parent is None:
            self._fail(request, EngineDeadError("the engine of the request and of its parent has ended"))
            return None
        replica = self.replicas[parent.replica]
        return replica if parent.connection is not None and self._is_open(replica) else None

    def _resume(self, request: SentRequest, replica: SupervisedEngine) -> None:
        del self._waiting[request]
        request.cancel_timer()
        replica.num_resumed += request.was_sent
        try:
            replica.connection.begin(request)
        except RequestError as error:
            self._fail(request, error)

    # Of the processes: `Owner`

    def on_end(self, request: SentRequest) -> None:
        """Forget a request that its process has answered."""
        self._forget(request)

    def _forget(self, request: SentRequest) -> None:
        self._waiting.pop(request, None)
        request.cancel_timer()
        if self._requests.get(request.request_id) is request:
            del self._requests[request.request_id]
        request.suspicion.end()
        if request.suspicion.is_alone:  # others may go on now
            self._set_alone(None)
            self._dispatch()

    def on_progress_alone(self, connection: EngineConnection) -> None:
        """If the suspect has run long enough, compute the next suspect alone, or else all other requests."""
        request = self._alone
        if request is None or request.connection is not connection:
            return
        if not request.suspicion.has_outlived(connection.num_steps):
            return
        self._set_alone(None)
        request.suspicion.clear()
        if any(other.is_suspect for other in self._waiting):
            self._put_aside(request)
        self._dispatch()

    def on_pause_alone(self, connection: EngineConnection) -> None:
        """If the reader of a suspect is slow, let other requests run meanwhile."""
        request = self._alone
        if request is not None and request.connection is connection and request.inbox.account.is_paused:
            self._set_alone(None)
            self._put_aside(request)
            self._dispatch()

    def _put_aside(self, request: SentRequest) -> None:
        """Let a request wait that a process has."""
        assert request.connection is not None
        request.connection.abort(request)
        request.has_left = True
        self._wait(request)

    def on_death(self, connection: EngineConnection) -> None:
        """Replace a process that has ended. Let its requests wait for another process."""
        replica = next((each for each in self.replicas if each.connection is connection), None)
        requests = connection.take_requests()
        error = connection.dead
        assert error is not None
        if self._is_closed or error.__cause__ is None:  # shut down
            for request in requests:
                self._fail(request, error)
            return
        if replica is None or not replica.is_up:
            return  # while it started, which `_start` is told
        death = replica.on_death()
        self._router.forget(connection.replica)
        for request in requests:
            self._after_death(request, death, connection)
        num_waiting = sum(request in self._waiting for request in requests)
        logger.error("%s; %d of its %d requests go on in another process", error, num_waiting, len(requests))
        if not replica.is_leaving:
            self._begin_replacing(replica, error)
        self._dispatch()

    def _after_death(self, request: SentRequest, death: Death, connection: EngineConnection) -> None:
        if self._requests.get(request.request_id) is not request:
            return  # the garbage collector closed its stream meanwhile
        request.has_left = True
        request.suspicion.on_death(death, connection.num_steps, connection.lived_until)
        if request.suspicion.is_alone:
            self._set_alone(None)
        if request.suspicion.is_proven:
            self._blame(request)
        elif not self._terms.resume or not request.can_go_on:
            assert connection.dead is not None
            self._fail(request, connection.dead)
        else:
            self._wait(request)

    def _blame(self, request: SentRequest) -> None:
        """End a request that is found to be what ended its processes.

        Other suspects are still computed alone if that takes less time than more deaths would; if not, what
        is explained is not held against them.
        """
        request.suspicion.explain()
        others = [each for each in self._requests.values() if each is not request]
        if sum(each.suspicion.time_alone_s for each in others if each.is_suspect) > MOST_TESTS_S:
            for each in others:
                each.suspicion.acquit()
        num = request.suspicion.num_deaths
        message = (
            f"{num} engine processes ended while they computed this request, the last {MOST_DEATHS_ALONE} "
            "nothing else"
        )
        logger.error("request %s is refused: %s", request.request_id, message)
        self._fail(request, RequestKillsEngineError(message))

    def _begin_replacing(self, replica: SupervisedEngine, error: EngineDeadError) -> None:
        assert self._loop is not None
        task = self._replacing[replica] = self._loop.create_task(self._replace(replica, error))

        def forget(task: asyncio.Task[None]) -> None:
            if self._replacing.get(replica) is task:
                del self._replacing[replica]

        task.add_done_callback(forget)

    async def _replace(self, replica: SupervisedEngine, error: EngineDeadError) -> None:
        """Start processes in place of one that has ended, until one serves."""
        pause_s = 0.0
        while True:
            await asyncio.to_thread(replica.connection.wait_end)
            if not replica.may_restart(self._terms.max_restarts):
                self._lose(error)
                return
            await asyncio.sleep(pause_s)
            if self._is_closed:
                return
            pause_s = next_pause(pause_s)
            connection = replica.begin_restart()
            try:
                await self._start(replica, connection)
            except PagedError as failure:
                if self._is_closed:
                    return
                error = caused(str(failure), failure)
                logger.error("%s", failure)
            else:
                logger.warning("%s serves again", connection.name)
                self._dispatch()
                return

    async def _start(self, replica: SupervisedEngine, connection: EngineConnection) -> None:
        """Wait until a new process serves. Raises PagedError if it does not."""
        assert self._loop is not None
        try:
            async with asyncio.timeout(replica.most_start_s):
                await connection.attach(self._loop)
                replica.on_ready(await connection.ready())
        except TimeoutError:
            connection.kill(f"has not made its engine within {replica.most_start_s:.0f} s")
            connection.check()
        except PagedError as error:
            connection.kill(str(error))
            raise

    def _lose(self, error: EngineDeadError) -> None:
        """End, as an engine cannot be had any more."""
        logger.error("%s, which is not started again: that was done too often", error)
        self._set_error(error)
        for request in [*self._waiting]:
            self._fail(request, error)

    def _set_error(self, error: EngineDeadError) -> None:
        for replica in self.replicas:
            replica.error = replica.error or error

    # More and fewer engines

    async def resize(self, num: int, num_sharing: int) -> None:
        """Add engines, or remove the engines with the highest numbers, while requests run.

        num_sharing: the number of engines that share the machine.

        Raises ConfigError if there is no room for more engines, EngineDeadError, and the errors of
        `LLMEngine`.
        """
        # What has begun goes on, also if none waits for it any more.
        task = asyncio.get_running_loop().create_task(self._resize(num, num_sharing))
        self._resizes.add(task)
        task.add_done_callback(self._resizes.discard)
        await asyncio.shield(task)

    async def _resize(self, num: int, num_sharing: int) -> None:
        async with self._resizing:
            self.check()
            if num <= len(self.replicas):
                leaving = self.replicas[num:]
                await asyncio.gather(*map(self._leave, leaving))
                self.removed |= {each.replica: each.stats for each in leaving}
                # Numbers stay places in this list.
                del self.replicas[num:]
                return
            await asyncio.to_thread(self._launcher.check_room, num - len(self.replicas))
            await self._add(num, num_sharing)
            for replica in self.replicas:  # in turns: the others serve
                if not replica.has_share_of(num_sharing):
                    await self._give_share(replica, num_sharing)

    async def _add(self, num: int, num_sharing: int) -> None:
        """Start engines until there are so many, all or none. They get requests once all serve."""
        first = self.replicas[0]
        new = self._new
        try:
            for number in range(len(self.replicas), num):
                new.append(first.begin_another(number, num_sharing, self.removed.get(number)))
            starts = [self._start(each, each.connection) for each in new]
            for failure in await asyncio.gather(*starts, return_exceptions=True):
                if failure is not None:
                    cause = failure.__cause__
                    raise cause if isinstance(cause, PagedError) else failure
            for each in new:
                each.connection.check()
            self.check()
        except BaseException:
            for each in new:
                await each.connection.aclose()
            new.clear()
            raise
        self.replicas += new
        for each in new:
            self.removed.pop(each.replica, None)
        new.clear()
        self._dispatch()

    async def _leave(self, replica: SupervisedEngine) -> None:
        """End an engine's process once it has no requests: those that can go on elsewhere do so."""
        replica.is_leaving = True
        self._router.forget(replica.replica)
        if (task := self._replacing.get(replica)) is not None:
            task.cancel()
            await asyncio.wait([task])
        while replica.is_up and replica.connection.requests:
            for key in sorted(requests := replica.connection.requests):
                self._move(requests[key])
            self._dispatch()
            await asyncio.sleep(LEAVE_S)
        if replica.is_up:
            replica.on_death()
        await replica.connection.aclose()

    def _move(self, request: SentRequest) -> None:
        """Let a request go on in another process, unless it has to end where it is."""
        if self._terms.resume and request.can_go_on and not request.suspicion.is_alone:
            self._put_aside(request)

    async def _give_share(self, replica: SupervisedEngine, num_sharing: int) -> None:
        """Replace the process of an engine by one with its share of the cores."""
        await self._leave(replica)
        self.check()
        connection = replica.begin_with_share_of(num_sharing)
        replica.is_leaving = False
        try:
            await self._start(replica, connection)
        except PagedError as failure:
            self._begin_replacing(replica, caused(str(failure), failure))
            raise
        self._dispatch()

    # LoRA adapters

    async def load_adapter(self, adapter: frames.Adapter) -> str:
        """Have all engines read an adapter. Return its hash. Engines that are replaced read it later.

        Raises RequestError if one cannot, and EngineDeadError if none is left.
        """
        while True:
            self.check()
            connections = [each.connection for each in self.replicas if each.is_up]
            loads = (connection.load_adapter(adapter) for connection in connections)
            found = await asyncio.gather(*loads, return_exceptions=True)
            for each in found:
                if isinstance(each, BaseException) and not isinstance(each, EngineDeadError):
                    raise each
            hashes = {each for each in found if isinstance(each, str)}
            if len(hashes) > 1:
                raise RequestError(
                    f"adapter {adapter.name!r} cannot be used: its files were changed while they were read",
                    param="lora_path",
                )
            if hashes:
                return hashes.pop()
            await asyncio.sleep(LEAVE_S)  # all are being replaced

    def set_adapters(self, adapters: Sequence[frames.Adapter]) -> None:
        """Have later processes of all engines read these adapters before they serve."""
        for engine in (*self.replicas, *self._new):
            engine.set_adapters(adapters)

    def forget_adapter(self, content_hash: str) -> None:
        """Have all engines free the memory of an adapter. Unfinished requests keep it."""
        for engine in self.replicas:
            if engine.is_up:
                engine.connection.tell(frames.ForgetAdapter(content_hash))

    # Hangs and ends

    def look(self) -> None:
        """End processes that hang."""
        now = time.monotonic()
        is_late = now - self._looked_at > 2 * LOOK_S
        self._looked_at = now
        for replica in self.replicas:
            if is_late:  # this process was held, and perhaps the others, too: their time counts from now
                replica.connection.heard_at = replica.connection.moved_at = now
            elif replica.is_up and (why := replica.why_hung(self._terms.step_timeout)) is not None:
                replica.connection.kill(why)
        self._dispatch()  # a process may have become fit
        if not self._is_closed and self._loop is not None:
            self._loop.call_later(LOOK_S, _look, weakref.ref(self))

    def check(self) -> None:
        """Raise EngineDeadError once no process will serve any more."""
        self.replicas[0].check()

    def close(self) -> None:
        """End all processes. Any thread may call this. Readers get EngineDeadError."""
        self._is_closed = True
        self.call_in_loop(self._shut_down)
        for replica in (*self.replicas, *self._new):
            replica.connection.close()

    async def aclose(self) -> None:
        """End all processes, in the event loop of `attach`; see `close`."""
        self._is_closed = True
        self._shut_down()
        for task in (*self._replacing.values(), *self._resizes):  # which would begin others
            task.cancel()
        for replica in (*self.replicas, *self._new):
            await replica.connection.aclose()

    def _shut_down(self) -> None:
        error = EngineDeadError("the engine was shut down")
        self._set_error(error)
        for request in [*self._waiting]:
            self._fail(request, error)

    def call_in_loop(self, function: Callable[[], None]) -> None:
        """Call a function in the event loop: soon, or at once if this thread runs the loop."""
        call_in_loop(self._loop, function)


def _order_of_suspects(request: SentRequest) -> tuple[int, float]:
    return -request.suspicion.num_deaths_alone, request.suspicion.survived_s


def _look(supervisor: weakref.ref[Supervisor]) -> None:
    # A supervisor whose client is not used any more is collected.
    if (alive := supervisor()) is not None:
        alive.look()
