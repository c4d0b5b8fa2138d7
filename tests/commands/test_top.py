"""`paged top` against a small server that answers GET /metrics."""

import contextlib
import http.server
import math
import socket
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from paged.options.config import EngineConfig
from paged.scheduler.schedule import SECONDS_OF_STEP, TOKENS_OF_STEP, Histogram
from paged.scheduler.stats import EngineStats
from paged.server.telemetry.records import Observers, RequestRecord

pytest.importorskip("prometheus_client")

from paged.commands import top
from paged.server.telemetry import scrape
from paged.server.telemetry.metrics import CONTENT_TYPE, ServerMetrics
from paged.server.telemetry.scrape import parse, quantile

# As vLLM answers: another prefix, no states of blocks, two engines.
VLLM = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 70.0
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="m"} 1.7e9
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.3",model_name="m"} 10.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 10.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 10.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 2.0
"""


keys = []  # with which the metrics were asked for


@contextlib.contextmanager
def serving(answer):
    """Serve GET /metrics. Yield the address, and the list of the paths that were asked for."""
    paths = []
    keys.clear()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            paths.append(self.path)
            keys.append(self.headers["authorization"])
            status, body = answer()
            self.send_response(status)
            self.send_header("content-type", CONTENT_TYPE)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", paths
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def stats(**changes):
    zeros = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
    sizes = {
        "num_blocks": 100,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "weight_bytes": {},
        "num_accepted_at": (),
    }
    histograms = {
        "step_seconds": Histogram(SECONDS_OF_STEP).snapshot(),
        "step_tokens": Histogram(TOKENS_OF_STEP).snapshot(),
    }
    return EngineStats(**{**zeros, **sizes, **histograms, **changes})


@pytest.fixture
def demo():
    """Serve the metrics of a server on which 500 tokens are generated between two looks."""
    metrics = ServerMetrics("de[b]mo", EngineConfig("demo"), max_model_len=64, routes=["/x"])
    observers = Observers(metrics)
    observers.refused("/x", 429)
    observers.begin(record := RequestRecord("a", "/x"))
    record.on_result("a", num_prompt_tokens=3)
    observers.end(record)
    states = {"num_free_blocks": 50, "num_used_blocks": 40, "num_cached_blocks": 10, "utilization": 0.4}
    steps = Histogram(SECONDS_OF_STEP)
    steps.add(0.3)
    states["step_seconds"] = steps.snapshot()
    now = stats(num_running=3, num_waiting=2, num_queried_tokens=100, num_cached_tokens=25, **states)
    looks = [0]

    def answer():
        looks[0] += 1
        return 200, metrics.render({0: replace(now, num_generated_tokens=500 * looks[0])})

    with serving(answer) as (url, paths):
        yield url, paths


def test_one_view(run, demo, monkeypatch):
    url, paths = demo
    looked_at = iter((100.0, 100.5))
    monkeypatch.setattr(scrape, "time", SimpleNamespace(monotonic=looked_at.__next__))
    code, out, err = run("top", url, "--once", "--interval", 0.01)
    assert (code, err, paths, keys) == (0, "", ["/metrics", "/metrics"], [None, None])
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == f"de[b]mo at {url}/metrics"
    assert lines[1].split()[1:] == ["█" * 20 + "▓" * 5 + "░" * 25]
    assert lines[2].startswith("requests 3 running 2 waiting")
    assert lines[3] == "so far 1 stop refused: 1 queue_full"
    assert lines[4].split()[1] == "1,000"  # 500 tokens in half a second
    assert lines[5] == "memory 40.0% of KV in use – prefix hits, 25% ever 0 preemptions"
    assert lines[6:8] == ["p50 p90 p99", "first token – – –"]
    assert lines[-1] == "step 375.0 ms 475.0 ms 497.5 ms"


def test_the_address_is_given_as_to_other_commands(run, demo):
    """As --url or as an argument, of the server or of its API; two different ones are an error."""
    url, paths = demo
    for given in ([url], ["--url", url], ["--url", f"{url}/v1/"], [url, "--url", url], [f"{url}/metrics"]):
        assert run("top", *given, "--once", "--interval", 0.01)[0] == 0
    assert paths == ["/metrics"] * 10
    assert f"given twice, as {url} and as --url x; leave one out" in run.fails("top", url, "--url", "x")


@pytest.mark.parametrize("on_terminal", [True, False])
def test_views_go_on_while_the_server_is_away(run, monkeypatch, on_terminal):
    monkeypatch.setattr(top.Console, "is_terminal", on_terminal)
    metrics = ServerMetrics("demo", EngineConfig("demo"), max_model_len=64, routes=[])
    good, bad = (200, metrics.render({0: stats(num_running=7)})), (503, b"")
    answers = [good, good, bad, good]

    def sleep(_):
        if not answers:
            raise KeyboardInterrupt

    monkeypatch.setattr(top, "time", SimpleNamespace(sleep=sleep))
    with serving(lambda: answers.pop(0)) as (url, paths):
        code, out, _ = run("top", url)
    assert (code, len(paths)) == (0, 4)
    assert "7 running" in out
    if not on_terminal:  # one view after the other
        assert (out.count("7 running"), out.count("answers 503")) == (3, 1)


def test_a_server_of_vllm():
    found = parse("", VLLM.encode())
    assert (found.model_names, found.engines) == (("m",), ("0", "1"))
    assert found.values == {"num_requests_running": 7, "kv_cache_usage_perc": 0.75, "generation_tokens": 70}
    assert quantile({}, found.buckets["time_to_first_token_seconds"], 0.5) == pytest.approx(0.2)
    top.view("", found, found)


def test_quantiles_are_those_of_what_came_between():
    before, after = {0.1: 5, 0.2: 5, math.inf: 6}, {0.1: 5, 0.2: 15, math.inf: 26}
    assert quantile(before, after, 0.25) == pytest.approx(0.15)
    assert quantile(before, after, 0.99) == 0.2  # beyond the last bound
    assert quantile(after, after, 0.5) is None


def test_addresses_and_answers_that_are_none(run):
    with socket.socket() as taken:  # bound, but not listening
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"no server answers at http://{address}/metrics" in run.fails("top", address, code=1)
    assert "is a URL such as" in run.fails("top", "ftp://x")
    for answer, message in (
        ((404, b""), "answers 404"),
        ((403, b""), "give the key of its operator by PAGED_ADMIN_KEY"),
        ((200, b"<html>"), "text format of Prometheus"),
        ((200, b"up 1\n"), "no metrics of an engine"),
        ((200, b'x:num_requests_running{a="1" 3\n'), "text format of Prometheus"),
    ):
        with serving(lambda answer=answer: answer) as (url, _):
            assert message in run.fails("top", url, code=1)
    nothing = VLLM.partition("\n")[0].encode()  # of any engine yet
    with serving(lambda: (200, nothing + b"\n")) as (url, _):
        assert run("top", url, "--once", "--interval", 0.01, "--admin-key", "k")[0] == 0
        assert keys == ["Bearer k"] * 2
    evil = VLLM.replace('"m"', '"\x1b[2J"').encode()
    with serving(lambda: (200, evil)) as (url, _):
        assert "\\x1b[2J" in run("top", url, "--once", "--interval", 0.01)[1]
