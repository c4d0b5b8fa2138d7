"""Requests beyond a limit, or wrong in another way: each gets its own error, and disturbs nothing else."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest

from paged.base.errors import EngineDeadError
from paged.server.http import failures
from tests.support.served import eventually, serving, unhurried

JSON = {"content-type": "application/json"}
COMPLETION = "/v1/completions"
WRONG = {
    "path": (404, "GET", "/v1/nothing", None, {}, None),
    "slash": (404, "GET", "/v1/models/", None, {}, None),
    "method": (405, "DELETE", "/health", None, {}, None),
    "type": (415, "POST", COMPLETION, b"{}", {"content-type": "text/plain"}, "content-type"),
    "no type": (415, "POST", COMPLETION, b"{}", {}, "content-type"),
    "charset": (
        415,
        "POST",
        COMPLETION,
        b"{}",
        {"content-type": "application/json; charset=utf-16"},
        "content-type",
    ),
    "encoding": (415, "POST", COMPLETION, b"{}", {**JSON, "content-encoding": "gzip"}, "content-encoding"),
    "no JSON": (400, "POST", COMPLETION, b'{"prompt": ', JSON, None),
    "twice": (400, "POST", COMPLETION, b'{"prompt": "a", "prompt": "b"}', JSON, None),
    "NaN": (400, "POST", COMPLETION, b'{"prompt": "a", "temperature": NaN}', JSON, None),
    "deep": (400, "POST", COMPLETION, b"[" * 50_000, JSON, None),
    "no UTF-8": (400, "POST", COMPLETION, b'{"prompt": "\xff"}', JSON, None),
    "no object": (400, "POST", COMPLETION, b"[1]", JSON, None),
    "field": (400, "POST", COMPLETION, b'{"prompt": "a", "max_token": 1}', JSON, "max_token"),
    "value": (400, "POST", COMPLETION, b'{"prompt": "a", "n": 0}', JSON, "n"),
    "token": (400, "POST", COMPLETION, b'{"prompt": [4096]}', JSON, "prompt"),
    "long": (400, "POST", COMPLETION, json.dumps({"prompt": [1] * 5000}).encode(), JSON, "prompt"),
    "model": (404, "POST", COMPLETION, b'{"prompt": "a", "model": "other"}', JSON, "model"),
    "messages": (400, "POST", "/v1/chat/completions", b'{"messages": []}', JSON, "messages"),
    "large": (413, "POST", COMPLETION, b" " * 70_000, JSON, None),
}


@pytest.fixture(scope="module")
def small(engine):
    """Yield a server with a small limit of bodies, and keys."""
    with serving(engine, max_request_bytes=60_000, api_key=["one", "two"]) as served:
        yield served


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests(name, small):
    status, method, path, body, headers, param = WRONG[name]
    found, sent, data = small.request(method, path, body, {"authorization": "Bearer two", **headers})
    error = json.loads(data)["error"]
    assert (found, error["param"]) == (status, param), error
    assert error["message"]
    assert sent["content-type"] == "application/json"
    assert sent["x-should-retry"] == "false"
    assert sent["x-request-id"]
    assert small.request("GET", "/health")[0] == 200


def test_errors_name_what_is_there(small):
    key = {"authorization": "Bearer one"}
    _, _, data = small.request("POST", COMPLETION, {"prompt": "a", "model": "other"}, key)
    assert json.loads(data)["error"]["code"] == "model_not_found"
    assert "'demo'" in json.loads(data)["error"]["message"]
    _, _, data = small.request("DELETE", "/health")
    assert json.loads(data)["error"]["message"] == "this route does not take that method; it takes GET, HEAD"
    _, headers, _ = small.request("GET", COMPLETION, None, key)
    assert headers["allow"] == "POST"
    _, _, data = small.request("POST", COMPLETION, {"prompt": "a", "max_token": 1}, key)
    assert "did you mean 'max_tokens'" in json.loads(data)["error"]["message"]


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/completions/", "/v1/completions"),
        ("/V1/Models", "/v1/models"),
        ("/metric", "/metrics"),
        ("/nothing-like-it", None),
        ("/" + "x" * 5000, None),
    ],
    ids=lambda text: str(text)[:20],
)
def test_a_wrong_path_names_the_nearest_routes_alone(small, path, near):
    status, _, data = small.request("GET", path, None, {"authorization": "Bearer one"})
    message = json.loads(data)["error"]["message"]
    assert status == 404
    assert message.endswith("; /openapi.json lists what there is")
    assert len(message) < 400
    named = re.findall(r"(?<=[ ])/[^ ,;]+", message.partition("here")[2])
    assert len(named) <= 4
    assert named[0] == (near or "/openapi.json")


@pytest.mark.parametrize("given", [None, "Bearer three", "Basic one", "Bearer one two", "Bearer"])
def test_a_request_without_the_key(given, small):
    headers = {} if given is None else {"authorization": given}
    status, sent, data = small.request("POST", COMPLETION, {"prompt": "a"}, headers)
    assert status == 401
    assert json.loads(data)["error"]["type"] == "authentication_error"
    assert sent["www-authenticate"] == "Bearer"
    assert small.request("GET", "/metrics", None, headers)[0] == 200


def test_request_ids(served):
    given = "job-7:éx".encode()
    for sent, is_kept in [("job-7/a_b", True), ("x" * 129, False), ("two words", False), (given, False)]:
        _, headers, _ = served.request("GET", "/version", None, {"x-request-id": sent})
        assert (headers["x-request-id"] == sent) == is_kept
    body = served.post(COMPLETION, prompt="a", max_tokens=1, request_id="mine")
    assert body["id"] == "cmpl-mine"


def test_requests_with_the_same_id_run_together_and_are_repeatable(served):
    asked = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "request_id": "same", "temperature": 1}
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: served.post(COMPLETION, **asked), range(2))
    assert first["id"] == second["id"] == "cmpl-same"
    # The seed comes from the client's id.
    assert first["choices"][0]["text"] == second["choices"][0]["text"]


@pytest.fixture(scope="module")
def hasty(engine):
    """Yield a server that waits briefly."""
    with serving(engine, head_timeout_s=0.05, body_timeout_s=0.05, keep_alive_timeout_s=0.1) as served:
        yield served


def test_slow_bodies_and_heads(hasty):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    full = head + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    for sent, is_answered in [(head, True), (full, True), (b"", False)]:
        answer = None
        while answer is None or (is_answered and not answer):  # a busy machine may send nothing in time
            with hasty.connect() as client, suppress(ConnectionError):
                client.sendall(sent)
                answer = b"".join(iter(lambda: client.recv(4096), b""))  # up to the end of the connection
        assert answer.startswith(b"HTTP/1.1 408 ") == is_answered
        assert (b"\r\nretry-after: 1\r\n" in answer) == is_answered


def test_a_large_body_that_does_not_say_so(small):
    with small.connect() as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n")
        client.sendall(b"content-type: application/json\r\n")
        client.sendall(b"authorization: Bearer one\r\ntransfer-encoding: chunked\r\n\r\n")
        client.sendall(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
        client.sendall((b"8000\r\n" + b" " * 0x8000 + b"\r\n") * 2)
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("num_headers", [1, 100])
def test_large_heads(num_headers, served):
    with served.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\n" + b"a: " + b"x" * 70_000 + b"\r\n" * num_headers)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"error"' in answer


def test_what_is_no_http(served):
    with served.connect() as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")


WRONG_LINES = [
    b"GET  /health HTTP/1.1",
    b"GET /health  HTTP/1.1",
    b"GET /health HTTP/1.1 ",
    b"GET\t/health HTTP/1.1",
    b" GET /health HTTP/1.1",
    b"\nGET /health HTTP/1.1",
    b"get /health HTTP/1.1",
    b"GET /health#there HTTP/1.1",
    b"GET /health RTSP/1.0",
    b"GET /health",
]


@pytest.mark.parametrize(
    "begin", [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"], ids=["first", "later"]
)
@pytest.mark.parametrize("line", WRONG_LINES, ids=ascii)
def test_request_lines_are_strict(line, begin, served):
    with served.connect() as client:
        client.sendall(begin + line + b"\r\nhost: localhost\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert re.findall(rb"HTTP/1.1 (\d+) ", answer)[-1:] == [b"200" if begin else b"400"]
    assert answer.count(b"HTTP/1.1 ") == 1


def test_request_lines_after_a_body(served):
    """They are found wherever the connection cuts what it gets; line ends before them are passed over."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    post = head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    chunked = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    get = b"\r\n\r\nGET /health HTTP/1.1\r\nhost: localhost\r\n"
    data = post + get + b"\r\n" + get + b"connection: close\r\n\r\n"
    for size in (1, 7, len(data)):
        with served.connect() as client:
            for start in range(0, len(data), size):
                client.sendall(data[start : start + size])
            answer = b"".join(iter(lambda client=client: client.recv(4096), b""))
        assert re.findall(rb"HTTP/1.1 (\d+) ", answer) == [b"200"] * 3, size
    for first, cut in itertools.product((post, chunked), range(5)):  # also within a line end
        data = first + get + b"connection: close\r\n\r\n"
        with served.connect() as client:
            client.sendall(data[: len(first) + cut])
            answer = client.recv(4096)  # so that the rest comes apart
            client.sendall(data[len(first) + cut :])
            answer += b"".join(iter(lambda client=client: client.recv(4096), b""))
        assert re.findall(rb"HTTP/1.1 (\d+) ", answer) == [b"200"] * 2, cut


def test_models_and_state(engine):
    with serving(engine, served_model_name=["a", "b"], root_path="/llm/") as served:
        _, _, data = served.request("GET", "/v1/models")
        assert [(m["id"], m["max_model_len"]) for m in json.loads(data)["data"]] == [("a", 2048), ("b", 2048)]
        for path in ("/health", "/ready", "/version"):
            assert served.request("GET", path)[0] == 200
        assert served.request("HEAD", "/health")[::2] == (200, b"")
        assert served.post(COMPLETION, model="b", prompt="a", max_tokens=1)["model"] == "a"
        served.front.is_draining = served.front.is_closed = True
        for method, path, body in [("GET", "/ready", None), ("POST", COMPLETION, {"prompt": "a"})]:
            status, headers, _ = served.request(method, path, body)
            assert (status, headers["retry-after"]) == (503, "1")


def test_pages_of_other_origins(engine):
    with serving(engine, allowed_origins=["https://a.example"]) as served:
        for origin, is_allowed in [("https://a.example", True), ("https://b.example", False)]:
            asked = {"origin": origin, "access-control-request-method": "POST"}
            status, headers, _ = served.request("OPTIONS", COMPLETION, None, asked)
            assert (status == 200) == is_allowed
            assert headers["x-request-id"]
            _, headers, _ = served.request("POST", COMPLETION, {}, {"origin": origin})
            assert (headers.get("access-control-allow-origin") == origin) == is_allowed


def test_a_full_queue_says_when_to_come_back(served, monkeypatch):
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    front = served.front
    failure = asyncio.run(front.failure_of(ValueError("a secret"), "id"))
    assert failure.body["error"]["message"] == "the server failed; its log has the error of request id"
    front._rate._finished.extend([900.0] * 2)  # it was idle, which delays nothing
    unavailable = asyncio.run(front.failure_of(EngineDeadError("ended"), "id"))
    assert (b"retry-after", b"1") in unavailable.headers
    rate = type(front._rate)()
    assert rate.seconds_for(1000) == 1  # nothing is known yet
    rate._finished.extend([980.2, 990])
    assert rate.seconds_for(3) == 30
    assert rate.seconds_for(1000) == 60


def pipelined(*bodies: dict) -> bytes:
    sent = []
    for body in bodies:
        data = json.dumps(body).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        sent.append(head + b"content-length: %d\r\n\r\n%b" % (len(data), data))
    return b"".join(sent)


def test_what_follows_a_request_does_not_spoil_its_response(served):
    """Earlier requests on a connection are answered, then it is closed. The same if a head is slow."""
    short = {"prompt": "a", "max_tokens": 20, "temperature": 0, "ignore_eos": True, "stream": True}
    with served.connect() as client:
        client.sendall(pipelined(short, short) + b"\x00 no HTTP\r\n\r\n")
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.count(b"HTTP/1.1 200 ") == answer.count(b"data: [DONE]\n\n") == 2
    assert answer.endswith(b"\r\n0\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 2


UPGRADES = {
    "h2c": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n",
    "websocket": b"Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nsec-websocket-version: 13\r\n",
}


@pytest.mark.parametrize("is_split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", UPGRADES)
def test_a_change_of_protocol_is_not_made(name, is_split, served):
    """The requests are answered as if they did not ask for it, also the next on the connection."""
    wanted = served.post(COMPLETION, prompt="def ", max_tokens=3, temperature=0)["choices"]
    data = pipelined({"prompt": "def ", "max_tokens": 3, "temperature": 0}).replace(b"host:", b"Host:")
    data = data.replace(b"\r\nHost:", b"\r\n" + UPGRADES[name] + b"host:", 1)
    last = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    with served.connect() as client:
        sent = data + data + last
        for part in [sent[i : i + 7] for i in range(0, len(sent), 7)] if is_split else [sent]:
            client.sendall(part)
            time.sleep(0.0002 * is_split)  # so that the server reads them one by one
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200"] * 3, answer
    bodies = [json.loads(body) for body in re.findall(rb"\r\n\r\n(\{.*\})", answer)]
    assert [body.get("choices") for body in bodies] == [wanted, wanted, None]


def refusals(served) -> dict[str, float]:
    _, _, metrics = served.request("GET", "/metrics")
    found = re.findall(r'requests_refused_total{reason="(\w+)"} (.*)', metrics.decode())
    return {reason: float(count) for reason, count in found}


def test_what_is_refused_is_counted(engine):
    large = b"GET /health HTTP/1.1\r\na: " + b"x" * 70_000
    with serving(engine, api_key=["one"]) as served:
        for sent in (b"\x16\x03\x01 hello\r\n\r\n", large):
            with served.connect() as client:
                client.sendall(sent)
                assert client.recv(100)
        assert served.request("GET", "/v1/models")[0] == 401
        served.server._context.head_s = 0.5
        answer = b""
        while not answer:  # a busy machine may send nothing in time
            with served.connect() as client, suppress(ConnectionError):
                client.sendall(b"GET /health HTTP/1.1\r\n")
                answer = client.recv(100)
        served.server._context.head_s = 60.0
        found = refusals(served)
    assert found == {"invalid": 1, "headers_too_large": 1, "slow_body": 1, "unauthorized": 1}


def aborts(served) -> float:
    _, _, metrics = served.request("GET", "/metrics")
    (line,) = re.findall(rb'request_success_total{.*finished_reason="abort".*} (.*)', metrics)
    return float(line)


def test_a_client_that_leaves_amid_several_requests(served):
    """The first is computed, the others wait: it is aborted, and they are never begun."""
    long = {"prompt": "a", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}
    aborted = aborts(served)
    with unhurried(served.front.engine):
        with served.connect() as client:
            client.sendall(pipelined(long, long, long))
            eventually(lambda: len(served.front.open_records) == 1)
        eventually(lambda: not served.front.open_records)
    assert aborts(served) == aborted + 1
