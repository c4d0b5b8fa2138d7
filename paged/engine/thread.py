"""EngineThread: the thread that owns an engine, and the mailboxes through which readers get outputs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import defaultdict, deque
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ..base.errors import EngineDeadError
from ..options.sampling_params import RequestOutputKind
from ..requests.request import RequestGroup, RequestOutput
from ..scheduler.picture import EnginePicture
from ..scheduler.stats import EngineStats
from .answer_memory import CANDIDATE_BYTES, PAUSE_BYTES, TOKEN_BYTES
from .engine import LLMEngine
from .loop import EngineLoop, Recipient, copy_of
from .reports import ReportSpec
from .request_spec import closed_error

logger = logging.getLogger(__name__)


class Mailbox(Recipient):
    """The unread outputs of one request: at most the newest output and the final one.

    The engine's thread calls `put`, `pauses` and `fail`; the reader's event loop calls `get`. Each side first
    publishes its own state (an output, a waiter, a pause) and then checks the other side's state, so that no
    wake-up is lost. A Mailbox is a `RequestHandle`.

    spec: the `ReportSpec`, if the request only reports on its prompt.
    adding: the call that adds the request to the engine.
    is_paused: whether the request is held because its reader is too far behind.
    """

    def __init__(
        self,
        thread: EngineThread,
        loop: asyncio.AbstractEventLoop,
        request_id: str,
        kind: RequestOutputKind,
        spec: ReportSpec[Any] | None = None,
    ) -> None:
        super().__init__()
        if kind is RequestOutputKind.CUMULATIVE:
            self._outputs = deque(maxlen=1)  # the newest output holds all text
        self.loop = loop
        self.adding: Future[Any] | None = None
        self._thread = thread
        self._request_id = request_id
        self._spec = spec
        self.is_paused = False
        self._num_put = 0  # tokens of all outputs so far
        self._waiter: asyncio.Future[None] | None = None
        self._failed: BaseException | None = None
        self._is_over = False  # the last output was read, or the reader is gone

    @property
    def replica(self) -> int:
        """The number of the engine that computes the request."""
        return self._thread.replica

    def wants(self, kind: RequestOutputKind) -> bool:
        """Return whether to make an output now. While a delta is unread, no further one is made."""
        return kind is RequestOutputKind.CUMULATIVE or (kind is RequestOutputKind.DELTA and not self._outputs)

    def put(self, output: RequestOutput) -> None:
        """Add the newest output."""
        self._num_put += sum(len(completion.token_ids) for completion in output.outputs)
        if self._failed is None:
            super().put(output)
        if self._waiter is not None:
            self._thread.news.append(self)

    def pauses(self, group: RequestGroup) -> bool:
        """Return whether to pause the request now because an unread delta has grown too large."""
        if self.is_paused or not self._outputs or group.output_kind is not RequestOutputKind.DELTA:
            return False
        num_tokens = sum(s.num_output_tokens - s.inputs.num_given_tokens for s in group.samples)
        num_top = group.samples[0].inputs.params.logprobs
        size = TOKEN_BYTES if num_top is None else TOKEN_BYTES + (1 + max(num_top, 0)) * CANDIDATE_BYTES
        self.is_paused = (num_tokens - self._num_put) * size > PAUSE_BYTES
        self.is_paused = self.is_paused and bool(self._outputs)  # unless it was read in between
        return self.is_paused

    def fail(self, error: BaseException) -> None:
        """Let `get` return all outputs, and then raise this error."""
        self._failed = error
        with suppress(RuntimeError):  # the event loop is closed
            self.loop.call_soon_threadsafe(self.wake)

    async def get(self) -> RequestOutput:
        """Return the next output. If none is left, raise the error given to `fail`."""
        while not self._outputs:
            waiter = self._waiter = self.loop.create_future()
            try:
                if not self._outputs:
                    if isinstance(self._failed, EngineDeadError):
                        raise copy_of(self._failed)
                    if self._failed is not None:
                        raise self._failed
                    await waiter
            finally:
                self._waiter = None
        output = self._outputs.popleft()
        if self.is_paused:
            self.is_paused = False
            self._thread.hold(self._request_id, self, False)
        self._is_over = output.finished
        return output

    async def result(self) -> Any:
        """Return the result of a request that only reports on its prompt."""
        await self.get()
        assert self._spec is not None
        assert self.adding is not None
        return self._spec.output(self.adding.result())

    def close(self) -> None:
        """Abort the request if it is unfinished. Any thread may call this."""
        if self._is_over:
            return
        self._is_over = True
        if self.adding is None or not self.adding.cancel():
            self._thread.abort(self._request_id, self)
        else:
            self.fail(closed_error(self._request_id))  # to who still waits

    def wake(self) -> None:
        """Resume a waiting `get`. Runs in the reader's event loop."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineThread(EngineLoop):
    """An `EngineReplica` whose loop runs on its own thread and wakes readers on their event loops."""

    replica = 0
    is_fit = True  # this process cannot say that it hangs
    trouble = None

    def __init__(self, engine: LLMEngine, stream_interval_s: float) -> None:
        super().__init__(engine, stream_interval_s, self._notify)
        self.news: list[Mailbox] = []  # mailboxes that got an output and have a waiting reader
        self.thread = threading.Thread(target=self.run, name="paged-engine", daemon=True)
        self.thread.start()

    @property
    def num_queued_tokens(self) -> int:
        """The number of tokens in the engine's waiting requests."""
        return self.engine.scheduler.num_queued_tokens

    def stop(self) -> None:
        """End the thread after its current step, and wait for its end."""
        super().stop()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    async def ask(self) -> EngineStats:
        """Return the engine's current stats. Raises EngineDeadError."""
        return await asyncio.wrap_future(self.call(LLMEngine.stats))

    async def picture(self) -> EnginePicture:
        """Return a picture of the engine's next step, or of an idle engine. Raises EngineDeadError."""
        return await asyncio.wrap_future(self.look())

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


def _wake(mailboxes: list[Mailbox]) -> None:
    for mailbox in mailboxes:
        mailbox.wake()
