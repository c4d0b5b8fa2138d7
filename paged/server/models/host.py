"""ModelHost: carries out what `Residency` decides, with an engine process for each loaded model."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol, TypeVar

from ...base.errors import MissingModelError, PagedError, QueueFullError
from ...checkpoints.library.models_file import ModelEntry
from ..http.failures import HttpError
from ..options import MAX_WAITING
from .residency import Admit, Load, Residency, Resident, Ticket, Unload
from .weigh import ModelWeight

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Loaded(Protocol):
    """A model that is loaded."""

    @property
    def is_dead(self) -> bool:
        """Whether its engine has ended for good."""

    async def aclose(self) -> None:
        """End its engine."""


L = TypeVar("L", bound=Loaded)


class Host:
    """Loads models when requests need them, and unloads them, within the memory.

    weigh: returns the memory of a model; it may block.
    load: starts the engine of a model.
    keep_alive: seconds for which a model without one of its own stays loaded without a request.
    most_wait_s: for which a request waits for its model.

    load_seconds: how long the last load of each model took.
    """

    def __init__(
        self,
        memory: int,
        *,
        weigh: Callable[[ModelEntry], ModelWeight],
        load: Callable[[ModelEntry, ModelWeight], Awaitable[L]],
        keep_alive: float,
        most_wait_s: float,
    ) -> None:
        self.residency = Residency(memory)
        self.load_seconds: dict[str, float] = {}
        self.weights: dict[str, ModelWeight] = {}
        self.loaded: dict[str, Loaded] = {}
        self._weigh = weigh
        self._load = load
        self._keep_alive = keep_alive
        self._most_wait_s = most_wait_s
        self._entries: dict[str, ModelEntry] = {}
        self._weighing: dict[str, asyncio.Task[ModelWeight]] = {}
        self._futures: dict[Ticket, asyncio.Future[Loaded]] = {}
        self._errors: dict[str, PagedError] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.on_use: Callable[[], None] = lambda: None  # called when the users of models may have changed
        self._is_closed = False

    @asynccontextmanager
    async def using(self, entry: ModelEntry, keep_alive: float | None = None) -> AsyncIterator[Loaded]:
        """Have a model loaded inside this context.

        keep_alive: seconds for which it stays loaded afterwards, from now on; None as before.

        Raises HttpError if it cannot be loaded, never fits, or is not loaded in time, QueueFullError.
        """
        loaded = await self._acquire(entry)
        try:
            yield loaded
        finally:
            self.residency.release(entry.name, self._now(), keep_alive)
            if loaded.is_dead:  # the next request gets another engine
                self.residency.unload(entry.name)
            self._go_on()

    async def _acquire(self, entry: ModelEntry) -> Loaded:
        await self._know(entry)
        if len(self._futures) >= MAX_WAITING:
            raise QueueFullError(f"{len(self._futures)} requests wait for models already; try again later")
        dead = self.loaded.get(entry.name)
        if dead is not None and dead.is_dead:
            self.unload(entry.name)
        ticket = self.residency.ask(entry.name, self._now())
        future = self._futures[ticket] = asyncio.get_running_loop().create_future()
        self._go_on()
        try:
            async with asyncio.timeout(self._most_wait_s):
                return await asyncio.shield(future)
        except TimeoutError:
            self._forget(ticket, future)
            raise self._unavailable(
                f"the model {entry.name} could not be loaded within {self._most_wait_s:g} s, as others are "
                "in use; try again later",
                self.load_seconds.get(entry.name, 10.0),
            ) from None
        except asyncio.CancelledError:
            self._forget(ticket, future)
            raise

    def _forget(self, ticket: Ticket, future: asyncio.Future[Loaded]) -> None:
        """Give up waiting, or what has come at the same moment."""
        self._futures.pop(ticket, None)
        if future.done() and not future.cancelled() and future.exception() is None:
            self.residency.release(ticket.name, self._now())
        else:
            self.residency.cancel(ticket)
            future.cancel()
        self._go_on()

    async def _know(self, entry: ModelEntry) -> Resident:
        """Make a model known to the policy. Raises HttpError if it cannot be loaded now, or never fits."""
        name = entry.name
        if self._is_closed:
            raise HttpError(503, "the server is shutting down")
        if left := self.residency.pause_left(name, self._now()):
            raise self._unavailable(f"the model {name} could not be loaded: {self._errors[name]}", left)
        known = self._entries.get(name)
        if known != entry or name not in self.weights:
            weight = await self._weight_of(entry)
            if not self.residency.fits(weight.num_bytes):
                raise HttpError(
                    400,
                    f"the model {name} takes {weight.num_bytes / 2**30:,.2f} GiB ({weight.parts}), and "
                    f"--memory is {self.residency.memory / 2**30:,.2f} GiB: raise it, lower max_model_len in "
                    "models.toml, or take a smaller quantisation",
                    param="model",
                    code="model_too_large",
                )
            if known not in (None, entry) and name in self.residency.models:  # loaded with other options
                self.residency.retire(name)
            self.weights[name] = weight
            self._entries[name] = entry
        return self._note(entry, self.weights[name].num_bytes)

    def _note(self, entry: ModelEntry, num_bytes: int) -> Resident:
        own = self._keep_alive if entry.keep_alive is None else entry.keep_alive
        return self.residency.know(entry.name, num_bytes, own)

    async def _weight_of(self, entry: ModelEntry) -> ModelWeight:
        task = self._weighing.get(entry.name)
        if task is None:
            task = asyncio.get_running_loop().create_task(in_thread(lambda: self._weigh(entry)))
            self._weighing[entry.name] = task
            task.add_done_callback(lambda _: self._weighing.pop(entry.name, None))
        try:
            return await asyncio.shield(task)
        except PagedError as error:
            if task.done() and not self.residency.pause_left(entry.name, self._now()):
                self._note(entry, 0)
                self.residency.pause(entry.name, self._now(), grows=not isinstance(error, MissingModelError))
                self._errors[entry.name] = error
                logger.error("the model %s could not be loaded: %s", entry.name, error)
            left = self.residency.pause_left(entry.name, self._now())
            raise self._unavailable(f"the model {entry.name} could not be loaded: {error}", left) from None

    @staticmethod
    def _unavailable(message: str, seconds: float) -> HttpError:
        after = b"%d" % max(1, math.ceil(seconds))
        return HttpError(
            503, message, param="model", code="model_unavailable", headers=((b"retry-after", after),)
        )

    # What the policy decides

    def _now(self) -> float:
        return time.monotonic()

    def _go_on(self) -> None:
        """Carry out what is to be done now, and look again when there may be more."""
        if self._is_closed:
            return
        loop = asyncio.get_running_loop()
        for action in self.residency.decide(self._now()):
            match action:
                case Load(name):
                    self._begin(self._load_model(name))
                case Unload(name):
                    self._begin(self._unload_model(name))
                case Admit(ticket):
                    future = self._futures.pop(ticket)
                    future.set_result(self.loaded[ticket.name])
        self.on_use()
        if self._timer is not None:
            self._timer.cancel()
        then = self.residency.next_time(self._now())
        left = then - self._now()
        self._timer = None if then == math.inf else loop.call_later(max(0.01, left), self._go_on)

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load_model(self, name: str) -> None:
        began = self._now()
        try:
            loaded = await self._load(self._entries[name], self.weights[name])
        except Exception as error:  # of any kind: it is that of the model's requests
            self._fail(name, error)
            return
        if self._is_closed:
            await loaded.aclose()
            return
        self.load_seconds[name] = self._now() - began
        self._errors.pop(name, None)
        self.loaded[name] = loaded
        self.residency.on_loaded(name, self._now())
        self._go_on()

    def _fail(self, name: str, error: Exception) -> None:
        if not isinstance(error, PagedError):
            logger.error("the model %s could not be loaded", name, exc_info=error)
            error = PagedError("the server's log says why")
        else:
            logger.error("the model %s could not be loaded: %s", name, error)
        self._errors[name] = error
        tickets = self.residency.on_failed(name, self._now())
        # What it takes may be wrong by now: files may have changed.
        self.weights.pop(name, None)
        left = self.residency.pause_left(name, self._now())
        for ticket in tickets:
            future = self._futures.pop(ticket)
            future.set_exception(self._unavailable(f"the model {name} could not be loaded: {error}", left))
        self._go_on()

    async def _unload_model(self, name: str) -> None:
        loaded = self.loaded.pop(name)
        with suppress(PagedError):
            await loaded.aclose()
        self.residency.on_gone(name)
        if name in self.weights:  # others than before, if its options have changed
            self._note(self._entries[name], self.weights[name].num_bytes)
        self._go_on()

    # By hand

    def unload(self, name: str) -> bool:
        """Let a model leave once no request uses it. Return whether it is here."""
        model = self.residency.models.get(name)
        if model is None or not model.is_here:
            return False
        self.residency.unload(name)
        self._go_on()
        return True

    def stop(self) -> None:
        """Refuse all requests, those that wait too."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for future in self._futures.values():
            if not future.done():
                future.set_exception(HttpError(503, "the server is shutting down"))
        self._futures.clear()

    async def aclose(self) -> None:
        """End all engines."""
        self.stop()
        for task in (*self._tasks, *self._weighing.values()):
            task.cancel()
        for loaded in [*self.loaded.values()]:
            with suppress(PagedError):
                await loaded.aclose()
        self.loaded.clear()


async def in_thread(function: Callable[[], T]) -> T:
    """Call a function in a thread that does not keep this process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def tell(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = function()
        except BaseException as failure:  # whatever it is, the caller raises it
            error = failure
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, daemon=True, name="paged-load").start()
    return await future
