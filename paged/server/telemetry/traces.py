"""Traces: a span of each request for an OTLP collector. Needs the extra paged[otel].

The attributes have the names that vLLM gives them.
"""

from __future__ import annotations

import time
from typing import Any

from ... import __version__
from ...base.errors import ConfigError, ResourceError
from .records import CLIENT_GONE, Ending, Observer, RequestRecord
from .trace_context import TraceContext

try:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
except ImportError:
    HAS_OTEL = False
else:
    HAS_OTEL = True

# How long `close` waits for the collector.
CLOSE_TIMEOUT_MS = 5000
_PHASES = {
    "gen_ai.latency.time_in_queue": "queue",
    "gen_ai.latency.time_in_model_prefill": "prefill",
    "gen_ai.latency.time_in_model_decode": "decode",
    "gen_ai.latency.time_in_model_inference": "inference",
}


class Traces(Observer):
    """Exports one span for each request that began. Refused requests, probes and scrapes have no span.

    endpoint: the collector's URL for traces over HTTP, such as http://localhost:4318/v1/traces.
    exporter: takes the spans instead of the endpoint.

    Raises ResourceError if the required extra is not installed.
    """

    def __init__(self, endpoint: str, *, exporter: SpanExporter | None = None) -> None:
        if not HAS_OTEL:
            raise ResourceError(
                "otlp_traces_endpoint needs the OpenTelemetry SDK, which is not installed; "
                "pip install 'paged[otel]'"
            )
        if exporter is None:
            if not endpoint.startswith(("http://", "https://")):
                raise ConfigError(
                    "otlp_traces_endpoint must be a URL such as http://localhost:4318/v1/traces, "
                    f"got {endpoint!r}"
                )
            exporter = OTLPSpanExporter(endpoint=endpoint)
        resource = Resource.create({"service.name": "paged", "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        # Spans leave from a thread of its own: no request waits for the collector.
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("paged.server", __version__)
        self._spans: dict[RequestRecord, trace.Span] = {}

    def begin(self, record: RequestRecord) -> None:
        """Open a span below the client's span, and store it in the record."""
        span = self._tracer.start_span(
            "llm_request",
            context=_parent(record.trace),
            kind=trace.SpanKind.SERVER,
            start_time=_since_epoch(record.received),
        )
        self._spans[record] = span
        own = span.get_span_context()
        state = record.trace.state if record.trace is not None else ""
        record.trace = TraceContext(
            f"{own.trace_id:032x}", f"{own.span_id:016x}", own.trace_flags.sampled, state
        )

    def end(self, record: RequestRecord, ending: Ending) -> None:
        """Close the span of a request."""
        span = self._spans.pop(record)
        for name, value in _attributes(record, ending).items():
            if value is not None:
                span.set_attribute(name, value)
        if ending.status >= 400 and ending.status != CLIENT_GONE:
            span.set_status(trace.Status(trace.StatusCode.ERROR, ending.error or ending.reason))
        span.end(end_time=_since_epoch(ending.at))

    def close(self) -> None:
        """Export the remaining spans."""
        self._provider.force_flush(CLOSE_TIMEOUT_MS)
        self._provider.shutdown()


def _parent(given: TraceContext | None) -> Any:
    """Return the client's span as a context of OpenTelemetry; an empty one if the client has none."""
    if given is None:
        return None
    context = trace.SpanContext(
        int(given.trace_id, 16),
        int(given.span_id, 16),
        is_remote=True,
        trace_flags=trace.TraceFlags(int(given.is_sampled)),
        trace_state=trace.TraceState.from_header([given.state]) if given.state else trace.TraceState(),
    )
    return trace.set_span_in_context(trace.NonRecordingSpan(context))


def _attributes(record: RequestRecord, ending: Ending) -> dict[str, Any]:
    progress = [*record.progress.values()]
    params = record.params
    first = progress[0] if progress else None
    attributes: dict[str, Any] = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.response.model": record.model or None,
        "gen_ai.response.finish_reasons": [why for p in progress for why in p.finish_reasons] or None,
        "gen_ai.usage.prompt_tokens": record.total(lambda p: p.num_prompt_tokens),
        "gen_ai.usage.cached_tokens": record.total(lambda p: p.num_cached_tokens),
        "gen_ai.usage.completion_tokens": record.total(lambda p: p.num_generated_tokens),
        "gen_ai.latency.e2e": ending.at - record.received,
        "http.route": record.route,
        "http.response.status_code": ending.status,
    }
    if params is not None:
        attributes |= {
            "gen_ai.request.n": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
        }
    if first is not None:
        attributes |= {name: first.seconds(phase) for name, phase in _PHASES.items()}
        if first.first_token_at is not None:
            attributes["gen_ai.latency.time_to_first_token"] = first.first_token_at - record.received
    return attributes


def _since_epoch(monotonic: float) -> int:
    """Return a time of time.monotonic in nanoseconds since 1970."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)
