"""timeout_s counts from a request's arrival through every phase, and no phase starves another."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from paged.base.errors import RequestTimeoutError
from paged.engine.async_base import Deadline
from paged.text.worker import Worker, WorkerLimits
from tests.support.served import PATIENCE_S, Served, eventually
from tests.support.small_server import small_server

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
LONG_PROMPT = "a b " * 400  # tokenized in a thread


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with small_server() as served:
        yield served


def workers_of(served: Served) -> list[Worker]:
    return served.front.engine.text.chat_templates._workers._workers


@pytest.fixture
def hung(served, monkeypatch) -> Iterator[list[Worker]]:
    """Yield the template workers, which all hang: each takes requests and does nothing."""
    monkeypatch.setattr("paged.text.worker.LOOK_AT_PROCESS_S", 3600.0)  # they are stopped, and not seen to be
    workers = workers_of(served)
    for worker in workers:
        worker.restart()
        os.kill(worker._process.pid, signal.SIGSTOP)
    yield workers
    for worker in workers:
        if worker._process is not None:
            os.kill(worker._process.pid, signal.SIGCONT)
    eventually(lambda: served.front._num_preparing == 0)


def chat(served: Served, **more) -> tuple[int, str]:
    status, _, body = served.request("POST", "/v1/chat/completions", {**CHAT, **more})
    return status, json.loads(body).get("error", {}).get("message", "")


def test_chats_that_hang_end_at_their_deadline_and_starve_no_completion(served, hung):
    with ThreadPoolExecutor(64) as pool:
        chats = [pool.submit(chat, served, timeout_s=1.5) for _ in range(40)]
        # Where this thread was stalled, all may have ended already.
        eventually(lambda: served.front._num_preparing > len(hung) or all(each.done() for each in chats))
        # Not all of them hang: each completion needs a thread for its tokens, and gets one.
        status, _, _ = served.request("POST", "/v1/completions", {"prompt": LONG_PROMPT, "max_tokens": 1})
        assert status == 200
        assert served.request("POST", "/tokenize", {"prompt": LONG_PROMPT})[0] == 200
        assert all(worker._lock.locked() for worker in hung) or any(each.done() for each in chats)
        assert {each.result() for each in chats} == {(504, "timeout_s has passed")}


def test_a_worker_that_hangs_is_replaced_and_chats_are_answered_again(served, hung, monkeypatch):
    limits = WorkerLimits(wall_s=1.0)
    for worker in hung:
        monkeypatch.setattr(worker, "limits", limits)
    processes = [worker._process for worker in hung]
    answers = []
    with ThreadPoolExecutor(8) as pool:
        while any(process.poll() is None for process in processes):
            answers += pool.map(lambda _: chat(served), range(len(hung)))
    # Where one comes so late that another worker is back, it is answered.
    assert {status for status, _ in answers} <= {200, 400}
    assert all("the chat template takes more than 1 s" in text for status, text in answers if status == 400)
    monkeypatch.undo()
    assert {process.returncode for process in processes} == {-signal.SIGKILL}
    assert chat(served)[0] == 200


def test_a_text_that_is_tokenized_too_long_ends_at_its_deadline(served):
    """The threads of tokenization are all taken by others."""
    go_on = threading.Event()
    pool = served.front.engine.text.tokenizing
    taken = [pool.submit(go_on.wait, PATIENCE_S) for _ in range(pool._max_workers)]
    try:
        for path, body in (
            ("/v1/completions", {"prompt": LONG_PROMPT, "max_tokens": 1}),
            ("/v1/embeddings", {"input": LONG_PROMPT}),
            ("/v1/score", {"prompt": "a", "continuations": ["b"]}),
        ):
            status, _, data = served.request("POST", path, {**body, "timeout_s": 0.1})
            assert (path, status) == (path, 504), data
        assert chat(served)[0] == 200  # short texts need no thread
    finally:
        go_on.set()
    assert all(each.result() for each in taken)


def test_what_is_left_of_a_deadline_shrinks_and_never_ends_below_zero():
    async def run() -> None:
        assert Deadline(None).left_s is None
        assert await Deadline(None).wait_for(asyncio.sleep(0, 5)) == 5
        late = Deadline(0.0)
        assert 0 < late.left_s < 1e-3
        with pytest.raises(RequestTimeoutError, match="timeout_s has passed"):
            await late.wait_for(asyncio.sleep(5))
        with pytest.raises(TimeoutError):  # one of its own
            await Deadline(9.0).wait_for(asyncio.wait_for(asyncio.sleep(5), 0.001))

    asyncio.run(run())
