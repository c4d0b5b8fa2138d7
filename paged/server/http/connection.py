"""HeadLimits: uvicorn's HTTP protocol with limits for the head of a request, which httptools has none of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ...protocol.answers.errors import error_body
from .exchange import ABORT, JSON, encode_json, request_id_of
from .failures import HttpError, retry_headers

MAX_HEAD_BYTES = 2**16  # request line and headers
HEAD_TIMEOUT_S = 30.0  # from the connection, or a request's first byte, to the end of its headers

TOO_LARGE = (431, f"the headers are larger than {MAX_HEAD_BYTES:,} bytes; send fewer or shorter ones")


UNKNOWN_ROUTE = "-"  # of a request whose head was refused

OnRefusal = Callable[..., None]  # `Observers.refused`


class HeadLimits(HttpToolsProtocol):
    """A connection whose requests have heads of limited size and time.

    A request to change the protocol, as some clients send with every request for HTTP/2, is answered as if it
    did not ask for that.

    on_refusal: is told the route, status and id of each request that is refused here.
    """

    _head_bytes = 0  # received of the head that is being read
    _in_head = True  # or between two requests
    _running: RequestResponseCycle | None = None  # the oldest request without a whole response
    _head_timer: asyncio.TimerHandle | None = None
    _refusal = (400, "the request is not valid HTTP/1.1")
    _upgrade_head: bytes | None = None  # without the header upgrade, while the parser skips the body

    def __init__(self, *args: Any, on_refusal: OnRefusal, **options: Any) -> None:
        super().__init__(*args, **options)
        self._on_refusal = on_refusal

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting, and tell the request that is being answered, which uvicorn does for the newest."""
        self._stop_head_timer()
        for cycle in self._unfinished():
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has come, and refuse a head that is too large."""
        if self._in_head:
            self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(memoryview(data))
        except httptools.HttpParserError:
            self._refuse(*self._refusal)
            return
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(*TOO_LARGE)

    def _feed(self, data: memoryview) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stopped:
                head, self._upgrade_head = self._upgrade_head, None
                if head is None:  # CONNECT, which has been answered
                    return
                # This parser takes what follows the head for another protocol.
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self.parser.feed_data(head)
                data = data[stopped.args[0] :]

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._in_head = True
        if self._head_timer is None:
            self._start_head_timer()

    def on_headers_complete(self) -> None:
        """End a head, and hand the request to the application unless the head is too large."""
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refusal = TOO_LARGE
            raise HttpError(*TOO_LARGE)  # ends the parsing
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._upgrade_head = self._head_without_upgrade()
            return
        super().on_headers_complete()
        self._in_head, self._head_bytes = False, 0
        self._stop_head_timer()

    def on_message_complete(self) -> None:
        """End a request: what comes next is another one's head."""
        if self._upgrade_head is not None:
            return
        super().on_message_complete()
        self._in_head = True

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _refuse(self, status: int, message: str) -> None:
        """Refuse what is being read, and close the connection after the responses to earlier requests."""
        if self.transport.is_closing():
            return
        earlier = self._unfinished()
        is_answered = False
        if not self._in_head:  # it is the body of the newest request
            is_answered = self.cycle.response_started
            if earlier and earlier[-1] is self.cycle:
                earlier.pop()
                if earlier:
                    self.pipeline.popleft()
        if earlier:
            earlier[-1].keep_alive = False
            return
        if not is_answered:
            self._respond(status, message)
        self.transport.close()

    def _respond(self, status: int, message: str) -> None:
        request_id = request_id_of(None)
        self._on_refusal(UNKNOWN_ROUTE, status, request_id=request_id)
        body = encode_json(error_body(status, message))
        headers = (
            (b"content-type", JSON.encode()),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
            *retry_headers(status, 1),
        )
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", body]))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        cycle.scope[ABORT] = cycle.transport.abort  # type: ignore[literal-required]
        super()._start_asgi_task(cycle, app)

    def _unfinished(self) -> list[RequestResponseCycle]:
        """Return the requests without a whole response, the oldest first."""
        running = self._running
        is_open = running is not None and not running.response_complete
        queued = [cycle for cycle, _ in reversed(self.pipeline)]
        return [running, *queued] if is_open and running is not None else queued

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_head_timeout)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        if self._unfinished():  # earlier requests on this connection
            self._start_head_timer()
        elif self._head_bytes:
            self._refuse(408, f"the headers did not arrive within {HEAD_TIMEOUT_S:g} s; try again")
        else:
            self.transport.close()
