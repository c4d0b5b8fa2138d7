"""Streamed responses, and the blank lines that keep idle ones open."""

from __future__ import annotations

import asyncio
from typing import Any

from .exchange import EVENTS, Exchange, encode_json

IDLE_S = 15.0  # after which proxies begin to close connections
# A parser of events ignores it. Not a comment: clients that strip what they read from the connection, such as
# vLLM's benchmark, take a comment and the next event for one.
BLANK_LINE = b"\n"
DONE = b"data: [DONE]\n\n"


class StreamedResponse:
    """A response that is sent in parts. Its status is sent with the first part.

    Before the first part, another response can still be sent instead, such as an error with its own status.
    """

    def __init__(self, exchange: Exchange, content_type: str = EVENTS) -> None:
        self._exchange = exchange
        self._content_type = content_type
        self._lock = asyncio.Lock()  # of those who write: the request's task and the timer

    @property
    def has_begun(self) -> bool:
        """Whether the status has been sent."""
        return self._exchange.status is not None

    async def write(self, body: bytes, *, more: bool = True) -> None:
        """Send a part, once the client has read enough of the earlier parts."""
        async with self._lock:
            if self._exchange.status is None:
                # Proxies such as nginx would hold the parts back.
                headers = ((b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"))
                await self._exchange.begin(200, self._content_type, headers)
            await self._exchange.write(body, more=more)

    async def keep_alive(self) -> None:
        """Send a blank line, unless another part is being sent."""
        if not self._lock.locked() and not self._exchange.is_complete:
            await self.write(BLANK_LINE)


def event(value: Any) -> bytes:
    """Return a value as a server-sent event."""
    return b"data: " + encode_json(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """Return a value as a server-sent event with the name of the value's type."""
    name: str = value["type"]
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(value))


class KeepAlive:
    """Sends a blank line to each event stream that was idle for `interval_s`. All streams share one timer."""

    def __init__(self, interval_s: float = IDLE_S) -> None:
        self._interval_s = interval_s
        # By the loop's time of their last part, the longest ago first.
        self._streams: dict[StreamedResponse, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def on_write(self, stream: StreamedResponse) -> None:
        """Record that a stream was written to or begins to wait."""
        now = asyncio.get_running_loop().time()
        self._set_last(stream, now)
        if self._timer is None:
            self._schedule(now)

    def remove(self, stream: StreamedResponse) -> None:
        """Forget a stream that has ended."""
        self._streams.pop(stream, None)

    def _set_last(self, stream: StreamedResponse, now: float) -> None:
        self._streams.pop(stream, None)
        self._streams[stream] = now

    def _schedule(self, last: float) -> None:
        self._timer = asyncio.get_running_loop().call_at(last + self._interval_s, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._streams:
            stream, last = next(iter(self._streams.items()))
            if last > now - self._interval_s:
                self._schedule(last)
                return
            self._set_last(stream, now)
            task = loop.create_task(stream.keep_alive())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
