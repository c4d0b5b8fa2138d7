"""Drain: how the server ends on a signal, so that no request is lost."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Protocol, Self

from .http.listener import Server

NOTIFY_READY = b"READY=1"
NOTIFY_STOPPING = b"STOPPING=1"


def notify(state: bytes) -> None:
    """Send a state to systemd, if systemd started this process and waits for it; see sd_notify(3)."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # of the abstract namespace
        address = f"\0{address[1:]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(OSError):
        sender.sendto(state, address)


SIGNALS = (signal.SIGTERM, signal.SIGINT)
POLL_S = 0.02  # between two looks at the requests in progress
AT_ONCE_S = 0.5  # from the second signal to the end of the process, whatever still runs

logger = logging.getLogger(__name__)


class Drained(Protocol):
    """What ends with a server; see `FrontEnd`."""

    is_draining: bool
    is_closed: bool

    @property
    def num_accepted(self) -> int:
        """How many accepted requests have no whole response yet."""

    def stop(self) -> None:
        """Refuse new requests, and abort the requests in progress."""


class Drain:
    """A context manager that ends a server on SIGTERM or Ctrl-C, once its requests have finished.

    From the signal on, the server is not ready. New requests are accepted for `delay_s` and then refused.
    Requests in progress may take another `timeout_s`; then they end with an error. A second signal ends
    everything at once; clients are told if that is possible within AT_ONCE_S.
    """

    def __init__(self, front: Drained, server: Server, *, delay_s: float, timeout_s: float) -> None:
        self._front = front
        self._server = server
        self._delay_s = delay_s
        self._timeout_s = timeout_s
        self._draining: asyncio.Task[None] | None = None
        self._num_signals = 0

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.begin)
            # Beside that of the loop, which may be held for long by one callback.
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(
                number, signal.SIG_DFL
            )  # the engines, which are yet to end, do so without this process
        if self._draining is not None:
            self._draining.cancel()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Bound the time that the end takes after the second signal. The engines end with this process."""
        self._num_signals += 1
        if self._num_signals == 2:
            timer = threading.Timer(AT_ONCE_S, os._exit, [0])
            timer.daemon = True
            timer.start()

    def begin(self) -> None:
        """Begin to drain. The second call ends the server at once."""
        if self._draining is None:
            notify(NOTIFY_STOPPING)
            self._front.is_draining = True
            self._draining = asyncio.get_running_loop().create_task(self._drain())
            return
        self._draining.cancel()
        self._end(at_once=True)

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        front = self._front
        await asyncio.sleep(self._delay_s)
        front.is_closed = True
        if front.num_accepted:
            logger.info("%d requests are finished before the server ends", front.num_accepted)
        until = loop.time() + self._timeout_s
        while front.num_accepted and loop.time() < until:
            await asyncio.sleep(POLL_S)
        if front.num_accepted:
            logger.warning("%d requests end unfinished, as drain_timeout has passed", front.num_accepted)
        self._end()

    def _end(self, *, at_once: bool = False) -> None:
        self._front.stop()
        self._server.stop(at_once=at_once)
