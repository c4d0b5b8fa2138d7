"""Clients that try to exhaust the server, or to be read in two ways: each is bounded, and gets its answer."""

from __future__ import annotations

import json
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from paged.server.http import acceptor, connection, listener
from paged.server.http.cycle import Cycle
from tests.server.test_refusals import COMPLETION, LONG, posted
from tests.support.certificate import CERTIFICATE
from tests.support.certificate import KEY as KEY_PEM
from tests.support.served import PATIENCE_S, Served, eventually, held, serving

KEY = b"authorization: Bearer one\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'
CHUNK = b"%x\r\n%b\r\n" % (len(BODY), BODY)
VERSION = b"GET /version HTTP/1.1\r\nhost: localhost\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"


def rest_of(client: socket.socket) -> bytes:
    """Return all that comes until the connection ends. Raises ConnectionResetError."""
    return b"".join(iter(lambda: client.recv(2**16), b""))


def answer_to(served: Served, sent: bytes) -> bytes:
    with served.connect() as client:
        client.sendall(sent)
        return rest_of(client)


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


@pytest.fixture(scope="module")
def keyed(engine) -> Iterator[Served]:
    """Yield a server with a key and a small limit of bodies."""
    with serving(engine, api_key=["one"], max_request_bytes=2**16) as served:
        yield served


def test_trailers_are_no_headers(keyed):
    """They came in the same read as the head, before the application looked at it."""
    sent = (
        CHUNKED + b"connection: close\r\nauthorization: Bearer two\r\n\r\n" + CHUNK + b"0\r\n" + KEY + b"\r\n"
    )
    assert statuses(answer_to(keyed, sent)) == [401]
    allowed = sent.replace(b"Bearer two", b"Bearer one").replace(
        b"0\r\nauthorization: ", b"0\r\nx-request-id: "
    )
    assert statuses(answer_to(keyed, allowed)) == [200]


@pytest.mark.parametrize(
    "frames",
    [
        b"0\r\n" + b"a: b\r\n" * 20_000,
        b"0\r\na: " + b"x" * 200_000,
        b"1;" + b"x" * 200_000,
    ],
    ids=["trailers", "one trailer", "extension"],
)
def test_what_is_around_chunks_is_bounded_like_a_head(frames, keyed):
    with keyed.connect() as client:
        client.sendall(CHUNKED + KEY + b"\r\n" + CHUNK)
        client.sendall(frames)
        assert statuses(rest_of(client)) == [431]


def test_few_requests_are_parsed_ahead_and_all_are_answered(served, monkeypatch):
    made = []

    class Counted(Cycle):
        def __init__(self, *args, **options) -> None:
            made.append(self)
            super().__init__(*args, **options)

    monkeypatch.setattr(connection, "Cycle", Counted)
    count = 1000
    numbered = b"".join(VERSION + b"x-request-id: %d\r\n\r\n" % i for i in range(count))
    with served.connect() as client:
        with held(served.front.engine):
            client.sendall(posted({**LONG, "max_tokens": 300}) + numbered[: len(numbered) // 2])
            eventually(lambda: len(made) > connection.MAX_AHEAD)
            assert len(made) <= connection.MAX_AHEAD + 2
        client.sendall(numbered[len(numbered) // 2 :] + VERSION + b"connection: close\r\n\r\n")
        ids = re.findall(rb"x-request-id: (\d+)\r", rest_of(client))
    assert ids == [b"%d" % i for i in range(count)]


def test_large_bodies_behind_a_request_wait_in_the_socket(served, monkeypatch):
    """The server takes no more than its buffers hold, until the first request has ended."""
    parts = []
    add = Cycle.add_body
    monkeypatch.setattr(Cycle, "add_body", lambda cycle, part: parts.append(len(part)) or add(cycle, part))
    large = POST + b"content-length: 8000000\r\n\r\n"
    with served.connect() as client, held(served.front.engine):
        client.sendall(posted({**LONG, "max_tokens": 60}) + large)
        eventually(lambda: len(served.front.open_records) == 1)
        client.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.sendall(b" " * 20_000_000)
        assert sum(parts) < 2**20


@pytest.fixture
def impatient(engine, monkeypatch) -> Iterator[tuple[Served, socket.socket]]:
    """Yield a server that waits briefly for a reader, and a client. The system holds little between them."""
    monkeypatch.setattr(listener, "SEND_BUFFER_BYTES", 4096)
    with serving(engine, slow_client_timeout_s=0.05) as served, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", served.port))
        client.settimeout(60)
        yield served, client


@pytest.mark.parametrize("path", [b"/v1/nothing", b"/v1/completions"])
def test_the_rest_of_a_body_has_a_deadline(path, keyed, monkeypatch):
    """Each byte that came counted as a sign of life, and the connection stayed."""
    monkeypatch.setattr(connection, "LINGER_S", 0.1)
    with keyed.connect() as client:
        client.sendall(POST.replace(b"/v1/completions", path) + b"content-length: 1000\r\n\r\n")
        answer = client.recv(2**16)
        assert b"\r\nconnection: close\r\n" in answer
        assert statuses(answer) == [401]

        def is_closed() -> bool:
            try:
                client.sendall(b"x")
            except OSError:
                return True
            return False

        eventually(is_closed)


def test_line_ends_between_requests_are_no_request(engine):
    with serving(engine, keep_alive_timeout_s=0.1) as served, served.connect() as client:
        client.sendall(VERSION + b"\r\n")

        def is_closed() -> bool:
            try:
                client.sendall(b"\r\n")
            except OSError:
                return True
            return False

        eventually(is_closed)


OPENAPI = VERSION.replace(b"/version", b"/openapi.json") + b"connection: close\r\n\r\n"


@pytest.mark.parametrize("sent", [OPENAPI, METRICS * 20], ids=["the last one", "in front of others"])
def test_an_unread_answer_does_not_keep_the_connection(sent, impatient):
    served, client = impatient
    client.sendall(sent)
    assert client.recv(1)  # it has begun
    eventually(lambda: served.num_connections == 0)


def test_a_client_that_reads_the_last_answer_byte_by_byte_is_cut_off(impatient, served):
    whole = len(answer_to(served, OPENAPI))
    _, client = impatient
    client.sendall(OPENAPI)
    num_read = 0
    with suppress(ConnectionResetError):
        while part := client.recv(64):
            num_read += len(part)
            time.sleep(0.001)  # as slow readers do
    assert num_read < whole


def test_a_body_that_is_too_large_gets_its_answer(keyed):
    """The server closed the connection with input unread, and the system reset it."""
    for expects in (b"", b"expect: 100-continue\r\n"):
        with keyed.connect() as client:
            client.sendall(POST + KEY + expects + b"content-length: 8000000\r\n\r\n")
            if not expects:
                client.sendall(b" " * 8_000_000)
            answer = rest_of(client)
        assert statuses(answer) == [413]  # and no 100
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


FRAMINGS = {
    "gzip, chunked": CHUNKED.replace(b"chunked", b"gzip, chunked") + b"\r\n0\r\n\r\n",
    "identity": CHUNKED.replace(b"chunked", b"identity") + b"\r\n",
    "chunked twice": CHUNKED + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths": CHUNKED + b"content-length: 5\r\n\r\n0\r\n\r\n",
    "both, the other way": POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": POST + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
    "chunks in HTTP/1.0": CHUNKED.replace(b"1.1", b"1.0") + b"\r\n0\r\n\r\n",
    "no host": b"GET /version HTTP/1.1\r\n\r\n",
    "two hosts": VERSION + b"host: localhost\r\n\r\n",
    "no name": b"GET /version HTTP/1.1\r\nhost: a b\r\n\r\n",
    "a user": b"GET /version HTTP/1.1\r\nhost: a@localhost\r\n\r\n",
    "folded": VERSION + b"a: b\r\n c\r\n\r\n",
    "bare line ends": VERSION.replace(b"\r\n", b"\n") + b"\n",
    "space before the colon": VERSION + b"content-length : 5\r\n\r\n",
    "HTTP/0.9": b"GET /version\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("name", FRAMINGS)
def test_what_two_servers_might_read_in_two_ways(name, served):
    answer = answer_to(served, FRAMINGS[name])
    assert statuses(answer) == [400]
    assert b'"error"' in answer


def test_nothing_after_the_last_request_is_answered(served):
    last = VERSION + b"connection: close\r\n\r\n"
    assert statuses(answer_to(served, last + VERSION + b"\r\n")) == [200]
    assert statuses(answer_to(served, POST + b"connection: close\r\ncontent-length: 2\r\n\r\n{}" + last)) == [
        400
    ]


def test_many_headers(served):
    assert statuses(answer_to(served, VERSION + b"a: b\r\n" * 300 + b"\r\n")) == [431]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_client_of_http_1_0(keeps, served):
    """It knows no chunks: the end of the connection ends a body without a length."""
    header = b"connection: keep-alive\r\n" if keeps else b""
    with served.connect() as client:
        client.sendall((VERSION + header + b"\r\n").replace(b"1.1", b"1.0"))
        if keeps:
            head = client.recv(2**16)
            assert b"\r\nconnection: keep-alive\r\n" in head
            client.sendall(
                posted({"prompt": "a", "max_tokens": 2, "stream": True}).replace(b"1.1", b"1.0", 1)
            )
        answer = rest_of(client)
    assert b"chunked" not in answer
    assert b"\r\nconnection: close\r\n" in answer
    if keeps:
        assert answer.endswith(b"}\n\ndata: [DONE]\n\n")


def test_connections_beyond_the_limit(engine, caplog, monkeypatch):
    """They are refused with the reason, and /health is answered among idle ones."""
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(acceptor, "NUM_SPARE", 3)
    monkeypatch.setattr(connection, "SPARE_TIMEOUT_S", PATIENCE_S)  # however slow the clients are
    probe = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving(engine, max_connections=2) as served, ExitStack() as stack:
        idle = [stack.enter_context(served.connect()) for _ in range(2)]
        answer = answer_to(served, VERSION + b"\r\n")
        assert statuses(answer) == [503]
        assert b"2 connections are open, and --max-connections allows no more" in answer
        assert b"\r\nretry-after: 1\r\n" in answer
        for _ in range(20):
            stack.enter_context(served.connect())
            assert statuses(answer_to(served, probe)) == [200]
        for client in idle:
            client.close()
        eventually(lambda: statuses(answer_to(served, VERSION + b"connection: close\r\n\r\n")) == [200])
        _, _, metrics = served.request("GET", "/metrics")
    assert re.search(rb'requests_refused_total{reason="connections"} \d+', metrics)
    assert not caplog.records


def test_connections_that_come_at_once_are_closed_and_forgotten(engine, monkeypatch):
    """Those that gave way while they were being made stayed open, and held up the end of the server."""
    monkeypatch.setattr(acceptor, "NUM_SPARE", 3)
    monkeypatch.setattr(connection, "SPARE_TIMEOUT_S", PATIENCE_S)  # however slow the clients are
    go_on = threading.Event()
    with serving(engine, max_connections=2) as served, ExitStack() as stack:
        served.loop.call_soon_threadsafe(go_on.wait, PATIENCE_S)
        clients = [stack.enter_context(served.connect()) for _ in range(60)]
        go_on.set()
        for client in clients[2:-3]:
            with suppress(ConnectionResetError):
                rest_of(client)
        eventually(lambda: served.num_connections == 2 + 3)  # the last may still be in the making


def test_an_idle_connection_beyond_the_limit_is_told(engine, monkeypatch):
    monkeypatch.setattr(connection, "SPARE_TIMEOUT_S", 0.05)
    with serving(engine, max_connections=1) as served, served.connect(), served.connect() as client:
        assert statuses(rest_of(client)) == [503]


@pytest.fixture
def encrypted(engine, tmp_path, monkeypatch) -> Iterator[tuple[Served, ssl.SSLContext]]:
    """Yield a server over TLS that takes one connection and two spare ones, and what its clients need."""
    monkeypatch.setattr(acceptor, "NUM_SPARE", 2)
    monkeypatch.setattr(connection, "SPARE_TIMEOUT_S", PATIENCE_S)  # however slow the clients are
    (tmp_path / "key.pem").write_text(KEY_PEM)
    (tmp_path / "certificate.pem").write_text(CERTIFICATE)
    files = {"ssl_keyfile": str(tmp_path / "key.pem"), "ssl_certfile": str(tmp_path / "certificate.pem")}
    with serving(engine, max_connections=1, max_request_bytes=2**16, **files) as served:
        yield served, ssl.create_default_context(cadata=CERTIFICATE)


def test_a_handshake_that_does_not_end(encrypted, monkeypatch):
    """It counts as a connection, does not silence /health, and has a deadline."""
    served, context = encrypted

    def answer(sent: bytes) -> bytes:
        with context.wrap_socket(served.connect(), server_hostname="localhost") as client:
            client.sendall(sent)
            return rest_of(client)

    with ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(served.connect())
        last = b" HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        assert statuses(answer(b"GET /health" + last)) == [200]
        assert statuses(answer(b"GET /version" + last)) == [503]
    eventually(lambda: statuses(answer(b"GET /version" + last)) == [200])
    with monkeypatch.context() as patched:
        patched.setattr(acceptor, "HANDSHAKE_TIMEOUT_S", 0.05)
        with served.connect() as client, suppress(ConnectionResetError):
            assert client.recv(1) == b""
    eventually(lambda: statuses(answer(b"GET /version" + last)) == [200])
    eventually(lambda: served.num_connections == 0)
    large = POST + b"content-length: 8000000\r\n\r\n" + b" " * 8_000_000
    with context.wrap_socket(served.connect(), server_hostname="localhost") as client:
        client.sendall(large)
        assert statuses(client.recv(2**16)) == [413]
    eventually(lambda: served.num_connections == 0)
    stream = posted({"prompt": "a", "max_tokens": 2, "stream": True}).replace(b"1.1", b"1.0", 1)
    assert answer(stream).endswith(b"}\n\ndata: [DONE]\n\n")


HOSTS = {
    "localhost": 200,
    "LocalHost:8000": 200,
    "127.0.0.1": 200,
    "127.1.2.3:80": 200,
    "[::1]:8000": 200,
    "localhost.": 200,
    "evil.example": 403,
    "localhost.evil.example": 403,
    "evil.example:8000": 403,
    "127.0.0.1.evil.example": 403,
    "192.0.2.1": 403,
    "": 403,
    "localhost:80:80": 403,
    "[]": 403,
    "[]:80": 403,
    ":80": 403,
    "[:80": 403,
}


def test_other_names_are_refused_on_loopback(served, keyed, engine):
    """A page could make its own name an alias of this address, and read what the server answers."""
    for host, status in HOSTS.items():
        sent = VERSION.replace(b"localhost", host.encode()) + b"connection: close\r\n\r\n"
        assert statuses(answer_to(served, sent)) == [status], host
        assert statuses(answer_to(keyed, sent)) == [status], host
    # No browser leaves it out, but probes of HTTP/1.0 do.
    assert statuses(answer_to(served, b"GET /health HTTP/1.0\r\n\r\n")) == [200]
    # The host of the target counts, where it has one.
    target = b"GET http://evil.example/version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answer = answer_to(served, target)
    assert statuses(answer) == [403]
    assert b"--allowed-hosts" in answer
    with serving(engine, allowed_hosts=["LLM.example"], api_key=["one"]) as named:
        for host, status in (("llm.example:80", 200), ("localhost", 200), ("evil.example", 403)):
            assert named.request("GET", "/version", None, {"host": host})[0] == status
    with serving(engine, allowed_hosts=["*"]) as open_to_all:
        assert open_to_all.request("GET", "/version", None, {"host": "evil.example"})[0] == 200


def test_cached_tokens_are_told_where_the_operator_allows_it(served, engine):
    asked = {"prompt": "def add(a, b): return a + b\n" * 8, "max_tokens": 1}
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    with serving(engine, enable_prompt_tokens_details=True) as telling:
        for _ in range(2):
            details = telling.post(COMPLETION, **asked)["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] > 0
        last = json.loads(telling.events(COMPLETION, **asked, **usage)[-2])
        assert last["usage"]["prompt_tokens_details"] == details
    assert served.post(COMPLETION, **asked)["usage"]["prompt_tokens_details"] is None
    assert not any('"cached_tokens"' in event for event in served.events(COMPLETION, **asked, **usage))
