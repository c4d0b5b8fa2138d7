"""The metrics of GET /metrics: name, type, labels and meaning of each, in one table.

Where vLLM has a metric, the name, the labels and the meaning are those of vLLM. docs/serving-metrics.md shows
this table, and a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from ...scheduler.schedule import SECONDS_OF_STEP, TOKENS_OF_STEP, HistogramCounts
from ...scheduler.stats import EngineStats

FamilyKind = Literal["gauge", "counter", "histogram"]
# What an engine's statistics say: one value, one for each value of the own label, or a histogram.
Reading = float | Mapping[str, float] | HistogramCounts
Read = Callable[[EngineStats], Reading]

ENGINE_LABELS = ("model_name", "engine")
FINISH_REASONS = ("stop", "length", "abort", "error")

# vLLM's bounds in seconds, with finer ones before them: of first tokens, tokens and requests.
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0),
    *(20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric at /metrics.

    name: the name without prefix, and without the suffix _total of counters.
    labels: the names of the metric's labels, in order.
    read: returns the value from an engine's statistics; None if the front end itself counts it.
    bounds: the bounds of a histogram; None for lengths in tokens, which have bounds up to max_model_len.
    """

    name: str
    kind: FamilyKind
    meaning: str
    labels: tuple[str, ...] = ENGINE_LABELS
    read: Read | None = None
    bounds: tuple[float, ...] | None = None


def _gauge(name: str, meaning: str, read: Read, label: str = "") -> MetricFamily:
    return MetricFamily(name, "gauge", meaning, (*ENGINE_LABELS, label) if label else ENGINE_LABELS, read)


def _counter(name: str, meaning: str, read: Read, label: str = "") -> MetricFamily:
    return MetricFamily(name, "counter", meaning, (*ENGINE_LABELS, label) if label else ENGINE_LABELS, read)


def _seconds(name: str, meaning: str, bounds: tuple[float, ...] = REQUEST_SECONDS) -> MetricFamily:
    return MetricFamily(name, "histogram", meaning, bounds=bounds)


def _lengths(name: str, meaning: str) -> MetricFamily:
    return MetricFamily(name, "histogram", meaning)


STATES = (
    _gauge("num_requests_running", "Requests that run.", lambda s: s.num_running),
    _gauge("num_requests_waiting", "Requests that wait to be scheduled.", lambda s: s.num_waiting),
    _gauge("num_tokens_waiting", "Tokens of the requests that wait.", lambda s: s.num_queued_tokens),
    _gauge("kv_cache_usage_perc", "Share of the KV cache blocks in use, 0 to 1.", lambda s: s.utilization),
    _gauge(
        "kv_cache_blocks",
        "KV cache blocks by state: free, used (by running requests or pinned) or cached.",
        lambda s: {"free": s.num_free_blocks, "used": s.num_used_blocks, "cached": s.num_cached_blocks},
        "state",
    ),
    _gauge("kv_cache_blocks_pinned", "KV cache blocks of pinned prefixes.", lambda s: s.num_pinned_blocks),
    _gauge(
        "kv_cache_host_blocks",
        "Blocks in host memory for requests that are swapped out, by state.",
        lambda s: {"free": s.num_host_blocks - s.num_used_host_blocks, "used": s.num_used_host_blocks},
        "state",
    ),
    _gauge(
        "kv_cache_waste_perc",
        "Share of running requests' slots that hold no token, 0 to 1.",
        lambda s: s.waste,
    ),
    _gauge(
        "state_snapshots",
        "Snapshots of states for prefixes: those that are kept, and the most that may be.",
        lambda s: {"kept": s.num_snapshots, "most": s.max_snapshots},
        "kind",
    ),
    _gauge(
        "batch_utilization_perc",
        "Running requests over max_num_seqs, 0 to 1.",
        lambda s: s.num_running / s.max_num_seqs,
    ),
    _gauge(
        "step_utilization_perc",
        "Tokens of the last step over max_num_batched_tokens, 0 to 1.",
        lambda s: (s.step_prefill_tokens + s.step_decode_tokens) / s.max_num_batched_tokens,
    ),
    _gauge(
        "weight_bytes",
        "Bytes of the weights in their files, by format, such as floats or GPTQ 4 bits.",
        lambda s: s.weight_bytes,
        "format",
    ),
    _gauge(
        "model_parameters",
        "Weights of the model, without norms and biases: all, or active, by which one token is multiplied.",
        lambda s: {"all": s.num_parameters, "active": s.num_active_parameters},
        "kind",
    ),
)
TOTALS = (
    _counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda s: s.num_queried_tokens),
    _counter("prefix_cache_hits", "Tokens found in the prefix cache.", lambda s: s.num_cached_tokens),
    _counter(
        "prefix_cache_cut",
        "Tokens whose blocks were cached, but computed again without a snapshot of states behind them.",
        lambda s: s.num_cut_tokens,
    ),
    _counter(
        "num_preemptions", "Preemptions.", lambda s: s.num_recompute_preemptions + s.num_swap_preemptions
    ),
    _counter(
        "num_preemptions_by_mode",
        "Preemptions by what becomes of the KV: recompute or swap.",
        lambda s: {"recompute": s.num_recompute_preemptions, "swap": s.num_swap_preemptions},
        "mode",
    ),
    _counter(
        "prompt_tokens",
        "Prompt tokens of requests that ran, the cached among them.",
        lambda s: s.num_prompt_tokens,
    ),
    _counter("prompt_tokens_cached", "Prompt tokens that were cached.", lambda s: s.num_cached_tokens),
    _counter(
        "prompt_tokens_by_source",
        "Prompt tokens by source: local_compute or local_cache_hit.",
        lambda s: {
            "local_compute": s.num_prompt_tokens - s.num_cached_tokens,
            "local_cache_hit": s.num_cached_tokens,
        },
        "source",
    ),
    _counter(
        "scheduled_prefill_tokens",
        "Tokens computed in chunks of prompts, those computed again after a preemption too.",
        lambda s: s.num_prefill_tokens,
    ),
    _counter("generation_tokens", "Tokens generated.", lambda s: s.num_generated_tokens),
    _counter("spec_decode_num_drafts", "Runs of guessed tokens that steps verified.", lambda s: s.num_drafts),
    _counter("spec_decode_num_draft_tokens", "Guessed tokens.", lambda s: s.num_draft_tokens),
    _counter(
        "spec_decode_num_accepted_tokens", "Guessed tokens that were right.", lambda s: s.num_accepted_tokens
    ),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos",
        "Guessed tokens that were right, by their place in the run, from 0 on.",
        lambda s: {str(place): num for place, num in enumerate(s.num_accepted_at)},
        "position",
    ),
    _counter(
        "engine_restarts", "Times that the process of the engine was replaced.", lambda s: s.num_restarts
    ),
    _counter(
        "exchange_seconds",
        "Time that steps waited for other processes of the model.",
        lambda s: s.exchange_seconds,
    ),
    _counter(
        "requests_resumed",
        "Requests that came from an engine process that had ended, or had to end.",
        lambda s: s.num_resumed,
    ),
    _gauge(
        "spec_decode_seconds_won",
        "Estimated time that guessed tokens have saved so far; below 0 if they have cost time.",
        lambda s: s.draft_seconds_won,
    ),
    MetricFamily(
        "iteration_tokens_total",
        "histogram",
        "Tokens of a step.",
        read=lambda s: s.step_tokens,
        bounds=TOKENS_OF_STEP,
    ),
    MetricFamily(
        "step_time_seconds",
        "histogram",
        "From the scheduling of a step to its results.",
        read=lambda s: s.step_seconds,
        bounds=SECONDS_OF_STEP,
    ),
)
REQUESTS = (
    MetricFamily(
        "request_success",
        "counter",
        "Samples of finished requests by finished_reason: stop, length, abort or error.",
        (*ENGINE_LABELS, "finished_reason"),
    ),
    _seconds(
        "time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_SECONDS
    ),
    _seconds(
        "inter_token_latency_seconds",
        "Between two tokens of a sample. Tokens sent together share the time since the last ones.",
        TOKEN_SECONDS,
    ),
    _seconds("request_time_per_output_token_seconds", "Mean time per token after the first.", TOKEN_SECONDS),
    _seconds("e2e_request_latency_seconds", "From a request's arrival to its last output."),
    _seconds("request_queue_time_seconds", "Waiting until first scheduled."),
    _seconds("request_prefill_time_seconds", "From first scheduled to the first token."),
    _seconds("request_decode_time_seconds", "From the first token to the last."),
    _seconds("request_inference_time_seconds", "From first scheduled to the last token."),
    _lengths("request_prompt_tokens", "Prompt tokens of a request."),
    _lengths("request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached."),
    _lengths("request_generation_tokens", "Tokens of a sample."),
    _lengths("request_max_num_generation_tokens", "Tokens of a request's longest sample."),
    _lengths("request_params_max_tokens", "The parameter max_tokens."),
    MetricFamily("request_params_n", "histogram", "The parameter n.", bounds=(1, 2, 5, 10, 20)),
    MetricFamily(
        "request_num_preemptions",
        "histogram",
        "Preemptions of a request.",
        bounds=(0, 1, 2, 3, 4, 5, 10, 20),
    ),
)
SERVER = (
    MetricFamily("http_responses", "counter", "HTTP responses by route and status code.", ("route", "code")),
    MetricFamily(
        "http_requests_in_progress", "gauge", "HTTP requests that began and have not ended.", ("route",)
    ),
    MetricFamily(
        "tenant_requests",
        "counter",
        "HTTP requests that ended by tenant of the keys file, at most 1,000 and other.",
        ("tenant",),
    ),
    MetricFamily(
        "tenant_prompt_tokens",
        "counter",
        "Prompt tokens by tenant, also those that were cached.",
        ("tenant",),
    ),
    MetricFamily("tenant_generation_tokens", "counter", "Tokens generated by tenant.", ("tenant",)),
    MetricFamily(
        "requests_refused",
        "counter",
        "HTTP requests refused by reason, such as invalid, not_found, too_large or queue_full.",
        ("reason",),
    ),
    MetricFamily(
        "log_lines_dropped", "counter", "Lines of the log that were dropped, as their reader is slow.", ()
    ),
    MetricFamily(
        "cache_config_info",
        "gauge",
        "Always 1; the labels describe the KV cache.",
        (
            *("block_size", "cache_dtype", "enable_prefix_caching", "engine", "gpu_memory_utilization"),
            *("num_gpu_blocks",),
        ),
    ),
    MetricFamily(
        "server_info",
        "gauge",
        "Always 1; the labels describe the server.",
        ("version", "model_name", "max_model_len"),
    ),
)
METRIC_FAMILIES = STATES + TOTALS + REQUESTS + SERVER


def length_bounds(longest: int) -> tuple[float, ...]:
    """Return the bounds 1, 2, 5, 10, 20, 50, … up to the longest length, as in vLLM."""
    bounds = list[float]()
    scale = 1
    while scale <= longest:
        bounds += [float(step * scale) for step in (1, 2, 5) if step * scale <= longest]
        scale *= 10
    return tuple(bounds)
