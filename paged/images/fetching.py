"""Fetcher: images at https: URLs of the hosts that the operator names.

The name of a host is resolved once, all its addresses must be public, and the connection is made to one of
these addresses: no second look-up may give another one. TLS checks that the answer comes from the host. A
redirect stays on its host, and each hop is checked anew. What a server says of its answer, such as its type
and its length, is not trusted: the process that decodes images finds out what it is.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property

import h11

from ..base.errors import RequestError
from .addresses import Address, is_public, place_of, redirected

FETCH_S = 10.0  # for all images of a request together, from the look-up on
CONNECT_S = 3.0  # for one of several addresses
MOST_FETCHED_BYTES = 20 * 2**20  # of an image as it comes
MOST_FETCHES = 4  # of the images of a request
MOST_HOPS = 3
MOST_LOOKUPS = 4  # at once; the system's look-up cannot be ended
MOST_HEAD = 2**15  # bytes of a response beside its body, and one for each 16 of the body: for its chunks
READ_BYTES = 2**16
REDIRECTS = (301, 302, 303, 307, 308)

Resolve = Callable[[str, int], Sequence[str]]
# Takes room for so many more bytes, or raises.
Hold = Callable[[int], Awaitable[None]]


def addresses_of(host: str, port: int) -> list[str]:
    """Return the addresses that a name stands for. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [*dict.fromkeys(str(address[0]) for *_, address in found)]


async def _no_limit(num_bytes: int) -> None:
    """Take room in a process that serves no one else."""


class Fetcher:
    """Fetches images.

    domains: names of hosts in lower case, with a port if it is not 443.
    resolve, is_allowed: the look-up, and whether an address may be connected to; tests have their own.
    context: of TLS; None takes the system's authorities.
    """

    def __init__(
        self,
        domains: Sequence[str],
        *,
        resolve: Resolve = addresses_of,
        is_allowed: Callable[[str], bool] = is_public,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._domains = tuple(domains)
        self._resolve = resolve
        self._is_allowed = is_allowed
        self._context = context

    def check(self, name: str, url: str) -> None:
        """Raise RequestError for a URL that is not fetched. name: the URL's name in messages."""
        place_of(name, url, self._domains)

    async def fetch_all(self, urls: Mapping[str, str], hold: Hold = _no_limit) -> dict[str, bytes]:
        """Return the contents of URLs. Raises RequestError, and the errors of `hold`.

        urls: with their names in messages.
        """
        places = {url: place_of(name, url, self._domains) for url, name in urls.items()}
        free = asyncio.Semaphore(MOST_FETCHES)

        async def fetch(url: str) -> bytes:
            async with free:
                return await self._fetch(urls[url], places[url], hold)

        tasks = {url: asyncio.ensure_future(fetch(url)) for url in urls}
        try:
            async with asyncio.timeout(FETCH_S):
                await asyncio.gather(*tasks.values())
        except TimeoutError:
            late = next((url for url, task in tasks.items() if task.cancelled() or not task.done()), None)
            names = [*urls.values()] if late is None else [urls[late]]
            raise RequestError(f"{names[0]} was not fetched within {FETCH_S:g} s", param=names[0]) from None
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        return {url: task.result() for url, task in tasks.items()}

    def fetch_now(self, urls: Mapping[str, str]) -> dict[str, bytes]:
        """Return the contents of URLs, from a thread that may wait. Raises RequestError."""
        if not urls:
            return {}
        with ThreadPoolExecutor(1) as thread:  # this one may have an event loop that runs
            return thread.submit(lambda: asyncio.run(self.fetch_all(urls))).result()

    async def _fetch(self, name: str, place: Address, hold: Hold) -> bytes:
        """Return what is at a place, or where it redirects to on its host."""
        for _ in range(1 + MOST_HOPS):
            answer = _Answer(name, place, hold)
            try:
                await self._get(name, place, answer)
            except (OSError, EOFError) as error:  # TLS's errors among them
                raise RequestError(
                    f"{name}: {place.host} gives no answer: {_reason(error)}", param=name
                ) from error
            except h11.RemoteProtocolError as error:
                raise RequestError(
                    f"{name}: {place.host} gives a wrong answer: {error}", param=name
                ) from error
            if answer.location is None:
                return bytes(answer.body)
            place = redirected(name, place, answer.location, self._domains)
        raise RequestError(f"{name} is redirected more than {MOST_HOPS} times", param=name)

    async def _get(self, name: str, place: Address, answer: _Answer) -> None:
        reader, writer = await self._connect(name, place)
        try:
            writer.write(answer.asked())
            await writer.drain()
            while not answer.is_done:
                await answer.take(await reader.read(READ_BYTES))
        finally:
            writer.transport.abort()  # a server might not answer TLS's end
            with suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _connect(self, name: str, place: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the host at an address that was checked. Raises OSError and RequestError."""
        loop = asyncio.get_running_loop()
        addresses = await loop.run_in_executor(self._lookups, self._resolve, place.host, place.port)
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise RequestError(
                f"{name}: {place.host} has an address that is not public, to which nothing connects",
                param=name,
            )
        error: Exception = OSError("it has no address")
        for address in addresses:
            try:
                async with asyncio.timeout(CONNECT_S):
                    return await asyncio.open_connection(
                        address, place.port, ssl=self._tls, server_hostname=place.host
                    )
            except TimeoutError:
                error = OSError(f"nothing within {CONNECT_S:g} s")
            except OSError as failure:
                error = failure
        raise error

    @cached_property
    def _lookups(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(MOST_LOOKUPS, "paged-lookups")

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return self._context or ssl.create_default_context()


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"no TLS: {error.reason or error}"
    if isinstance(error, socket.gaierror):
        return "its name is not known"
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


class _Answer:
    """The response to one request, read as it comes.

    location: where it redirects to; None if it does not.
    """

    def __init__(self, name: str, place: Address, hold: Hold) -> None:
        self._name = name
        self._place = place
        self._hold = hold
        self._connection = h11.Connection(h11.CLIENT)
        self._num_read = 0
        self.body = bytearray()
        self.location: str | None = None
        self.is_done = False

    def asked(self) -> bytes:
        """Return the request."""
        headers = {
            "Host": self._place.authority,
            "User-Agent": "paged",
            "Accept": "image/*",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        request = h11.Request(method="GET", target=self._place.path, headers=[*headers.items()])
        return (self._connection.send(request) or b"") + (self._connection.send(h11.EndOfMessage()) or b"")

    async def take(self, data: bytes) -> None:
        """Read a part of the response; b"" is its end. Raises RequestError and h11.RemoteProtocolError."""
        self._num_read += len(data)
        await self._hold(len(data))
        self._connection.receive_data(data)
        while not self.is_done:
            event = self._connection.next_event()
            if event is h11.NEED_DATA:
                self._check_beside()
                return
            if isinstance(event, h11.Response):
                self._begin(event)
            elif isinstance(event, h11.Data):
                self.body += event.data
                if len(self.body) > MOST_FETCHED_BYTES:
                    raise self._too_large()
            elif isinstance(event, h11.EndOfMessage):
                self.is_done = True
            elif isinstance(event, h11.ConnectionClosed):
                raise EOFError("it closes the connection")

    def _check_beside(self) -> None:
        """Raise RequestError for much besides the body: tiny chunks take far more time than their bytes."""
        if self._num_read - len(self.body) > MOST_HEAD + len(self.body) // 16:
            raise RequestError(
                f"{self._name}: {self._place.host} sends too much that is no image", param=self._name
            )

    def _begin(self, response: h11.Response) -> None:
        headers = dict(response.headers)
        status = response.status_code
        if status in REDIRECTS and b"location" in headers:
            self.location = headers[b"location"].decode("latin-1")
            self.is_done = True
            return
        if status != 200:
            raise RequestError(
                f"{self._name}: {self._place.host} answers with status {status}", param=self._name
            )
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding.lower() != "identity":
            raise RequestError(
                f"{self._name}: {self._place.host} sends it as {encoding[:40]!r}, which was not asked for",
                param=self._name,
            )
        length = headers.get(b"content-length", b"0")
        if int(length) > MOST_FETCHED_BYTES:
            raise self._too_large()

    def _too_large(self) -> RequestError:
        return RequestError(f"{self._name} has more than {MOST_FETCHED_BYTES:,} bytes", param=self._name)
