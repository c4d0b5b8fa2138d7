"""Requests whose first token is timed, and what is told of many of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

EVENT = b"data: {"


async def first_token_at(port: int, body: dict[str, Any]) -> float:
    """Send a completion that is streamed, read it to its end, and return when its first event came.

    On the clock of time.monotonic. An error, or a stream without its end, is an AssertionError.
    """
    content = json.dumps(body | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content)
    received = b""
    while EVENT not in received:
        part = await reader.read(2**16)
        assert part, received
        received += part
    found = time.monotonic()
    rest = await reader.read()
    writer.close()
    assert received.startswith(b"HTTP/1.1 200 "), received
    assert b"data: [DONE]" in received + rest, received + rest
    return found


def quantile_ms(seconds: Sequence[float], share: float) -> float:
    """Return the time below which this share of all is, in milliseconds."""
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))] * 1e3
