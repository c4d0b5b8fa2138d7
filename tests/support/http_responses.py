"""Reading HTTP/1.1 responses strictly, to find what a lenient client would forgive."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

_STATUS = re.compile(rb"HTTP/1\.1 ([1-5][0-9]{2}) [ -~]*\r\n")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([\t -~\x80-\xff]*)\r\n")


class BadResponseError(Exception):
    """What the server sent is no response of HTTP/1.1."""


@dataclass
class Response:
    """A response with its headers by lower-case name."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def media(self) -> str:
        """The content type without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0]


async def read_response(reader: asyncio.StreamReader, *, to_head: bool = False) -> Response | None:
    """Return the next final response; None if the connection ends before it.

    to_head: whether the request was HEAD, whose response has no body.

    Raises BadResponseError if it is not valid or ends in the middle.
    """
    try:
        while True:
            line = await reader.readline()
            if not line:
                return None
            found = _STATUS.fullmatch(line)
            if not found:
                raise BadResponseError(f"the status line is {line[:100]!r}")
            headers = await _headers(reader)
            if int(found[1]) >= 200:
                break
        body = b"" if to_head else await _body(reader, headers)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        raise BadResponseError(f"the response ends in the middle: {error}") from error
    return Response(int(found[1]), headers, body)


async def _headers(reader: asyncio.StreamReader) -> dict[str, str]:
    headers: dict[str, str] = {}
    while (line := await reader.readuntil(b"\r\n")) != b"\r\n":
        found = _HEADER.fullmatch(line)
        if not found:
            raise BadResponseError(f"a header line is {line[:100]!r}")
        name = found[1].decode().lower()
        if name in headers:
            raise BadResponseError(f"the header {name} comes twice")
        headers[name] = found[2].decode("latin-1")
    return headers


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    length = headers.get("content-length")
    if length is None and "transfer-encoding" not in headers and headers.get("connection") == "close":
        return await reader.read()  # to a client of HTTP/1.0
    if (length is None) == (headers.get("transfer-encoding") != "chunked"):
        raise BadResponseError("the body must have either content-length or the transfer-encoding chunked")
    if length is not None:
        return await reader.readexactly(int(length))
    parts = []
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        part = await reader.readexactly(size + 2)
        if part[-2:] != b"\r\n":
            raise BadResponseError("a chunk is longer than it says")
        if not size:
            return b"".join(parts)
        parts.append(part[:-2])
