"""Error responses: OpenAI's body, and the status of each error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...engine.embedding import EmbeddingRequestOutput
from ...engine.scoring import ScoreOutput
from ...errors import (
    EngineDeadError,
    PagedError,
    QueueFullError,
    RequestError,
    RequestTimeoutError,
    UnknownArgumentError,
)
from ...requests.request import TIMEOUT_MESSAGE, RequestOutput

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
# What ends an embedding or a score, and the reason; other errors are failures.
_ABORTS = {"abort": None, TIMEOUT_MESSAGE: TIMEOUT_MESSAGE}


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return the body of an error response.

    param: the field of the request body that is wrong.
    code: for programs, where the status is not enough.
    """
    kind = _TYPES.get(status, "invalid_request_error" if status < FAILED else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def status_of(error: PagedError) -> int:
    """Return the status of the response to a request that raised an error."""
    if isinstance(error, QueueFullError):
        return TOO_MANY
    if isinstance(error, RequestTimeoutError):
        return TIMED_OUT
    if isinstance(error, RequestError | UnknownArgumentError):
        return BAD_REQUEST
    return UNAVAILABLE if isinstance(error, EngineDeadError) else FAILED


def failure_of(
    outputs: Sequence[RequestOutput | EmbeddingRequestOutput | ScoreOutput],
) -> Failure | None:
    """Return status and message of the first output that failed or was ended; None if all are fine."""
    for output in outputs:
        if isinstance(output, RequestOutput):
            for completion in output.outputs:
                if completion.finish_reason == "error":
                    return _failed(str(completion.stop_reason))
                if completion.finish_reason == "abort":
                    return _aborted(completion.stop_reason)
        else:
            error = output.error if isinstance(output, ScoreOutput) else output.outputs.error
            if error is not None:
                return _aborted(_ABORTS[error]) if error in _ABORTS else (FAILED, error)
    return None


def _failed(reason: str) -> Failure:
    """Return the failure of a request: of its language, which was found too large, or of the server."""
    return (BAD_REQUEST if reason.startswith("structured_outputs") else FAILED), reason


def _aborted(reason: int | str | None) -> Failure:
    """Return the failure of a request that timeout_s ended, or that the server itself ended."""
    if reason is None:
        return UNAVAILABLE, "the server ended this request; send it again"
    return TIMED_OUT, str(reason)
