"""What every response of a server must be, and requests whose tokens nothing may change."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema

from paged.protocol.endpoints import is_of_messages
from tests.support.api_fields import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from tests.support.http_responses import Response, read_response
from tests.support.server_cases import PROTOCOL_STATUSES, Target

# After this time the server refuses a head or a body that is not complete.
SLOW_S = 0.5
# The server has no keys, no limit of waiting requests, and nothing that may fail.
NEVER = frozenset({401, 429, 500, 503})
RETRYABLE = frozenset({408, 429, 503})
CHUNKS = {CHAT: "ChatCompletionChunk", COMPLETIONS: "Completion"}
NATIVE = ("/completion", "/infill")  # whose events have no end of their own
EVENTS = {RESPONSES: "ResponseEvent", MESSAGES: "MessageEvent"}  # which have their types as names
PROMPTS = ("def f(x):", "import os\n", "class A:")
# What is zero in an idle server.
_LEFT = re.compile(
    r"paged:(num_requests_running|num_requests_waiting|http_requests_in_progress)\{"
    r'|paged:kv_cache_blocks\{.*state="used"'
)
_BYSTANDING = {"max_tokens": 20, "seed": 5, "ignore_eos": True, "return_token_ids": True}


def strict_json(data: bytes | str) -> Any:
    """Return the value of a JSON text. Raises ValueError for NaN and infinities, too."""

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is not JSON")

    text = data.decode() if isinstance(data, bytes) else data
    return json.loads(text, parse_constant=refuse)


class ResponseChecks:
    """Checks responses against a server's own /openapi.json."""

    def __init__(self, description: dict[str, Any]) -> None:
        self._paths = description["paths"]
        schemas = description["components"]["schemas"]
        self._validators = {
            name: jsonschema.Draft202012Validator({**schema, "components": {"schemas": schemas}})
            for name, schema in schemas.items()
        }

    @classmethod
    async def of(cls, port: int) -> ResponseChecks:
        """Return the checks for the server at a port."""
        response = await request(port, "GET", "/openapi.json")
        return cls(strict_json(response.body))

    def findings(self, response: Response, target: Target, *, must_succeed: bool = False) -> Iterator[str]:
        """Yield what is wrong with a response."""
        status, shown = response.status, response.body[:300]
        operation = self._operation(target)
        declared = {int(code) for code in operation.get("responses", ())} | PROTOCOL_STATUSES
        if status in NEVER or status not in declared or (must_succeed and status != 200):
            yield f"status {status}: {shown!r}"
        if "x-request-id" not in response.headers:
            yield f"status {status} without x-request-id"
        if target.method == "HEAD":
            return
        try:
            if status < 400:
                self._check_answer(response, target, operation)
            else:
                self._check_error(response, is_of_messages(target.path))
        except jsonschema.ValidationError as error:
            yield f"status {status}: {error.json_path}: {error.message[:300]}: {shown!r}"
        except (ValueError, AssertionError) as error:
            yield f"status {status}: {error!r}: {shown!r}"

    def _operation(self, target: Target) -> dict[str, Any]:
        method = "get" if target.method == "HEAD" else target.method.lower()
        operation: dict[str, Any] = self._paths[target.path].get(method, {})
        return operation

    def _check_error(self, response: Response, is_message: bool) -> None:
        body = strict_json(response.body)
        if isinstance(body["error"], str):  # of Ollama's API
            self._validators["OllamaError"].validate(body)
        elif is_message and "type" in body:  # a request whose head is wrong has no path
            self._validators["MessageError"].validate(body)
            assert body["error"]["message"].strip(), "the error has no message"
        else:
            self._check_error_body(body)
        assert response.headers["content-type"] == "application/json"
        retryable = response.status in RETRYABLE
        assert ("retry-after" in response.headers) == retryable
        assert (response.headers.get("x-should-retry") == "false") != retryable

    def _check_error_body(self, body: Any) -> None:
        self._validators["Error"].validate(body)
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert body["error"]["message"].strip(), "the error has no message"

    def _check_answer(self, response: Response, target: Target, operation: dict[str, Any]) -> None:
        if response.media == "text/html":  # a damaged request line may name /, which is the page
            return
        content = operation["responses"]["200"]["content"]
        assert response.media in content, f"content-type {response.media} is not declared"
        if response.media == "application/json":
            name = content[response.media]["schema"]["$ref"].rpartition("/")[2]
            self._validators[name].validate(strict_json(response.body))
        elif response.media == "text/event-stream":
            text = response.body.decode()
            if target.path in EVENTS:
                self._check_named_events(text, EVENTS[target.path])
            elif target.path in NATIVE:
                events = [strict_json(each.removeprefix("data: ")) for each in text.split("\n\n") if each]
                assert all("stop" in each or "error" in each for each in events)
            else:
                self._check_events(text, CHUNKS[target.path])
        elif response.media == "application/x-ndjson":
            *lines, rest = response.body.decode().split("\n")
            assert not rest, "the last line has no end"
            for line in lines:
                value = strict_json(line)
                assert {"index", "error", "done"} & value.keys()
        else:
            response.body.decode()

    def _check_events(self, text: str, schema: str) -> None:
        *events, rest = text.split("\n\n")
        assert not rest, "the last event has no end"
        *chunks, last = [event for event in events if not event.startswith(":")]
        assert all(event.startswith("data: ") for event in (*chunks, last)), "an event has no data"
        if last != "data: [DONE]":
            self._check_error_body(strict_json(last[6:]))
        for chunk in chunks:
            self._validators[schema].validate(strict_json(chunk[6:]))

    def _check_named_events(self, text: str, schema: str) -> None:
        *events, rest = text.split("\n\n")
        assert not rest, "the last event has no end"
        for event in events:
            name, data = event.split("\n")
            value = strict_json(data.removeprefix("data: "))
            assert name == f"event: {value['type']}"
            self._validators["MessageError" if name == "event: error" else schema].validate(value)


async def request(port: int, method: str, path: str, body: Any = None) -> Response:
    """Return the response to a request of its own connection."""
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
    sent = f"{head}content-type: application/json\r\n\r\n".encode() + data
    loop = asyncio.get_running_loop()
    while True:
        started = loop.time()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        try:
            writer.write(sent)
            response = await read_response(reader)
        finally:
            writer.close()
        # On a busy machine the server may be right not to wait for the request.
        is_late = loop.time() - started > SLOW_S
        if is_late and (response is None or response.status == 408):
            continue
        assert response is not None, f"{method} {path} has no response"
        return response


class Bystander:
    """Asks for the same completions again and again, whole or streamed, greedy or sampled."""

    def __init__(self, port: int) -> None:
        self._port, self._num_asked = port, 0
        self._wanted = dict[tuple[str, float], list[int]]()

    @classmethod
    async def of(cls, port: int) -> Bystander:
        """Return a bystander, which knows the tokens of an undisturbed server."""
        bystander = cls(port)
        for prompt in PROMPTS:
            for temperature in (0.0, 1.0):
                found = await bystander._complete(prompt, temperature, stream=False)
                bystander._wanted[prompt, temperature] = found
        return bystander

    async def ask(self) -> str | None:
        """Ask for a completion. Return what is wrong with it."""
        asked = [*self._wanted][self._num_asked % len(self._wanted)]
        self._num_asked += 1
        try:
            found = await self._complete(*asked, stream=self._num_asked % 4 < 2)
        except Exception as error:
            return f"another request fails: {error!r}"
        if found != self._wanted[asked]:
            return f"another request gets other tokens: {found} in place of {self._wanted[asked]}"
        return None

    async def _complete(self, prompt: str, temperature: float, *, stream: bool) -> list[int]:
        body = {"prompt": prompt, "temperature": temperature, "stream": stream, **_BYSTANDING}
        response = await request(self._port, "POST", COMPLETIONS, body)
        assert response.status == 200, response.body
        if not stream:
            choices = strict_json(response.body)["choices"]
        else:
            *events, done, rest = response.body.decode().split("\n\n")
            assert (done, rest) == ("data: [DONE]", ""), response.body
            choices = [choice for event in events for choice in strict_json(event[6:])["choices"]]
        return [token_id for choice in choices for token_id in choice.get("token_ids", ())]

    async def state_at_the_end(self) -> list[str]:
        """Wait until the server is idle. Return what is left of requests."""
        if finding := await self.ask():
            return [finding]
        for _ in range(1200):
            left = await self._left()
            if not left:
                return []
            await asyncio.sleep(0.1)
        return [f"left at the end: {left}"]

    async def _left(self) -> list[str]:
        metrics = (await request(self._port, "GET", "/metrics")).body.decode()
        lines = [line for line in metrics.splitlines() if _LEFT.match(line)]
        assert len(lines) >= 4, "the metrics have other names"
        # The request for the metrics is in progress itself.
        return [line for line in lines if float(line.split()[-1]) and 'route="/metrics"' not in line]
