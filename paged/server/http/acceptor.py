"""Acceptor: accepts connections up to a limit, and a few beyond it, which may ask for the server's state."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from functools import partial

from .connection import Connection, ConnectionContext

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections that the system keeps until they are accepted
ACCEPTED_AT_ONCE = 16
HANDSHAKE_TIMEOUT_S = 10.0
PAUSE_S = 0.5  # without accepting, where the system refuses
# Beyond the limit: each is told so once it has asked, or when the next ones come.
NUM_SPARE = 32


class Acceptor:
    """Accepts connections. The class has the methods of asyncio.Server that uvicorn calls.

    A connection counts from the moment it is accepted, including its TLS handshake.
    """

    def __init__(
        self, listener: socket.socket, context: ConnectionContext, tls: ssl.SSLContext | None
    ) -> None:
        self._listener = listener
        self._context = context
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._open: dict[Connection, asyncio.Task[None]] = {}  # each with the task that made it
        self._spare: dict[Connection, None] = {}  # of these, those beyond the limit, the oldest first
        self._pause: asyncio.TimerHandle | None = None
        self._is_closed = False

    def start(self) -> None:
        """Begin to listen."""
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Stop accepting connections."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener)
            if self._pause is not None:
                self._pause.cancel()
            for connection, making in self._open.items():
                self._give_up(connection, making)

    async def wait_closed(self) -> None:
        """Return at once, since uvicorn itself waits for the connections."""

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no files or no memory are left: accepting again would fail at once
                logger.error("no connection can be accepted for now: %s", error)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(PAUSE_S, self._go_on)
                return
            accepted.setblocking(False)
            self._admit(accepted)

    def _go_on(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _admit(self, accepted: socket.socket) -> None:
        is_spare = len(self._open) - len(self._spare) >= self._context.max_connections
        connection = Connection(self._context, is_spare=is_spare, on_lost=self._on_lost)
        making = self._loop.create_task(self._connect(connection, accepted))
        making.add_done_callback(partial(self._on_made, connection, accepted))
        self._open[connection] = making
        if not is_spare:
            return
        self._spare[connection] = None
        if len(self._spare) > NUM_SPARE:
            self._drop(next(iter(self._spare)))

    def _drop(self, oldest: Connection) -> None:
        del self._spare[oldest]
        oldest.refuse_spare()
        self._give_up(oldest, self._open[oldest])

    @staticmethod
    def _give_up(connection: Connection, making: asyncio.Task[None]) -> None:
        """End a connection that is not made yet, as in its handshake."""
        if not connection.is_made:
            connection.close_when_made()  # the loop may make it in spite of the end of the task
            making.cancel()

    async def _connect(self, connection: Connection, accepted: socket.socket) -> None:
        await self._loop.connect_accepted_socket(
            lambda: connection,
            accepted,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_TIMEOUT_S,
        )

    def _on_made(self, connection: Connection, accepted: socket.socket, making: asyncio.Task[None]) -> None:
        """End a connection that was not made: its handshake failed, was too slow, or had to give way."""
        if making.cancelled() or making.exception() is not None:
            accepted.close()
            self._on_lost(connection)

    def _on_lost(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        self._spare.pop(connection, None)
