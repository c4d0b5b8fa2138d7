"""EngineLoop: the loop that owns an engine and steps it while there is work."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from ..base.errors import EngineDeadError
from ..requests.request import Outbox, Request, RequestGroup
from ..scheduler.picture import EnginePicture
from ..scheduler.schedule import Schedule
from .async_base import next_publish_time
from .engine import LLMEngine
from .request_spec import Prepared, RequestSpec

if TYPE_CHECKING:
    from ..options.lora_request import LoRARequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

HELD_S = 0.05  # between two looks at requests that are all held
CALLS_S = 0.02  # of calls between two steps: a request may have a thousand prompts


class Recipient(Outbox, ABC):
    """An outbox that can also give its reader an error."""

    def pauses(self, group: RequestGroup) -> bool:  # noqa: ARG002
        """Return whether to pause the request now because its reader is slow."""
        return False

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Let the reader read all outputs, and then raise this error in it."""

    def follow(self, call: Future[Any]) -> None:
        """Call `fail` if the call that adds the request fails or is cancelled."""
        error = None if call.cancelled() else call.exception()
        if error is not None:
            self.fail(error)


class EngineLoop:
    """The loop that owns an engine. Other threads submit functions, which the loop calls between two steps.

    deliver: called on the loop's thread when readers may have new outputs.
    on_newcomers: called on the loop's thread before a step, with the requests that the step may compute for
        the first time.
    stream_interval_s: maximum delay of an output of an unfinished request, in seconds. With short steps and
        many readers, tokens are held back; see `next_publish_time`.
    """

    def __init__(
        self,
        engine: LLMEngine,
        stream_interval_s: float,
        deliver: Callable[[], None],
        on_newcomers: Callable[[Sequence[Request]], None] = lambda _: None,
    ) -> None:
        self.engine = engine
        self._stream_interval_s = stream_interval_s
        self._deliver = deliver
        self._on_newcomers = on_newcomers
        self._unpublished: dict[Request, None] = {}  # requests with tokens that are held back
        self._has_prompts = False  # whether the last step computed prompts
        self._publish_at = -math.inf  # the time at which held-back tokens are due
        self.dead: EngineDeadError | None = None
        self._is_stopping = False
        self.is_waiting = False  # for calls, as there is nothing to compute
        self._is_blocked = False  # whether the last step had nothing to compute
        self._lookers: list[Future[EnginePicture]] = []  # who wait for a picture of the next step
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[LLMEngine], Any]]] = SimpleQueue()

    # From any thread

    def check(self) -> None:
        """Raise EngineDeadError if the engine has stopped."""
        if self.dead is not None:
            raise copy_of(self.dead)

    def submit(self, function: Callable[[LLMEngine], T]) -> Future[T]:
        """Call function(engine) on the loop's thread between two steps. Return the future result.

        Raises EngineDeadError.
        """
        self.check()
        future: Future[T] = Future()
        self._calls.put((future, function))
        if self.dead is not None:  # it stopped in between, perhaps before it could see this call
            self._refuse_calls()
        return future

    def call(self, function: Callable[[LLMEngine], T]) -> Future[T]:
        """Call a user's function between two steps, after publishing all tokens that were held back."""

        def called(engine: LLMEngine) -> T:
            self._publish()
            return function(engine)

        return self.submit(called)

    def look(self) -> Future[EnginePicture]:
        """Return the future picture of the next step, or of an idle engine.

        Raises EngineDeadError.
        """
        looker: Future[EnginePicture] = Future()

        def begin(engine: LLMEngine) -> None:
            self._lookers.append(looker)
            if not engine.core.has_work():
                self._show(Schedule())

        def follow(call: Future[None]) -> None:
            if (error := call.exception()) is not None and not looker.done():
                looker.set_exception(error)

        self.submit(begin).add_done_callback(follow)
        return looker

    def prepare(self, spec: RequestSpec) -> RequestSpec:
        """Do the slow part of making a request. Any thread may call this: no state of the engine is used."""
        assert not isinstance(spec.prompt, Prepared)
        factory = self.engine.core.factory
        params = spec.params(factory.default_params)
        adapter = self.prepare_adapter(spec.lora_request)
        prompt = factory.prepare(spec.prompt, params)
        return replace(spec, prompt=prompt, sampling_params=params, lora_request=adapter)

    def prepare_adapter(self, lora_request: Any) -> Any:
        """Return a request's adapter, read if it is not in memory. Any thread may call this.

        Raises RequestError.
        """
        adapters = self.engine.core.factory.adapters
        return lora_request if lora_request is None or adapters is None else adapters.prepare(lora_request)

    def reads(self, lora_request: LoRARequest | None) -> bool:
        """Return whether a file is read to add a request with this adapter. Any thread may call this.

        Raises RequestError if the request contradicts a loaded adapter.
        """
        adapters = self.engine.core.factory.adapters
        if lora_request is None or adapters is None:
            return False
        return not adapters.is_in_memory(lora_request)

    def add(self, add: Callable[[LLMEngine], T], reader: Recipient) -> Future[T]:
        """Submit a call of `add`, which adds a reader's request. If it fails, the reader gets the error."""
        call = self.submit(add)
        call.add_done_callback(reader.follow)
        return call

    def abort(self, request_id: str, reader: Recipient) -> None:
        """Abort the request of a reader that has gone away."""
        self._call_for(request_id, reader, LLMEngine.abort_request)

    def hold(self, request_id: str, reader: Recipient, is_held: bool) -> None:
        """Hold the request of a slow reader, so that it computes nothing, or release it."""
        self._call_for(request_id, reader, lambda engine, name: engine.core.hold(name, is_held))

    def _call_for(
        self, request_id: str, reader: Recipient, function: Callable[[LLMEngine, str], object]
    ) -> None:
        def called(engine: LLMEngine) -> None:
            # The request may be finished, or refused because its id is in use by another one.
            group = engine.core.groups.get(request_id)
            if group is not None and group.outbox is reader:
                function(engine, request_id)

        with suppress(EngineDeadError):
            self.submit(called)

    def stop(self) -> None:
        """End the loop after its current step."""
        if self.dead is None:
            self._calls.put((Future(), self._request_stop))

    # On the loop's thread

    def run(self) -> None:
        """Step the engine until `stop` is called or a step raises."""
        self.engine.runner.watch(self._on_loss)
        try:
            while not self._is_stopping:
                self._make_calls()
                if self.engine.core.dead is not None and not self.engine.core.has_unpublished():
                    raise self.engine.core.dead
                if not self._is_stopping and self.engine.core.has_work():
                    self._step()
        except BaseException as error:  # of any kind: told to all who wait
            logger.exception("the engine has stopped")
            self._die(error)
        else:
            self._die(None)

    def _on_loss(self) -> None:
        """Notice that a process of the model has ended, also while there is nothing to compute."""
        with suppress(EngineDeadError):
            self.submit(lambda engine: engine.core.check())

    def _request_stop(self, _engine: LLMEngine) -> None:
        self._is_stopping = True

    def _make_calls(self) -> None:
        """Make submitted calls. Without work, wait for one; if all requests are held, HELD_S at most.

        Those that are left after CALLS_S are made after the next step.
        """
        core = self.engine.core
        is_idle = not core.has_work()
        if is_idle:
            self._unpublished.clear()
        # A deadline may pass, or a held request give up its seat: step again after HELD_S.
        is_held = not core.has_runnable() or (self._is_blocked and not core.has_unpublished())
        if not is_idle and core.waits_for_masks():  # the step itself waits for them
            is_held = False
        timeout_s = HELD_S if is_held and not is_idle else None
        until = math.inf
        while time.monotonic() < until or not core.has_runnable():
            self.is_waiting = is_idle or is_held
            try:
                future, function = self._calls.get(self.is_waiting, timeout_s)
            except Empty:
                break
            finally:
                self.is_waiting = False
            if until == math.inf:
                until = time.monotonic() + CALLS_S
            is_idle = is_held = self._is_blocked = False
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self.engine))
                except Exception as error:  # raised to the caller; the engine goes on
                    future.set_exception(error)
                except BaseException as error:  # SystemExit, say: it ends this thread, too
                    future.set_exception(_stopped_by(error))
                    raise
        self._deliver()

    def _step(self) -> None:
        self._unpublished |= dict.fromkeys(self.engine.core.step(on_schedule=self._on_schedule))
        if self._has_prompts or time.monotonic() >= self._publish_at:
            self._publish()
        else:
            self._deliver()

    def _on_schedule(self, schedule: Schedule) -> None:
        """Publish held-back tokens before a step that computes prompts, which may take long."""
        if self._lookers:
            self._show(schedule)
        if schedule.newcomers:
            self._on_newcomers(schedule.newcomers)
        self._is_blocked = schedule.is_empty
        self._has_prompts = schedule.has_prompts
        if self._has_prompts and self._unpublished:
            self._publish()

    def _show(self, schedule: Schedule) -> None:
        """Give all who wait for it a picture of what a step computes."""
        lookers = self._lookers
        self._lookers = []
        try:
            picture = EnginePicture.of(self.engine.scheduler, schedule)
        except Exception as error:  # a step does not fail for a picture
            _fail(lookers, error)
            return
        for looker in lookers:
            if looker.set_running_or_notify_cancel():
                looker.set_result(picture)

    def _publish(self) -> None:
        """Publish the tokens that were held back."""
        started = time.monotonic()
        core = self.engine.core
        # The id of an aborted request may belong to another one by now.
        groups = [*core.groups_of([r for r in self._unpublished if r.finish_reason != "abort"])]
        core.publish(groups)
        for group in groups:
            if isinstance(group.outbox, Recipient) and group.outbox.pauses(group):
                core.hold(group.request_id, True)
        self._unpublished.clear()
        self._deliver()
        self._publish_at = next_publish_time(started, time.monotonic(), self._stream_interval_s)

    def _die(self, cause: BaseException | None) -> None:
        """Fail all calls and mailboxes, then abort all requests, so that the engine holds no blocks."""
        if cause is None:
            self.dead = EngineDeadError("the engine was shut down")
        else:
            self.dead = _stopped_by(cause)
        self._refuse_calls()
        _fail(self._lookers, self.dead)
        groups = [*self.engine.core.groups.values()]
        for group in groups:
            if isinstance(group.outbox, Recipient):
                group.outbox.fail(self.dead)
        self._deliver()
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
                future.set_exception(copy_of(self.dead))


def _fail(lookers: list[Future[EnginePicture]], error: Exception) -> None:
    for looker in lookers:
        if looker.set_running_or_notify_cancel():
            looker.set_exception(copy_of(error) if isinstance(error, EngineDeadError) else error)


def _stopped_by(cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(f"the engine has stopped: {type(cause).__name__}: {cause}; make a new one")
    error.__cause__ = cause
    return error


def copy_of(error: EngineDeadError) -> EngineDeadError:
    """Copy an error for another caller, so that each has a traceback of its own."""
    copy = EngineDeadError(str(error))
    copy.__cause__ = error.__cause__
    return copy
