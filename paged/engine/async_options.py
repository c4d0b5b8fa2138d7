"""What engines for coroutines share, in this process and in others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from ..base.validation import check_number
from ..errors import ConfigError, RequestTimeoutError
from ..requests.request import TIMEOUT_MESSAGE

T = TypeVar("T")

# Characters or tokens that are validated and encoded on the event loop; more would block it too long.
MOST_AT_ONCE = 1024
PARTS_OF_TURN = 8  # prompts of one request that are begun in one turn of the event loop
STREAM_INTERVAL_S = 0.2  # text still appears to flow
SHOW_SHARE = 0.01  # of the time may be spent on showing tokens of unfinished requests
# About what is held of an answer until it is read.
TOKEN_BYTES = 40
CANDIDATE_BYTES = 200
PAUSE_BYTES = 2**20  # unread: the request computes nothing until its reader has read
LEAST_TIMEOUT_S = 1e-6  # of a request whose timeout_s has passed before its engine gets it
# Is told the id of a request and the number of the engine that computes it, before it is computed.
OnPlace = Callable[[str, int], object]


async def paced(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the parts of one request, and let the event loop do other work after every few."""
    for i, item in enumerate(items):
        if i and i % PARTS_OF_TURN == 0:
            await asyncio.sleep(0)
        yield item


def ignore_place(request_id: str, replica: int) -> None:
    """Do nothing: an `OnPlace` of callers that need not know."""


def check_interval(seconds: float) -> None:
    """Raise ConfigError unless stream_interval_s is a number of seconds."""
    check_number(ConfigError, "stream_interval_s", seconds, 0.0)


def next_show(started: float, ended: float, stream_interval_s: float) -> float:
    """Return when to show tokens again after showing some, which took from `started` to `ended`.

    Until then tokens are held back, so that showing takes at most SHOW_SHARE of the time, for at most
    stream_interval_s.
    """
    return ended + min((ended - started) / SHOW_SHARE, stream_interval_s)


class Deadline:
    """The time at which a request's timeout_s has passed, which counts from now; None sets no limit."""

    def __init__(self, timeout_s: float | None) -> None:
        self._at = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        """What is left of timeout_s."""
        return None if self._at is None else max(self._at - time.monotonic(), LEAST_TIMEOUT_S)

    async def wait_for(self, awaitable: Awaitable[T]) -> T:
        """Return what is awaited. Raises RequestTimeoutError if that takes too long."""
        waiting = asyncio.timeout(self.left_s)
        try:
            async with waiting:
                return await awaitable
        except TimeoutError:
            if not waiting.expired():
                raise
            raise RequestTimeoutError(TIMEOUT_MESSAGE) from None
