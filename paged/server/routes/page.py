"""The page at /, and the event stream from which it draws the engines."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from ...protocol.endpoints import Endpoint
from ..front_end import FrontEnd
from ..gallery import PERIOD_S
from ..http.exchange import Exchange, until_disconnect
from ..http.failures import Header, HttpError
from ..http.streams import StreamedResponse

PAGE_FOLDER = Path(__file__).parents[1]
NO_PAGE = (
    b"paged serves OpenAI's API at /v1, described at /openapi.json; --no-page leaves the page out here\n"
)
CLOSED_LOOK_S = 1.0  # between two looks whether the server ends, where no picture comes
# Nothing is loaded from elsewhere, no text becomes code, and no other site shows the page in a frame.
PAGE_HEADERS: tuple[Header, ...] = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class PageRoute:
    """A file of the page. If the page is turned off, / says where the API is."""

    def __init__(self, endpoint: Endpoint, file: str, front: FrontEnd) -> None:
        self._endpoint = endpoint
        self._body = (PAGE_FOLDER / file).read_bytes() if front.options.page else None

    async def __call__(self, exchange: Exchange) -> None:
        if self._body is not None:
            await exchange.respond(200, self._body, f"{self._endpoint.media}; charset=utf-8", PAGE_HEADERS)
        elif self._endpoint.path == "/":
            await exchange.respond(200, NO_PAGE, "text/plain; charset=utf-8")
        else:
            raise _no_page(exchange)


async def stream_pictures(front: FrontEnd, exchange: Exchange) -> None:
    """Stream pictures of the engines as events. With a key, they show only requests of the key's owner."""
    if not front.options.page:
        raise _no_page(exchange)
    gallery = front.gallery
    response = StreamedResponse(exchange)
    front.keep_alive.on_write(response)
    try:
        async with until_disconnect(exchange):
            with gallery.watching():
                while not front.is_closed:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(CLOSED_LOOK_S):
                            await gallery.wait()
                        await response.write(b"data: " + gallery.view(exchange.owner) + b"\n\n")
                        front.keep_alive.on_write(response)
                        await asyncio.sleep(PERIOD_S)
            await response.write(b"", more=False)
    finally:
        front.keep_alive.remove(response)


def _no_page(exchange: Exchange) -> HttpError:
    return HttpError(404, f"there is no {exchange.route!r} here: the server was started with --no-page")
