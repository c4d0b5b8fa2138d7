"""Keys of tenants: their file, the routes that each may use, and what tenants do not share."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from paged.base.errors import ConfigError
from paged.base.strict_json import parse_json
from paged.protocol.endpoints import MESSAGES_PATH, ROUTES
from paged.server.access.key_file import KeyEntry, parse_keys, read_keys
from paged.server.access.keys import Keys
from paged.server.http import exchange
from paged.server.options import ServeOptions
from tests.support.api_fields import BODIES
from tests.support.command_line import running
from tests.support.mutations import damage_bytes, damage_value, dumps
from tests.support.served import Served, eventually, serving, unhurried

COMPLETION = "/v1/completions"
DIGEST = hashlib.sha256(b"of nothing").hexdigest()


def line(key: str, tenant: str = "a", **fields: Any) -> str:
    return json.dumps({"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, **fields})


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines))
    path.chmod(0o600)
    return str(path)


def bearing(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# The file

WRONG_LINES = {
    "sha256 is missing": '{"tenant": "a"}',
    "tenant is missing": json.dumps({"sha256": DIGEST}),
    "sha256 is wrong; it must be: 64 hexadecimal digits": json.dumps({"sha256": DIGEST[1:], "tenant": "a"}),
    "sha256 is wrong; it must be: 64": json.dumps({"sha256": DIGEST.upper(), "tenant": "a"}),
    "tenant is wrong": json.dumps({"sha256": DIGEST, "tenant": ""}),
    "weight is wrong; it must be: number above 0": line("k", weight=0),
    "weight is wrong": line("k", weight=float("inf")),
    "weight is wrong; ": line("k", weight=True),
    "priorities is wrong; it must be: the most": line("k", priorities=["low", "high"]),
    "priorities is wrong": line("k", priorities=["urgent", "low"]),
    "models is wrong": line("k", models=[]),
    "tokens_per_minute is wrong": line("k", tokens_per_minute=0),
    "expires is wrong; it must be: a date": line("k", expires="2027-02-30"),
    "expires is wrong": line("k", expires="2027-02-03T10:00:00"),  # where?
    "expires is wrong; ": line("k", expires=5),
    "it has an unknown field; it may have sha256": line("k", secret="x"),
    "it must be a JSON object without a name twice": '{"tenant": "a", "tenant": "b"}',
    "it must be a JSON object": "[]",
    "it must be a JSON object without": "{",
    "it has the key of line 1": line("first"),
    "weight is another one than in line 1": line("k", "first", weight=3),
    "cache is another one": line("k", "first", weight=2, cache="x"),
}


@pytest.mark.parametrize("message", WRONG_LINES)
def test_a_wrong_line_is_named_without_what_it_says(message, tmp_path):
    path = write(tmp_path / "keys", line("first", "first", weight=2), "", "# a comment", WRONG_LINES[message])
    with pytest.raises(ConfigError, match=re.escape(f"{path}, line 4: {message}")) as caught:
        read_keys(path)
    assert not re.search("[0-9a-f]{30}", str(caught.value).removeprefix(path))


def test_a_whole_line():
    text = line(
        "k",
        "t",
        weight=2,
        cache="c",
        priorities=["high", 5],
        models=["m"],
        requests_per_minute=1,
        tokens_per_minute=2.0,
        concurrent_requests=3,
        concurrent_sequences=4,
        expires="2027-01-31",
    )
    (entry,) = parse_keys("", text)
    assert entry == KeyEntry(
        line=1,
        sha256=hashlib.sha256(b"k").digest(),
        tenant="t",
        weight=2,
        cache="c",
        priorities=(-10.0, 5.0),
        models=("m",),
        requests_per_minute=1,
        tokens_per_minute=2,
        concurrent_requests=3,
        concurrent_sequences=4,
        expires=1801353600.0,
    )
    assert entry.sha256.hex() not in repr(entry)
    (entry,) = parse_keys("", line("k", expires="2027-01-31T01:00:00+01:00"))
    assert entry.expires == 1801353600.0


@pytest.mark.parametrize(("mode", "others"), [(0o644, True), (0o620, True), (0o602, True), (0o640, False)])
def test_a_file_that_others_can_read_or_write_is_refused(mode, others, tmp_path):
    path = write(tmp_path / "keys", line("k"))
    os.chmod(path, mode)
    if others:
        with pytest.raises(ConfigError, match=f"by others .mode {mode:o}.*chmod 600"):
            read_keys(path)
    else:
        assert len(read_keys(path)) == 1


def test_what_is_no_file_of_keys(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "bytes").write_bytes(b"#\n\xff")
    (tmp_path / "bytes").chmod(0o600)
    for path, message in {
        tmp_path / "nowhere": "cannot be read: No such file",
        tmp_path: "is not a regular file",
        tmp_path / "pipe": "is not a regular file",
        tmp_path / "bytes": "line 2: it is not UTF-8",
        write(tmp_path / "empty", "# nothing"): "has no key; paged keys new makes one",
    }.items():
        with pytest.raises(ConfigError, match=message):
            read_keys(str(path))


def test_damaged_files(tmp_path):
    """Each is read or refused with one line, in which is no digest."""
    choose = random.Random(0)
    whole = {"weight": 2, "cache": "c", "priorities": ["high", 5], "models": ["m"], "expires": "2027-01-31"}
    messages: list[str] = []
    for _ in range(200):
        lines = [json.loads(line("k", "t", **whole)), json.loads(line("l", "u"))]
        damage_value(choose, lines[0])
        data = "\n".join(map(dumps, lines)).encode("utf-8", "surrogatepass")
        if choose.random() < 0.3:
            data, _ = damage_bytes(choose, data)
        path = tmp_path / "keys"
        path.write_bytes(data)
        path.chmod(0o600)
        messages += [message for message in [refusal_of(str(path))] if message]
    assert len(messages) > 50
    assert not [message for message in messages if re.search("[0-9a-f]{30}|\n", message)]


def refusal_of(path: str) -> str | None:
    try:
        read_keys(path)
    except ConfigError as error:
        return str(error)
    return None


def test_a_new_key_is_shown_once_and_its_line_fits_the_file(monkeypatch, capsys, tmp_path):
    with running(monkeypatch, capsys) as run:
        options = ["--weight", "2", "--priorities", "high", "5", "--models", "m", "--expires", "2027-01-31"]
        options[-1] = f"{date.today().year + 2}-01-31"
        code, out, err = run("keys", "new", "--tenant", "t", *options)
        assert code == 0
        key = err.split()[-1]
        (entry,) = read_keys(write(tmp_path / "keys", out))
        assert entry.sha256 == hashlib.sha256(key.encode()).digest()
        assert (entry.tenant, entry.weight, entry.priorities) == ("t", 2, (-10.0, 5.0))
        assert key not in out
        assert "weight is wrong" in run.fails("keys", "new", "--tenant", "t", "--weight", "0")
        assert "has passed already" in run.fails("keys", "new", "--tenant", "t", "--expires", "2020-01-31")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api_key": "k", "api_keys": "file"}, "api_key and api_keys exclude each other"),
        ({"port": 80, "metrics_port": 80}, "metrics_port must be another one than port, got 80 for both"),
        ({"metrics_port": -1}, "metrics_port must be from 0"),
        ({"api_key": ["k"], "admin_key": "k"}, "admin_key must be another one than each api_key"),
        ({"admin_key": ""}, "admin_key must be a text that is not empty"),
        ({"admin_key": 123456}, "^admin_key must be a text that is not empty$"),
        ({"admin_key": " k"}, "admin_key must have no white space"),
        ({"default_reservation": 5}, "default_reservation goes with api_keys"),
        ({"api_keys": "file", "default_reservation": 0}, "default_reservation must be at least 1"),
    ],
)
def test_contradictions(options, message):
    with pytest.raises(ConfigError, match=message):
        ServeOptions(**options)


def test_fields_without_an_effect_are_refused(tmp_path):
    for field, policy in (("weight", "fair"), ("priorities", "priority")):
        value = 2 if field == "weight" else [0, 5]
        path = write(tmp_path / "keys", line("k", **{field: value}))
        with pytest.raises(
            ConfigError, match=f"line 1: {field} goes with --scheduling-policy {policy} alone"
        ):
            Keys(path, scheduling_policy="fcfs")
        assert len(Keys(path, scheduling_policy=policy)) == 1


# The routes


@pytest.fixture(scope="module")
def tenants(engine, tmp_path_factory) -> Iterator[Served]:
    """Yield a server with keys of two tenants, one of which may use another name of the model alone."""
    path = write(
        tmp_path_factory.mktemp("keys") / "keys",
        line("one", "a"),
        line("two", "b", models=["b-model"], concurrent_requests=1),
        line("old", "c", expires="2020-01-01"),
        line("left", "d", cache="common"),
        line("right", "e", cache="common"),
    )
    with serving(engine, api_keys=path, served_model_name=["a-model", "b-model"]) as served:
        yield served


CALLERS = {
    "without a key": {},
    "a wrong key": bearing("three"),
    "an expired key": bearing("old"),
    "a digest": bearing(hashlib.sha256(b"one").hexdigest()),
    "no scheme": {"authorization": "one"},
    "another scheme": {"authorization": "Basic one"},
    "another header": {"x-api-key": "one"},
    "two keys": {"authorization": "Bearer one two"},
    "not ASCII": {"authorization": "Bearer \xe9"},
    "a key": bearing("one"),
}


# A model of one server is not changed by clients, and the demo cannot fill in the middle.
OTHERWISE = {"/api/pull": 403, "/api/copy": 403, "/api/delete": 403, "/infill": 400}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_every_route_and_key(route, tenants):
    path = route.path.replace("{model}", "a-model")
    for name, headers in CALLERS.items():
        for asked in (path, f"{path}?key=one&api_key=one"):
            body = None if route.call is None else BODIES[path]
            if body is not None and "model" in body:
                body = {**body, "model": "a-model"}
            status, _, data = tenants.request(route.method, asked, body, headers)
            if route.access == "all":
                wanted = 200
            elif route.access == "admin":
                wanted = 403
            elif name != "a key" and not (name == "another header" and path.startswith(MESSAGES_PATH)):
                wanted = 401
            elif "{response}" in path:
                wanted = 404
            else:
                wanted = 403 if route.access == "operator" else OTHERWISE.get(path, 200)
            assert status == wanted, (name, data)
    assert tenants.request("GET", "/nothing")[0] == 401


def test_an_expired_key_says_so_and_no_key_is_logged(tenants, caplog):
    status, headers, data = tenants.request("GET", "/v1/models", None, bearing("old"))
    assert (status, headers["www-authenticate"]) == (401, "Bearer")
    assert json.loads(data)["error"]["code"] == "invalid_api_key"
    assert b"no longer valid" in data
    assert "old" not in caplog.text


def test_a_key_has_the_models_of_its_line(tenants):
    def names(key: str) -> list[str]:
        return [
            m["id"] for m in json.loads(tenants.request("GET", "/v1/models", None, bearing(key))[2])["data"]
        ]

    assert names("one") == ["a-model", "b-model"]
    assert names("two") == ["b-model"]
    for model, status in (("a-model", 404), ("b-model", 200), (None, 200)):
        body = {"prompt": "a", "max_tokens": 1, "model": model}
        assert tenants.request("POST", COMPLETION, body, bearing("two"))[0] == status
    assert tenants.request("GET", "/v1/models/a-model", None, bearing("two"))[0] == 404


def test_tenants_share_no_prefix_unless_the_file_says_so(tenants):
    def num_hits(key: str, **body: Any) -> int:
        before = tenants.stats().num_cached_tokens
        status, _, data = tenants.request("POST", COMPLETION, body, bearing(key))
        assert status == 200, data
        return tenants.stats().num_cached_tokens - before

    body = {"prompt": "a prompt that only this test has " * 8, "max_tokens": 1}
    assert num_hits("one", **body) == 0
    assert num_hits("one", **body) > 0
    assert num_hits("two", **body) == 0
    # A tenant cannot name the salt of another.
    for salt in (json.dumps(["tenant", "a"]), "a", '["tenant", "a"'):
        assert num_hits("two", **body, cache_salt=salt) == 0
    assert num_hits("left", **body) == 0
    assert num_hits("right", **body) > 0
    embedded = {"input": "another prompt that only this test has " * 8}
    for key, has_hits in (("one", False), ("one", True), ("two", False)):
        before = tenants.stats().num_cached_tokens
        assert tenants.request("POST", "/v1/embeddings", embedded, bearing(key))[0] == 200
        assert (tenants.stats().num_cached_tokens > before) == has_hits


def test_the_file_is_read_again(engine, tmp_path, caplog):
    path = write(tmp_path / "keys", line("one", requests_per_minute=3), line("two"))

    def status(key: str) -> int:
        return served.request("POST", COMPLETION, {"prompt": "a", "max_tokens": 1}, bearing(key))[0]

    def reload() -> None:
        served.loop.call_soon_threadsafe(served.front.on_hangup)

    with serving(engine, api_keys=path) as served:
        assert [status("one"), status("two")] == [200, 200]
        write(tmp_path / "keys", line("one", requests_per_minute=2), line("three"))
        reload()
        eventually(lambda: status("three") == 200)
        assert status("two") == 401
        # What a key has used stays.
        assert [status("one"), status("one")] == [200, 429]
        write(tmp_path / "keys", line("one"), "{")
        reload()
        eventually(lambda: "line 2: it must be a JSON object" in caplog.text)
        assert "the one before is" in caplog.text
        assert [status("one"), status("three")] == [429, 200]


# Limits


@contextmanager
def streaming(served: Served, key: str, **body: Any) -> Iterator[bytes]:
    """Yield what comes first of a stream, whose client leaves at the end of the context."""
    data = json.dumps({**body, "stream": True}).encode()
    lines = ["host: localhost", "content-type: application/json", f"content-length: {len(data)}"]
    lines = [f"POST {COMPLETION} HTTP/1.1", *lines, f"authorization: Bearer {key}", "", ""]
    with served.connect() as client:
        client.sendall("\r\n".join(lines).encode() + data)
        yield client.recv(2**16)


def test_what_is_reserved_is_told_and_comes_back(engine, tmp_path):
    """Also after a client has left."""
    path = write(
        tmp_path / "keys",
        line("k", tokens_per_minute=200, requests_per_minute=50),
        line("one", concurrent_requests=1),
    )
    asked = {"prompt": [5] * 10, "max_tokens": 1000, "ignore_eos": True}
    with serving(engine, api_keys=path, default_reservation=100) as served:

        def post(key: str = "k", url: str = COMPLETION, **body: Any) -> tuple[int, dict[str, str], bytes]:
            given = body if url != COMPLETION else {**asked, **body}
            return served.request("POST", url, given, bearing(key))

        status, headers, _ = post(max_tokens=20)
        assert status == 200
        assert headers["x-ratelimit-limit-tokens"] == "200"
        assert headers["x-ratelimit-remaining-tokens"] == "170"  # 10 and 20 are reserved
        assert headers["x-ratelimit-remaining-requests"] == "49"
        assert 0 < float(headers["x-ratelimit-reset-tokens"].removesuffix("s")) <= 60
        usage = served.front.keys.find(b"k")
        with unhurried(engine):
            with streaming(served, "k", **asked) as first:
                assert b"x-ratelimit-remaining-tokens: 60\r\n" in first
                status, headers, data = post(max_tokens=80)
                assert status == 429
                assert json.loads(data)["error"]["code"] == "rate_limit_exceeded"
                assert 0 < int(headers["retry-after"]) <= 60
                assert headers["x-ratelimit-remaining-requests"] == "48"  # what is refused counts nothing
            eventually(lambda: usage.num_open == 0)
        # Few of the hundred were generated.
        assert int(dict(usage.headers())[b"x-ratelimit-remaining-tokens"]) > 60
        status, headers, data = post(max_tokens=195, prompt=[5] * 150)
        assert (status, headers["x-should-retry"]) == (400, "false")
        assert b"this key has 200 a minute" in data
        assert post(url="/v1/embeddings", input=[5] * 190)[0] == 429
        assert post(url="/v1/score", prompt=[5] * 10, continuations=[[5]] * 17)[0] == 429
        assert served.front.metrics._counts["requests_refused"]["rate_limit",] == 3
        with unhurried(engine), streaming(served, "one", **asked) as first:
            assert first.startswith(b"HTTP/1.1 200 ")
            status, headers, _ = post("one")
            assert (status, headers["retry-after"]) == (429, "1")
        eventually(lambda: post("one", max_tokens=1)[0] == 200)


@pytest.mark.parametrize("limit", ["requests_per_minute", "concurrent_requests"])
def test_a_request_beyond_a_limit_is_refused_before_its_body_is_read(limit, engine, tmp_path, monkeypatch):
    """The connection is closed, and nothing is parsed. Limits of tokens come afterwards."""
    path = write(tmp_path / "keys", line("k", **{limit: 1}))
    parsed = []
    monkeypatch.setattr(exchange, "parse_body", lambda body, _: parsed.append(body) or parse_json(body))
    head = f"POST {COMPLETION} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n"
    head += "content-type: application/json\r\ncontent-length: "
    with serving(engine, api_keys=path) as served, unhurried(engine):
        usage = served.front.keys.find(b"k")
        with streaming(served, "k", prompt="a", max_tokens=1900, ignore_eos=True):
            for num_bytes in (10_000_000, 2):  # not sent, and sent with the head
                with served.connect() as client:
                    client.sendall(f"{head}{num_bytes}\r\n\r\n{{}}".encode())
                    answer = client.recv(2**16)
                    assert answer.startswith(b"HTTP/1.1 429 ")
                    assert b"\r\nconnection: close\r\n" in answer
                    assert b"retry-after: " in answer
        assert len(parsed) == 1
        eventually(lambda: usage.num_open == 0)
        usage.check()


def test_sequences_of_a_key_are_counted_over_its_requests(engine, tmp_path):
    """Prompts times samples, inputs and continuations; more than fit at once are never retried."""
    path = write(tmp_path / "keys", line("k", concurrent_sequences=4))
    asked = {"prompt": [5], "max_tokens": 1000, "ignore_eos": True}
    with serving(engine, api_keys=path) as served:

        def post(url: str, **body: Any) -> tuple[int, str | None]:
            status, headers, data = served.request("POST", url, body, bearing("k"))
            assert status == 200 or b"sequences" in data
            return status, headers.get("x-should-retry")

        two_of_two = {"prompt": [[5], [6]], "n": 2, "max_tokens": 1}
        assert post(COMPLETION, **two_of_two) == (200, None)
        assert post(COMPLETION, **{**two_of_two, "n": 3}) == (400, "false")
        assert post("/v1/score", prompt=[5], continuations=[[6]] * 5) == (400, "false")
        assert post("/v1/embeddings", input=[[5]] * 4) == (200, None)
        with unhurried(engine), streaming(served, "k", **asked) as first:
            assert first.startswith(b"HTTP/1.1 200 ")
            assert post(COMPLETION, **two_of_two) == (429, None)
            assert post("/v1/embeddings", input=[[5]] * 4) == (429, None)
            assert served.front.keys.find(b"k").num_sequences == 1
        eventually(lambda: post(COMPLETION, **two_of_two)[0] == 200)
        eventually(lambda: served.front.keys.find(b"k").num_sequences == 0)


# The operator


@pytest.fixture(scope="module")
def operated(engine, tmp_path_factory) -> Iterator[Served]:
    path = write(tmp_path_factory.mktemp("operated") / "keys", line("one", "a"), line("two", "b"))
    with serving(engine, api_keys=path, admin_key="root") as served:
        yield served


def operate(served: Served, action: str, method: str = "POST") -> tuple[int, Any]:
    status, _, data = served.request(method, f"/admin/{action}", None, bearing("root"))
    return status, json.loads(data)


def test_the_operator_lists_and_ends_requests(operated, engine):
    asked = {"prompt": "a secret", "max_tokens": 2000, "ignore_eos": True, "user": "u"}
    with unhurried(engine), streaming(operated, "one", **asked) as first:
        (id_line,) = re.findall(rb"x-request-id: (\w+)", first)
        _, listed = operate(operated, "requests", "GET")
        (request,) = listed["data"]
        assert request["id"] == id_line.decode()
        assert (request["tenant"], request["user"], request["route"]) == ("a", "u", COMPLETION)
        assert request["generated_tokens"] > 0
        assert "secret" not in json.dumps(listed)
        assert operate(operated, f"requests/{request['id']}/end") == (200, {"ended": 1})
    eventually(lambda: not operate(operated, "requests", "GET")[1]["data"])
    assert operate(operated, "requests/x/end")[0] == 404
    given = {**bearing("one"), "x-request-id": "a/b"}
    with unhurried(engine), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(operated.request, "POST", COMPLETION, {**asked, "n": 2}, given)
        eventually(lambda: operate(operated, "requests/a%2Fb/end")[0] == 200)
        status, _, data = waiting.result(60)
    assert (status, json.loads(data)["error"]["message"]) == (
        503,
        "the server ended this request; send it again",
    )


def test_the_operator_pauses_and_resets(operated):
    asked = {"prompt": [5] * 64, "max_tokens": 1}

    def post() -> int:
        return operated.request("POST", COMPLETION, asked, bearing("two"))[0]

    assert operate(operated, "pause") == (200, {"paused": True})
    assert post() == 503
    status, headers, data = operated.request("GET", "/ready")
    assert (status, headers["retry-after"]) == (503, "1")
    assert b"paused by its operator" in data
    assert operated.request("GET", "/health")[0] == 200
    assert operate(operated, "resume") == (200, {"paused": False})
    assert post() == 200
    for has_hits in (True, False):
        before = operated.stats().num_cached_tokens
        assert post() == 200
        assert (operated.stats().num_cached_tokens > before) == has_hits
        assert operate(operated, "reset-prefix-cache") == (200, {"reset": True})
    drained = []
    operated.front.drain = lambda: drained.append(True)
    assert operate(operated, "drain") == (200, {"draining": True})
    eventually(lambda: drained == [True])


def test_the_operator_reloads_keys(operated, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "paged.server.requests")
    path = Path(operated.front.keys.path)
    whole = path.read_text()
    path.write_text("{\n")
    status, body = operate(operated, "reload-keys")
    assert (status, "line 1: it must be a JSON object" in body["error"]["message"]) == (400, True)
    path.write_text(whole)
    assert operate(operated, "reload-keys") == (200, {"keys": 2})
    # Once, as what was refused has changed nothing.
    eventually(lambda: caplog.messages == ["the operator has sent POST '/admin/reload-keys', status 200"])
    caplog.clear()
    monkeypatch.setattr(operated.front, "keys", None)
    operated.front.on_hangup()
    assert "there is no keys file" in caplog.text


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path}")
def test_the_admin_key_opens_what_is_the_operators_alone(route, operated, served):
    path = route.path.format(model="demo", request="x", replicas=1, response="x")
    data = b"{" if route.call is None else None
    operated.front.drain = lambda: None
    headers = {**bearing("root"), "content-type": "application/json"}
    status = operated.request(route.method, path, data, headers)[0]
    if route.access == "keys":
        assert status == 401
    else:
        # It has one model, which stays loaded, and what is to be pinned is no JSON.
        refused = 400 if "{model}" in route.path else 404
        is_refused = "{" in route.path.replace("{replicas}", "") or "lora" in route.path  # it has no adapters
        assert status == (refused if is_refused else 200)
    if route.access == "admin":
        for key in ("one", "roo", ""):
            assert operated.request(route.method, path, data, bearing(key))[0] == 401
        assert served.request(route.method, path, data, bearing("root"))[0] == 403  # it has no admin key
    operated.front.is_paused = False


def test_damaged_requests_of_tenants_and_of_the_operator(engine, tmp_path):
    """None is answered by an error of the server, and nothing of a key's limits is lost by any."""
    choose = random.Random(0)
    path = write(tmp_path / "keys", line("one", concurrent_requests=50, tokens_per_minute=10**6))
    body = json.dumps({"prompt": "a", "max_tokens": 2, "priority": "normal", "cache_salt": "s"})
    wholes = [
        f"{route.method} {route.path.format(request='x', model='demo', replicas=1)} HTTP/1.1\r\n"
        f"host: localhost\r\n"
        f"authorization: Bearer root\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        for route in ROUTES
        if route.access == "admin"
    ]
    wholes += [
        f"POST {COMPLETION} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer one\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ] * 8
    patience = {"head_timeout_s": 0.1, "body_timeout_s": 0.1}
    with serving(engine, api_keys=path, admin_key="root", **patience) as served:
        served.front.drain = lambda: None
        statuses = Counter[bytes]()
        for _ in range(250):
            data, _ = damage_bytes(choose, choose.choice(wholes).encode())
            with served.connect() as client, suppress(ConnectionError):
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                statuses.update(re.findall(rb"HTTP/1\.1 (\d+) ", client.recv(2**16)))
            served.front.is_paused = False
        assert statuses.keys() >= {b"200", b"400", b"401", b"404"}
        assert b"500" not in statuses
        usage = served.front.keys.find(b"one")
        eventually(lambda: usage.num_open == 0)
        usage.check()


def test_metrics_on_a_port_of_their_own(engine):
    with serving(engine, api_key=["one"], metrics_port=0) as served:
        metrics = replace(served, port=served.server.servers[1]._listener.getsockname()[1])
        for path, status in (("/metrics", 200), ("/health", 200), ("/ready", 200), ("/version", 404)):
            assert metrics.request("GET", path)[0] == status
            assert metrics.request("GET", path, None, {"host": "evil.example"})[0] == 403
        assert metrics.request("POST", COMPLETION, {"prompt": "a"}, bearing("one"))[0] == 404
        assert served.request("GET", "/metrics")[0] == 200
