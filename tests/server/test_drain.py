"""A signal: the server is not ready, requests finish, and what is left ends with an error."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from paged import AsyncLLMEngine
from paged.server import drain as drain_module
from paged.server.drain import Drain
from tests.server.conftest import OPTIONS
from tests.support.served import PATIENCE_S, Served, eventually, held, serving, unhurried

PATH = "/v1/completions"
DELAY_S = 9.0
LONG = {"prompt": "def f(", "temperature": 0, "max_tokens": 400, "ignore_eos": True}


@contextmanager
def draining(**terms: float) -> Iterator[tuple[Served, Drain]]:
    with serving(AsyncLLMEngine("demo", **OPTIONS)) as served:
        yield served, Drain(served.front, served.server, **terms)


@pytest.fixture
def delay_is_over(monkeypatch) -> threading.Event:
    """Return what ends a delay of DELAY_S, however long that takes."""
    is_over = threading.Event()

    async def sleep(seconds: float) -> None:
        while seconds == DELAY_S and not is_over.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)

    monkeypatch.setattr(drain_module, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    return is_over


def test_all_requests_finish(delay_is_over):
    """Those of before the signal, and those that come within the delay; others are refused."""
    with draining(delay_s=DELAY_S, timeout_s=PATIENCE_S) as (served, drain), ThreadPoolExecutor(9) as pool:
        whole = served.post(PATH, **LONG)["choices"][0]["text"]
        with ExitStack() as until_held:
            until_held.enter_context(unhurried(served.front.engine))  # else one might end before the last
            streams = [pool.submit(served.events, PATH, **LONG) for _ in range(8)]
            eventually(lambda: served.num_requests == 8)
            until_held.enter_context(held(served.front.engine))
            served.loop.call_soon_threadsafe(drain.begin)
            eventually(lambda: served.request("GET", "/ready")[0] == 503)
            assert not served.front.is_closed
            late = pool.submit(served.post, PATH, **LONG)
            eventually(lambda: served.front.num_accepted == 9)
            delay_is_over.set()
            eventually(lambda: served.front.is_closed)
            status, headers, body = served.request("POST", PATH, LONG)
            assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
            assert "shutting down" in json.loads(body)["error"]["message"]
            assert served.request("GET", "/health")[0] == 200
            assert not any(stream.done() for stream in streams)
        assert late.result()["choices"][0]["text"] == whole
        for stream in streams:
            *events, done = stream.result()
            assert done == "[DONE]"
            assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole
        eventually(lambda: served.server.should_exit)
        assert served.front.num_accepted == 0


def test_what_is_left_after_the_timeout_ends_with_an_error():
    with (
        draining(delay_s=0, timeout_s=0.2) as (served, drain),
        unhurried(served.front.engine),
        ThreadPoolExecutor(2) as pool,
    ):
        stream = pool.submit(served.events, PATH, **{**LONG, "max_tokens": 4000})
        eventually(lambda: served.stats().num_generated_tokens > 0)
        served.loop.call_soon_threadsafe(drain.begin)
        assert json.loads(stream.result()[-1])["error"]["message"] == "the server is shutting down"


def test_a_second_signal_ends_at_once():
    with (
        draining(delay_s=60, timeout_s=60) as (served, drain),
        unhurried(served.front.engine),
        ThreadPoolExecutor(2) as pool,
    ):
        stream = pool.submit(served.request, "POST", PATH, {**LONG, "max_tokens": 4000})
        eventually(lambda: served.num_requests == 1)
        for _ in range(2):
            served.loop.call_soon_threadsafe(drain.begin)
        eventually(lambda: served.server.force_exit)
        assert stream.result()[0] == 503
