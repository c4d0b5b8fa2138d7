"""Cycle: one request of a connection and its response, as an ASGI application receives and sends them."""

from __future__ import annotations

import asyncio
import http
import logging
import re
from collections.abc import Iterable
from typing import Protocol

from starlette.types import ASGIApp, Message, Scope

from .failures import Header

logger = logging.getLogger(__name__)

STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in http.HTTPStatus
}
_WITHOUT_BODY = (204, 304)  # statuses
_NOT_IN_HEADER = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class Wire(Protocol):
    """The methods of a connection that its cycles use."""

    def write(self, data: bytes) -> None:
        """Send bytes to the client, unless the connection is closed."""

    async def drain(self) -> None:
        """Wait until the client has read enough. Disconnect the client if that takes too long."""

    def update_reading(self) -> None:
        """Read from the socket if the body buffer has room; pause reading otherwise."""

    def on_response_end(self, cycle: Cycle) -> None:
        """Serve the next request of the connection, or close it."""

    def abort(self) -> None:
        """Close the connection in the middle of a response."""


class Cycle:
    """One request and its response.

    is_old: whether the client speaks HTTP/1.0, without chunks and status 100.
    closes: whether the connection ends after the response.
    body: the bytes that have arrived but have not been passed to the application yet.
    is_read: whether the whole body has arrived.
    is_started, is_complete: whether the response is started, and whether it is complete.
    is_gone: whether the client has disconnected or sent unreadable data.
    """

    def __init__(
        self,
        wire: Wire,
        scope: Scope,
        default_headers: Iterable[Header],
        *,
        closes: bool,
        expects_continue: bool,
    ) -> None:
        self._wire = wire
        self._scope = scope
        self._default_headers = default_headers
        self.is_old = scope["http_version"] == "1.0"
        self.closes = closes
        self._expects_continue = expects_continue and not self.is_old
        self.body = bytearray()
        self.is_read = False
        self.is_started = False
        self.is_complete = False
        self.is_gone = False
        self._is_chunked = False
        self._num_left: int | None = None  # bytes of the response that are still to come, if that is known
        self._news = asyncio.Event()

    # Of the connection

    def add_body(self, part: bytes) -> None:
        """Add a part of the request's body."""
        self.body += part
        self._news.set()

    def end_body(self) -> None:
        """Mark the request's body as complete."""
        self.is_read = True
        self._news.set()

    def leave(self) -> None:
        """Mark the client as gone. The application then receives a disconnect."""
        self.is_gone = True
        self._news.set()

    async def run(self, app: ASGIApp) -> None:
        """Run the application on the request."""
        try:
            await app(self._scope, self.receive, self.send)
        except Exception:
            # The application makes responses of errors: it raises only if one had begun.
            logger.exception("a request failed after its response had begun")
        finally:
            if not self._has_ended:
                self._wire.abort()

    # Of the application

    async def receive(self) -> Message:
        """Return the next part of the body. After the body, wait for the disconnect or the response's end."""
        if self._expects_continue and not self.is_started:
            self._wire.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
        if not self._has_ended:
            await self._news.wait()
            self._news.clear()
        if self._has_ended:
            return {"type": "http.disconnect"}
        body = bytes(self.body)
        self.body.clear()
        self._wire.update_reading()
        return {"type": "http.request", "body": body, "more_body": not self.is_read}

    @property
    def _has_ended(self) -> bool:
        return self.is_gone or self.is_complete

    async def send(self, message: Message) -> None:
        """Send the head or a part of the response's body, once the client has read enough."""
        if not self.is_gone:
            await self._wire.drain()
        if self.is_gone:
            return
        if message["type"] == "http.response.start":
            assert not self.is_started
            self._wire.write(self._head(message["status"], message.get("headers", ())))
            self.is_started = True
        else:
            assert self.is_started
            assert not self.is_complete
            self._write_body(message.get("body", b""), more=message.get("more_body", False))

    def _head(self, status: int, headers: Iterable[Header]) -> bytes:
        lines = [STATUS_LINES[status]]
        sent = [*self._default_headers, *headers]
        if _NOT_IN_HEADER.search(b"".join([value for _, value in sent])):  # all at once, which is quick
            wrong = [name for name, value in sent if _NOT_IN_HEADER.search(value)]
            raise ValueError(f"headers of the response have control characters: {wrong}")
        for given, value in sent:
            name = given.lower()
            match name:
                case b"connection":
                    self.closes = self.closes or value.lower() == b"close"
                    continue
                case b"content-length":
                    self._num_left = int(value)
            lines.append(b"%b: %b\r\n" % (name, value))
        # Without its rest, what follows on the connection cannot be read.
        self.closes = self.closes or not self.is_read
        has_body = self._scope["method"] != "HEAD" and status not in _WITHOUT_BODY
        if not has_body:
            self._num_left = 0
        elif self._num_left is None and self.is_old:
            self.closes = True  # which ends the body
        elif self._num_left is None:
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if self.closes:
            lines.append(b"connection: close\r\n")
        elif self.is_old:
            lines.append(b"connection: keep-alive\r\n")
        return b"".join([*lines, b"\r\n"])

    def _write_body(self, part: bytes, *, more: bool) -> None:
        if self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(part), part) if part else b""
            self._wire.write(chunk if more else chunk + b"0\r\n\r\n")
        elif self._scope["method"] != "HEAD":
            if self._num_left is not None:
                self._num_left -= len(part)
                assert self._num_left >= 0, "the response is longer than its content-length"
                assert more or not self._num_left, "the response is shorter than its content-length"
            self._wire.write(part)
        if not more:
            self.is_complete = True
            self._news.set()
            self._wire.on_response_end(self)
