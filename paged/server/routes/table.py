"""The table of routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

from ..front_end import FrontEnd
from ..http.exchange import Exchange
from .generation import Answers, Results
from .service import Health, Metrics, Models, Ready, Version
from .tokens import Text, Tokens
from .vectors import Embeddings, Scores

Handler = Callable[[Exchange], Awaitable[None]]


class RouteEntry(NamedTuple):
    """A method and a path, and what answers them."""

    method: str
    path: str
    new_handler: Callable[[FrontEnd], Handler]


_POSTED: dict[str, Callable[[str, FrontEnd], Handler]] = {
    "/v1/chat/completions": Answers,
    "/v1/completions": Answers,
    "/v1/embeddings": Embeddings,
    "/v1/score": Scores,
    "/tokenize": Tokens,
    "/detokenize": Text,
    "/generate": Results,
    "/generate/batch": Results,
}
ROUTES = (
    *(RouteEntry("POST", path, partial(handler, path)) for path, handler in _POSTED.items()),
    RouteEntry("GET", "/v1/models", Models),
    RouteEntry("GET", "/health", Health),
    RouteEntry("GET", "/ready", Ready),
    RouteEntry("GET", "/version", Version),
    RouteEntry("GET", "/metrics", Metrics),
)
PATHS = tuple(route.path for route in ROUTES)
