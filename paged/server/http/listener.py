"""Listening: the socket, the server on it, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import uvicorn
import uvloop
from starlette.types import ASGIApp

from ...base.errors import ResourceError
from ..options import ServeOptions
from .acceptor import NUM_SPARE, Acceptor
from .connection import ConnectionContext, OnRefusal

CLOSING_S = 5.0  # for responses that go on when the server ends
# What the kernel holds for a client that does not read: it doubles this.
SEND_BUFFER_BYTES = 2**18
# Files beside the connections: of the engine processes, of workers, of libraries, and some that end.
NUM_OTHER_FILES = 64
MOST_BY_DEFAULT = 8192
OLLAMA_PORT = 11434
METRICS_CONNECTIONS = 16  # to --metrics-port


class Listeners(NamedTuple):
    """The sockets of a server.

    metrics: the socket of --metrics-port; None without that option.
    ollama: the socket at Ollama's port; None without --api ollama.
    """

    main: socket.socket
    metrics: socket.socket | None
    ollama: socket.socket | None = None


@contextlib.contextmanager
def bind_all(options: ServeOptions) -> Iterator[Listeners]:
    """Yield the sockets of a server; close them at the end. Raises ResourceError as `bind` does."""
    with contextlib.ExitStack() as stack:
        main = stack.enter_context(bind(options))
        if options.uds is not None:
            stack.callback(_remove_socket, options.uds, os.stat(options.uds))
        metrics = None
        if options.metrics_port is not None:
            metrics = stack.enter_context(_bound(options.host, options.metrics_port, "--metrics-port"))
        ollama = None
        if "ollama" in options.api:
            ollama = stack.enter_context(_bound_to_ollama(options.host))
        yield Listeners(main, metrics, ollama)


def bind(options: ServeOptions) -> socket.socket:
    """Return a socket that is bound to the address but does not listen yet.

    Raises ResourceError if the address is in use or does not belong to this machine.
    """
    if options.uds is None:
        return _bound(options.host, options.port, "--port")
    with _explained(options.uds, "another --uds"):
        return _bind_path(options.uds)


@contextlib.contextmanager
def _bound_to_ollama(host: str) -> Iterator[socket.socket]:
    with _explained(f"{host}:{OLLAMA_PORT}", "--api ollama away, or end that one, which may be Ollama"):
        listener = _bind_port(host, OLLAMA_PORT)
    with listener:
        yield listener


def _bound(host: str, port: int, flag: str) -> socket.socket:
    with _explained(f"{host}:{port}", f"another {flag}, or 0 for a free one"):
        return _bind_port(host, port)


@contextlib.contextmanager
def _explained(where: str, way_out: str) -> Iterator[None]:
    """Turn an OSError from within into a ResourceError."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ResourceError(f"{where} is in use by another server; take {way_out}") from None
        raise ResourceError(f"cannot listen on {where}: {error.strerror or error}") from None


def _bind_port(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit these.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def _bind_path(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_over(path):
            os.unlink(path)
        listener.bind(path)
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_socket(path: str, made: os.stat_result) -> None:
    """Remove the file of a socket, unless it is another server's by now, or gone."""
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(path), made):
            os.unlink(path)


def _is_left_over(path: str) -> bool:
    """Return whether a path is a socket on which no server listens."""
    if not Path(path).exists() or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        return False


def allow_many_connections() -> None:
    """Raise the limit of open files as far as the system allows, since each connection is an open file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def connection_limit(wanted: int | None) -> int:
    """Return the limit of connections: `wanted`, or by default as many as open files allow.

    Raises ResourceError if `wanted` is more than open files allow.
    """
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = num_files == resource.RLIM_INFINITY
    most = MOST_BY_DEFAULT if unlimited else max(1, num_files - NUM_SPARE - NUM_OTHER_FILES)
    if wanted is None:
        return min(most, MOST_BY_DEFAULT)
    if wanted > most and not unlimited:
        raise ResourceError(
            f"max_connections must be at most {most}, as this process may open {num_files} files "
            f"(ulimit -n); got {wanted}"
        )
    return wanted


def url_of(options: ServeOptions, listener: socket.socket) -> str:
    """Return the URL of the server; for a Unix socket, `unix:` and its path."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    return f"{port_url(options, listener)}{options.root_path or ''}"


def port_url(options: ServeOptions, listener: socket.socket) -> str:
    """Return the URL of the host and port on which a socket listens, without the root path."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop of the type that the server uses."""
    return uvloop.new_event_loop()


class Server(uvicorn.Server):
    """Uvicorn's server with our own connection class. `Drain` handles signals.

    on_start: called once the server listens.
    on_refusal: called for requests that do not reach the application; see `Connection`.
    metrics_app: answers the requests to --metrics-port.
    ollama_app: answers the requests to Ollama's port.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: ServeOptions,
        *,
        on_start: Callable[[], None],
        on_refusal: OnRefusal,
        metrics_app: ASGIApp | None = None,
        ollama_app: ASGIApp | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http="httptools",  # its protocol is loaded, and not used
            ws="none",
            lifespan="off",
            workers=1,
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile or "",
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_config=None,
            log_level="error",
            timeout_graceful_shutdown=int(CLOSING_S),
        )
        super().__init__(config)
        self._on_start = on_start
        self._context = ConnectionContext(
            app,
            on_refusal,
            root_path=options.root_path or "",
            max_connections=connection_limit(options.max_connections),
            head_s=options.head_timeout_s,
            keep_alive_s=options.keep_alive_timeout_s,
            slow_client_s=options.slow_client_timeout_s,
            default_headers=lambda: self.server_state.default_headers,
            connections=self.server_state.connections,
            tasks=self.server_state.tasks,
        )
        self._contexts: list[ConnectionContext | None] = [self._context, None, None]
        if metrics_app is not None:
            most = METRICS_CONNECTIONS
            context = replace(self._context, app=metrics_app, root_path="", max_connections=most)
            self._contexts[1] = context
        if ollama_app is not None:
            self._contexts[2] = replace(self._context, app=ollama_app, root_path="")
        self._sockets: Listeners | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: signal handlers stay as they are."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        assert sockets is not None
        assert self._sockets is not None
        acceptors = [
            Acceptor(each, context, self.config.ssl)
            for each, context in zip(self._sockets, self._contexts, strict=True)
            if each is not None and context is not None
        ]
        self.servers = [*acceptors]  # type: ignore[list-item]
        for acceptor in acceptors:
            acceptor.start()
        self.started = True
        self._on_start()

    async def listen(
        self,
        listener: socket.socket,
        metrics: socket.socket | None = None,
        ollama: socket.socket | None = None,
    ) -> None:
        """Accept connections on these sockets until `stop` is called.

        listener: the socket of --host and --port, on which all routes are served.
        metrics: the socket of --metrics-port, on which only /metrics is served; None if there is none.
        ollama: the socket at Ollama's port; None if there is none.

        Raises ResourceError if another process has taken an address since the sockets were made.
        """
        self._sockets = Listeners(listener, metrics, ollama)
        try:
            await self.serve([each for each in self._sockets if each is not None])
        except OSError as error:
            if self.started or error.errno != errno.EADDRINUSE:
                raise
            raise ResourceError(
                "{}:{} was taken by another server while the model loaded; take another --port".format(
                    *listener.getsockname()[:2]
                )
            ) from None

    def stop(self, *, at_once: bool = False) -> None:
        """Stop accepting connections. End once all responses are sent, or at once with `at_once`."""
        self.should_exit = True
        self.force_exit = at_once
