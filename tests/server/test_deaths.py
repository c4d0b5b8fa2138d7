"""Engine processes end, and their requests go on: nothing is lost, nothing is repeated."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from paged import (
    EngineDeadError,
    LLMEngine,
    QueueFullError,
    RequestKillsEngineError,
    RequestOutputKind,
    RequestTimeoutError,
    SamplingParams,
)
from paged.checkpoints.library.models_file import ModelEntry
from paged.commands.serve import _serve
from paged.requests.request import RequestMetrics
from paged.runner.model_runner import ModelRunner
from paged.server import connection, frames, sent_request
from paged.server.deaths import Death, Suspicion
from paged.server.engine_client import EngineClient
from paged.server.http.failures import failure_of
from paged.server.http.listener import bind_all
from paged.server.options import ServeOptions
from paged.server.router import PrefixAware
from paged.server.sent_request import _Times
from tests import poisons
from tests.deaths import OPTIONS, read, run_round
from tests.support.mortal_engines import MortalEngines, MortalProcess

LONG = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
ENDLESS = replace(LONG, max_tokens=2000)


@pytest.fixture(scope="module")
def engines() -> list[LLMEngine]:
    """Return two engines, of which the second guesses tokens: a request may go from one to the other."""
    guessing = {"speculative_config": {"method": "suffix", "adaptive": False}}
    return [LLMEngine("demo", **OPTIONS), LLMEngine("demo", **OPTIONS, **guessing)]


def test_outputs_are_those_of_a_run_without_deaths(engines):
    """Seeds are the rounds of `python -m tests.deaths`, with fewer requests."""
    rounds = [
        run_round(engines[: 1 + seed % 2], seed, num_requests=30, mean_frames=25, resizes=seed == 3)
        for seed in range(4)
    ]
    assert sum(rounds) > 0


@contextlib.contextmanager
def mortal(engines: list[LLMEngine], **options: Any) -> Iterator[tuple[EngineClient, MortalEngines]]:
    lives = MortalEngines(engines, 0, None)
    with lives.installed():
        client = EngineClient("demo", replicas=len(engines), router="round-robin", **{**OPTIONS, **options})
        yield client, lives


def end(lives: MortalEngines, number: int = -1) -> None:
    """End a life as SIGKILL does."""
    lives.lives[number].kill()


@pytest.fixture
def hurry(monkeypatch) -> Iterator[threading.Event]:
    """Yield what ends the time of slow steps, in which no request ends before its process does."""
    hurry = threading.Event()
    execute = ModelRunner.execute
    monkeypatch.setattr(ModelRunner, "execute", lambda *given: (hurry.wait(0.05), execute(*given))[1])
    yield hurry
    hurry.set()


def test_what_can_happen_while_an_engine_is_replaced(engines, monkeypatch, hurry):
    """Readers leave, deadlines pass, requests come and are aborted, others are forked; then all goes on."""
    hurry.set()
    (whole,) = engines[1].generate(["x"], LONG, use_tqdm=False)
    hurry.clear()
    gate = asyncio.Event()
    start = connection.EngineConnection.ready

    async def late(self: connection.EngineConnection) -> frames.Ready:
        await gate.wait()
        return await start(self)

    monkeypatch.setattr(connection.EngineConnection, "ready", late)

    async def main() -> None:
        with mortal(engines[:1], max_waiting=7) as (client, lives):
            async with client:
                streams = [client.generate("x", ENDLESS, name) for name in ("leaves", "aborted")]
                streams.append(client.generate("x", LONG, "goes on"))
                streams.append(client.generate("x", replace(ENDLESS, timeout_s=600.0), "timed"))
                whole_one = client.generate("x", replace(LONG, output_kind=RequestOutputKind.FINAL_ONLY))
                last = asyncio.create_task(anext(whole_one))
                for stream in streams:
                    await anext(stream)
                late = asyncio.create_task(read(client.generate("x", replace(ENDLESS, timeout_s=0.6)), 0.0))
                while len(client._supervisor._requests) < 6 and not late.done():
                    await asyncio.sleep(0)
                end(lives)
                hurry.set()
                fork = await client.fork("goes on", "fork", LONG)
                while len(lives.lives) == 1:
                    await asyncio.sleep(0.01)
                assert not await client.is_fit()
                assert await client.troubles() == []
                with pytest.raises(RequestTimeoutError):
                    await late
                await client.abort("aborted")
                assert (await read(streams[1], 0.0))[-1].outputs[0].finish_reason == "abort"
                await streams[0].aclose()
                new = [asyncio.create_task(read(client.generate("x", LONG), 0.0)) for _ in range(3)]
                while len(client._supervisor._waiting) < 7:
                    await asyncio.sleep(0.01)
                with pytest.raises(QueueFullError, match="max_waiting is 7"):
                    await anext(client.generate("x", LONG))
                gate.set()
                for outputs in await asyncio.gather(read(streams[2], 0.0), read(fork, 0.0), *new):
                    assert outputs[-1].outputs[0].token_ids == whole.outputs[0].token_ids
                    assert outputs[-1].outputs[0].text == whole.outputs[0].text
                scheduler = engines[0].scheduler
                left_s = engines[0].core.groups["timed"].samples[0].inputs.deadline - scheduler.clock()
                assert 100 < left_s < 599.5  # it counts from the arrival
                await streams[3].aclose()
                assert (await last).outputs == whole.outputs
                stats = await client.stats()
                assert stats.num_restarts == 1
                assert 3 <= stats.num_resumed <= 4

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.usefixtures("hurry")
def test_an_engine_that_does_not_start_again_is_given_up(engines, monkeypatch):
    async def main() -> None:
        with mortal(engines[:1], max_restarts=2) as (client, lives):
            async with client:
                stream = client.generate("x", ENDLESS)
                await anext(stream)
                monkeypatch.setattr(MortalProcess, "run", MortalProcess.kill)
                end(lives)
                with pytest.raises(EngineDeadError, match="has ended"):
                    await read(stream, 0.0)
                assert (len(lives.lives), client.is_running, client.errored) == (3, False, True)
                with pytest.raises(EngineDeadError):
                    await anext(client.generate("x", LONG))

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_request_that_ends_each_process_ends_four(engines):
    """The last two times it is alone. The other requests go on, also those in flight at two deaths."""

    async def main() -> None:
        with mortal(engines) as (client, lives):
            lives.is_fatal = lambda engine: "poison" in engine.core.groups
            async with client:
                (whole,) = engines[0].generate(["x"], LONG, use_tqdm=False)
                streams = [client.generate("x", LONG) for _ in range(6)]
                for stream in streams:
                    await anext(stream)
                readers = [asyncio.create_task(read(stream, 0.0)) for stream in streams]
                poison = asyncio.create_task(anext(client.generate("x", LONG, "poison")))
                while not poison.done():
                    for each in client._supervisor.replicas:
                        held = [*each.connection.requests.values()]
                        assert len(held) == 1 or not any(request.suspicion.is_alone for request in held)
                    await asyncio.sleep(0)
                with pytest.raises(RequestKillsEngineError, match="4 engine processes ended") as refused:
                    await poison
                failure = failure_of(refused.value, 1, "x")
                assert (failure.status, failure.headers) == (500, ((b"x-should-retry", b"false"),))
                for outputs in await asyncio.gather(*readers):
                    assert outputs[-1].outputs == whole.outputs
                while (await client.stats()).num_restarts < 4:  # the fourth may begin after the answers end
                    await asyncio.sleep(0.01)
                assert (await client.stats()).num_restarts == 4

    asyncio.run(asyncio.wait_for(main(), 120))


def test_restarts_for_a_request_that_is_found_do_not_count_others_do(engines, monkeypatch):
    """Also if nothing was answered between two of them. An engine that cannot be made still ends it."""

    async def main() -> None:
        with mortal(engines[:1], max_restarts=4) as (client, lives):
            lives.is_fatal = lambda engine: "poison" in engine.core.groups
            async with client:
                end(lives)  # counts
                assert (await read(client.generate("x", LONG), 0.0))[-1].finished
                for _ in range(3):
                    with pytest.raises(RequestKillsEngineError):
                        await anext(client.generate("x", LONG, "poison"))
                assert (await read(client.generate("x", LONG), 0.0))[-1].finished
                assert len(lives.lives) == 1 + 1 + 3 * 4
                monkeypatch.setattr(MortalProcess, "run", MortalProcess.kill)
                end(lives)
                with pytest.raises(EngineDeadError):
                    await anext(client.generate("x", LONG))
                assert len(lives.lives) == 14 + 3, "four restarts have counted"

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize("seed", [2, 7])
def test_good_streams_survive_requests_that_end_their_engine(seed, engines):
    """Seeds are the rounds of `python -m tests.poisons`: three of them on one engine, eight on two."""
    poisons.run_round(engines[: 1 + seed % 2], poisons.expected_of(engines[0]), seed)


def test_a_request_that_leaves_after_it_ended_an_engine_alone_has_not_explained_it(engines):
    async def main() -> None:
        with mortal(engines[:1], max_restarts=5) as (client, lives):
            lives.is_fatal = lambda engine: "poison" in engine.core.groups
            known = client._supervisor._requests
            async with client:
                for _ in range(2):
                    poison = asyncio.create_task(anext(client.generate("x", LONG, "poison")))
                    while not any(each.suspicion.num_deaths_alone for each in known.values()):
                        await asyncio.sleep(0)
                    poison.cancel()
                    await asyncio.gather(poison, return_exceptions=True)
                while not client.errored:  # at the sixth death
                    await asyncio.sleep(0)
            assert len(lives.lives) == 6

    asyncio.run(asyncio.wait_for(main(), 120))


def test_suspicion():
    """Two deaths make a suspect; alone it must outlive twice what it survived, by steps and by time."""
    request = Suspicion()
    now = time.monotonic()
    for steps in (900, 10):
        request.on_send()
        request.on_begun(100)
        request.on_token()
        assert not request.is_there
        request.on_death(Death(), 100 + steps, now)  # it hung since then
    assert (request.is_there, request.time_alone_s) == (True, 0.0)
    request.is_alone = True
    request.on_send()
    assert not request.has_outlived(10**6), "it has not begun"
    request.on_begun(5)
    assert not request.has_outlived(10**6), "it has no token"
    request.on_token()
    assert [request.has_outlived(5 + steps) for steps in (21, 22)] == [False, True]
    request.on_death(one := Death(), 7, time.monotonic() + 50.0)
    assert (one.counts, request.is_proven) == (False, False)
    request.on_send()
    request.on_begun(0)
    request.on_token()
    assert not request.has_outlived(10**6), "it survived 50 s"
    request.clear()
    assert (one.counts, request.is_there) == (True, False)
    other = Death()
    request.on_death(other, 0, now)
    assert (request.is_there, request.is_proven, other.counts) == (True, False, False)
    request.explain()
    request.end()
    assert [one.counts, other.counts] == [False, False]


def test_a_router_forgets_a_replica():
    router = PrefixAware(2)
    prompt = [*range(9)]
    assert router.choose(prompt, [5, 0]) == 1
    assert router.choose(prompt, [0, 1]) == 1
    router.forget(1)
    assert router.choose(prompt, [0, 1]) == 0


def test_totals_go_on_from_process_to_process(engines):
    """All that /metrics counts of an engine, whatever the new process has computed."""
    earlier = replace(
        engines[0].stats(), num_restarts=1, num_drafts=3, num_accepted_at=(2, 1), draft_seconds_won=-0.5
    )
    new = LLMEngine("demo", **OPTIONS).stats()
    whole = new.after(earlier)
    of_drafts = ("num_drafts", "num_accepted_at", "draft_seconds_won")
    for name in ("num_steps", "num_generated_tokens", "step_tokens", "num_prompt_tokens", *of_drafts):
        assert getattr(whole, name) == getattr(earlier, name)
    assert whole.num_restarts == 1
    assert (whole.num_free_blocks, whole.num_blocks) == (new.num_free_blocks, new.num_blocks)


@pytest.mark.parametrize("num_silent", [0, 2])
def test_times_and_counts_of_a_request_go_on_from_process_to_process(num_silent, monkeypatch):
    """Counts are those of all processes, times on the clock of the first one that told some."""
    sent_at = itertools.count(100, 7)
    monkeypatch.setattr(sent_request, "time", SimpleNamespace(monotonic=lambda: next(sent_at)))
    times = _Times()
    for _ in range(num_silent + 1):
        times.on_send()
    first = times.of_first(RequestMetrics(21.0, 22.0, 23.0, None, 1, 2, 8, 5))
    arrival = 21.0 - 7 * num_silent
    assert (first.arrival_time, first.first_scheduled_time, first.first_token_time) == (arrival, 22.0, 23.0)
    times.on_send()
    whole = times.of_first(RequestMetrics(50.0, 51.0, 52.0, 53.0, 10, 20, 80, 50))
    assert replace(whole, finished_time=None, **_counts(first)) == first
    assert whole.finished_time == 21.0 + 7 + 3
    assert [*_counts(whole).values()] == [11, 22, 88, 55]


def _counts(metrics: RequestMetrics) -> dict[str, Any]:
    return {f.name: getattr(metrics, f.name) for f in fields(metrics) if f.name.startswith("num_")}


@pytest.mark.parametrize(
    ("num_restarts", "exit_code"), [(0, 1), (5, 0)], ids=["no engine is left", "SIGTERM"]
)
def test_the_exit_code(engines, monkeypatch, hurry, num_restarts, exit_code):
    """Without an engine the server ends with 1. On a signal streams finish first, even if one is replaced."""
    monkeypatch.setattr("paged.server.telemetry.request_log.set_up_logging", lambda _: None)
    monkeypatch.setattr("paged.commands.serving._collect_garbage", lambda _: asyncio.sleep(3600))
    options = ServeOptions(port=0, max_restarts=num_restarts)
    body = json.dumps(
        {"prompt": "x", "temperature": 0, "max_tokens": 400, "ignore_eos": True, "stream": True}
    )
    hurry.set()
    (whole,) = engines[0].generate(["x"], replace(LONG, max_tokens=400), use_tqdm=False)
    hurry.clear()

    def read_stream(port: int) -> bytes:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        with contextlib.closing(client):
            client.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            return client.getresponse().read()

    async def main() -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        with MortalEngines(engines[:1], 0, None).installed() as lives, bind_all(options) as listeners:
            port = listeners.main.getsockname()[1]
            serving = loop.create_task(
                _serve(
                    ModelEntry(name="demo", checkpoint="demo"),
                    {"model": "demo", **OPTIONS},
                    options,
                    listeners,
                )
            )
            while True:  # until it listens
                await asyncio.sleep(0.02)
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
            reading = loop.run_in_executor(None, read_stream, port)
            while not engines[0].core.groups:
                await asyncio.sleep(0.001)
            end(lives)
            hurry.set()
            if exit_code == 0:
                while not any(each.getMessage().endswith("another process") for each in logged):
                    await asyncio.sleep(0)
                os.kill(os.getpid(), signal.SIGTERM)
            return await serving, await reading

    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", logged.append)
    monkeypatch.setattr(logging.getLogger("paged.server.supervisor"), "handlers", [handler])
    code, events = asyncio.run(asyncio.wait_for(main(), 120))
    assert code == exit_code
    if exit_code == 0:
        parts = [json.loads(part[6:]) for part in events.split(b"\n\n") if part[6:7] == b"{"]
        assert "".join(part["choices"][0]["text"] for part in parts) == whole.outputs[0].text
        assert events.endswith(b"data: [DONE]\n\n")
    else:
        assert b"the engine has stopped" in events
