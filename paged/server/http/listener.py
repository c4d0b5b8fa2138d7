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
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from ...errors import ConfigError
from ..options import ServeOptions
from .acceptor import NUM_SPARE, Acceptor
from .connection import ConnectionContext, OnRefusal

CLOSING_S = 5.0  # for responses that go on when the server ends
# What the kernel holds for a client that does not read: it doubles this.
SEND_BUFFER_BYTES = 2**18
# Files beside the connections: of the engine processes, of workers, of libraries, and some that end.
NUM_OTHER_FILES = 64
MOST_BY_DEFAULT = 8192


def bind(options: ServeOptions) -> socket.socket:
    """Return a socket that is bound to the address, and does not listen yet.

    Raises ConfigError if the address is in use or not one of this machine.
    """
    try:
        return _bind_path(options.uds) if options.uds is not None else _bind_port(options.host, options.port)
    except OSError as error:
        where = options.uds or f"{options.host}:{options.port}"
        if error.errno == errno.EADDRINUSE:
            way_out = "another --uds" if options.uds else "another --port, or 0 for a free one"
            raise ConfigError(f"{where} is in use by another server; take {way_out}") from None
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from None


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
    """Raise the limit of open files, each connection being one, as far as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def connection_limit(wanted: int | None) -> int:
    """Return the limit of connections: as many as are wanted, by default as the limit of open files allows.

    Raises ConfigError if more are wanted.
    """
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = num_files == resource.RLIM_INFINITY
    most = MOST_BY_DEFAULT if unlimited else max(1, num_files - NUM_SPARE - NUM_OTHER_FILES)
    if wanted is None:
        return min(most, MOST_BY_DEFAULT)
    if wanted > most and not unlimited:
        raise ConfigError(
            f"max_connections must be at most {most}, as this process may open {num_files} files "
            f"(ulimit -n); got {wanted}"
        )
    return wanted


def url_of(options: ServeOptions, listener: socket.socket) -> str:
    """Return the address that clients use, or the path of the socket."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{options.root_path or ''}"


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop of the kind that serves."""
    return uvloop.new_event_loop()


class Server(uvicorn.Server):
    """Uvicorn's server with connections of its own. Signals are for `Drain`.

    on_start: is called when it listens.
    on_refusal: is told of requests that do not reach the application; see `Connection`.
    """

    def __init__(
        self,
        app: ASGIApp,
        options: ServeOptions,
        *,
        on_start: Callable[[], None],
        on_refusal: OnRefusal,
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
            slow_client_s=options.slow_client_timeout_s,
            default_headers=lambda: self.server_state.default_headers,
            connections=self.server_state.connections,
            tasks=self.server_state.tasks,
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the handlers of signals as they are."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        assert sockets is not None
        self.servers = [Acceptor(sockets[0], self._context, self.config.ssl)]  # type: ignore[list-item]
        self.servers[0].start()  # type: ignore[attr-defined]
        self.started = True
        self._on_start()

    async def listen(self, listener: socket.socket) -> None:
        """Serve until `stop` is called. Raises ConfigError if the address was taken meanwhile."""
        try:
            await self.serve([listener])
        except OSError as error:
            if self.started or error.errno != errno.EADDRINUSE:
                raise
            raise ConfigError(
                "{}:{} was taken by another server while the model loaded; take another --port".format(
                    *listener.getsockname()[:2]
                )
            ) from None

    def stop(self, *, at_once: bool = False) -> None:
        """Stop accepting connections, and end: once the responses are sent, or at once."""
        self.should_exit = True
        self.force_exit = at_once
