"""Several engine processes: each request counts for its own, and one that hangs is noticed."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator

import pytest

from paged.server import connection
from paged.server.engine_client import EngineClient
from tests.server.test_refusals import LONG, posted
from tests.support.served import Served, eventually, serving

OPTIONS = {"device": "cpu", "num_threads": 1, "num_blocks": 256, "max_num_seqs": 1}


@pytest.fixture(scope="module")
def pair() -> Iterator[Served]:
    """Yield a server of two engine processes that take turns, each with one request at a time."""
    engine = EngineClient("demo", replicas=2, router="round-robin", **OPTIONS)
    with serving(engine, closes=True, replicas=2) as served:
        yield served


def finished(served: Served) -> dict[tuple[str, str], float]:
    """Return how many requests have finished by engine and reason."""
    _, _, metrics = served.request("GET", "/metrics")
    found = re.findall(
        r'request_success_total{engine="(.)",finished_reason="(.*?)".*} (.*)', metrics.decode()
    )
    assert found
    return {(engine, reason): float(count) for engine, reason, count in found if float(count)}


def test_embeddings_and_scores_count_for_their_engine(pair):
    pair.post("/v1/embeddings", input=[[5], [6], [7]])
    one, two = sorted(finished(pair).items())
    assert (one[0][0], two[0][0], one[1] + two[1]) == ("0", "1", 3)
    before = finished(pair)
    for continuations in (["a"], ["a", "b"]):  # all of a prompt by one engine
        pair.post("/v1/score", prompt="x", continuations=continuations)
    after = finished(pair)
    assert sorted(after[key] - before[key] for key in before) == [1, 2]


def test_what_a_client_leaves_counts_for_its_engine(pair):
    """Two long requests keep the engines busy, so that an embedding waits in each."""
    before = finished(pair)
    with pair.connect() as client:
        client.sendall(posted({**LONG, "prompt": ["a", "a"]}))
        eventually(lambda: pair.stats().num_running == 2)
        with pair.connect() as waiting:
            waiting.sendall(posted({"input": ["a", "a"]}, "/v1/embeddings"))
            eventually(lambda: pair.stats().num_waiting == 2)
        eventually(lambda: pair.stats().num_waiting == 0)
    eventually(lambda: pair.num_requests == 0)
    eventually(lambda: not pair.front.open_records)
    after = finished(pair)
    assert {key: after[key] - before.get(key, 0) for key in after if key[1] == "abort"} == {
        ("0", "abort"): 2,
        ("1", "abort"): 2,
    }


def test_a_process_that_hangs_is_noticed_and_gets_no_requests_until_it_goes_on(pair, monkeypatch):
    # Four heartbeats: on a busy machine the process that runs may miss one.
    monkeypatch.setattr(connection, "SILENT_S", 4.0)

    def status(path: str) -> int:
        return pair.request("GET", path)[0]

    assert (status("/health"), status("/ready")) == (200, 200)
    pids = [each._process.pid for each in pair.front.engine._connections]
    os.kill(pids[1], signal.SIGSTOP)
    try:
        eventually(lambda: status("/health") == 503)
        _, headers, data = pair.request("GET", "/health")
        assert "engine process 1 has sent nothing for" in json.loads(data)["error"]["message"]
        assert headers["retry-after"] == "1"
        assert (status("/ready"), status("/metrics")) == (200, 200)
        before = finished(pair)
        pair.post("/v1/embeddings", input=[[8], [9], [10]])  # all by the other one
        after = finished(pair)
        assert {
            key[0]: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key)
        } == {"0": 3}
        os.kill(pids[0], signal.SIGSTOP)
        eventually(lambda: status("/ready") == 503)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    eventually(lambda: (status("/health"), status("/ready")) == (200, 200))


def test_a_process_that_ends_is_logged_at_once_and_fails_the_health_check(caplog):
    """Without a request that could find it: the others go on, and the server stays ready."""
    engine = EngineClient("demo", replicas=2, router="round-robin", **OPTIONS)
    with serving(engine, closes=True, replicas=2) as served:
        assert served.request("GET", "/health")[0] == 200
        os.kill(engine._connections[1]._process.pid, signal.SIGKILL)
        eventually(lambda: served.request("GET", "/health")[0] == 503)
        _, _, data = served.request("GET", "/health")
        assert "an engine process has ended, others run" in json.loads(data)["error"]["message"]
        assert served.request("GET", "/ready")[0] == 200
        served.post("/v1/embeddings", input=[[8], [9], [10]])
    ended = [record.getMessage() for record in caplog.records if "has ended" in record.getMessage()]
    assert ended == [
        "engine process 1 has ended (by signal SIGKILL); make a new engine, or restart the server"
    ]
