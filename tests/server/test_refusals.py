"""What is refused or fails: at once, with the time to come back, and without what happened inside."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest

from paged import AsyncLLMEngine
from paged.base.errors import EngineDeadError
from paged.protocol.limits import MAX_PROMPTS
from paged.server import app
from paged.server.engine_client import EngineClient
from paged.server.http import failures
from paged.server.http.exchange import Exchange
from paged.server.options import MAX_WAITING
from paged.text import prompt_parser
from tests.support.mortal_engines import processes
from tests.support.served import Served, UnhurriedLauncher, eventually, serving, unhurried

COMPLETION = "/v1/completions"
LONG = {"prompt": "a", "temperature": 0, "max_tokens": 1900, "ignore_eos": True}
NUM_LONG = 20


def posted(body: dict, path: str = COMPLETION) -> bytes:
    data = json.dumps(body).encode()
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" % path.encode()
    return head + b"content-length: %d\r\n\r\n%b" % (len(data), data)


ENGINES = [AsyncLLMEngine, EngineClient]


@pytest.fixture(scope="module", params=ENGINES, ids=["in this process", "in another process"])
def narrow(request) -> Iterator[Served]:
    """Yield a server that answers one request at a time."""
    options = {"launcher": UnhurriedLauncher()} if request.param is EngineClient else {}
    engine = request.param("demo", device="cpu", num_threads=1, num_blocks=512, max_num_seqs=1, **options)
    with serving(engine, closes=True) as served:
        yield served


@pytest.fixture
def busy(narrow) -> Iterator[Served]:
    """Yield a server that is answering long prompts one after the other, so that other requests wait."""
    eventually(lambda: narrow.num_requests == 0)
    with unhurried(narrow.front.engine), narrow.connect() as client:
        client.sendall(posted({**LONG, "prompt": ["a"] * NUM_LONG}))
        eventually(lambda: narrow.num_requests > NUM_LONG // 2)
        yield narrow


def stats(engine, name: str) -> int:
    return engine._thread.call(lambda engine: getattr(engine.stats(), name)).result()


def test_a_full_queue_says_when_to_come_back(monkeypatch):
    """By how often requests finish, which refusals do not change, and how many wait in the engine."""
    engine = AsyncLLMEngine(
        "demo", device="cpu", num_threads=1, num_blocks=512, max_num_seqs=1, max_waiting=3
    )
    monkeypatch.setattr(failures, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    with serving(engine) as served, unhurried(engine):
        clients = [served.connect() for _ in range(2)]
        for client, num_prompts, name in zip(clients, (1, 3), ("num_running", "num_waiting"), strict=True):
            client.sendall(posted({**LONG, "prompt": ["a"] * num_prompts}))
            eventually(lambda name=name, wanted=num_prompts: stats(engine, name) == wanted)
        served.front._rate._finished.extend([990.2, 995])  # one finishes every 5 seconds
        for _ in range(4):
            status, headers, _ = served.request("POST", COMPLETION, LONG)
            assert (status, headers["retry-after"]) == (429, "15")
        for client in clients:
            client.close()
    engine.shutdown()


def test_a_wrong_prompt_ends_the_others_at_once(served, engine):
    before = stats(engine, "num_generated_tokens")
    with unhurried(engine):
        status, _, data = served.request("POST", COMPLETION, {**LONG, "prompt": [[5] * 9, [4096]]})
    assert (status, json.loads(data)["error"]["param"]) == (400, "prompt")
    eventually(lambda: engine._thread.call(lambda engine: not engine.core.groups).result())
    assert stats(engine, "num_generated_tokens") - before < LONG["max_tokens"]


def test_timeout_s_counts_from_the_arrival(served, monkeypatch):
    made = []

    class Noted(Exchange):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(app, "Exchange", Noted)
    sent = posted({"prompt": "a", "max_tokens": 1, "timeout_s": 0.2})
    with served.connect() as client:
        client.sendall(sent[:-9])
        eventually(lambda: made and time.monotonic() > made[0].received + 0.2)
        client.sendall(sent[-9:])
        assert client.recv(100).startswith(b"HTTP/1.1 504 ")


VECTORS = {
    "/v1/embeddings": {"input": ["a", "b"]},
    "/v1/score": {"prompt": "a", "continuations": ["b", "c"]},
}


@pytest.mark.parametrize("path", VECTORS)
def test_timeout_s_ends_embeddings_and_scores_that_wait(path, busy):
    status, headers, data = busy.request("POST", path, {**VECTORS[path], "timeout_s": 0.05})
    assert (status, headers["x-should-retry"]) == (504, "false"), data
    assert json.loads(data)["error"]["message"] == "timeout_s has passed"
    assert 0 < busy.num_requests <= NUM_LONG
    assert busy.request("POST", path, {**VECTORS[path], "timeout_s": 0})[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": [[5], [4096]]}, "input"),
        ("/v1/score", {"prompt": [4096], "continuations": [[5]]}, "prompt"),
        ("/v1/score", {"prompt": [5], "continuations": [[5], [4096]]}, "continuations"),
        ("/v1/score", {"prompt": [5] * 600, "continuations": [[5]] * 2}, "continuations"),
        ("/v1/score", {"prompt": "a", "continuations": ["b"], "priority": 1}, "priority"),
    ],
)
def test_errors_of_the_engine_name_the_field(path, body, param, served_by_either, monkeypatch):
    monkeypatch.setattr(prompt_parser, "MAX_CONTINUED_TOKENS", 1000)
    status, _, data = served_by_either.request("POST", path, body)
    assert (status, json.loads(data)["error"]["param"]) == (400, param)


def test_what_is_prepared_is_bounded_like_what_waits():
    """Conversations that are rendered, texts that are tokenized, and grammars that are compiled."""
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "chat_template": "{{ 1 }}"}
    with serving(
        EngineClient("demo", device="cpu", num_threads=1, num_blocks=512, max_waiting=2),
        closes=True,
        trust_request_chat_template=True,
    ) as served:
        for num_preparing, status in ((2, 429), (1, 200)):
            served.front._num_preparing = num_preparing
            for path, body in (("/v1/chat/completions", chat), ("/tokenize", {"prompt": "a"})):
                assert served.request("POST", path, body)[0] == status
        served.front._num_preparing = 0

        def compiled(i: int) -> bytes:
            schema = {"enum": [f"{i} {j}" for j in range(1000)]}
            return served.request(
                "POST", COMPLETION, {"prompt": "a", "structured_outputs": {"json": schema}}
            )[2]

        (process,) = processes(served.front.engine)
        connection = served.front.engine._supervisor.replicas[0].connection
        with ThreadPoolExecutor(16) as pool:
            os.kill(process.pid, signal.SIGSTOP)  # until all have come, however busy the machine is
            answers = [pool.submit(compiled, i) for i in range(16)]
            eventually(lambda: len(connection.requests) == 16)
            os.kill(process.pid, signal.SIGCONT)
            answers = [answer.result() for answer in answers]
        refused = [answer for answer in answers if b"2 requests wait for their grammars" in answer]
        assert 0 < len(refused) < 16
        eventually(lambda: served.num_requests == 0)


def test_a_flood_is_refused_by_default():
    """Two bodies with the most prompts wait. Of the third nearly all are refused, as few have ended."""
    engine = AsyncLLMEngine(
        "demo", device="cpu", num_threads=1, num_blocks=512, max_num_seqs=1, max_waiting=MAX_WAITING
    )
    flood = {**LONG, "prompts": [[5]] * MAX_PROMPTS, "stream": True}
    del flood["prompt"]
    with serving(engine, closes=True) as served, unhurried(engine), ExitStack() as stack:
        clients = [stack.enter_context(served.connect()) for _ in range(3)]
        for i, client in enumerate(clients[:2], start=1):
            client.sendall(posted(flood, "/generate/batch"))
            eventually(lambda i=i: served.num_requests >= i * MAX_PROMPTS - 20)
        clients[2].sendall(posted(flood, "/generate/batch"))
        answer = b""
        while answer.count(b"4096 requests wait already") < MAX_PROMPTS - 20:
            answer += clients[2].recv(2**16)
        assert b"rate_limit_error" in answer
        assert MAX_WAITING - 20 < served.stats().num_waiting <= MAX_WAITING


def test_scores_have_their_usage(served_by_either):
    asked = {"prompt": [5, 6, 7], "continuations": [[8], [9, 10]], "timeout_s": 60}
    assert served_by_either.post("/v1/score", **asked)["usage"] == {
        "prompt_tokens": 3 + 1 + 3 + 2,
        "completion_tokens": 0,
        "total_tokens": 9,
        "prompt_tokens_details": None,
    }


def test_what_failed_inside_is_for_the_log(served, caplog):
    for _ in range(2):
        error = EngineDeadError("the engine has stopped: ValueError: a secret")
        failure = asyncio.run(served.front.failure_of(error, "id"))
        assert failure.status == 503
        assert "stopped" in failure.body["error"]["message"]
        assert "secret" not in str(failure.body)
    assert [r.levelno for r in caplog.records if "a secret" in r.message] == [logging.ERROR]


def test_a_queue_full_of_tokens_is_told_before_anything_is_tokenized(engine, served, monkeypatch):
    monkeypatch.setattr(engine, "config", replace(engine.config, max_queued_tokens=20))
    for queued, status in (([20, 25], 429), ([19, 25], 200)):
        monkeypatch.setattr(type(engine), "queued_tokens", queued)
        found, headers, data = served.request("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert found == status
        assert ("retry-after" in headers) == (status == 429)
        assert (b"20 tokens wait already and max_queued_tokens is 20" in data) == (status == 429)
        assert served.request("POST", "/tokenize", {"prompt": "a"})[0] == 200
