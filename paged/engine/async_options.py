"""What engines for coroutines share, in this process and in others."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import ConfigError
from ..validation import check_number

# Characters or tokens that are validated and encoded on the event loop; more would block it too long.
MOST_AT_ONCE = 1024
STREAM_INTERVAL_S = 0.2  # text still appears to flow
# About what is held of an answer until it is read.
TOKEN_BYTES = 40
CANDIDATE_BYTES = 200
PAUSE_BYTES = 2**20  # unread: the request computes nothing until its reader has read
# Is told the id of a request and the number of the engine that computes it, before it is computed.
OnPlace = Callable[[str, int], object]


def ignore_place(request_id: str, replica: int) -> None:
    """Do nothing: an `OnPlace` of callers that need not know."""


def check_interval(seconds: float) -> None:
    """Raise ConfigError unless stream_interval_s is a number of seconds."""
    check_number(ConfigError, "stream_interval_s", seconds, 0.0)
