"""Metrics of the server: names, types, labels, and values of requests whose course is known."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from paged import AsyncLLMEngine, SamplingParams
from paged.architectures.config import DEMO
from paged.architectures.hf_config import read_config
from paged.base.errors import RequestError
from paged.options.config import EngineConfig
from paged.options.sampling_params import RequestOutputKind
from paged.requests.request import CompletionOutput, RequestMetrics, RequestOutput
from paged.server.telemetry.records import CLIENT_GONE, Observers, RequestRecord

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from paged.server.telemetry.families import METRIC_FAMILIES
from paged.server.telemetry.metrics import CONTENT_TYPE, ServerMetrics

COMPLETIONS = "/v1/completions"


def new_metrics(**options):
    defaults = {"max_model_len": 64, "routes": [COMPLETIONS, "/health"]}
    return ServerMetrics("demo", EngineConfig("demo"), **{**defaults, **options})


def samples(metrics, stats=None):
    """Return each sample by name and label values, of the families that paged makes."""
    families = {f.name: f for f in text_string_to_metric_families(metrics.render(stats or {}).decode())}
    found = {}
    for family in METRIC_FAMILIES:
        for sample in families[f"paged:{family.name}"].samples:
            values = [sample.labels[label] for label in (*family.labels, "le") if label in sample.labels]
            found[sample.name.removeprefix("paged:"), *values] = sample.value
    return found


def output(request_id="a", *, tokens=(1,), reason=None, metrics=None, prompt=(1, 2, 3), cached=0):
    completions = [
        CompletionOutput(i, "x", list(range(count)), finish_reason=reason) for i, count in enumerate(tokens)
    ]
    times = metrics or RequestMetrics(arrival_time=100.0)
    return RequestOutput(request_id, None, list(prompt), completions, reason is not None, cached, times)


@pytest.mark.parametrize("prefix", ["paged", "vllm"])
def test_what_is_rendered_is_what_the_table_says(demo_stats, prefix):
    metrics = new_metrics(prefix=prefix)
    record = RequestRecord("a", COMPLETIONS, params=SamplingParams(n=2, max_tokens=4))
    observers = Observers(metrics)
    observers.begin(record)
    record.on_output(output(tokens=(2, 2), reason="length"), 200.0)
    observers.end(record)
    observers.refused(COMPLETIONS, 429)
    parsed = text_string_to_metric_families(metrics.render({0: demo_stats}).decode())
    rendered = {family.name: family for family in parsed if ":" in family.name}
    assert list(rendered) == [f"{prefix}:{family.name}" for family in METRIC_FAMILIES]
    for family in METRIC_FAMILIES:
        own = rendered[f"{prefix}:{family.name}"]
        assert (own.type, own.documentation) == (family.kind, family.meaning)
        labels = {frozenset(sample.labels) - {"le"} for sample in own.samples}
        assert labels == {frozenset(family.labels)}, family.name
        suffixes = {"gauge": {""}, "counter": {"_total"}, "histogram": {"_bucket", "_count", "_sum"}}
        assert {s.name.removeprefix(own.name) for s in own.samples} == suffixes[family.kind]


@pytest.fixture(scope="module")
def demo_stats():
    """Return the statistics of an engine after two requests, the second a continuation of the first."""

    async def run():
        async with AsyncLLMEngine("demo", num_blocks=64, num_threads=1) as engine:
            for prompt in ([5] * 40, [5] * 44):
                params = SamplingParams(max_tokens=3, ignore_eos=True)
                _ = [o async for o in engine.generate({"prompt_token_ids": prompt}, params)]
            return await engine.stats()

    return replace(asyncio.run(run()), num_accepted_tokens=3, num_accepted_at=(2, 1))


def test_figures_of_the_engine(demo_stats):
    found, own = samples(new_metrics(), {0: demo_stats, 1: demo_stats}), ("demo", "0")
    assert found[("prompt_tokens_total", *own)] == 84
    assert found[("prompt_tokens_total", "demo", "1")] == 84
    assert found[("generation_tokens_total", *own)] == 6
    assert found[("prefix_cache_queries_total", *own)] == 84
    assert found[("prefix_cache_hits_total", *own)] == 32  # two blocks of 16
    assert found[("prompt_tokens_by_source_total", *own, "local_compute")] == 52
    assert found[("scheduled_prefill_tokens_total", *own)] == 52
    assert found[("step_time_seconds_count", *own)] == found[("iteration_tokens_total_count", *own)] == 6
    assert found[("iteration_tokens_total_sum", *own)] == 52 + 4
    assert found[("iteration_tokens_total_bucket", *own, "1.0")] == 4
    assert found[("kv_cache_usage_perc", *own)] == 0
    assert found[("spec_decode_num_accepted_tokens_total", *own)] == 3
    assert found[("spec_decode_num_accepted_tokens_per_pos_total", *own, "1")] == 1
    blocks = {state: found[("kv_cache_blocks", *own, state)] for state in ("free", "used", "cached")}
    assert sum(blocks.values()) == 64
    assert blocks["cached"] == 2
    assert found[("batch_utilization_perc", *own)] == 0
    file = (DEMO / "model.safetensors").read_bytes()
    header = int.from_bytes(file[:8], "little")
    assert found[("weight_bytes", *own, "floats")] == len(file) - 8 - header
    kinds = [found[("model_parameters", *own, kind)] for kind in ("all", "active")]
    assert kinds[0] == kinds[1] == read_config(DEMO).num_params
    assert [key for key in found if key[0] == "cache_config_info"] == [
        ("cache_config_info", "16", "auto", "True", str(engine), "0.92", "64") for engine in (0, 1)
    ]


def test_tenants_are_counted_up_to_a_bound():
    metrics = new_metrics()
    observers = Observers(metrics)
    for i in range(1002):
        record = RequestRecord("a", COMPLETIONS, account=str(i % 1001))
        observers.begin(record)
        record.on_output(output(tokens=(2, 3), reason="length"), 20.0)
        observers.end(record)
    found = samples(metrics)
    assert found["tenant_requests_total", "0"] == 2
    assert found["tenant_prompt_tokens_total", "0"] == 6
    assert found["tenant_generation_tokens_total", "0"] == 10
    assert found["tenant_requests_total", "other"] == 1
    assert len([key for key in found if key[0] == "tenant_requests_total"]) == 1001


def test_times_of_a_stream():
    metrics = new_metrics()
    record = RequestRecord("a", COMPLETIONS, received=10.0, stream=True, params=SamplingParams(max_tokens=9))
    observers = Observers(metrics)
    observers.begin(record)
    assert samples(metrics)[("http_requests_in_progress", COMPLETIONS)] == 1
    times = RequestMetrics(100.0, 101.0, 103.0, 107.0, num_preemptions=2)
    record.on_output(output(tokens=(1,)), 13.5)
    record.on_output(output(tokens=(4,)), 15.5)  # tokens held back: 0.5 s each
    record.on_output(output(tokens=(0,)), 16.0)  # text alone
    record.on_output(output(tokens=(1,), reason="stop", metrics=times, cached=2), 17.5)
    observers.end(record)
    found, own = samples(metrics), ("demo", "0")
    sums = {
        "time_to_first_token_seconds": 3.5,
        "inter_token_latency_seconds": 2.0 + 2.0,
        "request_time_per_output_token_seconds": 4.0 / 5,
        "e2e_request_latency_seconds": 7.5,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 4.0,
        "request_inference_time_seconds": 6.0,
        "request_prompt_tokens": 3,
        "request_prefill_kv_computed_tokens": 1,
        "request_generation_tokens": 6,
        "request_max_num_generation_tokens": 6,
        "request_params_max_tokens": 9,
        "request_params_n": 1,
        "request_num_preemptions": 2,
    }
    assert {name: found[(f"{name}_sum", *own)] for name in sums} == pytest.approx(sums)
    counts = {name: found[(f"{name}_count", *own)] for name in sums}
    assert counts == dict.fromkeys(sums, 1) | {"inter_token_latency_seconds": 5}
    assert found[("inter_token_latency_seconds_bucket", *own, "0.5")] == 4
    assert found[("request_success_total", *own, "stop")] == 1
    assert found[("http_responses_total", COMPLETIONS, "200")] == 1
    assert found[("http_requests_in_progress", COMPLETIONS)] == 0


def test_a_request_is_counted_for_the_engine_that_computed_it():
    metrics = new_metrics(num_engines=1)
    observers = Observers(metrics)
    observers.begin(record := RequestRecord("a", COMPLETIONS, num_requests=2))
    for engine in (0, 1):
        record.on_output(output(f"a-{engine}"), 13.0, engine)
        record.on_output(output(f"a-{engine}", tokens=(1 + engine,), reason="stop"), 14.0, engine)
    observers.end(record)
    found = samples(metrics)
    for engine in ("0", "1"):
        assert found[("request_success_total", "demo", engine, "stop")] == 1
        assert found[("e2e_request_latency_seconds_count", "demo", engine)] == 1
        assert found[("inter_token_latency_seconds_count", "demo", engine)] == 1 + int(engine)


def test_times_of_whole_responses():
    """The only output says when the first token was. Two prompts of two samples are four finished ones."""
    metrics = new_metrics()
    record = RequestRecord("x", COMPLETIONS, received=10.0, num_requests=2)
    observers = Observers(metrics)
    observers.begin(record)
    times = RequestMetrics(100.0, 101.0, 103.0, 107.0)
    for request_id in ("x-0", "x-1"):
        record.on_output(output(request_id, tokens=(3, 5), reason="length", metrics=times), 18.0)
    observers.end(record)
    found, own = samples(metrics), ("demo", "0")
    assert found[("time_to_first_token_seconds_sum", *own)] == 2 * 4.0
    assert found[("inter_token_latency_seconds_count", *own)] == 2 * (2 + 4)
    assert found[("inter_token_latency_seconds_sum", *own)] == 2 * 6 * 1.0
    assert found[("request_success_total", *own, "length")] == 4
    assert found[("request_generation_tokens_count", *own)] == 4
    assert found[("request_max_num_generation_tokens_sum", *own)] == 10


@pytest.mark.parametrize(
    ("status", "error", "counted"),
    [
        (400, RequestError("no"), ("requests_refused_total", "invalid")),
        (429, None, ("requests_refused_total", "queue_full")),
        (500, ValueError("no"), ("request_success_total", "demo", "0", "error")),
        (CLIENT_GONE, None, ("request_success_total", "demo", "0", "abort")),
    ],
    ids=["refused", "full", "failed", "gone"],
)
def test_requests_without_a_result(status, error, counted):
    metrics = new_metrics()
    record = RequestRecord("a", COMPLETIONS)
    observers = Observers(metrics)
    observers.begin(record)
    observers.end(record, status=status, error=error)
    found = samples(metrics)
    assert found[counted] == 1
    assert found[("http_responses_total", COMPLETIONS, str(status))] == 1
    ended = {key: value for key, value in found.items() if key[0] == counted[0] and value}
    assert ended == {counted: 1}


def test_what_is_aborted_is_counted_for_its_engine():
    metrics = new_metrics(num_engines=2)
    record = RequestRecord("a", COMPLETIONS, num_requests=3)
    observers = Observers(metrics)
    observers.begin(record)
    record.on_output(output("a-0"), 1.0, 1)
    record.on_place("a-0", 1)
    record.on_place("a-1", 1)
    observers.end(record, status=CLIENT_GONE)
    found = samples(metrics)
    ended = {key: value for key, value in found.items() if key[0] == "request_success_total" and value}
    assert ended == {
        ("request_success_total", "demo", "1", "abort"): 2,
        ("request_success_total", "demo", "0", "abort"): 1,
    }


def test_label_values_from_outside_are_bounded():
    metrics = new_metrics()
    observers = Observers(metrics)
    for i in range(50):
        observers.responded(f"/scan/{i}", 404)
        observers.refused(f"/scan/{i}", 404, reason=f"made up {i}")
        observers.begin(record := RequestRecord("a", f"/scan/{i}", model=f"m{i}", tenant=f"t{i}"))
        observers.end(record)
    found = samples(metrics)
    assert found[("http_responses_total", "other", "404")] == 100
    assert found[("requests_refused_total", "not_found")] == 50
    assert not [key for key in found if "/scan" in str(key) or "made up" in str(key) or "m1" in str(key)]


def test_an_observer_that_raises_disturbs_nothing(caplog):
    class Broken(ServerMetrics):
        def begin(self, record):
            raise KeyError(record.request_id)

    metrics = new_metrics()
    observers = Observers(Broken("demo", EngineConfig("demo"), max_model_len=8, routes=[]), metrics)
    observers.begin(RequestRecord("a", COMPLETIONS))
    assert samples(metrics)[("http_requests_in_progress", COMPLETIONS)] == 1
    assert "Broken failed" in caplog.text


def test_a_served_request_has_all_its_times():
    """With the engine itself: what it says of a stream and of a whole output is complete."""

    async def run(kind):
        metrics = new_metrics(max_model_len=1024)
        async with AsyncLLMEngine("demo", num_blocks=64, num_threads=1) as engine:
            observers = Observers(metrics)
            params = SamplingParams(max_tokens=6, ignore_eos=True, n=2, output_kind=kind)
            observers.begin(record := RequestRecord("a", COMPLETIONS, params=params))
            async for result in engine.generate("def add(a, b):", params):
                record.on_output(result, asyncio.get_running_loop().time())
            observers.end(record)
        return samples(metrics)

    for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
        found = asyncio.run(run(kind))
        counts = {key[0]: value for key, value in found.items() if key[0].endswith("_count")}
        assert counts.pop("inter_token_latency_seconds_count") == 10
        assert counts.pop("request_generation_tokens_count") == 2
        assert set(counts.values()) == {1}
        assert found[("request_success_total", "demo", "0", "length")] == 2


def test_requests_over_http_are_counted_by_route(served):
    def scraped():
        status, headers, body = served.request("GET", "/metrics")
        assert (status, headers["content-type"]) == (200, CONTENT_TYPE)
        found = Counter()
        for family in text_string_to_metric_families(body.decode()):
            for sample in family.samples:
                values = [value for _, value in sorted(sample.labels.items())]
                found[sample.name.removeprefix("paged:"), *values] += sample.value
        return found

    trace = f"00-{'1' * 32}-{'2' * 16}-01"
    before = scraped()
    body = {"prompt": [[5, 6, 7], [5, 6]], "max_tokens": 4, "ignore_eos": True}
    served.post(COMPLETIONS, **body)
    _, headers, _ = served.request("POST", COMPLETIONS, {**body, "stream": True}, {"traceparent": trace})
    assert headers["traceparent"] == trace
    served.post("/v1/embeddings", input=[[5, 6, 7]])
    assert served.request("POST", COMPLETIONS, {"prompt": "a", "n": 0})[0] == 400
    after = scraped()
    gained = after - before
    wanted = {
        ("request_success_total", "0", "length", "demo"): 4,
        ("request_success_total", "0", "stop", "demo"): 1,
        ("generation_tokens_total", "0", "demo"): 16,
        ("prompt_tokens_total", "0", "demo"): 10 + 3,
        ("time_to_first_token_seconds_count", "0", "demo"): 4,
        ("inter_token_latency_seconds_count", "0", "demo"): 12,
        ("request_queue_time_seconds_count", "0", "demo"): 5,
        ("http_responses_total", "200", COMPLETIONS): 2,
        ("http_responses_total", "400", COMPLETIONS): 1,
        ("http_responses_total", "200", "/v1/embeddings"): 1,
        ("http_responses_total", "200", "/metrics"): 1,
        ("requests_refused_total", "invalid"): 1,
    }
    assert {key: gained[key] for key in wanted} == wanted
    for name in ("http_responses_total", "request_success_total", "requests_refused_total"):
        assert {key for key in gained if key[0] == name} <= wanted.keys()
    assert not any(value for key, value in after.items() if key[0] == "http_requests_in_progress")
