"""TraceContext: the header `traceparent` of W3C Trace Context, level 1."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

# version - trace id - parent id - flags; a later version may add more.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[!-~]*)?", re.ASCII)
MAX_LENGTH = 512  # of the headers


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The place of a request in a trace.

    trace_id, span_id: 32 and 16 lower-case hexadecimal digits.
    is_sampled: whether the caller records the trace.
    state: the header `tracestate`, which is passed on unchanged.
    """

    trace_id: str
    span_id: str
    is_sampled: bool = False
    state: str = ""

    @classmethod
    def parse(cls, traceparent: str | None, tracestate: str | None = None) -> Self | None:
        """Parse the two headers. Return None without a valid `traceparent`, as the specification demands."""
        if traceparent is None or len(traceparent) > MAX_LENGTH:
            return None
        found = _TRACEPARENT.fullmatch(traceparent.strip(" \t"))
        if found is None:
            return None
        version, trace_id, span_id, flags, more = found.groups()
        if version == "ff" or (version == "00" and more) or not (int(trace_id, 16) and int(span_id, 16)):
            return None
        state = tracestate or ""
        if len(state) > MAX_LENGTH or not (state.isascii() and state.isprintable()):
            state = ""
        return cls(trace_id, span_id, bool(int(flags, 16) & 1), state)

    @property
    def traceparent(self) -> str:
        """The `traceparent` header for calls to other services, and for the response."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"
