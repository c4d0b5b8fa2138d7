"""What is refused or fails: at once, with the time to come back, and without what happened inside."""

from __future__ import annotations

import asyncio
import json
import logging
import time

from paged import AsyncLLMEngine
from paged.errors import EngineDeadError
from tests.support.served import eventually, serving

COMPLETION = "/v1/completions"
LONG = {"prompt": "a", "temperature": 0, "max_tokens": 1900, "ignore_eos": True}


def posted(body: dict) -> bytes:
    data = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n%b" % (len(data), data)


def stats(engine, name: str) -> int:
    return engine._thread.call(lambda engine: getattr(engine.stats(), name)).result()


def test_a_full_queue_says_when_to_come_back():
    """By how often requests finish, which refusals do not change, and how many wait in the engine."""
    engine = AsyncLLMEngine(
        "demo", device="cpu", num_threads=1, num_blocks=512, max_num_seqs=1, max_waiting=3
    )
    with serving(engine) as served:
        clients = [served.connect() for _ in range(2)]
        for client, num_prompts, name in zip(clients, (1, 3), ("num_running", "num_waiting"), strict=True):
            client.sendall(posted({**LONG, "prompt": ["a"] * num_prompts}))
            eventually(lambda name=name, wanted=num_prompts: stats(engine, name) == wanted)
        now = time.monotonic()
        served.front._rate._finished.extend([now - 9.8, now - 5])  # one finishes every 5 seconds
        for _ in range(4):
            status, headers, _ = served.request("POST", COMPLETION, LONG)
            assert (status, headers["retry-after"]) == (429, "15")
        for client in clients:
            client.close()
    engine.shutdown()


def test_a_wrong_prompt_ends_the_others_at_once(served, engine):
    before = stats(engine, "num_generated_tokens")
    status, _, data = served.request("POST", COMPLETION, {**LONG, "prompt": [[5] * 9, [4096]]})
    assert (status, json.loads(data)["error"]["param"]) == (400, "prompt")
    eventually(lambda: engine._thread.call(lambda engine: not engine.core.groups).result())
    assert stats(engine, "num_generated_tokens") - before < LONG["max_tokens"]


def test_timeout_s_counts_from_the_arrival(served):
    sent = posted({"prompt": "a", "max_tokens": 1, "timeout_s": 0.2})
    with served.connect() as client:
        client.sendall(sent[:-9])
        time.sleep(0.25)
        client.sendall(sent[-9:])
        assert client.recv(100).startswith(b"HTTP/1.1 504 ")


def test_what_failed_inside_is_for_the_log(served, caplog):
    for _ in range(2):
        error = EngineDeadError("the engine has stopped: ValueError: a secret")
        failure = asyncio.run(served.front.failure_of(error, "id"))
        assert failure.status == 503
        assert "stopped" in failure.body["error"]["message"]
        assert "secret" not in str(failure.body)
    assert [r.levelno for r in caplog.records if "a secret" in r.message] == [logging.ERROR]
