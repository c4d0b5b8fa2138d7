"""What engines for coroutines share, in this process and in others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TypeVar

from ..errors import ConfigError
from ..validation import check_number

# Characters or tokens that are validated and encoded on the event loop; more would block it too long.
MOST_AT_ONCE = 1024
PARTS_OF_TURN = 8  # prompts of one request that are begun in one turn of the event loop
STREAM_INTERVAL_S = 0.2  # text still appears to flow
T = TypeVar("T")
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
