"""Errors as HTTP responses: status, body in OpenAI's form, and whether to try again."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException

from ...base.errors import PagedError, RequestError
from ...protocol.answers.errors import error_body, status_of
from ..access.limits import RateLimitError

logger = logging.getLogger(__name__)

Header = tuple[bytes, bytes]
# Statuses after which a client may send the same request again.
RETRYABLE = (408, 429, 503)
MAX_RETRY_AFTER_S = 60


class HttpError(RequestError):
    """An error of a request with its HTTP status.

    param: the wrong field or header.
    code: a word for programs, such as "model_not_found".
    headers: headers added to the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Iterable[Header] = (),
    ) -> None:
        super().__init__(message, param=param)
        self.status = status
        self.code = code
        self.headers = tuple(headers)


class FailureResponse(NamedTuple):
    """A response that reports an error."""

    status: int
    body: dict[str, Any]
    headers: tuple[Header, ...]


class FinishRate:
    """The rate at which requests finish, used to estimate how long the queue takes."""

    def __init__(self) -> None:
        self._finished: deque[float] = deque(maxlen=64)

    def on_finish(self) -> None:
        """Record that a request has finished."""
        self._finished.append(time.monotonic())

    def seconds_for(self, num_requests: int) -> int:
        """Estimate the seconds until this many requests have finished, from 1 to MAX_RETRY_AFTER_S."""
        times = self._finished
        if len(times) < 2:
            return 1
        # Up to now: if none has finished for a while, it takes longer than before.
        interval = (time.monotonic() - times[0]) / len(times)
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(num_requests * interval)))


def failure_of(error: Exception, retry_after_s: int, request_id: str) -> FailureResponse:
    """Return the response that reports an error. An unexpected error is logged, and its text is not shown.

    retry_after_s: the value of the header retry-after, for errors after which the same request may succeed.
    """
    headers: tuple[Header, ...] = ()
    code = None
    if isinstance(error, HttpError):
        status = error.status
        message = str(error)
        headers = error.headers
        code = error.code
    elif isinstance(error, HTTPException):  # of the router: 405
        allowed = ", ".join(sorted((error.headers or {})["Allow"].split(", ")))
        status = error.status_code
        message = f"this route does not take that method; it takes {allowed}"
        headers = tuple((name.encode(), value.encode()) for name, value in (error.headers or {}).items())
    elif isinstance(error, PagedError):
        status = status_of(error)
        message = str(error)
        if isinstance(error, RateLimitError):
            code = error.CODE
            retry_after_s = error.retry_after_s
    else:
        logger.error("request %s failed", request_id, exc_info=error)
        status = 500
        message = f"the server failed; its log has the error of request {request_id}"
    param = error.param if isinstance(error, PagedError) else None
    body = error_body(status, message, param=param, code=code)
    if not any(name == b"retry-after" for name, _ in headers):
        headers = (*headers, *retry_headers(status, retry_after_s))
    return FailureResponse(status, body, headers)


def retry_headers(status: int, retry_after_s: int) -> tuple[Header, ...]:
    """Return the headers that say whether the same request may succeed later."""
    if status in RETRYABLE:
        return ((b"retry-after", b"%d" % retry_after_s),)
    return ((b"x-should-retry", b"false"),)
