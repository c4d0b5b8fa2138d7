"""RequestLog: one line on stderr for each request, as text or JSON, without prompts, answers and keys."""

from __future__ import annotations

import logging
from typing import IO, Any

from .log_lines import LogFormat, formatter_of
from .log_queue import log_to_stderr
from .records import Ending, Observer, RequestProgress, RequestRecord

_lines = logging.getLogger("paged.server.requests")


class RequestLog(Observer):
    """Writes a log line when a request ends or is refused, but not for probes and scrapes."""

    def end(self, record: RequestRecord, ending: Ending) -> None:
        """Write the line of a request."""
        level = logging.ERROR if ending.status >= 500 else logging.INFO
        _lines.log(level, "request", extra={"fields": fields_of(record, ending)})

    def refused(self, route: str, status: int, reason: str, request_id: str) -> None:
        """Write the line of a request that was refused before it began."""
        fields = {"route": route, "status": status, "reason": reason}
        _lines.info("refused", extra={"fields": {"id": request_id, **fields} if request_id else fields})

    def close(self) -> None:
        """Write buffered lines."""
        for handler in _lines.handlers:
            handler.flush()


def set_up_logging(log_format: LogFormat, stream: IO[str] | None = None) -> None:
    """Write the log in this format to stderr, or the lines of requests to another stream."""
    formatter = formatter_of(log_format)
    handler = log_to_stderr(formatter) if stream is None else logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    _lines.handlers = [handler]
    _lines.setLevel(logging.INFO)
    _lines.propagate = False


def announce(text: str) -> None:
    """Write a log line of the server itself."""
    _lines.info("%s", text)


def fields_of(record: RequestRecord, ending: Ending) -> dict[str, Any]:
    """Return the fields of a request's log line: counts and seconds, but no text of a prompt or answer."""
    progress = [*record.progress.values()]
    fields: dict[str, Any] = {
        "id": record.request_id,
        "tenant": record.tenant or None,
        "user": record.user if record.user not in ("", record.tenant) else None,
        "route": record.route,
        "model": record.model or None,
        "stream": record.stream,
        "status": ending.status,
        "reason": ending.reason,
        "error": ending.error,
        "prompts": record.num_prompts,
        "prompt_tokens": record.total(lambda p: p.num_prompt_tokens),
        "cached_tokens": record.total(lambda p: p.num_cached_tokens),
        "generated_tokens": record.total(lambda p: p.num_generated_tokens),
        "preemptions": record.total(lambda p: None if p.times is None else p.times.num_preemptions),
        "queue_s": _longest(progress, "queue"),
        "prefill_s": _longest(progress, "prefill"),
        "decode_s": _longest(progress, "decode"),
        "first_token_s": _first_token(record, progress),
        "total_s": round(ending.at - record.received, 6),
        "trace_id": None if record.trace is None else record.trace.trace_id,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _longest(progress: list[RequestProgress], phase: str) -> float | None:
    seconds = [s for p in progress if (s := p.seconds(phase)) is not None]
    return round(max(seconds), 6) if seconds else None


def _first_token(record: RequestRecord, progress: list[RequestProgress]) -> float | None:
    times = [p.first_token_at for p in progress if p.first_token_at is not None]
    return round(min(times) - record.received, 6) if times else None
