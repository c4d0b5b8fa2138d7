"""Errors in Anthropic's form."""

from __future__ import annotations

from typing import Any

from ..answers.errors import BAD_REQUEST, FAILED, NOT_FOUND, TIMED_OUT, TOO_MANY, UNAVAILABLE

_TYPES = {
    BAD_REQUEST: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    NOT_FOUND: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    TOO_MANY: "rate_limit_error",
    FAILED: "api_error",
    UNAVAILABLE: "overloaded_error",
    TIMED_OUT: "timeout_error",
}
_UNTHREADED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def message_error(status: int, body: dict[str, Any], request_id: str | None = None) -> dict[str, Any]:
    """Return an error in Anthropic's form, which names the field in the message alone.

    body: the same error in OpenAI's form.
    """
    error = body["error"]
    param = error["param"]
    message = error["message"]
    if param is not None and param not in message:
        message = f"{param}: {message}"
    # Anthropic's clients then go on without threads.
    details = {"details": _UNTHREADED} if param == "thread" else {}
    kind = _TYPES.get(status, "invalid_request_error" if status < FAILED else "api_error")
    identity = {} if request_id is None else {"request_id": request_id}
    return {"type": "error", "error": {"type": kind, "message": message, **details}, **identity}
