"""Channel: lines of JSON over the socket between the driver and a rank that it has started. Free of torch."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

_RECEIVED_BYTES = 2**16
Message = dict[str, Any]


class Channel:
    """One end of a socket between two processes. Any thread may call `send`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()
        self._received = b""

    def send(self, message: Message) -> None:
        """Send a message. If the other end is closed, do nothing: the thread that reads will notice."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock, suppress(OSError):
            self._socket.sendall(line)

    def messages(self) -> Iterator[Message]:
        """Yield the messages from the other end until it is closed."""
        while True:
            *lines, self._received = self._received.split(b"\n")
            for line in lines:
                yield json.loads(line)
            try:
                data = self._socket.recv(_RECEIVED_BYTES)
            except OSError:
                return
            if not data:
                return
            self._received += data

    def close(self) -> None:
        """Close this end. Readers at both ends are woken."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
