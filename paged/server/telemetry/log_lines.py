"""The lines of the log, as text or JSON, of the server and of its engine processes."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any, Literal

from .log_queue import MAX_LINE_BYTES

LogFormat = Literal["text", "json"]
MAX_TEXT = 128  # characters of an id, a tenant or a model's name
# What is written as it is. Any other text is quoted and escaped: it cannot look like a line of its own.
_PLAIN = re.compile(r"[\w./:+@-]+", re.ASCII)


def formatter_of(log_format: LogFormat) -> logging.Formatter:
    """Return the formatter for this log format."""
    return _JsonLine() if log_format == "json" else _TextLine()


class _TextLine(logging.Formatter):
    """Time, message, then name=value for each field; the message alone where there are no fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, Any] | None = getattr(record, "fields", None)
        if fields is None:
            return super().format(record)
        pairs = [f"{name}={_shown(value)}" for name, value in fields.items()]
        return " ".join([_time_of(record), record.getMessage(), *pairs])


class _JsonLine(logging.Formatter):
    """An object with the time, the level, the event, the fields and the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        shortened = {name: _shortened(value) for name, value in fields.items()}
        line = {"time": _time_of(record), "level": record.levelname.lower(), "event": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _encoded({**line, **shortened})


def _encoded(fields: dict[str, Any]) -> str:
    """Encode the fields as a line of MAX_LINE_BYTES at most: of the longest text the middle is left out."""
    # Other than ASCII is escaped, and so is every control character.
    while len(line := json.dumps(fields)) > MAX_LINE_BYTES:
        name = max(fields, key=lambda name: len(str(fields[name])))
        text = str(fields[name])
        kept = min(len(text), MAX_LINE_BYTES) // 4  # at each end: those of a traceback say most
        fields[name] = f"{text[:kept]} ... {text[len(text) - kept :]}"
    return line


def _time_of(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


def _shortened(value: Any) -> Any:
    return value[:MAX_TEXT] if isinstance(value, str) else value


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = value[:MAX_TEXT]
        return text if _PLAIN.fullmatch(text) else json.dumps(text)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
