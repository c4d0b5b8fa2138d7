"""Exchange: one HTTP request and its response, within limits of size and time."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from ...engine.async_base import LEAST_TIMEOUT_S
from ...protocol.endpoints import Access, Endpoint, is_of_ollama
from ...requests.request import RequestOutput
from ..access.limits import Admission, KeyUsage
from ..telemetry.records import RequestRecord
from .budgets import BodyBudget, BodyRoom, ResponseBudget
from .failures import Header, HttpError
from .large_json import PARSED_AT_ONCE, parse_body

T = TypeVar("T")
JSON, EVENTS, JSON_LINES = "application/json", "text/event-stream; charset=utf-8", "application/x-ndjson"
MEDIUM_BYTES = 2**20  # larger bodies are parsed one after another, and do not keep others waiting
WAIT_FOR_ROOM_S = 2.0  # for a body; by then others that have stalled have lost theirs
LOOK_FOR_ROOM_S = 0.25
SENT_AT_ONCE = 2**16  # bytes of a response, of which a client has to read most before the next are sent
# Functions of a request's scope: whether its client was cut off for reading too slowly, and what does so.
IS_TOO_SLOW = "paged.is_too_slow"
CUT = "paged.cut"
LOADED_AFTER = "paged.load_s"  # of a scope: seconds for which the request has waited for its model
PARTS_AT_ONCE = 4096  # tokens and candidates of an answer that is made on the event loop
# An id is written to logs and headers: printable ASCII without spaces, commas and quotes.
_REQUEST_ID = re.compile(rb"[!#-+\--~]{1,128}")


class Exchange:
    """One HTTP request and its response.

    max_body_bytes: maximum size of the body.
    body_timeout_s: seconds within which the body must arrive.
    budget: the memory budget for the bodies of all requests.
    responses: the memory budget for all whole responses.
    scope, receive, send: of the ASGI application.
    address: the client's address; "" at a Unix domain socket.
    num_body_bytes: how many bytes of the body were read.
    route: the path below --root-path.
    request_id: the response's header x-request-id: the client's own id if it is short and printable.
    extra_headers: headers added to the response.
    status: the status of the response, once it has begun.
    is_accepted: whether the server answers the request even while it shuts down.
    is_complete: whether the last part of the response was passed on for sending.
    is_passed_on: whether another application answers it, which counts it.
    load_s: seconds for which the request has waited for its model.
    record: the record of the request, once its body was accepted.
    access: the access for which the key was checked; None if the route needs no key.
    key: the usage of the request's key, if keys belong to tenants.
    owner: the owner of objects that the request creates and may see; None without keys, and for the operator,
        who sees everything.
    admission: the request's usage of its key's limits, once its body was read.
    error: the error that ended the response after it had begun.
    """

    __slots__ = (
        "_body_timeout_s",
        "_budget",
        "_cut",
        "_headers",
        "_is_too_slow",
        "_query_string",
        "_responses",
        "_room",
        "access",
        "address",
        "admission",
        "error",
        "extra_headers",
        "is_accepted",
        "is_complete",
        "is_passed_on",
        "key",
        "load_s",
        "max_body_bytes",
        "method",
        "owner",
        "receive",
        "received",
        "record",
        "request_id",
        "route",
        "scope",
        "send",
        "status",
    )

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        max_body_bytes: int,
        body_timeout_s: float,
        budget: BodyBudget,
        responses: ResponseBudget,
    ) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self._is_too_slow: Callable[[], bool] = scope[IS_TOO_SLOW]
        self._cut: Callable[[], None] = scope[CUT]
        self._responses = responses
        self.method: str = scope["method"]
        self.route: str = scope["path"].removeprefix(scope.get("root_path", ""))
        self._query_string: bytes = scope["query_string"]
        self.max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._budget = budget
        self._room: BodyRoom | None = None
        self.address: str = (scope.get("client") or ("",))[0]
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self.request_id = request_id_of(self._headers.get(b"x-request-id"))
        self.received = time.monotonic()
        self.extra_headers: list[Header] = []
        self.status: int | None = None
        self.is_accepted = False
        self.is_complete = False
        self.is_passed_on = False
        self.load_s: float = scope.get(LOADED_AFTER, 0.0)
        self.record: RequestRecord | None = None
        self.access: Access | None = None
        self.key: KeyUsage | None = None
        self.owner: str | None = None
        self.admission: Admission | None = None
        self.error: Exception | None = None

    @property
    def query(self) -> dict[str, str]:
        """The parameters in the URL."""
        return dict(parse_qsl(self._query_string.decode("latin-1")))

    @property
    def is_too_slow(self) -> bool:
        """Whether the client was cut off because it read too slowly, or because memory was needed."""
        return self._is_too_slow()

    def header(self, name: str) -> str | None:
        """Return the value of a request header; the last value if it occurs several times."""
        value = self._headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    def take_parameter(self, endpoint: Endpoint) -> str:
        """Return the part of the path at {…} of an endpoint. Metrics count the request under its template."""
        before, _, after = re.split(r"(\{\w+\})", endpoint.path)
        value = self.route.removeprefix(before).removesuffix(after)
        self.route = endpoint.path
        return value

    def time_left(self, timeout_s: float | None) -> float | None:
        """Return the seconds left of timeout_s, which counts from the request's arrival; None without one."""
        if timeout_s is None:
            return None
        return max(timeout_s - (time.monotonic() - self.received), LEAST_TIMEOUT_S)

    def on_output(self, output: RequestOutput, replica: int) -> None:
        """Record an output of an engine."""
        if self.record is not None:
            self.record.on_output(output, time.monotonic(), replica)

    async def read_body(self) -> bytes:
        """Read the body as it is. Its memory counts until `end`. Raises what `read_json` does."""
        self._check_type()
        return b"".join(await self._read())

    async def read_json(self, parse: Callable[[Any], T]) -> T:
        """Read the body as JSON. Return the result of `parse` for its value.

        parse: runs in a thread if the body is long.

        Raises HttpError if the body is too large, too slow or of another type, or if the memory for bodies is
        used up; RequestError if the body is not JSON; and the errors of `parse`.
        """
        self._check_type()
        parts = await self._read()
        room = self._room
        assert room is not None
        if not self.has_large_body:
            return parse(parse_body(b"".join(parts), room.hold))
        loop = asyncio.get_running_loop()

        def parse_beside() -> T:
            body = b"".join(parts)
            parts.clear()
            return parse(parse_body(body, lambda num: loop.call_soon_threadsafe(room.hold, num)))

        pool = _parsing_large if room.num_bytes > MEDIUM_BYTES else _parsing
        return await loop.run_in_executor(pool, parse_beside)

    def end(self) -> None:
        """Release the memory of the body once the request has ended."""
        if self._room is not None:
            self._room.close()

    @property
    def num_body_bytes(self) -> int:
        """The number of bytes of the body, as long as they count in the budget."""
        return 0 if self._room is None else self._room.num_bytes

    @property
    def has_large_body(self) -> bool:
        """Whether work on the body would block the event loop too long."""
        return self.num_body_bytes > PARSED_AT_ONCE

    async def _read(self) -> list[bytes]:
        """Return the parts of the body. Raises HttpError if it is too large or too slow."""
        length = self._headers.get(b"content-length", b"")
        if length.isdigit() and int(length[:20]) > self.max_body_bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._body_timeout_s) as timer:
                client = self.address if self.key is None else f"tenant {self.key.entry.tenant}"
                self._room = self._budget.open(client, lambda: _expire(timer))
                parts = await self._read_parts(self._room)
                self._room.finish_reading()
                return parts
        except TimeoutError:
            raise HttpError(408, self._why_late(), headers=((b"connection", b"close"),)) from None

    def _why_late(self) -> str:
        if self._room is not None and self._room.is_lost:
            return "the body did not go on, and others needed its room; send the request again"
        return f"the body did not arrive within {self._body_timeout_s:g} seconds; send the request again"

    async def _read_parts(self, room: BodyRoom) -> list[bytes]:
        more = True
        parts: list[bytes] = []
        while more:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body = message.get("body", b"")
            more = message.get("more_body", False)
            if room.num_bytes + len(body) > self.max_body_bytes:
                raise self._too_large()
            if not await _grow(room, len(body)):
                raise self._no_room(((b"connection", b"close"),))
            parts.append(body)
        return parts

    async def hold(self, num_bytes: int) -> None:
        """Count bytes that were fetched for the request as bytes of its body. Raises HttpError."""
        assert self._room is not None, "the body was read before"
        if not await _grow(self._room, num_bytes):
            raise self._no_room()

    def _no_room(self, headers: Iterable[Header] = ()) -> HttpError:
        return HttpError(
            503,
            f"the bodies of the requests in progress may have {self._budget.max_bytes:,} bytes together, and "
            "each client its share; send the request again when some have ended",
            headers=tuple(headers),
        )

    def _too_large(self) -> HttpError:
        return HttpError(
            413,
            f"the body is larger than {self.max_body_bytes:,} bytes; send less, or raise --max-request-bytes",
            # What is left of the body is not read.
            headers=((b"connection", b"close"),),
        )

    def _check_type(self) -> None:
        # Ollama takes any type, as curl -d sends one. What a browser sends without asking first is refused.
        is_browser = any(self.header(name) is not None for name in ("origin", "sec-fetch-site"))
        if is_of_ollama(self.route) and not is_browser:
            return
        kind, _, parameters = (self.header("content-type") or "").partition(";")
        if kind.strip().lower() != JSON:
            got = f"got {kind.strip()!r}" if kind else "it is missing"
            raise HttpError(415, f"content-type must be {JSON}, {got}", param="content-type")
        charset = re.search(r'charset="?([^\s";]*)', parameters, re.IGNORECASE)
        if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii"):
            raise HttpError(415, f"charset must be utf-8, got {charset[1]!r}", param="content-type")
        if (encoding := self.header("content-encoding")) not in (None, "identity"):
            raise HttpError(
                415,
                f"content-encoding {encoding!r} is not supported; send the body as it is",
                param="content-encoding",
            )

    async def begin(self, status: int, content_type: str, headers: Iterable[Header] = ()) -> None:
        """Send the status and the headers of a response."""
        self.status = status
        sent = [
            (b"content-type", content_type.encode()),
            (b"x-request-id", self.request_id.encode()),
            *self.extra_headers,
            *headers,
            *(self.key.headers() if self.key is not None else ()),
        ]
        await self.send({"type": "http.response.start", "status": status, "headers": sent})

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send the next part of the response, once the client has read enough of the earlier parts."""
        for start in range(0, len(body) - SENT_AT_ONCE, SENT_AT_ONCE):
            await self._send_body(body[start : start + SENT_AT_ONCE], more=True)
        rest = (len(body) - 1) // SENT_AT_ONCE * SENT_AT_ONCE
        self.is_complete = not more
        await self._send_body(body[rest:] if body else body, more=more)

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    async def respond(
        self, status: int, body: bytes, content_type: str = JSON, headers: Iterable[Header] = ()
    ) -> None:
        """Send a whole response."""
        await self.begin(status, content_type, ((b"content-length", b"%d" % len(body)), *headers))
        if len(body) <= SENT_AT_ONCE:
            await self.write(body, more=False)
            return
        with self._responses.sending(len(body), self._cut):
            await self.write(body, more=False)

    async def respond_json(self, status: int, value: Any, headers: Iterable[Header] = ()) -> None:
        """Send a whole response of JSON."""
        await self.respond(status, encode_json(value), headers=headers)

    async def answer(self, new_body: Callable[[], Any], num_parts: int) -> None:
        """Send a whole response of JSON with status 200; see `encode_answer`."""
        await self.respond(200, await encode_answer(new_body, num_parts))


class ClientGone(Exception):  # noqa: N818 - an event like CancelledError, no error
    """The client has closed the connection, so no response can be sent."""


def _expire(timer: asyncio.Timeout) -> None:
    if not timer.expired():
        timer.reschedule(0.0)


async def _grow(room: BodyRoom, num_bytes: int) -> bool:
    """Take more room for a body, if there is some within WAIT_FOR_ROOM_S. Return whether there was."""
    until = time.monotonic() + WAIT_FOR_ROOM_S
    while not room.grow(num_bytes):
        if time.monotonic() > until:
            return False
        await asyncio.sleep(LOOK_FOR_ROOM_S)
    return True


# Few threads: more would take turns at the interpreter, and the event loop would wait for each.
_parsing = ThreadPoolExecutor(2, "paged-bodies")
_parsing_large = ThreadPoolExecutor(1, "paged-large-bodies")


class until_disconnect:  # noqa: N801 - used as a function is, like asyncio.timeout
    """A context that is cancelled when the client of an exchange disconnects; it then raises ClientGone.

    The body of the request must have been read before.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._is_gone = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._exchange.receive())["type"] != "http.disconnect":
            pass
        # The end of the response is told as a disconnect, too.
        if not self._exchange.is_complete:
            self._is_gone = True
            self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._watching.cancel()
        if self._is_gone and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise ClientGone from None


def request_id_of(given: bytes | None) -> str:
    """Return a client's id if it is short and printable, otherwise a new id."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode()
    return uuid.uuid4().hex


async def in_thread_if(is_long: bool, function: Callable[..., T], *args: Any) -> T:
    """Call a function in a thread if it takes long, otherwise on the event loop."""
    return await asyncio.to_thread(function, *args) if is_long else function(*args)


async def encode_answer(new_body: Callable[[], Any], num_parts: int) -> bytes:
    """Return a body as JSON. Large bodies are encoded in a thread, one after the other.

    num_parts: the approximate number of tokens, candidates or other values in the body.
    """
    if num_parts <= PARTS_AT_ONCE:
        return encode_json(new_body())
    return await beside_loop(lambda: encode_in_pieces(new_body()))


async def beside_loop(function: Callable[..., T], *args: Any) -> T:
    """Call a function in a thread, for a part of an answer. Such calls run one after the other."""
    return await asyncio.get_running_loop().run_in_executor(_answers, function, *args)


# One thread: more would take turns at the interpreter, and the event loop would wait for each of them.
_answers = ThreadPoolExecutor(1, "paged-answers")


def encode_in_pieces(value: Any) -> bytes:
    """Encode a large value as JSON. Let other threads run between its parts."""
    return bytes(_in_pieces(value, depth=6))  # down to one token of one choice of a chat


def _in_pieces(value: Any, depth: int) -> msgspec.Raw:
    """Return a value as JSON. What is in it is encoded before, so that no call of the encoder takes long."""
    if depth and isinstance(value, dict):
        value = {key: _in_pieces(part, depth - 1) for key, part in value.items()}
    elif depth and isinstance(value, list) and value and isinstance(value[-1], dict | list):
        value = [_in_pieces(part, depth - 1) for part in value]
    return msgspec.Raw(encode_json(value))


def encode_json(value: Any) -> bytes:
    """Return a value as JSON."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:  # a lone surrogate, which a request's JSON may contain as an escape
        return json.dumps(value, allow_nan=False).encode()


# The token ids of an unfinished request are a sequence of its own kind.
_encoder = msgspec.json.Encoder(enc_hook=list)
