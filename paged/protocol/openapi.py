"""The description of the server's API as OpenAPI 3.1, made from the tables that parse the bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from .answers.schemas import RESPONSES
from .endpoints import ENDPOINTS
from .fields.structural_tags import SCHEMA_NAME, format_schema

OPENAPI_VERSION = "3.1.0"
# Statuses that every route may answer with, and those of routes that take a body.
_OF_ALL = (401, 403, 405, 429, 431, 500, 503)
_OF_BODIES = (400, 404, 408, 413, 415, 504)
_JSON, _LINES, _EVENTS, _PLAIN = "application/json", "application/x-ndjson", "text/event-stream", "text/plain"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a route answers with.

    schema: the name of the body's schema; None if it has no body.
    streamed: the content type of a stream, if there may be one.
    """

    summary: str
    schema: str | None
    media: str = _JSON
    streamed: str | None = None


_ANSWERS: dict[tuple[str, str], _Answer] = {
    ("POST", "/v1/chat/completions"): _Answer("Answer a conversation", "ChatCompletion", streamed=_EVENTS),
    ("POST", "/v1/completions"): _Answer("Complete one or several prompts", "Completion", streamed=_EVENTS),
    ("POST", "/v1/embeddings"): _Answer("Embed one or several texts", "Embeddings"),
    ("POST", "/v1/score"): _Answer("Return the log-probabilities of continuations", "Scores"),
    ("POST", "/tokenize"): _Answer("Return the tokens of a text or a conversation", "Tokens"),
    ("POST", "/detokenize"): _Answer("Return the text of tokens", "Text"),
    ("POST", "/generate"): _Answer("Complete prompts, each with its own result", "Results", streamed=_LINES),
    ("POST", "/generate/batch"): _Answer(
        "Complete prompts, each with its own result", "Results", streamed=_LINES
    ),
    ("GET", "/v1/models"): _Answer("List the model's names", "Models"),
    ("GET", "/v1/models/{model}"): _Answer("Return one of the model's names", "Model"),
    ("GET", "/health"): _Answer("Return whether the engine runs", "Any"),
    ("GET", "/ready"): _Answer("Return whether requests are accepted", "Any"),
    ("GET", "/version"): _Answer("Return the version of paged", "Version"),
    ("GET", "/metrics"): _Answer("Return metrics in the form of Prometheus", None, _PLAIN),
    ("GET", "/openapi.json"): _Answer("Return this description", "Any"),
}


def openapi(routes: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the description of these routes, each a method and a path.

    Raises KeyError for a route without a description here.
    """
    paths = dict[str, dict[str, Any]]()
    for method, path in routes:
        paths.setdefault(path, {})[method.lower()] = _operation(path, _ANSWERS[method, path])
    bodies = {_schema_name(path): call.table.schema() for path, call in ENDPOINTS.items() if path in paths}
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "paged", "version": _version()},
        "paths": paths,
        "components": {
            "schemas": {**bodies, **RESPONSES, SCHEMA_NAME: format_schema()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # a server without keys asks for none
    }


def _version() -> str:
    from importlib.metadata import version

    return version("paged")


def _schema_name(path: str) -> str:
    """Return the name of a body's schema, such as V1ChatCompletionsBody."""
    words = path.removeprefix("/").replace("/", " ").title().replace(" ", "")
    return f"{words}Body"


def _operation(path: str, answer: _Answer) -> dict[str, Any]:
    has_body = path in ENDPOINTS
    names = re.findall(r"{(\w+)}", path)
    statuses = sorted(_OF_ALL + (_OF_BODIES if has_body else (404,) if names else ()))
    responses: dict[str, Any] = {"200": {"description": "OK", "content": _content(answer)}}
    for status in statuses:
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}},
        }
    operation: dict[str, Any] = {
        "summary": answer.summary,
        "operationId": _operation_id(path),
        "responses": responses,
    }
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if has_body:
        schema = {"$ref": f"#/components/schemas/{_schema_name(path)}"}
        operation["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    return operation


def _operation_id(path: str) -> str:
    return re.sub(r"\W+", "_", path.strip("/}"))


def _content(answer: _Answer) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{answer.schema}"} if answer.schema else {"type": "string"}
    content: dict[str, Any] = {answer.media: {"schema": schema}}
    if answer.streamed:
        content[answer.streamed] = {"schema": {"type": "string"}}
    return content
