"""The table of routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from ..front_end import FrontEnd
from ..http.exchange import Exchange
from .service import Health, Models, Ready, Version

Handler = Callable[[Exchange], Awaitable[None]]


class RouteEntry(NamedTuple):
    """A method and a path, and what answers them."""

    method: str
    path: str
    new_handler: Callable[[FrontEnd], Handler]


ROUTES = (
    RouteEntry("GET", "/v1/models", Models),
    RouteEntry("GET", "/health", Health),
    RouteEntry("GET", "/ready", Ready),
    RouteEntry("GET", "/version", Version),
)
