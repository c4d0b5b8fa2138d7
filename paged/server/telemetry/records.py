"""RequestRecord: what the server knows about one HTTP request. Observers: metrics, logs and traces of them.

The HTTP layer tells the observers of a request's begin, outputs and end. They never raise into it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...options.sampling_params import SamplingParams
from ...requests.request import RequestMetrics, RequestOutput
from ...scheduler.schedule import Histogram
from .trace_context import TraceContext

logger = logging.getLogger(__name__)

SLOW_CLIENT = "slow_client"  # the reason for which a connection was cut whose client did not read
CLIENT_GONE = 499  # the status of a request whose client disconnected, as in nginx; it is never sent
RATE_LIMIT = "rate_limit"  # why a request beyond the limits of its key was refused
TOO_MANY_CONNECTIONS = "connections"  # why a connection beyond the limit was refused
# From which time of `RequestMetrics` to which each phase of a request lasts.
PHASES = {
    "queue": ("arrival_time", "first_scheduled_time"),
    "prefill": ("first_scheduled_time", "first_token_time"),
    "decode": ("first_token_time", "finished_time"),
    "inference": ("first_scheduled_time", "finished_time"),
}
# Why a request was refused, by the status of its response.
REFUSALS = {
    400: "invalid",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method",
    408: "slow_body",
    413: "too_large",
    415: "media_type",
    429: "queue_full",
    431: "headers_too_large",
    503: "unavailable",
}


@dataclass(slots=True, eq=False)
class RequestProgress:
    """One engine request. An HTTP request has one for each prompt.

    Times are from time.monotonic, except that `times` is from the engine's clock, which has an arbitrary
    zero.

    engine: the number of the replica that computes it.
    num_prompt_tokens, num_cached_tokens: None until known.
    num_generated: the number of tokens of each sample.
    finish_reasons: the finish reason of each sample; empty until the request is finished.
    """

    request_id: str
    engine: int = 0
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_generated: list[int] = field(default_factory=list)
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    finish_reasons: tuple[str, ...] = ()
    times: RequestMetrics | None = None

    @property
    def num_generated_tokens(self) -> int | None:
        """The number of tokens of all samples; None while some may not have been sent yet."""
        return sum(self.num_generated) if self.num_generated or self.finished_at is not None else None

    def seconds(self, phase: str) -> float | None:
        """Return how long one of PHASES lasted; None if that is unknown."""
        first, last = (getattr(self.times, name, None) for name in PHASES[phase])
        return None if first is None or last is None else max(0.0, last - first)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One HTTP request, from its first byte to its last.

    route: the template of the path, such as /v1/completions.
    received: when the request arrived, by time.monotonic.
    params: the sampling parameters, once they are parsed.
    num_requests: the number of engine requests.
    engine_ids: the ids of the engine requests.
    user: the user that the body names.
    trace: the client's trace context; `Observers.begin` replaces it by the server's own span if traces are
        exported. Its `traceparent` is a header of the response.
    account: the tenant of the key; "" without a keys file.
    owner: who may see the request besides the operator; None without keys.
    is_ended: whether the operator has ended the request.
    token_latencies: a histogram of the seconds between two tokens, for each engine; set by `Observers.begin`.
    """

    request_id: str
    route: str
    tenant: str = ""
    model: str = ""
    stream: bool = False
    received: float = field(default_factory=time.monotonic)
    params: SamplingParams | None = None
    num_requests: int = 1
    engine_ids: Sequence[str] = ()
    user: str = ""
    account: str = ""
    owner: str | None = None
    is_ended: bool = False
    trace: TraceContext | None = None
    token_latencies: Mapping[int, Histogram] = field(default_factory=dict)
    progress: dict[str, RequestProgress] = field(default_factory=dict)
    _newest: RequestProgress | None = None

    def on_output(self, output: RequestOutput, now: float, engine: int = 0) -> None:
        """Record an output: a delta, or the only output of its request.

        now: the time by time.monotonic.
        engine: the number of the replica that sent it.
        """
        progress = self._newest
        if progress is None or progress.request_id != output.request_id:
            progress = self._progress_of(output.request_id, engine)
        last = progress.last_token_at
        counts = progress.num_generated
        if progress.num_prompt_tokens is None:
            progress.num_prompt_tokens = len(output.prompt_token_ids)
            progress.num_cached_tokens = output.num_cached_tokens
        for completion in output.outputs:
            num_new = len(completion.token_ids)
            if not num_new:
                continue
            if completion.index >= len(counts):
                counts.extend([0] * (1 + completion.index - len(counts)))
            counts[completion.index] += num_new
            progress.last_token_at = now
            if last is not None and self.token_latencies:
                self.token_latencies[engine].add((now - last) / num_new, num_new)
        if last is None and progress.last_token_at is not None:
            self._on_first_token(progress, output, now)
        if output.finished:
            reasons = tuple(completion.finish_reason or "stop" for completion in output.outputs)
            self._finish(progress, output, reasons or ("length",), now)

    @property
    def part_of(self) -> str:
        """The name under which this HTTP request's engine requests take turns with others; "" for one."""
        return self.engine_ids[0] if len(self.engine_ids) > 1 else ""

    @property
    def num_prompts(self) -> int:
        """The number of engine requests."""
        return max(self.num_requests, len(self.progress))

    def total(self, count: Callable[[RequestProgress], int | None]) -> int | None:
        """Return a sum over all engine requests; None if a summand is unknown."""
        counts = map(count, self.progress.values())
        known = [each for each in counts if each is not None]
        return sum(known) if len(known) == self.num_prompts else None

    def on_place(self, request_id: str, engine: int) -> None:
        """Record which replica computes an engine request that may have no output yet."""
        self._progress_of(request_id, engine)

    def on_result(
        self,
        request_id: str,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int | None = None,
        times: RequestMetrics | None = None,
        reason: str = "stop",
    ) -> None:
        """Record the result of a request that generates no tokens: an embedding or a score.

        The engine is the one given to `on_place`.
        """
        progress = self._progress_of(request_id, 0)
        progress.num_prompt_tokens = num_prompt_tokens
        progress.num_cached_tokens = num_cached_tokens
        progress.times = times
        progress.finish_reasons = (reason,)
        progress.finished_at = time.monotonic()

    def _progress_of(self, request_id: str, engine: int) -> RequestProgress:
        progress = self.progress.get(request_id)
        if progress is None:
            progress = self.progress[request_id] = RequestProgress(request_id, engine)
        self._newest = progress
        return progress

    def _on_first_token(self, progress: RequestProgress, output: RequestOutput, now: float) -> None:
        times = output.metrics
        num_tokens = max(progress.num_generated)
        progress.first_token_at = now
        if not output.finished or times.first_token_time is None or times.finished_time is None:
            return
        # The only output of its request: how long ago the first token was, the engine knows.
        seconds = times.finished_time - times.first_token_time
        progress.first_token_at = max(self.received, now - seconds)
        if num_tokens > 1 and self.token_latencies:
            num_intervals = sum(count - 1 for count in progress.num_generated if count)
            self.token_latencies[progress.engine].add(seconds / (num_tokens - 1), num_intervals)

    @staticmethod
    def _finish(
        progress: RequestProgress, output: RequestOutput, reasons: tuple[str, ...], now: float
    ) -> None:
        progress.finished_at = now
        progress.finish_reasons = reasons
        progress.num_prompt_tokens = len(output.prompt_token_ids)
        progress.num_cached_tokens = output.num_cached_tokens
        progress.times = output.metrics


@dataclass(frozen=True, slots=True)
class Ending:
    """How an HTTP request ended.

    status: the status of the response; CLIENT_GONE if the client disconnected.
    reason: the finish reason, such as "stop", or the reason of the refusal.
    error: the name of the error's class. The message is not stored, since it may repeat a prompt.
    at: the time of the end, by time.monotonic.
    """

    status: int
    reason: str
    error: str | None
    at: float


class Observer:
    """A listener for all HTTP requests. A method that is not overridden does nothing."""

    def begin(self, record: RequestRecord) -> None:
        """Handle the beginning of a request whose body was accepted."""

    def end(self, record: RequestRecord, ending: Ending) -> None:
        """Handle the end of a request that began."""

    def refused(self, route: str, status: int, reason: str, request_id: str) -> None:
        """Handle a request that was refused before it began."""

    def responded(self, route: str, status: int) -> None:
        """Handle a response to a request that has no record, such as GET /health."""

    def close(self) -> None:
        """Send everything that has not been sent yet."""


class Observers:
    """Passes each event to all observers. If one raises, the error is logged and the others still get it."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def begin(self, record: RequestRecord) -> None:
        """Announce a request whose body was accepted, before its first output."""
        self._tell(lambda observer: observer.begin(record))

    def end(
        self,
        record: RequestRecord,
        *,
        status: int = 200,
        reason: str | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Announce the end of a request that began. Further calls are ignored.

        status: the status of the response; CLIENT_GONE if the client disconnected.
        reason: by default the finish reason of the first sample, or the reason that the status implies.
        error: the error that ended the request, if any.
        """
        name = None if error is None else type(error).__name__
        ending = Ending(status, reason or _reason(record, status), name, time.monotonic())
        self._tell(lambda observer: observer.end(record, ending))

    def refused(self, route: str, status: int, reason: str | None = None, request_id: str = "") -> None:
        """Announce a request that was refused before it began.

        reason: by default the reason that the status implies; see REFUSALS.
        """
        why = reason or REFUSALS.get(status, "other")
        self._tell(lambda observer: observer.refused(route, status, why, request_id))

    def responded(self, route: str, status: int) -> None:
        """Announce a response to a request that has no record, such as GET /health."""
        self._tell(lambda observer: observer.responded(route, status))

    def close(self) -> None:
        """Send everything that has not been sent yet."""
        self._tell(lambda observer: observer.close())

    def _tell(self, tell: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                tell(observer)
            except Exception:  # a wrong observer must not fail what it is told of
                logger.exception("%s failed to record a request", type(observer).__name__)


def _reason(record: RequestRecord, status: int) -> str:
    reasons: Sequence[str] = [why for p in record.progress.values() for why in p.finish_reasons]
    if status == CLIENT_GONE:
        return "disconnected"
    if status >= 400:
        return REFUSALS.get(status, "timeout" if status == 504 else "error")
    return reasons[0] if reasons else "stop"
