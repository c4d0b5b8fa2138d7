"""AsyncLLMEngine: one engine on a thread of its own, for callers on any event loop."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar

from ..errors import ConfigError, EngineDeadError, UsageError
from ..requests.request import Prompt, RequestOutput
from ..sampling_params import SamplingParams
from ..validation import check_number
from .engine import LLMEngine
from .generation import Row
from .thread import EngineThread, Mailbox

T = TypeVar("T")

# Characters or tokens that are checked and encoded at once; more would hold up the caller's event loop.
MOST_AT_ONCE = 1024
STREAM_INTERVAL_S = 0.2  # one still reads along


class AsyncLLMEngine:
    """Serves one model to coroutines, with the options of `LLMEngine`.

    >>> async with AsyncLLMEngine("demo") as engine:
    ...     async for output in engine.generate("def add(a, b):", SamplingParams(max_tokens=16)):
    ...         print(output.outputs[0].text)

    A thread owns the engine and steps it while there is work. Callers may be on several event loops and
    threads. A reader that is slow holds up nobody, and is shown less often: a cumulative output takes the
    place of one that was not read, and the next delta holds all that came since the last.

    stream_interval_s: how many seconds tokens may be kept back, so that one output shows several. They are
        where steps are so short and readers so many that showing each token by itself would take more than a
        hundredth of the time; 0 does that. Never kept back are the first token, the end, and what comes
        before a step with prompts to compute.

    A step that raises ends the engine: all callers, then and later, get EngineDeadError from what it raised.
    `LLMEngine` would compute everybody again; here nobody is there to see that it fails every time.

    Raises what `LLMEngine` does.
    """

    def __init__(self, model: str, *, stream_interval_s: float = STREAM_INTERVAL_S, **options: Any) -> None:
        # On a thread that then ends: OpenMP keeps workers for every thread that lives and once used them, and
        # with more workers than cores they sleep between any two operations. A step takes twice as long then.
        _check_interval(stream_interval_s)
        with ThreadPoolExecutor(1) as maker:
            engine = maker.submit(LLMEngine, model, **options).result()
        self._start(engine, stream_interval_s)

    @classmethod
    def from_engine(cls, engine: LLMEngine, *, stream_interval_s: float = STREAM_INTERVAL_S) -> Self:
        """One that takes over an engine, which nobody else may use until `shutdown`.

        On a CPU its steps may take twice as long as those of one that was made here: see __init__.

        Raises UsageError if that has unfinished requests.
        """
        _check_interval(stream_interval_s)
        if engine.has_unfinished_requests():
            raise UsageError("the engine has unfinished requests; finish or abort them first")
        self = cls.__new__(cls)
        self._start(engine, stream_interval_s)
        return self

    def _start(self, engine: LLMEngine, stream_interval_s: float) -> None:
        self._thread = EngineThread(engine, stream_interval_s)
        # Also when nobody refers to it any more, and before the interpreter goes down.
        self._finalizer = weakref.finalize(self, self._thread.stop)

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
        """The outputs of a prompt as they come: each is what output_kind says, and the last one finished.

        The request begins when the first output is asked for. It is aborted, and its blocks are free within
        a step, if the task that reads is cancelled, or the iterator is closed or dropped. The arguments are
        those of `LLMEngine.add_request`; without a request_id it has the next number.

        Iterating raises RequestError if the prompt or a parameter is wrong, QueueFullError if max_waiting
        requests wait already, and EngineDeadError.
        """
        request_id = self._thread.engine.core.next_id() if request_id is None else request_id
        params = SamplingParams() if sampling_params is None else sampling_params
        return RequestStream(self, request_id, Row(prompt, params, priority, tenant, timeout_s))

    async def abort(self, request_id: str) -> None:
        """End a request: its reader gets a last output. Nothing if there is no unfinished one of this id."""
        if self.is_running:
            await self.call(lambda engine: engine.abort_request(request_id))

    async def call(self, function: Callable[[LLMEngine], T]) -> T:
        """What the function returns for the engine, called on its thread between two steps.

        Nobody is served meanwhile. Raises what the function does, and EngineDeadError.
        """
        return await asyncio.wrap_future(self._thread.call(function))

    def shutdown(self) -> None:
        """Abort all requests, whose readers get EngineDeadError, and end the thread. Waits for its step."""
        self._finalizer()
        self._thread.stop()

    @property
    def is_running(self) -> bool:
        """Whether requests are served: from the beginning until `shutdown` or a step that raises."""
        return self._thread.dead is None

    @property
    def errored(self) -> bool:
        """Whether a step has raised."""
        return self.dead_error is not None and self.dead_error.__cause__ is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """Why no requests are served any more."""
        return self._thread.dead

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)


class RequestStream(AsyncIterator[RequestOutput]):
    """The outputs of a request, for one reader.

    request_id: that of its outputs, and for `AsyncLLMEngine.abort`.
    """

    def __init__(self, engine: AsyncLLMEngine, request_id: str, row: Row) -> None:
        self.request_id = request_id
        self._owner = engine  # which must not be collected while somebody reads
        self._thread, self._row = engine._thread, row
        self._mailbox: Mailbox | None = None
        self._adding: Future[None] | None = None
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

    async def _begin(self) -> Mailbox:
        thread, row = self._thread, self._row
        thread.check()
        if _is_short(row):
            prompt = thread.prepare(row)
        else:
            prompt = await asyncio.to_thread(thread.prepare, row)
        # From here on there may be a request to abort.
        kind = row.sampling_params.output_kind
        self._mailbox = Mailbox(asyncio.get_running_loop(), kind, thread.news)
        self._adding = thread.add(self.request_id, prompt, row, self._mailbox)
        return self._mailbox

    def _abort(self) -> None:
        if not self._is_over:
            self._is_over = True
            if self._mailbox is not None and not (self._adding and self._adding.cancel()):
                self._thread.abort(self.request_id, self._mailbox)


def _check_interval(seconds: float) -> None:
    check_number(ConfigError, "stream_interval_s", seconds, 0.0)


def _is_short(row: Row) -> bool:
    """Whether so little is to be checked, encoded and compiled that it holds up no event loop."""
    parts: list[Any] = [*row.prompt.values()] if isinstance(row.prompt, Mapping) else [row.prompt]
    if isinstance(params := row.sampling_params, SamplingParams):
        if params.structured_outputs is not None or params.dry_multiplier:
            return False
        parts += (*params.stop, *params.bad_words)
    return sum(len(part) for part in parts if isinstance(part, Sized)) <= MOST_AT_ONCE
