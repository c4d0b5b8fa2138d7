"""Traces: recorded requests, one JSON object per line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import FileError, RequestError
from ..base.validation import check_int, check_number

NAMES = ("timestamp", "input_tokens", "prompt_token_ids", "output_tokens", "tenant", "priority", "prefix_id")
MAX_TOKENS = 2**24  # a longer request is a mistake, and its token ids would fill the memory
MAX_TOKEN_ID = 2**31 - 1


class TraceLine(NamedTuple):
    """One request. timestamp: seconds since the first request."""

    timestamp: float
    input_tokens: int
    prompt_token_ids: list[int] | None
    output_tokens: int
    tenant: str
    priority: float
    prefix_id: str | int | None


def read_trace(file: Path) -> list[TraceLine]:
    """Return the requests of a file, sorted by time. Blank lines are skipped.

    Raises FileError naming file and line, OSError if the file cannot be read.
    """
    lines = []
    with file.open("rb") as source:
        for number, line in enumerate(source, start=1):
            try:
                if line.strip():
                    lines.append(_parse(line))
            except (ValueError, RecursionError) as error:  # from the decoder, json, and our own
                raise FileError(f"{file}:{number}: {error}") from error
    if not lines:
        raise FileError(f"{file}: there is no request in it")
    lines.sort(key=lambda line: line.timestamp)
    start = lines[0].timestamp
    return [line._replace(timestamp=line.timestamp - start) for line in lines]


def _parse(line: bytes) -> TraceLine:
    value = json.loads(line.decode("utf-8-sig"))
    if not isinstance(value, dict):
        raise RequestError('a line must be an object such as {"timestamp": 0, "input_tokens": 9, ...}')
    if unknown := sorted(set(value) - set(NAMES)):
        raise RequestError(f"unknown {unknown[0]!r}; a line has {', '.join(NAMES)}")
    for name in ("timestamp", "output_tokens"):
        if name not in value:
            raise RequestError(f"{name} is missing")
    if ("input_tokens" in value) == ("prompt_token_ids" in value):
        raise RequestError("a line must have either input_tokens or prompt_token_ids")
    tokens = value.get("prompt_token_ids")
    num_tokens = value.get("input_tokens") if tokens is None else _num_tokens(tokens)
    tenant = value.get("tenant", "")
    prefix_id = value.get("prefix_id")
    if not isinstance(tenant, str):
        raise RequestError(f"tenant must be a string, got {tenant!r}")
    if prefix_id is not None and not isinstance(prefix_id, str | int):
        raise RequestError(f"prefix_id must be a string or an int, got {prefix_id!r}")
    if prefix_id is not None and tokens is not None:
        raise RequestError("prompt_token_ids already shows shared prefixes; prefix_id needs input_tokens")
    return TraceLine(
        timestamp=check_number(RequestError, "timestamp", value["timestamp"], -math.inf),
        input_tokens=check_int(RequestError, "input_tokens", num_tokens, 1, MAX_TOKENS),
        prompt_token_ids=tokens,
        output_tokens=check_int(RequestError, "output_tokens", value["output_tokens"], 1, MAX_TOKENS),
        tenant=tenant,
        priority=check_number(RequestError, "priority", value.get("priority", 0.0), -math.inf),
        prefix_id=prefix_id,
    )


def _num_tokens(tokens: Any) -> int:
    if not isinstance(tokens, list) or not tokens:
        raise RequestError(f"prompt_token_ids must be a list of ints, got {tokens!r}")
    for token in tokens:
        check_int(RequestError, "prompt_token_ids", token, 0, MAX_TOKEN_ID)
    return len(tokens)
