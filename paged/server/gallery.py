"""Gallery: pictures of the engines, made for those who watch, and only while any does."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import msgspec

from ..base.errors import PagedError
from ..engine.async_base import AsyncEngine
from ..scheduler.picture import EnginePicture, PicturedRequest
from .http.failures import HttpError

PERIOD_S = 0.25  # between two pictures of an engine
MOST_SHARE = 0.005  # of an engine's time that the making of pictures may take
MOST_WATCHERS = 64

# What a picture has of the whole engine, of which an owner of requests is told no more than sizes.
_OF_ENGINE = tuple(field.name for field in fields(EnginePicture) if field.name != "requests")
_OF_OWNER = ("time", "block_size")


class Gallery:
    """The newest picture of each engine, for the operator or an owner of requests.

    owners: returns the owner of each engine request, by the request's id.

    The next picture of an engine is requested only after the last one has arrived, and later if making that
    one took long.
    """

    def __init__(
        self,
        engine: AsyncEngine[Any],
        num_engines: int,
        owners: Callable[[], Mapping[str, str | None]] = dict,
    ) -> None:
        self._engine = engine
        self._num_engines = num_engines
        self._owners = owners
        self._pictures: list[EnginePicture | None] = [None] * num_engines
        self._views: dict[str | None, bytes] = {}  # of these pictures, by owner
        self._next: asyncio.Event | None = None  # of the next picture of any engine
        self._making: list[asyncio.Task[None]] = []
        self.num_watchers = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Request pictures inside this context. Raises HttpError if there are MOST_WATCHERS already."""
        if self.num_watchers >= MOST_WATCHERS:
            raise HttpError(429, f"{MOST_WATCHERS} others watch already; try again later")
        self.num_watchers += 1
        if self.num_watchers == 1:
            self._next = asyncio.Event()
            self._begin()
        try:
            yield
        finally:
            self.num_watchers -= 1
            if not self.num_watchers:
                self._stop()

    def resize(self, num_engines: int) -> None:
        """Set the number of engines to show."""
        self._num_engines = num_engines
        self._stop()
        if self.num_watchers:
            self._begin()

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._making = [loop.create_task(self._make(i)) for i in range(self._num_engines)]

    def _stop(self) -> None:
        for task in self._making:
            task.cancel()
        self._making = []
        self._pictures = [None] * self._num_engines
        self._views.clear()

    async def wait(self) -> None:
        """Wait for a new picture of any engine."""
        assert self._next is not None, "nothing is watched"
        await self._next.wait()

    def view(self, owner: str | None) -> bytes:
        """Return the newest pictures as JSON.

        owner: the owner whose requests are shown; None shows all requests.
        """
        view = self._views.get(owner)
        if view is None:
            if owner is None:
                engines = [picture and _view_of_all(picture) for picture in self._pictures]
            else:
                own = {request_id for request_id, each in self._owners().items() if each == owner}
                engines = [picture and _view_of_own(picture, own) for picture in self._pictures]
            scope = "all" if owner is None else "own"
            view = self._views[owner] = msgspec.json.encode({"scope": scope, "engines": engines})
        return view

    async def _make(self, replica: int) -> None:
        while True:
            pause_s = PERIOD_S
            picture = None
            try:
                picture = await self._engine.picture(replica)
                pause_s = max(PERIOD_S, picture.seconds / MOST_SHARE)
            except (PagedError, RuntimeError):  # it is replaced, has stopped, or has logged what failed
                pass
            self._pictures[replica] = picture
            self._views.clear()
            assert self._next is not None
            self._next.set()
            self._next = asyncio.Event()
            await asyncio.sleep(pause_s)


def _view_of_all(picture: EnginePicture) -> dict[str, Any]:
    view = {name: getattr(picture, name) for name in _OF_ENGINE}
    return {**view, "requests": [_described(each, _ids_of(each)) for each in picture.requests]}


def _view_of_own(picture: EnginePicture, own: set[str]) -> dict[str, Any]:
    view = {name: getattr(picture, name) for name in _OF_OWNER}
    # Numbers of its own: those of the engine tell how much others have.
    numbers = dict[int, int]()
    requests = []
    for each in picture.requests:
        if each.request_id not in own:
            continue
        blocks = [numbers.setdefault(block, len(numbers)) for block in _ids_of(each)]
        requests.append(_described(each, blocks))
    return {**view, "requests": requests}


def _ids_of(request: PicturedRequest) -> list[int]:
    return array("i", request.blocks).tolist()


def _described(request: PicturedRequest, blocks: Sequence[int]) -> dict[str, Any]:
    return {**request._asdict(), "blocks": blocks}
