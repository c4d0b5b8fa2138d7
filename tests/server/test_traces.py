"""Traces: the headers of W3C Trace Context, and the spans of requests."""

import sys
import time

import pytest

from paged import SamplingParams
from paged.base.errors import ConfigError
from paged.requests.request import CompletionOutput, RequestMetrics, RequestOutput
from paged.server.telemetry.records import Observers, RequestRecord
from paged.server.telemetry.trace_context import TraceContext

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{SPAN}-01"


def test_valid_headers_are_passed_on():
    context = TraceContext.parse(VALID, "vendor=1")
    assert context == TraceContext(TRACE, SPAN, True, "vendor=1")
    assert context.traceparent == VALID
    assert TraceContext.parse(f"00-{TRACE}-{SPAN}-00").traceparent == f"00-{TRACE}-{SPAN}-00"
    # A later version may add fields; the response speaks the version known here.
    assert TraceContext.parse(f"cc-{TRACE}-{SPAN}-01-what").traceparent == VALID


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "x",
        VALID.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"{VALID}\n",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 600}",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
    ],
    ids=ascii,
)
def test_invalid_headers_are_ignored(header):
    assert TraceContext.parse(header, "vendor=1") is None


def test_a_state_that_could_split_a_header_is_dropped():
    assert TraceContext.parse(VALID, "a=1\r\nx: y").state == ""


def test_without_the_extra_it_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "paged.server.telemetry.traces", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    from paged.server.telemetry.traces import Traces

    with pytest.raises(ConfigError, match=r"pip install 'paged\[otel\]'"):
        Traces("http://localhost:4318/v1/traces")
    sys.modules.pop("paged.server.telemetry.traces")


def test_a_request_is_a_span_of_the_clients_trace():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from paged.server.telemetry.traces import Traces

    with pytest.raises(ConfigError, match="URL such as"):
        Traces("localhost:4317")
    exporter = InMemorySpanExporter()
    traces = Traces("", exporter=exporter)
    observers = Observers(traces)
    record = RequestRecord("req", "/v1/completions", model="demo", params=SamplingParams(max_tokens=7))
    record.trace = TraceContext.parse(VALID, "vendor=1")
    observers.begin(record)
    assert record.trace.trace_id == TRACE
    assert record.trace.span_id != SPAN
    completion = CompletionOutput(0, "secret", [7, 8], finish_reason="length")
    times = RequestMetrics(1.0, 1.5, 2.0, 4.0)
    output = RequestOutput("req", "secret", [1, 2, 3], [completion], True, 2, times)
    record.on_output(output, record.received + 3.0)
    observers.end(record)
    other = RequestRecord("other", "/v1/completions")
    observers.begin(other)
    observers.end(other, status=500, error=ValueError("secret"))
    observers.refused("/v1/completions", 413)
    observers.close()
    span, failed = exporter.get_finished_spans()
    assert (span.name, span.parent.trace_id, span.parent.span_id) == (
        "llm_request",
        int(TRACE, 16),
        int(SPAN, 16),
    )
    assert f"{span.context.span_id:016x}" == record.trace.span_id
    attributes = dict(span.attributes)
    assert 0 <= attributes.pop("gen_ai.latency.e2e") <= time.monotonic() - record.received
    assert attributes == {
        "gen_ai.request.id": "req",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.model": "demo",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.cached_tokens": 2,
        "gen_ai.usage.completion_tokens": 2,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.5,
        "gen_ai.latency.time_to_first_token": pytest.approx(1.0),
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert (failed.parent, failed.status.is_ok, failed.status.description) == (None, False, "ValueError")
    assert "secret" not in span.to_json() + failed.to_json()
