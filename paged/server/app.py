"""The ASGI application: routing, keys, and errors as responses."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from ..base.validation import shown
from ..protocol.endpoints import (
    GET_OPENAPI,
    MONITORED,
    NOT_HERE,
    ROUTES,
    Access,
    Endpoint,
    access_of,
    error_in_form_of,
    is_of_messages,
)
from .front_end import FrontEnd
from .gate import Gate
from .http.budgets import BodyBudget, ResponseBudget
from .http.exchange import ClientGone, Exchange, request_id_of
from .http.failures import FailureResponse, HttpError
from .options import ServeOptions
from .routes.table import HANDLERS, Handler
from .telemetry.records import CLIENT_GONE
from .telemetry.request_log import announce

RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
# Headers of responses that a page in a browser may read.
EXPOSED_HEADERS = (
    "x-request-id",
    "request-id",
    "x-paged-ignored",
    "x-should-retry",
    "retry-after",
    *RATE_LIMIT_HEADERS,
)
OLLAMA_RUNS = "Ollama is running"  # clients look for these words
MOST_NAMED = 3  # routes that an error names
MOST_COMPARED = 100  # characters of a path that is compared with all routes
EXCHANGE = "paged.exchange"  # the exchange of a request, in its scope


class Front(Protocol):
    """What an application needs of what is behind it; see `FrontEnd`."""

    options: ServeOptions
    max_request_bytes: int
    body_budget: BodyBudget
    response_budget: ResponseBudget
    gate: Gate

    def end(self, exchange: Exchange, status: int, error: BaseException | None) -> None:
        """End the record of a request."""

    async def failure_of(self, error: Exception, request_id: str) -> FailureResponse:
        """Return the response for an error."""


def new_app(front: FrontEnd) -> ASGIApp:
    """Return the ASGI application that serves an engine."""
    return with_origins(App(front), front.options)


def with_origins(app: ASGIApp, options: ServeOptions) -> ASGIApp:
    """Return an application that also answers the pages of other websites, as far as the options allow."""
    origins = options.allowed_origins
    if not origins:
        return app
    return _Cors(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=EXPOSED_HEADERS,
    )


def new_ollama_app(app: ASGIApp, options: ServeOptions) -> ASGIApp:
    """Return the application at Ollama's port: the server's own, but / says what Ollama's does."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_root = scope["type"] == "http" and scope["path"] == "/" and scope["method"] in ("GET", "HEAD")
        hosts = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"host"]
        if is_root and all(map(options.allows_host, hosts)):
            await Response(OLLAMA_RUNS, media_type="text/plain")(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


def new_metrics_app(front: FrontEnd) -> ASGIApp:
    """Return the ASGI application for --metrics-port, which needs no key."""
    return App(front, MONITORED, is_open=True)


class App:
    """Routes requests to their handlers. Any error that a handler raises becomes a response.

    is_open: whether all routes can be used without a key.
    handlers: what answers each route.
    """

    def __init__(
        self,
        front: Front,
        endpoints: Sequence[Endpoint] = ROUTES,
        *,
        is_open: bool = False,
        handlers: Mapping[Endpoint, Callable[[Any], Handler]] = HANDLERS,
    ) -> None:
        self._front = front
        self._is_open = is_open
        self._paths = [*dict.fromkeys(endpoint.path for endpoint in endpoints)]
        by_path = dict[str, list[Endpoint]]()
        for endpoint in endpoints:
            by_path.setdefault(endpoint.path, []).append(endpoint)
        routes = [
            Route(
                re.sub(r"{(model|request)}", r"{\1:path}", path),  # these names may contain slashes
                _Path({each.method: handlers[each](front) for each in of_path}, of_path[0].access),
                methods=[each.method for each in of_path],
            )
            for path, of_path in by_path.items()
        ]
        self._router = Router(routes, redirect_slashes=False, default=self._not_found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        front = self._front
        exchange = Exchange(
            scope,
            receive,
            send,
            max_body_bytes=front.max_request_bytes,
            body_timeout_s=front.options.body_timeout_s,
            budget=front.body_budget,
            responses=front.response_budget,
        )
        if is_of_messages(exchange.route):  # where Anthropic's clients look for it
            exchange.extra_headers.append((b"request-id", exchange.request_id.encode()))
        scope[EXCHANGE] = exchange
        scope["app"] = self
        try:
            self._check_host(exchange)
            self._check_key(exchange)
            await self._router(scope, receive, send)
        except ClientGone as gone:
            front.end(exchange, CLIENT_GONE, gone)
        except Exception as error:  # of any kind: the client gets an answer
            failure = await front.failure_of(error, exchange.request_id)
            front.end(exchange, failure.status, error)
            if exchange.status is not None:  # too late for another response: the connection is closed
                raise
            body = error_in_form_of(exchange.route, failure.status, failure.body, exchange.request_id)
            await exchange.respond_json(failure.status, body, failure.headers)
        except BaseException as error:  # cancelled, most of all
            front.end(exchange, CLIENT_GONE, error)
            raise
        else:
            front.end(exchange, exchange.status or 200, exchange.error)
        finally:
            exchange.end()

    def _check_host(self, exchange: Exchange) -> None:
        host = exchange.header("host")
        if not self._front.options.allows_host(host):
            raise HttpError(
                403,
                f"this server is not known as {host!r}; use localhost, or start it with --allowed-hosts",
                param="host",
                code="host_not_allowed",
            )

    def _check_key(self, exchange: Exchange) -> None:
        if self._is_open:
            return
        exchange.access = access_of(exchange.route)
        authorization = exchange.header("authorization")
        if authorization is None and is_of_messages(exchange.route):
            key = exchange.header("x-api-key")
            authorization = None if key is None else f"Bearer {key}"
        caller = self._front.gate.check(exchange.access, authorization)
        exchange.key = caller.usage
        exchange.owner = caller.owner

    async def _not_found(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        if scope["type"] == "http":  # no websocket, which the server refuses
            path = scope[EXCHANGE].route
            for other, why in NOT_HERE.items():
                if path == other or path.startswith(f"{other}/"):
                    raise HttpError(404, f"{other} is not here: {why}", code="not_here")
            raise HttpError(404, f"there is no {shown(path)} here{routes_near(path, self._paths)}")


def routes_near(path: str, paths: Sequence[str]) -> str:
    """Return the end of an error message, which names paths that are similar to an unknown one."""
    if len(paths) <= MOST_NAMED:
        return f", but {', '.join(paths)}"
    wanted = path[:MOST_COMPARED].rstrip("/").lower()
    # Clients most often get the beginning wrong: /v1 twice, or not at all.
    same_end = [each for each in paths if _last_part(each) == _last_part(wanted) != ""]
    alike = difflib.get_close_matches(wanted, paths, MOST_NAMED, cutoff=0.75)
    near = [wanted] if wanted in paths else [*dict.fromkeys([*alike, *same_end])][:MOST_NAMED]
    listed = f"{GET_OPENAPI.path} lists what there is"
    return f", but {', '.join(near)}; {listed}" if near else f"; {listed}"


def _last_part(path: str) -> str:
    return path.rpartition("/")[2]


class _Path:
    """The handlers of a path, by method, as the ASGI application of a route."""

    def __init__(self, handlers: Mapping[str, Handler], access: Access) -> None:
        self._handlers = handlers
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        exchange: Exchange = scope[EXCHANGE]
        # The key was checked for the path. Should the router ever read a path in another way, nothing opens.
        assert exchange.access in (None, self._access), "the key was checked for another route"
        path = exchange.route  # which a handler may replace by its template, for the metrics
        await self._handlers["GET" if exchange.method == "HEAD" else exchange.method](exchange)
        if self._access == "admin" and exchange.method == "POST":
            announce(f"the operator has sent POST {path!a}, status {exchange.status}")


class _Cors(CORSMiddleware):
    """Cross-origin requests, whose preflight responses have an x-request-id, too."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        given = request_headers.get("x-request-id")
        response.headers["x-request-id"] = request_id_of(None if given is None else given.encode("latin-1"))
        return response
