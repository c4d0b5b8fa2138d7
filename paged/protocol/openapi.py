"""The description of the server's API as OpenAPI 3.1, made from the routes and the tables of their bodies."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from ..options.structural_tag import SCHEMA_NAME, format_schema
from .answers.schemas import RESPONSES
from .endpoints import ENDPOINTS, JSON, ROUTES, Endpoint

OPENAPI_VERSION = "3.1.0"
# Statuses that every route may answer with, those of routes that need a key, and of those that take a body.
_OF_ALL = (405, 429, 431, 500, 503)
_OF_KEYS = (401, 403)
_OF_BODIES = (400, 404, 408, 413, 415, 504)


def openapi() -> dict[str, Any]:
    """Return the OpenAPI description of all routes."""
    paths = dict[str, dict[str, Any]]()
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    bodies = {_schema_name(path): call.table.schema() for path, call in ENDPOINTS.items()}
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


def _operation(route: Endpoint) -> dict[str, Any]:
    names = re.findall(r"{(\w+)}", route.path)
    statuses = {*_OF_ALL, *(_OF_KEYS if route.needs_key else ())}
    statuses |= set(_OF_BODIES if route.call is not None else (404,) if names else ())
    responses: dict[str, Any] = {"200": {"description": "OK", "content": _content(route)}}
    for status in sorted(statuses):
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {JSON: {"schema": {"$ref": f"#/components/schemas/{route.error}"}}},
        }
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": _operation_id(route),
        "responses": responses,
    }
    if not route.needs_key:
        operation["security"] = []
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.call is not None:
        schema = {"$ref": f"#/components/schemas/{_schema_name(route.path)}"}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return operation


def _operation_id(route: Endpoint) -> str:
    name = re.sub(r"\W+", "_", route.path.strip("/}"))
    return f"delete_{name}" if route.method == "DELETE" else name


def _content(route: Endpoint) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{route.answer}"} if route.answer else {"type": "string"}
    content: dict[str, Any] = {route.media: {"schema": schema}}
    if route.streamed:
        # OpenAPI 3.1 has no schema of the events in a stream, and clients take one for that of each event.
        content[route.streamed] = {"schema": {}}
    return content
