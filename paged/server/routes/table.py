"""The table of routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from ..front_end import FrontEnd
from ..http.exchange import Exchange
from .generation import AnswerRoute, ResultRoute
from .service import (
    HealthRoute,
    MetricsRoute,
    ModelRoute,
    ModelsRoute,
    OpenAPIRoute,
    ReadyRoute,
    VersionRoute,
)
from .tokens import DetokenizeRoute, TokenizeRoute
from .vectors import EmbeddingRoute, ScoreRoute

Handler = Callable[[Exchange], Awaitable[None]]


class RouteEntry(NamedTuple):
    """A method and a path, and what answers them."""

    method: str
    path: str
    new_handler: Callable[[FrontEnd], Handler]


_POSTED: dict[str, Callable[[str, FrontEnd], Handler]] = {
    "/v1/chat/completions": AnswerRoute,
    "/v1/completions": AnswerRoute,
    "/v1/embeddings": EmbeddingRoute,
    "/v1/score": ScoreRoute,
    "/tokenize": TokenizeRoute,
    "/detokenize": DetokenizeRoute,
    "/generate": ResultRoute,
    "/generate/batch": ResultRoute,
}
ROUTES = (
    *(RouteEntry("POST", path, partial(handler, path)) for path, handler in _POSTED.items()),
    RouteEntry("GET", "/v1/models", ModelsRoute),
    RouteEntry("GET", "/v1/models/{model}", ModelRoute),
    RouteEntry("GET", "/health", HealthRoute),
    RouteEntry("GET", "/ready", ReadyRoute),
    RouteEntry("GET", "/version", VersionRoute),
    RouteEntry("GET", "/metrics", MetricsRoute),
    RouteEntry("GET", "/openapi.json", OpenAPIRoute),
)
ROUTE_PATHS = tuple((route.method, route.path) for route in ROUTES)
