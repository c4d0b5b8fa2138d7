"""The ASGI application: routing, keys, and errors as responses."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from ..protocol.endpoints import ACCESS, ROUTES
from .front_end import FrontEnd
from .http.exchange import ClientGone, Exchange, request_id_of
from .http.failures import HttpError
from .routes.table import HANDLERS, Handler
from .telemetry.records import CLIENT_GONE

RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")
)
# Headers of responses that a page in a browser may read.
EXPOSED_HEADERS = ("x-request-id", "x-paged-ignored", "x-should-retry", "retry-after", *RATE_LIMIT_HEADERS)
EXCHANGE = "paged.exchange"  # the exchange of a request, in its scope


def new_app(front: FrontEnd) -> ASGIApp:
    """Return the application that serves an engine."""
    app = App(front)
    origins = front.options.allowed_origins
    if not origins:
        return app
    return _Cors(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=EXPOSED_HEADERS,
    )


class App:
    """Routes requests to their handlers. Whatever a handler raises becomes a response."""

    def __init__(self, front: FrontEnd) -> None:
        self._front = front
        routes = [
            Route(
                route.path.replace("{model}", "{model:path}"),  # a name may contain slashes
                _Endpoint(HANDLERS[route](front)),
                methods=[route.method],
            )
            for route in ROUTES
        ]
        self._router = Router(routes, redirect_slashes=False, default=_not_found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        front = self._front
        exchange = Exchange(
            scope,
            receive,
            send,
            max_body_bytes=front.options.max_request_bytes,
            budget=front.body_budget,
            responses=front.response_budget,
        )
        scope[EXCHANGE] = exchange
        scope["app"] = self
        try:
            self._check_host(exchange)
            self._check_key(exchange)
            await self._router(scope, receive, send)
        except ClientGone as gone:
            front.end(exchange, CLIENT_GONE, gone)
        except Exception as error:
            failure = await front.failure_of(error, exchange.request_id)
            front.end(exchange, failure.status, error)
            if exchange.status is not None:  # too late for another response: the connection is closed
                raise
            await exchange.respond_json(failure.status, failure.body, failure.headers)
        except BaseException as error:
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
        # A path that is no route needs a key, too: without one, nobody learns which there are.
        access = ACCESS.get(exchange.route, "keys")
        exchange.key = self._front.gate.check(access, exchange.header("authorization"))


class _Endpoint:
    """A handler as the ASGI application of a route."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        await self._handler(scope[EXCHANGE])


class _Cors(CORSMiddleware):
    """Cross-origin requests, whose preflight responses have an x-request-id, too."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        given = request_headers.get("x-request-id")
        response.headers["x-request-id"] = request_id_of(None if given is None else given.encode("latin-1"))
        return response


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG001
    if scope["type"] != "http":
        return  # a websocket, which the server refuses
    paths = ", ".join(dict.fromkeys(route.path for route in ROUTES))
    raise HttpError(404, f"there is no {scope[EXCHANGE].route!r} here, but {paths}")
