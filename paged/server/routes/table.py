"""What answers each route of `protocol/endpoints.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from ...protocol import endpoints
from ...protocol.endpoints import Endpoint
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
    """A route, and what answers it."""

    endpoint: Endpoint
    new_handler: Callable[[FrontEnd], Handler]


# What answers a body is told which route it is.
_OF_BODIES: dict[Endpoint, Callable[[str, FrontEnd], Handler]] = {
    endpoints.CHAT: AnswerRoute,
    endpoints.COMPLETIONS: AnswerRoute,
    endpoints.EMBEDDINGS: EmbeddingRoute,
    endpoints.SCORE: ScoreRoute,
    endpoints.TOKENIZE: TokenizeRoute,
    endpoints.DETOKENIZE: DetokenizeRoute,
    endpoints.GENERATE: ResultRoute,
    endpoints.GENERATE_BATCH: ResultRoute,
}
_HANDLERS: dict[Endpoint, Callable[[FrontEnd], Handler]] = {
    **{endpoint: partial(handler, endpoint.path) for endpoint, handler in _OF_BODIES.items()},
    endpoints.MODELS: ModelsRoute,
    endpoints.MODEL: ModelRoute,
    endpoints.HEALTH: HealthRoute,
    endpoints.READY: ReadyRoute,
    endpoints.VERSION: VersionRoute,
    endpoints.METRICS: MetricsRoute,
    endpoints.OPENAPI: OpenAPIRoute,
}
_UNANSWERED = [endpoint.path for endpoint in endpoints.ROUTES if endpoint not in _HANDLERS]
assert not _UNANSWERED, f"nothing answers {', '.join(_UNANSWERED)}: see docs/add-a-route.md"

ROUTES = tuple(RouteEntry(endpoint, _HANDLERS[endpoint]) for endpoint in endpoints.ROUTES)
