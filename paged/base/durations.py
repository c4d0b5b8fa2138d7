"""Durations as users of Ollama and Go write them: seconds, or a text such as "5m" or "1h30m"."""

from __future__ import annotations

import math
import re
from typing import Any

from .errors import RequestError
from .validation import shown

_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|us|µs|ns|h|m|s)")
_WHOLE = re.compile(rf"(?:{_PART.pattern})+")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def parse_duration(name: str, value: Any) -> float:
    """Return a duration in seconds. A negative duration means for ever and returns inf.

    value: a number of seconds, the same as text, or texts such as "5m", "1h30m", "-1m".

    Raises RequestError, naming the field, for anything else.
    """
    seconds = _seconds(value)
    if seconds is None or math.isnan(seconds):
        raise RequestError(
            f'{name} must be a number of seconds or a duration such as "5m", "1h30m" or "-1", which is for '
            f"ever; got {shown(value)}",
            param=name,
        )
    return math.inf if seconds < 0 else seconds


def _seconds(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value) if abs(value) < 2**63 else None
    if not isinstance(value, str) or len(value) > 64:
        return None
    if _NUMBER.fullmatch(value):
        return float(value)
    sign = -1.0 if value.startswith("-") else 1.0
    text = value.removeprefix("-").removeprefix("+")
    if not _WHOLE.fullmatch(text):
        return None
    return sign * sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))
