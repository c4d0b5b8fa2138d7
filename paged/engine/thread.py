"""EngineThread: the thread that owns an engine, what others hand it, and the mailboxes it puts outputs in."""

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
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from ..errors import EngineDeadError
from ..requests.request import Outbox, Request, RequestOutput
from ..sampling_params import RequestOutputKind
from ..scheduler.schedule import Schedule
from .engine import LLMEngine
from .generation import Row
from .request_factory import Prepared

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHOW_SHARE = 0.01


class Mailbox(Outbox):
    """What a reader has not read yet: at most one output, and a last one.

    The engine's thread puts and fails, the reader's gets. Each first says what it does and then looks at what
    the other one did, so that none waits for what is there.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, kind: RequestOutputKind, news: list[Mailbox]) -> None:
        super().__init__()
        if kind is RequestOutputKind.CUMULATIVE:
            self._outputs = deque(maxlen=1)  # the newest says it all
        self.loop = loop
        self._news = news  # where the thread finds whom to wake
        self._waiter: asyncio.Future[None] | None = None
        self._failed: BaseException | None = None

    def wants(self, kind: RequestOutputKind) -> bool:
        """Not if that would be one more delta to keep: the next one will hold it."""
        return kind is RequestOutputKind.CUMULATIVE or (kind is RequestOutputKind.DELTA and not self._outputs)

    def put(self, output: RequestOutput) -> None:
        """Add the newest output."""
        if self._failed is None:
            super().put(output)
        if self._waiter is not None:
            self._news.append(self)

    def fail(self, error: BaseException) -> None:
        """There will be no more."""
        self._failed = error
        with suppress(RuntimeError):  # the loop is closed, and the reader with it
            self.loop.call_soon_threadsafe(self.wake)

    def follow(self, call: Future[None]) -> None:
        """Fail if what was to fill it did."""
        error = None if call.cancelled() else call.exception()
        if error is not None:
            self.fail(error)

    async def get(self) -> RequestOutput:
        """The next output. Raises why there will be none."""
        while not self._outputs:
            waiter = self._waiter = self.loop.create_future()
            try:
                if not self._outputs:
                    if isinstance(self._failed, EngineDeadError):
                        raise _again(self._failed)
                    if self._failed is not None:
                        raise self._failed
                    await waiter
            finally:
                self._waiter = None
        return self._outputs.popleft()

    def wake(self) -> None:
        """Let the reader look, in his event loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineThread:
    """The thread that owns an engine, and what others hand it.

    stream_interval_s: how long the outputs of unfinished requests are kept back at most, to show several
        tokens at once. They are where steps are short and readers many, so that making outputs takes no more
        than SHOW_SHARE of the time.
    """

    def __init__(self, engine: LLMEngine, stream_interval_s: float) -> None:
        self.engine, self._stream_interval_s = engine, stream_interval_s
        self._unshown: dict[Request, None] = {}  # those with tokens that are kept back
        self._has_prompts = False  # the last step
        self._show_next = -math.inf  # when everybody's are to be shown
        self.news: list[Mailbox] = []  # who got something in this step and waits for it
        self.dead: EngineDeadError | None = None
        self._is_stopping = False
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[LLMEngine], Any]]] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="paged-engine", daemon=True)
        self.thread.start()

    # From any thread

    def check(self) -> None:
        """Raise EngineDeadError if nobody is served any more."""
        if self.dead is not None:
            raise _again(self.dead)

    def submit(self, function: Callable[[LLMEngine], T]) -> Future[T]:
        """Have a function called between two steps."""
        self.check()
        future: Future[T] = Future()
        self._calls.put((future, function))
        if self.dead is not None:  # it died in between, and may have looked before
            self._refuse_calls()
        return future

    def call(self, function: Callable[[LLMEngine], T]) -> Future[T]:
        """Have a function of a caller's own called between two steps. Nothing is kept back meanwhile."""

        def called(engine: LLMEngine) -> T:
            self._show()
            return function(engine)

        return self.submit(called)

    def prepare(self, row: Row) -> Prepared:
        """Do all that takes long and needs nothing of the engine's state."""
        return self.engine.core.factory.prepare(row.prompt, row.sampling_params)

    def add(self, request_id: str, prompt: Prepared, row: Row, mailbox: Mailbox) -> Future[None]:
        """Queue a request of this row, whose prompt is prepared. Its mailbox fails if that is refused."""
        _, *terms = row
        call = self.submit(lambda engine: engine.core.queue(request_id, prompt, *terms, outbox=mailbox))
        call.add_done_callback(mailbox.follow)
        return call

    def abort(self, request_id: str, mailbox: Mailbox) -> None:
        """End the request of this mailbox, which nobody reads any more."""

        def abort(engine: LLMEngine) -> None:
            # Another one may have its id: it was taken, or is free again.
            group = engine.core.groups.get(request_id)
            if group is not None and group.outbox is mailbox:
                engine.abort_request(request_id)

        with suppress(EngineDeadError):
            self.submit(abort)

    def stop(self) -> None:
        """End the thread, which finishes its step."""
        if self.dead is None:
            self._calls.put((Future(), self._note_stop))
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

    def _note_stop(self, _engine: LLMEngine) -> None:
        self._is_stopping = True

    def _make_calls(self) -> None:
        """Make the calls there are; without anything else to do wait for one."""
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
                except Exception as error:  # the caller's, as far as one can know
                    future.set_exception(error)
                except BaseException as error:
                    future.set_exception(_stopped_by(error))
                    raise
        self._notify()

    def _step(self) -> None:
        core = self.engine.core
        self._unshown |= dict.fromkeys(core.advance(self._note_kind))
        if self._has_prompts or time.monotonic() >= self._show_next:
            self._show()
        else:
            core.publish(())
            self._notify()

    def _note_kind(self, schedule: Schedule) -> None:
        """Keep nothing back during a step that computes prompts, which may take long, nor after it."""
        self._has_prompts = not schedule.is_decode
        if self._has_prompts and self._unshown:
            self._show()

    def _show(self) -> None:
        """Publish what was kept back."""
        started = time.monotonic()
        core = self.engine.core
        # Another one may have the id of who was aborted.
        core.publish(core.groups_of([r for r in self._unshown if r.finish_reason != "abort"]))
        self._unshown.clear()
        self._notify()
        now = time.monotonic()
        self._show_next = now + min((now - started) / SHOW_SHARE, self._stream_interval_s)

    def _notify(self) -> None:
        """Wake who waits for what there is now, all readers of a loop at once."""
        if not self.news:
            return
        by_loop: dict[asyncio.AbstractEventLoop, list[Mailbox]] = defaultdict(list)
        for mailbox in self.news:
            by_loop[mailbox.loop].append(mailbox)
        self.news.clear()
        for loop, mailboxes in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake, mailboxes)
            except RuntimeError:  # the loop is closed, and its readers with it
                logger.debug("the event loop of %d readers is closed", len(mailboxes))

    def _die(self, cause: BaseException | None) -> None:
        """Tell everybody, and leave an engine that holds nothing."""
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
                future.set_exception(_again(self.dead))


def _wake(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()


def _stopped_by(cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(f"the engine has stopped: {type(cause).__name__}: {cause}; make a new one")
    error.__cause__ = cause
    return error


def _again(error: EngineDeadError) -> EngineDeadError:
    """The same error for one more caller: a traceback belongs to one."""
    copy = EngineDeadError(str(error))
    copy.__cause__ = error.__cause__
    return copy
