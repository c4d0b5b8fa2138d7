"""Connection: parses the requests of one client and answers one after another, all within limits."""

from __future__ import annotations

import asyncio
import re
import urllib.parse
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import httptools
from starlette.types import ASGIApp, Scope

from ...protocol.answers.errors import error_body
from ...protocol.endpoints import PROBES
from ..telemetry.records import TOO_MANY_CONNECTIONS
from .cycle import STATUS_LINES, Cycle
from .exchange import CUT, IS_TOO_SLOW, JSON, encode_json, request_id_of
from .failures import Header, HttpError, retry_headers

MAX_HEAD_BYTES = 2**16  # of request line and headers; also of trailers, and of what is around one chunk
MAX_HEADERS = 256
MAX_AHEAD = 4  # requests that are parsed while an earlier one is answered
MAX_BUFFERED_BYTES = 2**16  # of input, and of bodies, that wait: beyond that, nothing more is read
# Pieces of a body are at least this long where they end like a head. Few heads fit.
BODY_PIECE_BYTES = 256
# After the last response, input is discarded until the client has closed the connection: closed at once, the
# system would reset it, and the client might lose the response.
LINGER_S = 10.0
MAX_LINGER_BYTES = 2**28
# Of a connection beyond the limit, which may ask for the server's state alone.
SPARE_TIMEOUT_S = 2.0

NOT_HTTP = (400, "the request is not valid HTTP/1.1")
HEAD_TOO_LARGE = (431, f"the headers are larger than {MAX_HEAD_BYTES:,} bytes; send fewer or shorter ones")
TOO_MANY_HEADERS = (431, f"the request has more than {MAX_HEADERS} headers; send fewer")
FRAMES_TOO_LARGE = (
    431,
    f"trailers, or what is around a chunk, are larger than {MAX_HEAD_BYTES:,} bytes; send shorter ones",
)
WRONG_LINE = (
    400,
    "the request line must be a method, a target without a fragment and the version, with one blank between",
)
UNKNOWN_ROUTE = "-"  # of a request whose head was refused
_LINE_ENDS = re.compile(rb"(?:\r\n)*")
_CUT_LINE_ENDS = re.compile(rb"[\r\n]*")  # behind a part of one, which came with the end of a body
# RFC 3986: a name or an address, and a port.
_HOST = re.compile(rb"[\w.~!$&'()*+,;=%:\[\]-]*", re.ASCII)

OnRefusal = Callable[..., None]  # `Observers.refused`


@dataclass(eq=False)
class ConnectionContext:
    """The settings and the state that all connections of a server share.

    on_refusal: called with route, status, reason and id of each request that does not reach the application.
    root_path: the path under which a proxy publishes the server.
    max_connections: the limit; connections beyond it are spare.
    head_s: seconds for the head of a request, counted from the connection or from the request's first byte.
    keep_alive_s: seconds between two requests.
    slow_client_s: seconds within which a client must read enough for the next part of a response to be sent;
        after the last response, seconds for reading the rest.
    default_headers: headers of every response.
    connections, tasks: the open connections and their tasks; uvicorn waits for them when it ends.
    """

    app: ASGIApp
    on_refusal: OnRefusal
    root_path: str
    max_connections: int
    head_s: float
    keep_alive_s: float
    slow_client_s: float
    default_headers: Callable[[], Sequence[Header]]
    connections: set[Any] = field(default_factory=set)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def refusal(self) -> tuple[int, str]:
        """Status and message for a connection beyond the limit."""
        return (
            503,
            f"{self.max_connections} connections are open, and --max-connections allows no more; try again",
        )


class Connection(asyncio.Protocol):
    """A client's connection. The size and the duration of heads are limited, and only few requests are parsed
    ahead.

    Requests to upgrade the protocol, as some clients send for HTTP/2, are answered without the upgrade.

    is_spare: whether the connection is beyond the limit of connections.
    is_too_slow: whether the client was cut off because it did not read its responses.
    on_lost: called when the connection has ended.
    """

    def __init__(
        self, context: ConnectionContext, *, is_spare: bool, on_lost: Callable[[Connection], None]
    ) -> None:
        self._context = context
        self.is_spare = is_spare
        self.is_too_slow = False
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._parser = self._new_parser()
        self._transport: asyncio.Transport | None = None
        self._addresses: dict[str, tuple[Any, ...] | None] = {}
        self._scheme = "http"
        self._is_writable = asyncio.Event()
        self._is_writable.set()
        self._is_reading = True
        self._deadline: asyncio.TimerHandle | None = None
        # Input
        self._unparsed = bytearray()
        self._recent = bytearray()  # received since the last head, or with it
        self._is_at_head = True  # whether a head begins where `_recent` does
        self._line_ends = _LINE_ENDS  # what may be before it
        self._url = b""
        self._headers: list[Header] = []
        self._in_head = True  # or between two requests
        self._is_begun = False  # whether a request's first byte has come
        self._head_bytes = 0  # received of the head that is being read
        self._frame_bytes = 0  # received since the last byte of a body
        self._trailer_bytes = 0  # of the body that is being read
        self._refusal = NOT_HTTP  # why the parser stopped, where it did
        self._upgrade_head: bytes | None = None  # without the header upgrade, while the parser skips the body
        self._discards = False  # whether no further request is answered
        self._num_discarded = 0
        # Requests
        self._queue: deque[Cycle] = (
            deque()
        )  # without a whole response, the oldest first; it is being answered
        self._incoming: Cycle | None = None  # whose body is not whole
        self._is_stopping = False

    # Of asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop has a class of its own
        if self._discards:
            self._transport.abort()
            return
        for name, of in (("client", "peername"), ("server", "sockname")):
            address = transport.get_extra_info(of)
            self._addresses[name] = tuple(address[:2]) if isinstance(address, tuple) else None
        self._scheme = "http" if transport.get_extra_info("ssl_object") is None else "https"
        self._context.connections.add(self)
        self._set_deadline(SPARE_TIMEOUT_S if self.is_spare else self._context.head_s, self._on_head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Tell the requests of this connection that the client has disconnected."""
        self._clear_deadline()
        self._context.connections.discard(self)
        self._discards = True
        self._unparsed.clear()
        self._drop_requests()
        self._is_writable.set()
        self._on_lost(self)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        if not self._discards:
            self._unparsed += data
            self._parse()
            return
        self._num_discarded += len(data)
        if self._num_discarded > MAX_LINGER_BYTES:
            self.abort()

    def eof_received(self) -> None:
        """Close the connection: a client that closes its side is considered gone."""

    def pause_writing(self) -> None:
        """Make responses wait until the client reads."""
        self._is_writable.clear()

    def resume_writing(self) -> None:
        """Let responses continue."""
        self._is_writable.set()

    # Of the server

    def shutdown(self) -> None:
        """Close the connection after the responses to all requests received so far."""
        self._is_stopping = True
        if self._queue:
            self._queue[-1].closes = True
        elif self._transport is not None:
            self._transport.close()

    @property
    def is_made(self) -> bool:
        """Whether the handshake is complete, so that data can be written."""
        return self._transport is not None

    def close_when_made(self) -> None:
        """Close the connection as soon as its handshake is complete."""
        self._discards = True

    def refuse_spare(self) -> None:
        """Refuse a connection beyond the limit and close it at once, to free its file descriptor."""
        if self._discards or self._queue:
            self.abort()
        elif self._transport is not None:
            self._discards = True
            self._respond(*self._context.refusal)
            self._transport.close()

    # Of the requests: `Wire`

    def write(self, data: bytes) -> None:
        """Send bytes to the client, unless the connection is closed."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    async def drain(self) -> None:
        """Wait until the client has read enough. Disconnect the client if this takes too long."""
        if self._is_writable.is_set():
            return
        timer = self._loop.call_later(self._context.slow_client_s, self._cut_off)
        try:
            await self._is_writable.wait()
        finally:
            timer.cancel()

    def _cut_off(self) -> None:
        self.is_too_slow = True
        self.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def update_reading(self) -> None:
        """Read from the connection, unless too much data waits to be parsed or received."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        waiting = len(self._unparsed) + (0 if self._incoming is None else len(self._incoming.body))
        should_read = self._discards or waiting <= MAX_BUFFERED_BYTES
        if should_read == self._is_reading:
            return
        self._is_reading = should_read
        if should_read:
            transport.resume_reading()
        else:
            transport.pause_reading()

    def on_response_end(self, cycle: Cycle) -> None:
        """Serve the next request, or close the connection."""
        if self._queue and self._queue[0] is cycle:
            self._queue.popleft()
        if cycle.closes:
            self._end()
            return
        if self._queue:
            self._start(self._queue[0])
        elif self._is_begun:
            self._set_deadline(self._context.head_s, self._on_head_timeout)
        else:
            self._set_deadline(self._context.keep_alive_s, self._on_head_timeout)
        self._parse()

    def _start(self, cycle: Cycle) -> None:
        task = self._loop.create_task(cycle.run(self._context.app))
        self._context.tasks.add(task)
        task.add_done_callback(self._context.tasks.discard)

    def _drop_requests(self) -> None:
        for cycle in self._queue:
            cycle.leave()
        self._queue.clear()

    # Input

    def _new_parser(self) -> Any:
        return httptools.HttpRequestParser(self)

    def _parse(self) -> None:
        """Parse requests until there is no more input, or enough of them wait."""
        while self._unparsed and not self._discards and not self._is_ahead:
            self._feed(self._next_piece())
        if self._discards:
            self._unparsed.clear()
        self.update_reading()

    @property
    def _is_ahead(self) -> bool:
        """Whether enough requests wait for the end of an earlier one."""
        waiting = [*self._queue][1:]
        num_bytes = sum(len(cycle.body) for cycle in waiting)
        return len(waiting) >= MAX_AHEAD or num_bytes > MAX_BUFFERED_BYTES

    def _next_piece(self) -> bytes:
        """Take input up to what may be the end of a head, as the parser cannot stop after a request."""
        end = self._unparsed.find(b"\r\n\r\n", 0 if self._in_head else BODY_PIECE_BYTES)
        length = len(self._unparsed) if end < 0 else end + 4
        piece = bytes(self._unparsed[:length])
        del self._unparsed[:length]
        return piece

    def _feed(self, data: bytes) -> None:
        was_in_body = not self._in_head
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._frame_bytes += len(data)
            self._recent.clear()
            self._is_at_head = False
        self._recent += data
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            self._go_on_without_upgrade(data[stopped.args[0] :])
        except httptools.HttpParserError:
            if not self._discards:  # else it is what follows the last request
                self._refuse(*self._refusal)
            return
        if not self._is_begun:
            self._is_at_head = True
            if was_in_body or self._recent.strip(b"\r\n"):  # else it may be a line end before a head
                is_cut = was_in_body and self._recent.endswith((b"\r", b"\n"))
                self._line_ends = _CUT_LINE_ENDS if is_cut else _LINE_ENDS
                self._recent.clear()
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(*HEAD_TOO_LARGE)
        elif self._frame_bytes > MAX_HEAD_BYTES:
            self._refuse(*FRAMES_TOO_LARGE)

    def _go_on_without_upgrade(self, rest: bytes) -> None:
        head = self._upgrade_head
        self._upgrade_head = None
        if head is None:  # CONNECT, which is answered
            self._discards = True
            return
        # This parser takes what follows the head for another protocol.
        self._parser = self._new_parser()
        self._head_bytes = 0
        self._recent.clear()
        self._is_at_head = True
        self._unparsed[:0] = rest
        self._feed(head)

    # Of httptools

    def on_message_begin(self) -> None:
        """Begin the head of a request."""
        self._url = b""
        self._headers = []
        self._is_begun = True
        if not self._queue and not self.is_spare:
            self._set_deadline(self._context.head_s, self._on_head_timeout)

    def on_url(self, part: bytes) -> None:
        """Add a part of the URL."""
        self._url += part

    def on_header(self, name: bytes, value: bytes | None) -> None:
        """Add a header. Trailers are counted and dropped."""
        if self._in_head:
            self._headers.append((name.lower(), value or b""))
            if len(self._headers) > MAX_HEADERS:
                self._reject(TOO_MANY_HEADERS)
            return
        self._trailer_bytes += len(name) + len(value or b"") + len(": \r\n")
        if self._trailer_bytes > MAX_HEAD_BYTES:
            self._reject(FRAMES_TOO_LARGE)

    def on_headers_complete(self) -> None:
        """End a head, and pass the request to the application unless the head is wrong."""
        method = self._parser.get_method()
        self._check_line(method)
        self._check_head()
        if self._parser.should_upgrade() and method != b"CONNECT":
            self._upgrade_head = self._head_without_upgrade(method)
            return
        scope = self._scope(method)
        if self.is_spare and scope["path"].removeprefix(scope["root_path"]) not in PROBES:
            self._reject(self._context.refusal)
        cycle = Cycle(
            self,
            scope,
            self._context.default_headers(),
            closes=self._is_stopping or self.is_spare or not self._parser.should_keep_alive(),
            expects_continue=(b"expect", b"100-continue") in [(n, v.lower()) for n, v in self._headers],
        )
        self._in_head = False
        self._head_bytes = self._frame_bytes = self._trailer_bytes = 0
        self._incoming = cycle
        self._queue.append(cycle)
        if len(self._queue) == 1:
            self._clear_deadline()
            self._start(cycle)

    def on_body(self, part: bytes) -> None:
        """Add a part of the body to the request that is being read."""
        self._frame_bytes = 0
        if self._incoming is not None:
            self._incoming.add_body(part)

    def on_message_complete(self) -> None:
        """End a request. The next data is the head of another request."""
        if self._upgrade_head is not None or self._incoming is None:
            return
        self._incoming.end_body()
        if not self._parser.should_keep_alive():
            self._discards = True
        self._incoming = None
        self._in_head = True
        self._is_begun = False
        self._frame_bytes = 0

    def _check_line(self, method: bytes) -> None:
        """Reject a request line of more than a method, a target and a version, with one blank between two.

        The parser takes more blanks, and does not tell. A line after a body is looked for in all that came
        with the body's end.
        """
        line = b"%b %b HTTP/%b\r\n" % (method, self._url, self._parser.get_http_version().encode())
        place = self._recent.find(line)
        begins = not self._is_at_head or self._line_ends.fullmatch(self._recent, 0, place)
        if place < 0 or not begins or b"#" in self._url:
            self._reject(WRONG_LINE)
        del self._recent[: place + len(line)]
        self._is_at_head = False

    def _check_head(self) -> None:
        """Reject a head that is too large, or that another server might read in another way."""
        if len(self._url) + sum(len(name) + len(value) for name, value in self._headers) > MAX_HEAD_BYTES:
            self._reject(HEAD_TOO_LARGE)
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._reject((400, f"HTTP/{version} is not supported; use HTTP/1.1"))
        codings = self._values(b"transfer-encoding")
        if codings and version == "1.0":
            self._reject((400, "HTTP/1.0 has no transfer-encoding; send content-length"))
        if codings and [coding.lower() for coding in codings] != [b"chunked"]:
            self._reject((400, f"transfer-encoding must be chunked, got {_shown(b', '.join(codings))}"))
        if codings and self._values(b"content-length"):
            self._reject((400, "a request has either content-length or transfer-encoding, not both"))
        hosts = self._values(b"host")
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            self._reject((400, f"a request has one header host; this one has {len(hosts)}"))
        if hosts and not _HOST.fullmatch(hosts[0]):
            self._reject((400, f"host must be a name and a port, got {_shown(hosts[0])}"))

    def _values(self, wanted: bytes) -> list[bytes]:
        return [value.strip() for name, value in self._headers if name == wanted]

    def _scope(self, method: bytes) -> Scope:
        url = httptools.parse_url(self._url)
        path = urllib.parse.unquote(url.path.decode("ascii"))
        if url.schema is not None:  # a URL with a host, which counts
            name = b"[%b]" % url.host if b":" in url.host else url.host
            port = b"" if url.port is None else b":%d" % url.port
            others = [header for header in self._headers if header[0] != b"host"]
            self._headers = [*others, (b"host", name + port)]
        root_path = self._context.root_path
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._parser.get_http_version(),
            "scheme": self._scheme,
            "method": method.decode("ascii"),
            "root_path": root_path,
            "path": root_path + path,
            "raw_path": root_path.encode() + url.path,
            "query_string": url.query or b"",
            "headers": self._headers,
            IS_TOO_SLOW: lambda: self.is_too_slow,
            CUT: self._cut_off,
            **self._addresses,
        }

    def _head_without_upgrade(self, method: bytes) -> bytes:
        version = self._parser.get_http_version().encode()
        lines = [method + b" " + self._url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self._headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _reject(self, refusal: tuple[int, str]) -> NoReturn:
        """End the parsing, after which the request is refused."""
        self._refusal = refusal
        raise HttpError(*refusal)

    # Ends

    def _refuse(self, status: int, message: str) -> None:
        """Refuse what is being read, and end the connection after the responses to earlier requests."""
        if self._transport is None or self._transport.is_closing() or self._discards:
            return
        self._discards = True
        is_answered = False
        if self._incoming is not None:  # its body is wrong
            is_answered = self._incoming.is_started
            self._incoming.leave()
            if self._incoming in self._queue:
                self._queue.remove(self._incoming)
        if self._queue:
            self._queue[-1].closes = True
            return
        if not is_answered:
            self._respond(status, message)
        self._end(lingers=True)

    def _respond(self, status: int, message: str) -> None:
        request_id = request_id_of(None)
        reason = TOO_MANY_CONNECTIONS if status == 503 else None
        self._context.on_refusal(UNKNOWN_ROUTE, status, reason=reason, request_id=request_id)
        body = encode_json(error_body(status, message))
        headers = (
            (b"content-type", JSON.encode()),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
            *retry_headers(status, 1),
        )
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        self.write(b"".join([STATUS_LINES[status], *lines, b"\r\n", body]))

    def _end(self, *, lingers: bool = False) -> None:
        """Close the connection once the client has read all responses. What it still sends is discarded."""
        self._discards = True
        self._unparsed.clear()
        self._drop_requests()
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        # TLS cannot end its output alone: its client would wait for the end, unless it still sends.
        can_end = transport.can_write_eof()
        if self._incoming is None and not self._num_discarded and not (lingers and can_end):
            transport.close()
        elif can_end:
            transport.write_eof()
        self.update_reading()
        # However slowly the client reads, sends or closes, the connection ends.
        is_unread = transport.get_write_buffer_size() > 0
        self._set_deadline(self._context.slow_client_s if is_unread else LINGER_S, self.abort)

    def _on_head_timeout(self) -> None:
        if self.is_spare:
            self.refuse_spare()
        elif self._is_begun:
            self._refuse(408, f"the headers did not arrive within {self._context.head_s:g} s; try again")
        else:
            self._end()

    def _set_deadline(self, seconds: float, on_time: Callable[[], None]) -> None:
        self._clear_deadline()
        self._deadline = self._loop.call_later(seconds, on_time)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))
