"""ServerMetrics: what GET /metrics says, in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ... import __version__
from ...options.config import EngineConfig
from ...scheduler.schedule import Histogram, HistogramCounts
from ...scheduler.stats import EngineStats
from .families import FINISH_REASONS, METRIC_FAMILIES, REQUESTS, SERVER, MetricFamily, length_bounds
from .log_queue import num_dropped_lines
from .records import (
    CLIENT_GONE,
    RATE_LIMIT,
    REFUSALS,
    TOO_MANY_CONNECTIONS,
    Ending,
    Observer,
    RequestProgress,
    RequestRecord,
)

T = TypeVar("T")

# Not OpenMetrics, in which prometheus_client writes the colon of the names as an underscore.
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
# Label values from outside are bounded: others than these become OTHER.
OTHER = "other"
MOST_TENANTS = 1000
_REASONS = frozenset((*REFUSALS.values(), RATE_LIMIT, TOO_MANY_CONNECTIONS))


class ServerMetrics(Observer):
    """Counts requests, and renders the counts with the statistics of the engines.

    model_name: the value of the label model_name: the first served name.
    max_model_len: the upper limit of bounds for histograms of lengths.
    routes: the templates of the server's paths. Other paths are counted as "other".
    prefix: the prefix of all names; "vllm" for dashboards that were made for vLLM.
    """

    def __init__(
        self,
        model_name: str,
        config: EngineConfig,
        *,
        max_model_len: int,
        routes: Sequence[str],
        prefix: str = "paged",
        num_engines: int = 1,
    ) -> None:
        self._model_name = model_name
        self._config = config
        self._routes = frozenset(routes)
        self._prefix = prefix
        self._lengths = length_bounds(max_model_len)
        self._histograms = _ByEngine(self._new_histograms)  # then by name
        self._token_latencies = _ByEngine(lambda i: self._histograms[i]["inter_token_latency_seconds"])
        # By family, then by the values of the labels.
        self._counts: dict[str, Counter[tuple[str, ...]]] = {
            family.name: Counter() for family in (*REQUESTS, *SERVER) if family.kind != "histogram"
        }
        self._counts["server_info"][__version__, model_name, str(max_model_len)] = 1
        self.expect(num_engines)

    def expect(self, num_engines: int) -> None:
        """Show metrics for `num_engines` engines even before they finish a request."""
        for engine in range(num_engines):
            self._token_latencies[engine]  # makes both, if they are not there

    def _new_histograms(self, engine: int) -> dict[str, Histogram]:
        """Return the histograms of an engine, and show its other counts as 0."""
        for reason in FINISH_REASONS:
            self._count_finish(engine, reason, 0)
        histograms = (family for family in REQUESTS if family.kind == "histogram")
        return {family.name: Histogram(family.bounds or self._lengths) for family in histograms}

    def begin(self, record: RequestRecord) -> None:
        """Count a request as in progress, and let its record count the time between tokens."""
        self._counts["http_requests_in_progress"][(self._route(record.route),)] += 1
        record.token_latencies = self._token_latencies

    def end(self, record: RequestRecord, ending: Ending) -> None:
        """Count the end of a request that began, and of each of its engine requests."""
        self._counts["http_requests_in_progress"][(self._route(record.route),)] -= 1
        self.responded(record.route, ending.status)
        self._count_tenant(record)
        refused = ending.status in REFUSALS and not any(p.finish_reasons for p in record.progress.values())
        if refused:
            self._count_refusal(ending.reason, ending.status)
            return
        for progress in record.progress.values():
            if progress.finished_at is not None:
                self._count_finished(record, progress, progress.finished_at)
        reason = "abort" if ending.status == CLIENT_GONE else "error"
        for progress in record.progress.values():
            if progress.finished_at is None:
                self._count_finish(progress.engine, reason)
        # What reached no engine is counted for the first one.
        self._count_finish(0, reason, max(record.num_requests - len(record.progress), 0))

    def _count_tenant(self, record: RequestRecord) -> None:
        known = self._counts["tenant_requests"]
        is_counted = (record.account,) in known or len(known) < MOST_TENANTS
        label = (record.account if is_counted else OTHER,)
        progress = record.progress.values()
        known[label] += 1
        self._counts["tenant_prompt_tokens"][label] += sum(own.num_prompt_tokens or 0 for own in progress)
        generated = sum(sum(own.num_generated) for own in progress)
        self._counts["tenant_generation_tokens"][label] += generated

    def refused(self, route: str, status: int, reason: str, request_id: str) -> None:  # noqa: ARG002
        """Count a refused request."""
        self._count_refusal(reason, status)
        self.responded(route, status)

    def responded(self, route: str, status: int) -> None:
        """Count a response."""
        self._counts["http_responses"][self._route(route), str(status)] += 1

    def render(
        self, stats: Mapping[int, EngineStats], removed: Mapping[int, EngineStats] = MappingProxyType({})
    ) -> bytes:
        """Return the body of GET /metrics. Its content type is CONTENT_TYPE.

        stats: the newest statistics by engine. An engine without statistics has no metrics.
        removed: the last statistics of removed engines. Their counts stay, so that sums over engines never
            fall.
        """
        return rendered(self.families(stats, removed))

    # Counting

    def _count_finished(self, record: RequestRecord, progress: RequestProgress, finished_at: float) -> None:
        histograms = self._histograms[progress.engine]
        for reason in progress.finish_reasons:
            self._count_finish(progress.engine, reason if reason in FINISH_REASONS else "error")
        seconds: dict[str, float | None] = {
            "e2e_request_latency_seconds": finished_at - record.received,
            "request_queue_time_seconds": progress.seconds("queue"),
            "request_prefill_time_seconds": progress.seconds("prefill"),
            "request_inference_time_seconds": progress.seconds("inference"),
        }
        num_prompt_tokens = progress.num_prompt_tokens or 0
        lengths = {
            "request_prompt_tokens": num_prompt_tokens,
            "request_prefill_kv_computed_tokens": num_prompt_tokens - (progress.num_cached_tokens or 0),
        }
        if progress.times is not None:
            lengths["request_num_preemptions"] = progress.times.num_preemptions
        if progress.first_token_at is not None:
            longest = max(progress.num_generated)
            seconds["time_to_first_token_seconds"] = progress.first_token_at - record.received
            decode = progress.seconds("decode")
            seconds["request_decode_time_seconds"] = decode
            if decode is not None and longest > 1:
                seconds["request_time_per_output_token_seconds"] = decode / (longest - 1)
            lengths["request_max_num_generation_tokens"] = longest
            for count in progress.num_generated:
                histograms["request_generation_tokens"].add(count)
        if record.params is not None:
            lengths["request_params_n"] = record.params.n
            if record.params.max_tokens is not None:
                lengths["request_params_max_tokens"] = record.params.max_tokens
        for name, value in (*seconds.items(), *lengths.items()):
            if value is not None:
                histograms[name].add(value)

    def _route(self, route: str) -> str:
        return route if route in self._routes else OTHER

    def _count_finish(self, engine: int, reason: str, times: int = 1) -> None:
        self._counts["request_success"][self._model_name, str(engine), reason] += times

    def _count_refusal(self, reason: str, status: int) -> None:
        bounded = reason if reason in _REASONS else REFUSALS.get(status, OTHER)
        self._counts["requests_refused"][(bounded,)] += 1

    # Rendering

    def families(
        self, stats: Mapping[int, EngineStats], removed: Mapping[int, EngineStats] = MappingProxyType({})
    ) -> Iterator[Metric]:
        """Yield the metrics of `render`."""
        for family in METRIC_FAMILIES:
            metric = _new_metric(self._prefix, family)
            if family.read is not None:
                shown = stats if family.kind == "gauge" else {**stats, **removed}
                for engine, newest in shown.items():
                    self._add_reading(metric, family, engine, newest)
            else:
                self._add_own(metric, family, stats)
            yield metric

    def _add_reading(self, metric: Metric, family: MetricFamily, engine: int, stats: EngineStats) -> None:
        assert family.read is not None
        value = family.read(stats)
        labels = (self._model_name, str(engine))
        if isinstance(value, HistogramCounts):
            assert family.bounds is not None
            _add_histogram(metric, labels, family.bounds, value)
        elif isinstance(value, Mapping):
            for own, one in value.items():
                _add(metric, (*labels, own), one)
        else:
            _add(metric, labels, value)

    def _add_own(self, metric: Metric, family: MetricFamily, stats: Mapping[int, EngineStats]) -> None:
        if family.kind == "histogram":
            for engine, histograms in self._histograms.items():
                histogram = histograms[family.name]
                labels = (self._model_name, str(engine))
                _add_histogram(metric, labels, histogram.bounds, histogram.snapshot())
            return
        for values, count in self._own_values(family.name, stats):
            _add(metric, values, count)

    def _own_values(
        self, name: str, stats: Mapping[int, EngineStats]
    ) -> Iterable[tuple[tuple[str, ...], float]]:
        """Return the values of a counter or gauge by their labels."""
        if name == "log_lines_dropped":
            return [((), num_dropped_lines())]
        if name != "cache_config_info":
            return self._counts[name].items()
        config = self._config
        dtype, share = config.kv_cache_dtype, str(config.gpu_memory_utilization)
        return [
            (
                (
                    str(s.block_size),
                    dtype,
                    str(s.enable_prefix_caching),
                    str(engine),
                    share,
                    str(s.num_blocks),
                ),
                1,
            )
            for engine, s in stats.items()
        ]


def rendered(families: Iterator[Metric]) -> bytes:
    """Return metrics in the text format of Prometheus, with the metrics of this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Rendering(families))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def merged(parts: Iterable[Iterator[Metric]]) -> Iterator[Metric]:
    """Yield the metrics of several models as one: values with equal labels are added."""
    for families in zip(*parts, strict=True):
        first = families[0]
        values = dict[tuple[str, tuple[tuple[str, str], ...]], float]()
        is_of_process = not any(sample.labels for family in families for sample in family.samples)
        for family in families[: 1 if is_of_process else None]:
            for sample in family.samples:
                key = sample.name, tuple(sample.labels.items())
                values[key] = values.get(key, 0.0) + sample.value
        metric = Metric(first.name, first.documentation, first.type)
        for (name, labels), value in values.items():
            # An info has its facts as labels, and is always 1.
            metric.add_sample(name, dict(labels), 1.0 if name.endswith("_info") else value)
        yield metric


class _ByEngine(dict[int, T]):
    """Values by engine. Each is made when it is first asked for."""

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make

    def __missing__(self, engine: int) -> T:
        self[engine] = made = self._make(engine)
        return made


class _Rendering(Collector):
    """The families of one response."""

    def __init__(self, families: Iterator[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return self._families


def _new_metric(prefix: str, family: MetricFamily) -> Metric:
    name = f"{prefix}:{family.name}"
    if family.kind == "gauge":
        return GaugeMetricFamily(name, family.meaning, labels=family.labels)
    if family.kind == "counter":
        return CounterMetricFamily(name, family.meaning, labels=family.labels)
    return HistogramMetricFamily(name, family.meaning, labels=family.labels)


def _add(metric: Metric, labels: Sequence[str], value: float) -> None:
    assert isinstance(metric, GaugeMetricFamily | CounterMetricFamily)
    metric.add_metric(labels, value)


def _add_histogram(
    metric: Metric, labels: Sequence[str], bounds: Sequence[float], counts: HistogramCounts
) -> None:
    assert isinstance(metric, HistogramMetricFamily)
    buckets = []
    so_far = 0
    for bound, count in zip((*bounds, float("inf")), counts.counts, strict=True):
        so_far += count
        buckets.append((_text_of(bound), float(so_far)))
    metric.add_metric(labels, buckets, counts.total)


def _text_of(bound: float) -> str:
    return "+Inf" if bound == float("inf") else repr(float(bound))
