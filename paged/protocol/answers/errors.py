"""Error responses: OpenAI's body, and the status of each error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...base.errors import (
    EngineDeadError,
    PagedError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    UnknownArgumentError,
    WorkerLostError,
)
from ...engine.embedding import EmbeddingRequestOutput
from ...engine.scoring import ScoreOutput
from ...requests.request import ErrorKind, RequestOutput

BAD_REQUEST = 400
NOT_FOUND = 404
TOO_MANY = 429
FAILED = 500
UNAVAILABLE = 503
TIMED_OUT = 504
# The `type` of an error by its status; of others below 500 it is invalid_request_error.
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    TOO_MANY: "rate_limit_error",
    TIMED_OUT: "timeout_error",
}
MODEL_NOT_FOUND = "model_not_found"  # the `code` of a wrong model
Failure = tuple[int, str]  # status and message
_STATUSES: dict[ErrorKind, int] = {
    "request": BAD_REQUEST,
    "engine": FAILED,
    "timeout": TIMED_OUT,
    "abort": UNAVAILABLE,
}
_ABORTED = "the server ended this request; send it again"


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of an error response.

    param: the field of the request body that is wrong.
    code: a word that tells programs more than the status does.
    """
    kind = _TYPES.get(status, "invalid_request_error" if status < FAILED else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def status_of(error: PagedError) -> int:
    """Return the HTTP status of the response to a request that raised this error."""
    if isinstance(error, QueueFullError):
        return TOO_MANY
    if isinstance(error, RequestTimeoutError):
        return TIMED_OUT
    if isinstance(error, WorkerLostError):
        return UNAVAILABLE
    if isinstance(error, RequestError | UnknownArgumentError):
        return BAD_REQUEST
    return UNAVAILABLE if isinstance(error, EngineDeadError) else FAILED


def failure_of(
    outputs: Sequence[RequestOutput | EmbeddingRequestOutput | ScoreOutput],
) -> Failure | None:
    """Return status and message of the first output that failed or was aborted; None if there is none."""
    for output in outputs:
        for kind, message in _errors_of(output):
            if kind is not None:
                return _STATUSES[kind], _ABORTED if kind == "abort" else str(message)
    return None


def _errors_of(
    output: RequestOutput | EmbeddingRequestOutput | ScoreOutput,
) -> list[tuple[ErrorKind | None, int | str | None]]:
    """Return kind and message of the error of each part; (None, ...) for a part that is fine."""
    if isinstance(output, RequestOutput):
        return [(completion.error_kind, completion.stop_reason) for completion in output.outputs]
    part = output if isinstance(output, ScoreOutput) else output.outputs
    return [(part.error_kind, part.error)]
