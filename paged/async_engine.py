"""AsyncLLMEngine: one engine on a thread of its own, for callers on any event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

from .engine import LLMEngine
from .errors import EngineDeadError, UsageError
from .request import Outbox, Prompt, RequestOutput
from .request_factory import Prepared
from .sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Characters or tokens that are checked and encoded at once; more would hold up the caller's event loop.
MOST_AT_ONCE = 1024


class AsyncLLMEngine:
    """Serves one model to coroutines, with the options of `LLMEngine`.

    >>> async with AsyncLLMEngine("demo") as engine:
    ...     async for output in engine.generate("def add(a, b):", SamplingParams(max_tokens=16)):
    ...         print(output.outputs[0].text)

    A thread owns the engine and steps it while there is work. Callers may be on several event loops and
    threads. A reader that is slow holds up nobody, and is shown less often: a cumulative output takes the
    place of one that was not read, and the next delta holds all that came since the last.

    A step that raises ends the engine: all callers, then and later, get EngineDeadError from what it raised.
    `LLMEngine` would compute everybody again; here nobody is there to see that it fails every time.

    Raises what `LLMEngine` does.
    """

    def __init__(self, model: str, **options: Any) -> None:
        # On a thread that then ends: OpenMP keeps workers for every thread that lives and once used them, and
        # with more workers than cores they sleep between any two operations. A step takes twice as long then.
        with ThreadPoolExecutor(1) as maker:
            engine = maker.submit(LLMEngine, model, **options).result()
        self._start(engine)

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> Self:
        """One that takes over an engine, which nobody else may use until `shutdown`.

        On a CPU its steps may take twice as long as those of one that was made here: see __init__.

        Raises UsageError if that has unfinished requests.
        """
        if engine.has_unfinished_requests():
            raise UsageError("the engine has unfinished requests; finish or abort them first")
        self = cls.__new__(cls)
        self._start(engine)
        return self

    def _start(self, engine: LLMEngine) -> None:
        self._core = _Core(engine)
        # Also when nobody refers to it any more, and before the interpreter goes down.
        self._finalizer = weakref.finalize(self, self._core.stop)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: float | None = None,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> RequestStream:
        """The outputs of a prompt as they come: after each step what output_kind says, the last one finished.

        The request begins when the first output is asked for. It is aborted, and its blocks are free within
        a step, if the task that reads is cancelled, or the iterator is closed or dropped. The arguments are
        those of `LLMEngine.add_request`; without a request_id it has the next number.

        Iterating raises RequestError if the prompt or a parameter is wrong, QueueFullError if max_waiting
        requests wait already, and EngineDeadError.
        """
        request_id = self._core.engine._next_id() if request_id is None else request_id
        params = SamplingParams() if sampling_params is None else sampling_params
        return RequestStream(self, _Order(request_id, prompt, params, priority, tenant, timeout_s))

    async def abort(self, request_id: str) -> None:
        """End a request: its reader gets a last output. Nothing if there is no unfinished one of this id."""
        if self.is_running:
            await self.call(lambda engine: engine.abort_request(request_id))

    async def call(self, function: Callable[[LLMEngine], T]) -> T:
        """What the function returns for the engine, called on its thread between two steps.

        Nobody is served meanwhile. Raises what the function does, and EngineDeadError.
        """
        return await asyncio.wrap_future(self._core.submit(function))

    def shutdown(self) -> None:
        """Abort all requests, whose readers get EngineDeadError, and end the thread. Waits for its step."""
        self._finalizer()
        self._core.stop()

    @property
    def is_running(self) -> bool:
        """Whether requests are served: from the beginning until `shutdown` or a step that raises."""
        return self._core.dead is None

    @property
    def errored(self) -> bool:
        """Whether a step has raised."""
        return self.dead_error is not None and self.dead_error.__cause__ is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why no requests are served any more."""
        return self._core.dead

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of a request, for one reader.

    request_id: that of its outputs, and for `AsyncLLMEngine.abort`.
    """

    def __init__(self, engine: AsyncLLMEngine, order: _Order) -> None:
        self.request_id = order.request_id
        self._owner = engine  # which must not be collected while somebody reads
        self._core, self._order = engine._core, order
        self._mailbox: _Mailbox | None = None
        self._is_over = False

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        try:
            if self._mailbox is None:
                self._mailbox = await self._begin()
            output = await self._mailbox.get()
        except BaseException:  # cancelled, most of all
            self._abort()
            raise
        self._is_over = output.finished
        return output

    async def aclose(self) -> None:
        """Abort the request if it is not finished."""
        self._abort()

    def __del__(self) -> None:
        self._abort()

    async def _begin(self) -> _Mailbox:
        core, order = self._core, self._order
        core.check()
        if order.is_short:
            prompt = core.prepare(order)
        else:
            prompt = await asyncio.to_thread(core.prepare, order)
        # From here on there may be a request to abort.
        self._mailbox = _Mailbox(asyncio.get_running_loop(), order.params.output_kind, core.news)
        await asyncio.wrap_future(core.add(order, prompt, self._mailbox))
        return self._mailbox

    def _abort(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._mailbox is not None:
                self._core.abort(self.request_id, self._mailbox)


@dataclass(frozen=True, slots=True)
class _Order:
    """What a caller asked for, unchecked."""

    request_id: str
    prompt: Prompt
    params: SamplingParams
    priority: float | None
    tenant: str
    timeout_s: float | None

    @property
    def is_short(self) -> bool:
        """Whether so little is to be checked, encoded and compiled that it holds up no event loop."""
        parts: list[Any] = [*self.prompt.values()] if isinstance(self.prompt, Mapping) else [self.prompt]
        if isinstance(params := self.params, SamplingParams):
            if params.structured_outputs is not None or params.dry_multiplier:
                return False
            parts += (*params.stop, *params.bad_words)
        return sum(len(part) for part in parts if isinstance(part, Sized)) <= MOST_AT_ONCE


class _Mailbox(Outbox):
    """What a reader has not read yet: at most one output, and a last one.

    The engine's thread puts and fails, the reader's gets. Each first says what it does and then looks at what
    the other one did, so that none waits for what is there.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, kind: RequestOutputKind, news: list[_Mailbox]
    ) -> None:
        super().__init__()
        if kind is RequestOutputKind.CUMULATIVE:
            self._outputs = deque(maxlen=1)  # the newest says it all
        self.loop = loop
        self._news = news  # where the thread finds whom to wake
        self._waiter: asyncio.Future[None] | None = None
        self._failed: EngineDeadError | None = None

    def wants(self, kind: RequestOutputKind) -> bool:
        """Not if that would be one more delta to keep: the next one will hold it."""
        return kind is RequestOutputKind.CUMULATIVE or (kind is RequestOutputKind.DELTA and not self._outputs)

    def put(self, output: RequestOutput) -> None:
        """Add the newest output."""
        if self._failed is None:
            super().put(output)
        if self._waiter is not None:
            self._news.append(self)

    def fail(self, error: EngineDeadError) -> None:
        """There will be no more."""
        self._failed = error
        self._news.append(self)

    async def get(self) -> RequestOutput:
        """The next output. Raises EngineDeadError if there will be none."""
        while not self._outputs:
            waiter = self._waiter = self.loop.create_future()
            try:
                if not self._outputs:
                    if self._failed is not None:
                        raise _again(self._failed)
                    await waiter
            finally:
                self._waiter = None
        return self._outputs.popleft()

    def wake(self) -> None:
        """Let the reader look, in his event loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Core:
    """The thread that owns an engine, and what others hand it."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.news: list[_Mailbox] = []  # who got something in this step and waits for it
        self.dead: EngineDeadError | None = None
        self._is_stopping = False
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[LLMEngine], Any]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paged-engine", daemon=True)
        self._thread.start()

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

    def prepare(self, order: _Order) -> Prepared:
        """Do all that takes long and needs nothing of the engine's state."""
        return self.engine._factory.prepare(order.prompt, order.params)

    def add(self, order: _Order, prompt: Prepared, mailbox: _Mailbox) -> Future[None]:
        """Queue a request."""
        terms = (order.priority, order.tenant, order.timeout_s)
        return self.submit(
            lambda engine: engine._queue(order.request_id, prompt, order.params, *terms, outbox=mailbox)
        )

    def abort(self, request_id: str, mailbox: _Mailbox) -> None:
        """End the request of this mailbox, which nobody reads any more."""

        def abort(engine: LLMEngine) -> None:
            # Another one may have its id: it was taken, or is free again.
            if request_id in engine._groups and engine._groups[request_id].outbox is mailbox:
                engine.abort_request(request_id)

        with suppress(EngineDeadError):
            self.submit(abort)

    def stop(self) -> None:
        """End the thread, which finishes its step."""
        if self.dead is None:
            self._calls.put((Future(), self._note_stop))
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # On the engine's thread

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._make_calls()
                if not self._is_stopping and self.engine.has_unfinished_requests():
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
        is_idle = not self.engine.has_unfinished_requests()
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
        engine = self.engine
        engine._publish(engine._groups_of(engine._advance()))
        self._notify()

    def _notify(self) -> None:
        """Wake who waits for what there is now, all readers of a loop at once."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_Mailbox]] = defaultdict(list)
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
        groups = [*self.engine._groups.values()]
        for group in groups:
            if isinstance(group.outbox, _Mailbox):
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


def _wake(mailboxes: list[_Mailbox]) -> None:
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
