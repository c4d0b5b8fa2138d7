"""A server of images over TLS on a loopback port, which answers as it is told."""

from __future__ import annotations

import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from paged.images import fetching
from paged.images.fetching import Fetcher
from tests.support.certificate import CERTIFICATE, KEY
from tests.support.served import PATIENCE_S

Send = Callable[[bytes], None]
LOOPBACK = "127.0.0.1"


def ok(body: bytes, *headers: str, length: int | None = None) -> bytes:
    """Return an answer with status 200, whose length may be a lie."""
    lines = ["HTTP/1.1 200 OK", f"content-length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def moved(location: str, status: int = 302) -> bytes:
    """Return a redirect."""
    return f"HTTP/1.1 {status} Moved\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()


@dataclass
class MediaServer:
    """The server while it runs.

    answers: what it sends for a path: bytes, or a function that gets what sends them.
    asked: the requests so far. connections: how many there were.
    """

    port: int
    answers: dict[str, bytes | Callable[[Send], None]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    connections: int = 0

    @property
    def domain(self) -> str:
        return f"localhost:{self.port}"

    def url(self, path: str) -> str:
        return f"https://{self.domain}{path}"

    def fetcher(
        self, resolve: Callable[[str, int], list[str]] = lambda *_: [LOOPBACK], others: Sequence[str] = ()
    ) -> Fetcher:
        """Return a fetcher that may connect to this server alone, and trusts its certificate.

        others: further names of it.
        """
        context = ssl.create_default_context(cadata=CERTIFICATE)
        allowed = LOOPBACK.__eq__
        return Fetcher([self.domain, *others], resolve=resolve, is_allowed=allowed, context=context)

    def serve(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._answer, args=(connection, context), daemon=True).start()

    def _answer(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        connection.settimeout(PATIENCE_S)
        with suppress(OSError), connection, context.wrap_socket(connection, server_side=True) as client:
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(2**16)
            self.asked.append(head.decode())
            answer = self.answers[head.split()[1].decode()]
            if isinstance(answer, bytes):
                client.sendall(answer)
            else:
                answer(client.sendall)


@contextmanager
def media_server() -> Iterator[MediaServer]:
    """Serve on a port of its own."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as directory:
        for name, text in (("key.pem", KEY), ("certificate.pem", CERTIFICATE)):
            Path(directory, name).write_text(text)
        context.load_cert_chain(Path(directory, "certificate.pem"), Path(directory, "key.pem"))
    patient = mock.patch.multiple(fetching, FETCH_S=PATIENCE_S, CONNECT_S=PATIENCE_S)  # on a busy machine
    with patient, socket.create_server((LOOPBACK, 0)) as listener:
        server = MediaServer(listener.getsockname()[1])
        thread = threading.Thread(target=server.serve, args=(listener, context), daemon=True)
        thread.start()
        yield server
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)


def slowly(parts: Iterator[bytes], pause_s: float) -> Callable[[Send], None]:
    """Return an answer whose parts come with pauses between them."""

    def answer(send: Send) -> None:
        for part in parts:
            send(part)
            time.sleep(pause_s)

    return answer
