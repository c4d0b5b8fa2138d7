"""Seeded cases for the server's fuzzer: what is sent on one connection, how, and how the client leaves."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from paged.protocol.endpoints import ROUTES
from tests.support.mutations import dumps
from tests.support.server_bodies import JSON, VALID, new_body, valid_body
from tests.support.small_server import MODEL

# Those that answer 200 in an idle server, and whose answer has an end.
GETS = [route.path for route in ROUTES if route.method == "GET" and route.access not in ("admin", "watch")]
GETS.remove("/v1/responses/{response}")
POSTS = [*VALID]
# Of what is no request to a route, or is refused before it reaches one.
PROTOCOL_STATUSES = frozenset({400, 404, 405, 408, 413, 415, 431})


class End(Enum):
    """How a client ends its connection."""

    READS = "reads the responses"
    RESETS = "resets the connection"
    SHUTS = "shuts down its sending side, and reads"
    LEAVES = "closes without reading"


class Target(NamedTuple):
    """What a request is for: the table of /openapi.json has its statuses."""

    method: str
    path: str

    @property
    def line(self) -> tuple[bytes, bytes]:
        """The method and the path of its request line."""
        return self.method.encode(), self.path.format(model=MODEL).encode()


@dataclass
class Case:
    """One connection.

    number: of the case; with the seed it fixes everything.
    done: what is sent, in words.
    targets: of the requests that may get responses; the last one stands for all behind it.
    parts: are sent one after another, with pauses.
    end: of the connection, once as many responses as targets have been read.
    after: bytes that a client reads before it resets or leaves.
    must_answer: whether no response is a failure.
    succeeds: whether all responses must have the status 200.
    """

    number: int
    done: str
    targets: Sequence[Target]
    parts: Sequence[bytes]
    end: End = End.READS
    after: int = 0
    pause_s: float = 0.0
    must_answer: bool = True
    succeeds: bool = False

    @property
    def num_wanted(self) -> int:
        """How many responses the case must get."""
        return len(self.targets) if self.succeeds else 1


def new_case(seed: int, number: int) -> Case:
    """Return a case. It is the same for the same seed and number."""
    choose = random.Random(f"{seed}/{number}")
    make = choose.choices([_body_case, _head_case, _framing_case, _leaving_case], [14, 3, 2, 2])[0]
    return make(choose, number)


@dataclass
class _Request:
    """The parts of a request that are damaged."""

    target: Target
    body: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    line: bytes = b""

    def encode(self, body: bytes | None = None) -> bytes:
        line = self.line or b"%b %b HTTP/1.1" % self.target.line
        lines = [line, *(name + b": " + value for name, value in self.headers)]
        return b"\r\n".join(lines) + b"\r\n\r\n" + (self.body if body is None else body)


def _request(number: int, target: Target, body: bytes = b"", content_type: str = JSON) -> _Request:
    headers = [(b"host", b"localhost"), (b"x-request-id", b"case-%d" % number)]
    if target.method == "POST":
        headers.append((b"content-length", b"%d" % len(body)))
        if content_type:
            headers.append((b"content-type", content_type.encode("latin-1")))
    return _Request(target, body, headers)


def _valid(choose: random.Random, number: int) -> _Request:
    """Return a valid request."""
    if choose.random() < 0.3:
        return _request(number, Target("GET", choose.choice(GETS)))
    url = choose.choice(POSTS)
    return _request(number, Target("POST", url), dumps(valid_body(choose, url)).encode())


def _body_case(choose: random.Random, number: int) -> Case:
    target = Target("POST", choose.choice(POSTS))
    data, content_type, done = new_body(choose, target.path)
    request = _request(number, target, data, content_type)
    words = f"{target.path} {done or 'valid'}"
    return Case(number, words, [target], [request.encode()], succeeds=not done)


def _head_case(choose: random.Random, number: int) -> Case:
    """Damage the request line, or the headers."""
    request = _valid(choose, number)
    damage = choose.choice([_damage_line, _damage_headers])
    done = damage(choose, request)
    case = Case(number, f"{request.target.path} {done}", [request.target], [request.encode()])
    method, path = [*request.line.split(), b"", b""][:2]
    if method == b"HEAD":
        case.targets = [Target("HEAD", request.target.path)]
    elif b"health" in path or path == b"/%68ealth":
        case.targets = [Target("GET", "/health")]
    case.must_answer = not request.line.startswith(b"CONNECT")
    return case


_LINES = [
    b"GET",
    b"GET /",
    b"GET / HTTP/9.9",
    b"GET / HTTP/0.9",
    b"GET  /  HTTP/1.1",
    b"get / HTTP/1.1",
    b" GET / HTTP/1.1",
    b"\x00\x01\x02",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0",
    b"GET * HTTP/1.1",
    b"OPTIONS * HTTP/1.1",
    b"GET http://[::1]/health HTTP/1.1",
    b"GET //health HTTP/1.1",
    b"GET /health?a=%ff&b=\xff HTTP/1.1",
    b"GET /%68ealth HTTP/1.1",
    b"GET /health%00 HTTP/1.1",
    b"GET /%ff%fe HTTP/1.1",
    b"GET /\xff HTTP/1.1",
    b"GET /../../etc/passwd HTTP/1.1",
    b"GET /health/ HTTP/1.1",
    b"GET /health#x HTTP/1.1",
    b"GET /%0d%0ax-evil:%201 HTTP/1.1",
    b"GET /" + b"a" * 5000 + b" HTTP/1.1",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1",
    b"POST /v1/nothing HTTP/1.1",
    b"GET /health HTTP/1.1 x",
    b"CONNECT a:80 HTTP/1.1",
    b"M-SEARCH /health HTTP/1.1",
    b"GET /health\tHTTP/1.1",
    b"GET /health HTTP/1.1\r",
    b"RTSP /health RTSP/1.0",
    b"GET /health ICE/1.0",
    b"BREW /health HTTP/1.1",
]
_METHODS = [b"HEAD", b"OPTIONS", b"DELETE", b"PUT", b"PATCH", b"TRACE", b"CONNECT", b"GET", b"POST", b"QUERY"]


def _damage_line(choose: random.Random, request: _Request) -> str:
    if choose.random() < 0.5:
        request.line = choose.choice(_LINES)
    else:
        method, version = choose.choice(_METHODS), choose.choice([b"1.1", b"1.1", b"1.0"])
        request.line = b"%b %b HTTP/%b" % (method, request.target.line[1], version)
    return f"as {request.line[:60]!a}"


_HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-length", b"0"),
    (b"content-length", b"-1"),
    (b"content-length", b"+5"),
    (b"content-length", b"0x5"),
    (b"content-length", b"5, 5"),
    (b"content-length", b"9" * 30),
    (b"content-length", b""),
    (b"transfer-encoding", b"chunked"),
    (b"transfer-encoding", b"gzip, chunked"),
    (b"transfer-encoding", b"identity"),
    (b"transfer-encoding", b"chunked, chunked"),
    (b"transfer-encoding", b"xchunked"),
    (b"content-type", b"text/html"),
    (b"content-type", b"application/json"),
    (b"content-encoding", b"gzip"),
    (b"expect", b"100-continue"),
    (b"expect", b"nonsense"),
    (b"connection", b"close"),
    (b"connection", b"upgrade"),
    (b"upgrade", b"websocket"),
    (b"upgrade", b"h2c"),
    (b"host", b"b"),
    (b"host", b""),
    (b"x-request-id", b"a b"),
    (b"x-request-id", b"\xff" * 200),
    (b"x-request-id", b"ok"),
    (b"authorization", b"Bearer \xff"),
    (b"authorization", b"Basic"),
    (b"a", b"x" * 70_000),
    (b"a", b"x" * 9000),
    (b"a", b"\x00"),
    (b"a", b"b\r\n c"),
    (b"a b", b"c"),
    (b"", b"x"),
    (b"a\xff", b"x"),
    (b"a ", b"x"),
    (b"traceparent", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01"),
    (b"traceparent", b"ff-\xff"),
    (b"traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    (b"tracestate", b"a=" + b"b" * 3000),
    (b"origin", b"null"),
    (b"range", b"bytes=0-1"),
    (b"accept", b"nothing/at-all"),
    (b"accept-encoding", b"br;q=x"),
    (b"cookie", b";;;"),
    (b"x-forwarded-for", b"\xff, , 1"),
    (b"trailer", b"x"),
    (b"te", b"trailers"),
    (b"host", b"a\tb"),
]


def _damage_headers(choose: random.Random, request: _Request) -> str:
    how = choose.randrange(6)
    headers = request.headers
    if how == 0 and headers:
        name, _ = headers.pop(choose.randrange(len(headers)))
        return f"without {name.decode()}"
    if how == 1:
        name, value = choose.choice(headers)
        headers.append((name, value))
        return f"with {name.decode()} twice"
    if how == 2:
        headers += [(b"h%d" % i, b"x" * choose.choice([1, 60])) for i in range(choose.choice([150, 2000]))]
        return f"with {len(headers)} headers"
    added = [choose.choice(_HEADERS) for _ in range(choose.choice([1, 1, 2]))]
    for header in added:
        headers.insert(choose.randrange(len(headers) + 1), header)
    return "with " + ", ".join(f"{name!a}: {value[:30]!a}" for name, value in added)


def _chunked(choose: random.Random, body: bytes) -> list[bytes]:
    """Cut a body into chunks, each with its size."""
    cuts = sorted(choose.randrange(len(body) + 1) for _ in range(choose.randrange(4)))
    parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    return [b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part]


_BAD_CHUNKS = [
    b"zz\r\nx\r\n",
    b"-1\r\n\r\n",
    b"ffffffffffffffff1\r\nx",
    b"5\r\nab\r\n",
    b"1;" + b"a" * 20_000 + b"\r\nx\r\n",
    b"1\nx\n",
    b" 1\r\nx\r\n",
    b"1\r\nxy\r\n",
    b"\r\n",
    b"0x1\r\nx\r\n",
]


def _framing_case(choose: random.Random, number: int) -> Case:
    """Say another length than that of the body, cut it into chunks, or send several requests at once."""
    makers: Sequence[Callable[[random.Random, int], Case]] = (_wrong_length, _in_chunks, _pipelined, _slow)
    return choose.choice(makers)(choose, number)


def _posted(choose: random.Random, number: int) -> _Request:
    while True:
        request = _valid(choose, number)
        if request.body:
            return request


def _wrong_length(choose: random.Random, number: int) -> Case:
    request = _posted(choose, number)
    actual = len(request.body)
    said = choose.choice([0, 1, actual - 1, actual + 1, actual + 5000, 2**21, 2**40])
    request.headers = [h for h in request.headers if h[0] != b"content-length"]
    request.headers.append((b"content-length", b"%d" % said))
    return Case(
        number, f"{request.target.path} {said} for {actual} bytes", [request.target], [request.encode()]
    )


def _in_chunks(choose: random.Random, number: int) -> Case:
    request = _posted(choose, number)
    length = [h for h in request.headers if h[0] == b"content-length"]
    request.headers = [h for h in request.headers if h[0] != b"content-length"]
    chunks, done = _chunked(choose, request.body), "in chunks"
    request.headers.append((b"transfer-encoding", b"chunked"))
    end, is_valid = b"0\r\n\r\n", False
    how = choose.randrange(6)
    if how == 0:
        bad = choose.choice(_BAD_CHUNKS)
        chunks.insert(choose.randrange(len(chunks) + 1), bad)
        done += f", one {bad[:20]!a}"
    elif how == 1:
        end, done = b"", f"{done} without an end"
    elif how == 2:
        request.headers += length
        done += " and with content-length"
    elif how == 3:
        end, done = b"0\r\nx-trailer: 1\r\ncontent-length: 5\r\n\r\n", f"{done} with trailers"
    elif how == 4:
        chunks.append(b"100000\r\n" + b" " * 2**20 + b"\r\n")
        done += " beyond the limit"
    else:
        is_valid = True
    parts = [request.encode(b""), *chunks, end]
    return Case(
        number, f"{request.target.path} {done}", [request.target], parts, pause_s=0.001, succeeds=is_valid
    )


def _pipelined(choose: random.Random, number: int) -> Case:
    requests = [_valid(choose, number) for _ in range(choose.randint(2, 6))]
    data = b"".join(request.encode() for request in requests)
    targets = [request.target for request in requests]
    done = f"{len(requests)} requests at once"
    if choose.random() < 0.3:
        return Case(
            number, f"{done}, then garbage", targets, [data + b"\x00garbage\r\n\r\n"], must_answer=False
        )
    return Case(number, done, targets, [data], succeeds=True)


def _slow(choose: random.Random, number: int) -> Case:
    request = _posted(choose, number)
    data = request.encode()
    if choose.random() < 0.5:
        cut = choose.randrange(1, len(data))
        return Case(number, f"{request.target.path} stops after {cut} bytes", [request.target], [data[:cut]])
    parts = [data[i : i + 40] for i in range(0, len(data), 40)]
    done = f"{request.target.path} in {len(parts)} parts"
    return Case(number, done, [request.target], parts, pause_s=0.002)


def _leaving_case(choose: random.Random, number: int) -> Case:
    """Leave amid the request or its response."""
    requests = [_posted(choose, number) for _ in range(choose.choice([1, 1, 1, 2]))]
    data = b"".join(request.encode() for request in requests)
    end = choose.choice([End.RESETS, End.SHUTS, End.LEAVES])
    if choose.random() < 0.3:
        data = data[: choose.randrange(1, len(data))]
    return Case(
        number,
        f"{', '.join(request.target.path for request in requests)}: the client {end.value}",
        [request.target for request in requests],
        [data],
        end,
        after=choose.choice([0, 0, 1, 100, 400]),
        pause_s=choose.choice([0, 0.001, 0.01]),
        must_answer=False,
    )
