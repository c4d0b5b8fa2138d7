"""Several engine processes: each request counts for its own, and one that hangs is noticed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from paged.base.errors import EngineDeadError
from paged.scheduler.stats import EngineStats
from paged.server import connection, frames, supervised_engine, supervisor
from paged.server.engine_client import EngineClient
from paged.server.router import ROUTERS, WAITING_WEIGHT, new_router
from tests.server.test_refusals import LONG, posted
from tests.support.mortal_engines import processes
from tests.support.scheduler_cases import new_scheduler
from tests.support.served import PATIENCE_S, Served, UnhurriedLauncher, eventually, serving, unhurried

OPTIONS = {"device": "cpu", "num_threads": 1, "num_blocks": 256, "max_num_seqs": 1}


@pytest.fixture(scope="module")
def pair() -> Iterator[Served]:
    """Yield a server of two engine processes that take turns, each with one request at a time."""
    engine = EngineClient("demo", replicas=2, router="round-robin", launcher=UnhurriedLauncher(), **OPTIONS)
    with serving(engine, closes=True, replicas=2, admin_key="root") as served:
        yield served


def finished(served: Served) -> dict[tuple[str, str], float]:
    """Return how many requests have finished by engine and reason."""
    _, _, metrics = served.request("GET", "/metrics")
    found = re.findall(
        r'request_success_total{engine="(.)",finished_reason="(.*?)".*} (.*)', metrics.decode()
    )
    assert found
    return {(engine, reason): float(count) for engine, reason, count in found if float(count)}


def gained(served: Served, before: dict[tuple[str, str], float]) -> list[tuple[str, float]]:
    """Return the engines of which more requests have finished than before, and how many."""
    after = finished(served)
    gains = {key: count - before.get(key, 0) for key, count in after.items()}
    return sorted((engine, gain) for (engine, _), gain in gains.items() if gain)


def counts(served: Served) -> tuple[set[str], dict[Any, float]]:
    """Return the engines that have gauges, and the values of all counters and histograms."""
    text = served.request("GET", "/metrics")[2].decode()
    engines = set()
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.type != "gauge":
                values[sample.name, *sorted(sample.labels.items())] = sample.value
            elif "engine" in sample.labels:
                engines.add(sample.labels["engine"])
    return engines, values


def test_embeddings_and_scores_count_for_their_engine(pair):
    before = finished(pair)
    pair.post("/v1/embeddings", input=[[5], [6], [7]])
    assert sorted(count for _, count in gained(pair, before)) == [1, 2]
    before = finished(pair)
    for continuations in (["a"], ["a", "b"]):  # all of a prompt by one engine
        pair.post("/v1/score", prompt="x", continuations=continuations)
    assert sorted(count for _, count in gained(pair, before)) == [1, 2]


def waits_weigh_more(served: Served) -> bool:
    """Return whether each engine's load is that of a request that it computes, and of one that waits."""

    async def look() -> bool:
        connections = [each.connection for each in served.front.engine._supervisor.replicas]
        pairs = [(each.load, [r.num_tokens for r in each.requests.values()]) for each in connections]
        return all(load == computed + WAITING_WEIGHT * waiting for load, (computed, waiting) in pairs)

    return asyncio.run_coroutine_threadsafe(look(), served.loop).result(PATIENCE_S)


def test_what_a_client_leaves_counts_for_its_engine(pair):
    """Two long requests keep the engines busy, so that an embedding waits in each."""
    before = finished(pair)
    with unhurried(pair.front.engine), pair.connect() as client:
        client.sendall(posted({**LONG, "prompt": ["a", "a"]}))
        eventually(lambda: pair.stats().num_running == 2)
        with pair.connect() as waiting:
            waiting.sendall(posted({"input": ["a", "a"]}, "/v1/embeddings"))
            eventually(lambda: pair.stats().num_waiting == 2)
            eventually(lambda: waits_weigh_more(pair))
        eventually(lambda: pair.stats().num_waiting == 0)
    eventually(lambda: pair.num_requests == 0)
    eventually(lambda: not pair.front.open_records)
    assert gained(pair, before) == [("0", 2), ("1", 2)]


def test_a_process_that_hangs_gets_no_requests_and_is_replaced(pair, monkeypatch):
    monkeypatch.setattr(connection, "SILENT_S", 100.0)  # a busy machine may delay heartbeats
    monkeypatch.setattr(supervised_engine, "HANG_S", 1000.0)
    monkeypatch.setattr(supervisor, "LOOK_S", 1000.0)
    look = supervisor.Supervisor.look
    monkeypatch.setattr(supervisor.Supervisor, "look", lambda _: None)  # one is due
    hung = pair.front.engine._supervisor.replicas[1]
    num_restarts = pair.stats().num_restarts

    def status(path: str) -> int:
        return pair.request("GET", path)[0]

    assert (status("/health"), status("/ready")) == (200, 200)
    first, second = processes(pair.front.engine)
    os.kill(second.pid, signal.SIGSTOP)
    eventually(lambda: psutil.Process(second.pid).status() == psutil.STATUS_STOPPED)
    for _ in range(3):  # what it sent before comes
        status("/ready")
    hung.connection.heard_at -= 200.0
    assert not hung.is_fit
    assert (status("/health"), status("/ready"), status("/metrics")) == (200, 200, 200)
    before = finished(pair)
    pair.post("/v1/embeddings", input=[[8], [9], [10]])  # all by the other one
    assert gained(pair, before) == [("0", 3)]
    monkeypatch.setattr(supervised_engine, "HANG_S", 100.0)
    eventually(lambda: status("/health") == 503)  # in the moment before it is replaced
    _, headers, data = pair.request("GET", "/health")
    assert "engine process 1 has sent nothing for" in json.loads(data)["error"]["message"]
    assert headers["retry-after"] == "1"
    with routed(pair) as router:
        pair.loop.call_soon_threadsafe(look, pair.front.engine._supervisor)
        eventually(lambda: pair.stats().num_restarts == num_restarts + 1)
        router.forget.assert_called_once_with(1)
    assert (status("/health"), status("/ready")) == (200, 200)
    eventually(lambda: all(each.is_fit for each in pair.front.engine._supervisor.replicas))
    assert processes(pair.front.engine)[0] is first
    assert second.how_ended(0) == "by signal SIGKILL"


def routed(served: Served) -> Any:
    """Watch the calls of the router."""
    supervised = served.front.engine._supervisor
    return mock.patch.object(supervised, "_router", mock.Mock(wraps=supervised._router))


def resized(served: Served, number: object) -> tuple[int, str]:
    """Have the server run so many engines. Return the status and the message of an error."""
    headers = {"authorization": "Bearer root"}
    status, _, data = served.request("POST", f"/admin/replicas/{number}", None, headers, patience_s=600)
    body = json.loads(data)
    return status, body["error"]["message"] if status != 200 else ""


def test_engines_leave_and_come_while_streams_run(pair, monkeypatch):
    monkeypatch.setattr(supervised_engine, "LEAST_START_S", 600.0)
    body = {"prompt": "def f(", "temperature": 0, "max_tokens": 1000, "ignore_eos": True}
    whole = pair.post("/v1/completions", **body)
    _, last = processes(pair.front.engine)
    seen = [counts(pair)]
    with ThreadPoolExecutor(2) as pool:
        with unhurried(pair.front.engine):
            streams = [pool.submit(pair.events, "/v1/completions", **body) for _ in range(2)]
            eventually(lambda: pair.stats().num_running == 2)
            with routed(pair) as router:
                assert resized(pair, 1) == (200, "")
                router.forget.assert_called_once_with(1)
                # Also where there is one: it knows what that has when others come.
                router.choose.assert_called()
        assert last.wait(0), "its process has not ended"
        assert len(processes(pair.front.engine)) == 1
        seen.append(counts(pair))
        assert resized(pair, 2) == (200, "")
        for stream in streams:
            *events, _ = stream.result()
            assert "".join(json.loads(e)["choices"][0]["text"] for e in events) == whole["choices"][0]["text"]
    assert pair.front.engine._supervisor.replicas[0].num_resumed >= 1
    seen.append(counts(pair))
    assert [engines for engines, _ in seen] == [{"0", "1"}, {"0"}, {"0", "1"}]
    (_, first), (_, removed), (_, back) = seen
    assert first.keys() <= removed.keys() <= back.keys(), "a count is gone"
    last_counts = {key: count for key, count in removed.items() if ("engine", "1") in key}
    assert {key: (count, back[key]) for key, count in last_counts.items() if back[key] < count} == {}
    before = finished(pair)
    pair.post("/v1/embeddings", input=[[5], [6], [7], [8]])
    assert gained(pair, before) == [("0", 2), ("1", 2)]


def test_how_many_engines_there_cannot_be(pair):
    cores = len(os.sched_getaffinity(0))
    for number, message in (
        (0, "replicas must be from 1 to 1024, got 0"),
        (2000, "from 1 to 1024, got 2000"),
        ("two", "replicas must be a number, got 'two'"),
        (cores + 1, f"{cores + 1} replicas need {cores + 1} CPU cores; there are {cores}"),
    ):
        status, said = resized(pair, number)
        assert (status, message in said) == (400, True), said
        assert not re.search(rb'engine="[^01]', pair.request("GET", "/metrics")[2])
    assert len(processes(pair.front.engine)) == pair.front.options.replicas == 2


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_knows_replicas_by_number_while_they_leave_and_come(name):
    choose = random.Random(0)
    router = new_router(name, 4)
    num = 3
    for _ in range(300):
        if choose.random() < 0.2:
            new = choose.randint(1, 6)
            for gone in range(new, num):
                router.forget(gone)
            num = new
        text = [choose.randrange(4)] * 9
        assert router.choose(text, [choose.randrange(9) for _ in range(num)]) in range(num)
    for gone in range(num):
        router.forget(gone)
    chosen = [router.choose([1] * 9, [i, 2, 2]) for i in range(3)]
    assert chosen == {"round-robin": chosen, "least-loaded": [0, 0, 0], "prefix-aware": [0, 0, 0]}[name]
    assert name != "round-robin" or {*chosen} == {0, 1, 2}


def test_signals_for_the_front_end_end_no_engine(pair):
    """Ctrl-C, and SIGHUP, by which keys are read again, may come to the whole group of processes."""
    num_restarts = pair.stats().num_restarts
    for process in processes(pair.front.engine):
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(process.pid, number)
    pair.post("/v1/embeddings", input=[[8], [9], [10]])
    assert not any(process.wait(0) for process in processes(pair.front.engine))
    assert pair.stats().num_restarts == num_restarts


def test_a_killed_process_is_replaced_and_its_streams_go_on(pair, caplog, monkeypatch):
    """The counts of the metrics never fall, and an engine that is replaced fails neither probe."""
    body = {"prompt": "def f(", "temperature": 0, "max_tokens": 1000, "ignore_eos": True}
    whole = pair.post("/v1/completions", **body)
    num_restarts = pair.stats().num_restarts
    replicas = pair.front.engine._supervisor.replicas
    may_begin, ready = threading.Event(), connection.EngineConnection.ready

    async def late(self: connection.EngineConnection) -> frames.Ready:
        while not may_begin.is_set():
            await asyncio.sleep(0.01)
        return await ready(self)

    monkeypatch.setattr(connection.EngineConnection, "ready", late)
    with ThreadPoolExecutor(2) as pool:
        usage = {"stream_options": {"include_usage": True}}
        before = pair.stats()
        with unhurried(pair.front.engine):  # else they might have ended before the kill
            streams = [pool.submit(pair.events, "/v1/completions", **body, **usage) for _ in range(2)]
            eventually(lambda: all(each.connection.requests for each in replicas))
            eventually(lambda: pair.stats().num_generated_tokens > before.num_generated_tokens + 10)
            for process in processes(pair.front.engine):
                os.kill(process.pid, signal.SIGKILL)
            eventually(lambda: pair.request("GET", "/ready")[0] == 503)
        assert pair.request("GET", "/health")[0] == 200
        may_begin.set()
        for stream in streams:
            *events, last, done = stream.result()
            assert done == "[DONE]"
            text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
            assert text == whole["choices"][0]["text"]
            assert json.loads(last)["usage"] == whole["usage"]
    after = pair.stats()
    assert (after.num_restarts - num_restarts, after.num_resumed >= 2) == (2, True)
    assert after.num_generated_tokens >= before.num_generated_tokens
    assert pair.request("GET", "/ready")[0] == 200
    ended = [record.getMessage() for record in caplog.records if "has ended" in record.getMessage()]
    assert all(
        re.search(r"process \d has ended \(by signal SIGKILL\); \d of its \d requests", e) for e in ended
    )
    assert len(ended) == 2


class Beginnings:
    """Starts of processes: how each ends before its engine is made, None for one that makes it."""

    divides_machine = True
    engine_options = MappingProxyType({})

    def __init__(self, *ends: str | None) -> None:
        self.ends = [*ends]

    def launch(self, _: Any) -> tuple[socket.socket, Any]:
        ours, theirs = socket.socketpair()
        how = self.ends.pop(0)
        with theirs:
            if how is None:
                stats = EngineStats.of(new_scheduler())
                theirs.sendall(frames.encode(frames.Ready(64, 16, "made", stats, "cpu")))
        process = SimpleNamespace(how_ended=lambda _: how, wait=lambda _: True, kill=lambda: None)
        return ours, process


KILLED = "by signal SIGKILL"


@pytest.mark.parametrize(
    ("ends", "max_restarts", "error", "num_left"),
    [
        ([KILLED, None], 5, None, 0),
        ([KILLED, "by signal SIGSEGV", KILLED, None], 3, None, 0),
        ([KILLED] * 4, 2, r"made \(by signal SIGKILL\), as did 2 before it; it is not started again", 1),
        ([KILLED, None], 0, r"engine process 0 ended before its engine was made \(by signal SIGKILL\)$", 1),
        (["exit code 1", None], 5, r"ended before its engine was made \(exit code 1\)$", 1),
    ],
)
def test_a_process_that_is_killed_while_it_starts_is_started_again(
    monkeypatch, caplog, ends, max_restarts, error, num_left
):
    """As one that serves is, so often as max_restarts allows; one that ends by itself would end again."""
    monkeypatch.setattr(supervised_engine, "FIRST_PAUSE_S", 0.0)
    launcher = Beginnings(*ends)
    start = frames.Start({}, 0.0, "text", 0, 1, "here")
    engine = supervised_engine.SupervisedEngine(start, mock.Mock(), launcher)
    if error is None:
        assert engine.wait_ready(max_restarts).description == "made"
        assert engine.stats.num_restarts == len(ends) - 1
        assert len(caplog.messages) == len(ends) - 1
        assert "made (by signal SIGKILL); it is started again" in caplog.messages[0]
    else:
        with pytest.raises(EngineDeadError, match=error):
            engine.wait_ready(max_restarts)
    assert len(launcher.ends) == num_left
    engine.connection.close()
