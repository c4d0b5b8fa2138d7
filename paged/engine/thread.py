"""EngineThread: the thread that owns an engine, and the mailboxes through which readers get outputs."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ..errors import EngineDeadError
from ..requests.request import Outbox, Request, RequestOutput
from ..sampling_params import RequestOutputKind
from ..scheduler.schedule import Schedule
from .engine import LLMEngine
from .request_factory import Prepared, RequestSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHOW_SHARE = 0.01  # of the time may be spent on making outputs of unfinished requests


class Mailbox(Outbox):
    """The outputs that one reader has not read yet: at most one, and the last one.

    The engine's thread calls `put` and `fail`, the reader's event loop `get`. Each side first publishes its
    own state (an output, a waiter) and then checks the other's, so that no wake-up is lost.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, kind: RequestOutputKind, news: list[Mailbox]) -> None:
        super().__init__()
        if kind is RequestOutputKind.CUMULATIVE:
            self._outputs = deque(maxlen=1)  # the newest output holds all text
        self.loop = loop
        self._news = news  # the thread's list of mailboxes to wake
        self._waiter: asyncio.Future[None] | None = None
        self._failed: BaseException | None = None

    def wants(self, kind: RequestOutputKind) -> bool:
        """Return whether to make an output now. No delta is made while another is unread: it accumulates."""
        return kind is RequestOutputKind.CUMULATIVE or (kind is RequestOutputKind.DELTA and not self._outputs)

    def put(self, output: RequestOutput) -> None:
        """Add the newest output."""
        if self._failed is None:
            super().put(output)
        if self._waiter is not None:
            self._news.append(self)

    def fail(self, error: BaseException) -> None:
        """Make `get` raise this error once all outputs are read."""
        self._failed = error
        with suppress(RuntimeError):  # the event loop is closed
            self.loop.call_soon_threadsafe(self.wake)

    def follow(self, call: Future[None]) -> None:
        """Fail if the call that adds the request failed."""
        error = None if call.cancelled() else call.exception()
        if error is not None:
            self.fail(error)

    async def get(self) -> RequestOutput:
        """Return the next output. Raises the error of `fail` when there is none."""
        while not self._outputs:
            waiter = self._waiter = self.loop.create_future()
            try:
                if not self._outputs:
                    if isinstance(self._failed, EngineDeadError):
                        raise _copy_of(self._failed)
                    if self._failed is not None:
                        raise self._failed
                    await waiter
            finally:
                self._waiter = None
        return self._outputs.popleft()

    def wake(self) -> None:
        """Resume `get`. Runs in the reader's event loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineThread:
    """The thread that owns an engine. Other threads hand it functions to call between two steps.

    stream_interval_s: longest delay of an output of an unfinished request, in seconds. Where steps are short
        and readers many, tokens are held back so that making outputs takes at most SHOW_SHARE of the time.
    """

    def __init__(self, engine: LLMEngine, stream_interval_s: float) -> None:
        self.engine, self._stream_interval_s = engine, stream_interval_s
        self._unshown: dict[Request, None] = {}  # requests with tokens that are held back
        self._has_prompts = False  # whether the last step computed prompts
        self._show_next = -math.inf  # the time at which held-back tokens are due
        self.news: list[Mailbox] = []  # mailboxes that got an output and have a waiting reader
        self.dead: EngineDeadError | None = None
        self._is_stopping = False
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[LLMEngine], Any]]] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="paged-engine", daemon=True)
        self.thread.start()

    # From any thread

    def check(self) -> None:
        """Raise EngineDeadError if the engine has stopped."""
        if self.dead is not None:
            raise _copy_of(self.dead)

    def submit(self, function: Callable[[LLMEngine], T]) -> Future[T]:
        """Call a function of the engine between two steps. Return its future.

        Raises EngineDeadError.
        """
        self.check()
        future: Future[T] = Future()
        self._calls.put((future, function))
        if self.dead is not None:  # it stopped in between, perhaps before it could see this call
            self._refuse_calls()
        return future

    def call(self, function: Callable[[LLMEngine], T]) -> Future[T]:
        """Call a user's function between two steps, after all tokens held back are shown."""

        def called(engine: LLMEngine) -> T:
            self._show()
            return function(engine)

        return self.submit(called)

    def prepare(self, spec: RequestSpec) -> RequestSpec:
        """Do the slow part of making a request, which needs none of the engine's state."""
        assert not isinstance(spec.prompt, Prepared)
        factory = self.engine.core.factory
        params = factory.params_of(spec)
        return replace(spec, prompt=factory.prepare(spec.prompt, params), sampling_params=params)

    def add(self, request_id: str, spec: RequestSpec, mailbox: Mailbox) -> Future[None]:
        """Queue a prepared request. Its mailbox fails if the engine refuses it."""
        call = self.submit(lambda engine: engine.core.add(request_id, spec, mailbox))
        call.add_done_callback(mailbox.follow)
        return call

    def abort(self, request_id: str, mailbox: Mailbox) -> None:
        """Abort the request of this mailbox, whose reader is gone."""

        def abort(engine: LLMEngine) -> None:
            # The request may be finished, or refused because its id is in use by another one.
            group = engine.core.groups.get(request_id)
            if group is not None and group.outbox is mailbox:
                engine.abort_request(request_id)

        with suppress(EngineDeadError):
            self.submit(abort)

    def stop(self) -> None:
        """End the thread after its current step."""
        if self.dead is None:
            self._calls.put((Future(), self._request_stop))
        if threading.current_thread() is not self.thread:
            self.thread.join()

    # On the engine's thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._make_calls()
                if not self._is_stopping and self.engine.core.has_work():
                    self._step()
        except BaseException as error:
            logger.exception("the engine has stopped")
            self._die(error)
        else:
            self._die(None)

    def _request_stop(self, _engine: LLMEngine) -> None:
        self._is_stopping = True

    def _make_calls(self) -> None:
        """Make the submitted calls. If the engine has no work, wait for one."""
        is_idle = not self.engine.core.has_work()
        if is_idle:
            self._unshown.clear()
        while True:
            try:
                future, function = self._calls.get(block=is_idle)
            except Empty:
                break
            is_idle = False
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self.engine))
                except Exception as error:  # raised to the caller; the engine goes on
                    future.set_exception(error)
                except BaseException as error:
                    future.set_exception(_stopped_by(error))
                    raise
        self._notify()

    def _step(self) -> None:
        self._unshown |= dict.fromkeys(self.engine.core.step(on_schedule=self._on_schedule))
        if self._has_prompts or time.monotonic() >= self._show_next:
            self._show()
        else:
            self._notify()

    def _on_schedule(self, schedule: Schedule) -> None:
        """Show held-back tokens before a step that computes prompts, which may take long."""
        self._has_prompts = not schedule.is_decode
        if self._has_prompts and self._unshown:
            self._show()

    def _show(self) -> None:
        """Publish the tokens that were held back."""
        started = time.monotonic()
        core = self.engine.core
        # The id of an aborted request may belong to another one by now.
        core.publish(core.groups_of([r for r in self._unshown if r.finish_reason != "abort"]))
        self._unshown.clear()
        self._notify()
        now = time.monotonic()
        self._show_next = now + min((now - started) / SHOW_SHARE, self._stream_interval_s)

    def _notify(self) -> None:
        """Wake the readers that have new outputs, all of one event loop by one call."""
        if not self.news:
            return
        by_loop: dict[asyncio.AbstractEventLoop, list[Mailbox]] = defaultdict(list)
        for mailbox in self.news:
            by_loop[mailbox.loop].append(mailbox)
        self.news.clear()
        for loop, mailboxes in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake, mailboxes)
            except RuntimeError:  # the event loop is closed
                logger.debug("the event loop of %d readers is closed", len(mailboxes))

    def _die(self, cause: BaseException | None) -> None:
        """Fail all calls and mailboxes, then abort all requests, so that the engine holds no blocks."""
        if cause is None:
            self.dead = EngineDeadError("the engine was shut down")
        else:
            self.dead = _stopped_by(cause)
        self._refuse_calls()
        groups = [*self.engine.core.groups.values()]
        for group in groups:
            if isinstance(group.outbox, Mailbox):
                group.outbox.fail(self.dead)
        self._notify()
        for group in groups:
            self.engine.abort_request(group.request_id)

    def _refuse_calls(self) -> None:
        assert self.dead is not None
        while True:
            try:
                future, _ = self._calls.get_nowait()
            except Empty:
                return
            if future.set_running_or_notify_cancel():
                future.set_exception(_copy_of(self.dead))


def _wake(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()


def _stopped_by(cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(f"the engine has stopped: {type(cause).__name__}: {cause}; make a new one")
    error.__cause__ = cause
    return error


def _copy_of(error: EngineDeadError) -> EngineDeadError:
    """Return the same error for one more caller, so that tracebacks do not mix."""
    copy = EngineDeadError(str(error))
    copy.__cause__ = error.__cause__
    return copy
