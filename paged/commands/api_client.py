"""ApiClient: asks a server of OpenAI's API, this project's or another's, and reads its streams."""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ..base.errors import ConfigError, PagedError
from ..base.validation import shown

DEFAULT_URL = "http://127.0.0.1:8000"  # that of `paged serve`
# In this order. The server's own variable comes first, so that one name serves both sides of a test.
KEY_VARIABLES = ("PAGED_API_KEY", "OPENAI_API_KEY")
CONNECT_TIMEOUT_S = 10.0
_DATA = b"data:"
_MAX_ERROR_BYTES = 65536


class ApiError(PagedError):
    """There is no server at the address, the server refuses a request, or an answer breaks off."""

    MAX_LENGTH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiAddress:
    """The address of a server, and a key for it.

    url: the address of a server with OpenAI's API, such as http://127.0.0.1:8000 or
        https://example.com/openai/v1. If the URL has no path, /v1 is added.
    api_key: the key that the server asks for; None takes the environment variable PAGED_API_KEY or
        OPENAI_API_KEY.

    Other users of this machine may see a key on the command line, but not one in the environment.
    """

    url: str | None = None
    api_key: str | None = None


class ApiClient:
    """Sends requests to one server, each on a connection of its own. Safe to use from several threads.

    Raises ConfigError for an invalid address or key.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_address = False
        if not is_address or parts.query or parts.fragment or not url.isascii() or " " in url:
            raise ConfigError(f"--url is an address such as http://127.0.0.1:8000, got {shown(url)}")
        self._is_secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port
        self._base = parts.path.rstrip("/") or "/v1"
        self.url = parts._replace(path=self._base).geturl()
        self._headers = {"content-type": "application/json"}
        key = api_key or next(filter(None, map(os.environ.get, KEY_VARIABLES)), None)
        if key is not None:
            if not key.isascii() or not key.isprintable():
                raise ConfigError("the API key has characters that no header can hold")
            self._headers["authorization"] = f"Bearer {key}"

    def first_model(self) -> str:
        """Return the name of the first model that the server lists. Raises ApiError."""
        return str(self.models()[0]["id"])

    def models(self) -> list[dict[str, Any]]:
        """Return the models that the server lists, at least one, each with its id. Raises ApiError."""
        with self.request("GET", "/models") as exchange:
            body = exchange.read()
        try:
            models = json.loads(body)["data"]
        except (ValueError, LookupError, TypeError):
            models = None
        listed = models if isinstance(models, list) else []
        if not listed or not all(isinstance(m, dict) and isinstance(m.get("id"), str) for m in listed):
            raise ApiError(
                f"{self.url}/models is no list of models in JSON; is this a server of OpenAI's API? "
                "Its path, where that is not /v1, belongs into --url"
            )
        return listed

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> ApiExchange:
        """Return a request, to be used as a context manager. It is sent when the context is entered.

        path: the path below the base URL, such as /models.
        """
        kind = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        data = None if body is None else json.dumps(body).encode()
        return ApiExchange(connection, self.url + path, (method, self._base + path, data, self._headers))


class ApiExchange:
    """A request and its response, as a context manager that closes the connection at its end.

    call: the arguments of HTTPConnection.request.
    """

    def __init__(
        self,
        connection: http.client.HTTPConnection,
        url: str,
        call: tuple[str, str, bytes | None, Mapping[str, str]],
    ) -> None:
        self._connection = connection
        self._url = url
        self._call = call
        self._is_given_up = False
        self._socket: socket.socket | None = None
        self._response: http.client.HTTPResponse | None = None

    def __enter__(self) -> ApiExchange:
        """Send the request and read the head of the response. Raises ApiError."""
        try:
            self._response = self._send()
            if self._response.status == 200:
                return self
            refusal = self._refusal()
        except (OSError, http.client.HTTPException, ValueError) as error:
            refusal = f"no server of HTTP answers at {self._url}: {error}"
        self.__exit__()
        raise ApiError(refusal)

    def __exit__(self, *_: object) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def _send(self) -> http.client.HTTPResponse:
        self._connection.connect()
        self._socket = self._connection.sock  # the connection lets it go where the response ends it
        # A prompt may wait in the server's queue for longer than any limit.
        self._socket.settimeout(None)
        if self._is_given_up:
            self.give_up()
        self._connection.request(*self._call)
        return self._connection.getresponse()

    def give_up(self) -> None:
        """Stop reading the response: a pending or later read finds its end. Safe in a signal handler."""
        self._is_given_up = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def read(self) -> bytes:
        """Return the whole body of the response. Raises ApiError."""
        try:
            return self._entered.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from None

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of the streamed response up to [DONE]. Raises ApiError if it ends earlier."""
        kind = self._entered.getheader("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise ApiError(f"{self._url} answers {kind or 'without a type'}, not with a stream of events")
        for line in self._lines():
            if line.startswith(_DATA):
                data = line.removeprefix(_DATA).strip()
                if data == b"[DONE]":
                    return
                yield self._event(data)
        raise self._broken()

    @property
    def _entered(self) -> http.client.HTTPResponse:
        assert self._response is not None, "an exchange that was not entered"
        return self._response

    def _lines(self) -> Iterator[bytes]:
        while True:
            try:
                line = self._entered.readline()
            except (OSError, http.client.HTTPException) as error:
                raise self._broken(error) from None
            if not line:
                return
            yield line

    def _event(self, data: bytes) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise ApiError(
                f"{self._url} sent an event that is no JSON object: {shown(data.decode(errors='replace'))}"
            )
        if event.get("error") is not None:
            raise ApiError(f"the server ended the answer: {_message(event) or shown(event)}")
        return event

    def _refusal(self) -> str:
        """Describe a response that is no success."""
        response = self._entered
        try:
            body = response.read(_MAX_ERROR_BYTES)
        except (OSError, http.client.HTTPException):
            body = b""
        try:
            message = _message(json.loads(body))
        except ValueError:
            message = None
        if message is None:
            message = response.getheader("location") or response.reason
        text = f"{self._url} answers {response.status}: {message}"
        if response.status == 401:
            text += f"; give a key with --api-key, or in {' or '.join(KEY_VARIABLES)}"
        return text

    def _broken(self, error: Exception | None = None) -> ApiError:
        reason = f": {error}" if str(error or "") else ""
        return ApiError(f"the connection to {self._url} ended in the middle of the answer{reason}")


def part_of(event: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the text that an event adds to the first choice, and its finish reason. Raises ApiError."""
    try:
        choices = event["choices"]
        if not choices:  # an event of the usage alone
            return "", None
        text = choices[0]["delta"].get("content") if "delta" in choices[0] else choices[0]["text"]
        return text or "", choices[0].get("finish_reason")
    except (LookupError, TypeError, AttributeError):
        raise ApiError(f"the server sent an event that is no part of an answer: {shown(event)}") from None


def reasoning_of(event: Mapping[str, Any]) -> str:
    """Return the reasoning that an event adds to the first choice. Raises ApiError."""
    part_of(event)
    delta = event["choices"][0].get("delta", {}) if event["choices"] else {}
    return delta.get("reasoning") or delta.get("reasoning_content") or ""


def has_text(event: Mapping[str, Any]) -> bool:
    """Return whether an event adds text or reasoning to the first choice. Raises ApiError."""
    text, _ = part_of(event)
    return bool(text or reasoning_of(event))


def _message(body: Any) -> str | None:
    """Return the message of an error, in the form of OpenAI, vLLM or FastAPI; None if there is none."""
    error = body.get("error", body) if isinstance(body, dict) else None
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail")
    return error if isinstance(error, str) else None
