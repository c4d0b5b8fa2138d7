"""OpenAI's Responses: answers, and those that are stored or in progress."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

from ...engine.async_base import RequestStream
from ...protocol.calls.call import AnswerCall
from ...protocol.endpoints import DELETE_RESPONSE, GET_RESPONSE, POST_CANCEL
from ...protocol.responses.call import ResponseCall
from ...protocol.responses.events import response_of_item
from ..http.exchange import Exchange, encode_json
from ..http.failures import HttpError
from ..responses import ResponseInProgress, ResponseKey, Responses, StoredResponse
from ..telemetry.records import RequestRecord
from .generation import AnswerRoute
from .readers import OnOutput


def _key(exchange: Exchange, response_id: str) -> ResponseKey:
    owner = exchange.owner or ""
    return ResponseKey(owner, response_id)


class ResponsesFront(Protocol):
    """What the routes of stored responses need; see `FrontEnd`."""

    @property
    def responses(self) -> Responses:
        """The stored responses, and those in progress."""

    async def end_record(self, record: RequestRecord) -> None:
        """Abort a request, which then gets an error."""


def _absent(front: ResponsesFront, what: str, param: str | None = None) -> HttpError:
    stores = front.responses.max_bytes
    why = "it may have left the memory of" if stores else "this server stores none without"
    return HttpError(
        404,
        f"there is no {what} here: {why} --response-store",
        param=param,
        code="not_found",
    )


def _without_output(response: ResponseInProgress, status: str) -> dict[str, Any]:
    """Return a response in progress: its output is what its own client gets."""
    return response.call.chunks(response.identity, response.created, response.record.model).response(status)


class ResponsesRoute(AnswerRoute):
    """Generates responses, whole or streamed. A response may continue a stored response."""

    def take(self, exchange: Exchange, call: AnswerCall) -> None:
        """Add the stored responses that a call needs. Raises HttpError if one does not exist."""
        assert isinstance(call, ResponseCall)
        if not call.needs_stored:
            return
        earlier = call.previous_response_id
        messages: list[dict[str, Any]] = []
        if earlier is not None:
            what = f"response {earlier!r}"
            messages = json.loads(self._find(exchange, earlier, what, "previous_response_id").messages)
        call.go_on(messages, self._referred(exchange, call.references))

    def _find(self, exchange: Exchange, response_id: str, what: str, param: str) -> StoredResponse:
        """Return a stored response. Raises HttpError, which says what is absent, and names its field."""
        found = self._front.responses.find(_key(exchange, response_id))
        if found is None:
            raise _absent(self._front, what, param)
        return found

    def _referred(self, exchange: Exchange, references: Mapping[int, str]) -> dict[int, dict[str, Any]]:
        """Return the items of stored responses that an input refers to, by their place in it.

        Raises HttpError for an item that is not stored.
        """
        outputs: dict[str, dict[str, Any]] = {}  # the items of each response, by their ids
        found = {}
        for i, item_id in references.items():
            param = f"input[{i}].id"
            response_id = response_of_item(item_id)
            if response_id not in outputs:
                stored = self._find(exchange, response_id, f"item {item_id!r}", param)
                body = json.loads(stored.body)
                outputs[response_id] = {item["id"]: item for item in body["output"]}
            if item_id not in outputs[response_id]:
                raise _absent(self._front, f"item {item_id!r}", param)
            found[i] = outputs[response_id][item_id]
        return found

    def answering(
        self, exchange: Exchange, call: AnswerCall, identity: str, created: int
    ) -> AbstractContextManager[None]:
        """Return a context in which the response can be cancelled."""
        assert isinstance(call, ResponseCall)
        assert exchange.record is not None, "_begin() has opened it"
        responses = self._front.responses
        key = _key(exchange, call.response_id(identity))
        if call.wants_store and responses.max_bytes:
            call.keep = partial(responses.store, key)
        return responses.in_progress(key, ResponseInProgress(call, exchange.record, identity, created))

    async def _answered(
        self,
        exchange: Exchange,
        call: AnswerCall,
        streams: Sequence[RequestStream],
        terms: tuple[str, int, str],
        on_output: OnOutput,
    ) -> bytes | None:
        """Return the whole response, or send it as a stream.

        A cancelled response is an answer: an error would have the client send its request again.
        """
        assert isinstance(call, ResponseCall)
        try:
            return await super()._answered(exchange, call, streams, terms, on_output)
        except HttpError:
            if not call.is_cancelled:
                raise
        if call.stream:  # of which nothing was sent
            raise HttpError(400, "the response was cancelled before it began", code="cancelled")
        return encode_json(call.chunks(*terms).response("cancelled"))


async def get_response(front: ResponsesFront, exchange: Exchange) -> None:
    """Return a stored response or a response in progress."""
    response_id = exchange.take_parameter(GET_RESPONSE)
    if exchange.query.get("stream") == "true":
        raise HttpError(
            400,
            "stream is not supported here: a stored response has ended, ask for it without",
            param="stream",
        )
    key = _key(exchange, response_id)
    response = front.responses.find_in_progress(key)
    if response is not None:
        await exchange.respond_json(200, _without_output(response, "in_progress"))
        return
    found = front.responses.find(key)
    if found is None:
        raise _absent(front, f"response {response_id!r}")
    await exchange.respond(200, found.body)


async def delete_response(front: ResponsesFront, exchange: Exchange) -> None:
    """Remove a stored response."""
    response_id = exchange.take_parameter(DELETE_RESPONSE)
    if not front.responses.forget(_key(exchange, response_id)):
        raise _absent(front, f"response {response_id!r}")
    body: dict[str, Any] = {"id": response_id, "object": "response", "deleted": True}
    await exchange.respond_json(200, body)


async def cancel_response(front: ResponsesFront, exchange: Exchange) -> None:
    """Cancel a response in progress. A stored response that has ended is returned unchanged."""
    response_id = exchange.take_parameter(POST_CANCEL)
    key = _key(exchange, response_id)
    response = front.responses.find_in_progress(key)
    if response is not None:
        response.call.is_cancelled = True
        await front.end_record(response.record)
        await exchange.respond_json(200, _without_output(response, "cancelled"))
        return
    found = front.responses.find(key)
    if found is None:
        raise _absent(front, f"response {response_id!r}")
    await exchange.respond(200, found.body)
