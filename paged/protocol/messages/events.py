"""MessageEvents: the events of a message of Anthropic's API, the message that they build, and errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from ...chat.parts import ContentDelta, Part, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from ...requests.request import RequestOutput
from ..answers.chats import ChatForm
from ..answers.chunks import Head
from ..answers.errors import BAD_REQUEST, FAILED, NOT_FOUND, TIMED_OUT, TOO_MANY, UNAVAILABLE
from ..answers.typed_events import TypedEvents

_TYPES = {
    BAD_REQUEST: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    NOT_FOUND: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    TOO_MANY: "rate_limit_error",
    FAILED: "api_error",
    UNAVAILABLE: "overloaded_error",
    TIMED_OUT: "timeout_error",
}
_UNTHREADED = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def message_error(status: int, body: dict[str, Any], request_id: str | None = None) -> dict[str, Any]:
    """Return an error in Anthropic's format. Only its message names the wrong field.

    body: the same error in OpenAI's format.
    """
    error = body["error"]
    param = error["param"]
    message = error["message"]
    if param is not None and param not in message:
        message = f"{param}: {message}"
    # Anthropic's clients then go on without threads.
    details = {"details": _UNTHREADED} if param == "thread" else {}
    kind = _TYPES.get(status, "invalid_request_error" if status < FAILED else "api_error")
    identity = {} if request_id is None else {"request_id": request_id}
    return {"type": "error", "error": {"type": kind, "message": message, **details}, **identity}


Event = dict[str, Any]
UNSIGNED = "unsigned"  # clients leave thinking without a signature out of the next request
_SEPARATOR = re.compile(r"\s*([:,}])\s*")


class MessageEvents(TypedEvents):
    """Makes the events of a streamed message, in Anthropic's order, and from them the whole message.

    shows_thinking: whether the message includes the text of the thinking. Otherwise it only says that the
        model thinks.
    max_tokens: the request's max_tokens. An answer that is cut off earlier has filled the context.
    """

    def __init__(
        self,
        head: Head,
        form: ChatForm,
        count_tokens: Callable[[str], int],
        *,
        shows_thinking: bool,
        max_tokens: int,
    ) -> None:
        super().__init__(head, form, count_tokens)
        self._shows_thinking = shows_thinking
        self._max_tokens = max_tokens
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the block that is open
        self._open: dict[str, Any] | None = None

    def opening(self) -> list[Event]:
        """Return the event that precedes all content blocks."""
        return [{"type": "message_start", "message": self._message([], None, None)}]

    def before(self, index: int, output: RequestOutput) -> list[Event]:  # noqa: ARG002
        """Return an empty list: no further event describes the prompt."""
        return []

    def take(self, part: Part) -> list[Event]:
        """Return the events for a part of the answer."""
        match part:
            case ContentDelta(text):
                begun = self._begin_unless_open({"type": "text", "text": ""})
                return [*begun, self._delta(text, {"type": "text_delta", "text": text})]
            case ReasoningDelta(text):
                begun = self._begin_unless_open({"type": "thinking", "thinking": "", "signature": ""})
                if not self._shows_thinking:
                    return begun
                return [*begun, self._delta(text, {"type": "thinking_delta", "thinking": text})]
            case ToolCallStart(_, call_id, name):
                return self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case ToolArgumentsDelta(_, text):
                return [self._delta(text, {"type": "input_json_delta", "partial_json": text})]

    def finish(self) -> list[Event]:
        """Return the events that follow all content."""
        events = self._end_open()
        reason, sequence = self._stop()
        events.append(
            {
                "type": "message_delta",
                "delta": {"stop_reason": reason, "stop_sequence": sequence},
                "usage": self._usage(),
            }
        )
        return [*events, {"type": "message_stop"}]

    def error(self, status: int, body: dict[str, Any]) -> Event:
        """Return the event that ends the stream with an error."""
        return message_error(status, body)

    def whole(self) -> dict[str, Any]:
        """Return the whole message. Call this after `finish`."""
        return self._message(self._blocks, *self._stop())

    def _message(
        self, blocks: list[dict[str, Any]], reason: str | None, sequence: str | None
    ) -> dict[str, Any]:
        return {
            "id": self.head.id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.num_prompt - (usage.num_cached or 0),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.num_cached or 0,
            "output_tokens": usage.num_new,
            "output_tokens_details": {"thinking_tokens": usage.num_reasoning(self.count_tokens)},
        }

    def _stop(self) -> tuple[str, str | None]:
        """Return stop_reason and stop_sequence."""
        completion = self.completion
        assert completion is not None, "the answer has not ended"
        if completion.finish_reason == "length":
            is_full = self.usage.num_new < self._max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        if self.has_whole_calls:
            return "tool_use", None
        if isinstance(completion.stop_reason, str):
            return "stop_sequence", completion.stop_reason
        return "end_turn", None

    def _begin_unless_open(self, block: dict[str, Any]) -> list[Event]:
        is_open = self._open is not None and self._open["type"] == block["type"]
        return [] if is_open else self._begin(block)

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        """Begin a block. Return the events."""
        events = self._end_open()
        self._open = block
        index = len(self._blocks)
        return [*events, {"type": "content_block_start", "index": index, "content_block": {**block}}]

    def _delta(self, text: str, delta: dict[str, Any]) -> Event:
        assert self._open is not None, "a delta follows the beginning of its block"
        self._texts.append(text)
        return {"type": "content_block_delta", "index": len(self._blocks), "delta": delta}

    def _end_open(self) -> list[Event]:
        """End the open block, if there is one. Return the events."""
        block = self._open
        if block is None:
            return []
        index = len(self._blocks)
        events: list[Event] = []
        text = "".join(self._texts)
        match block["type"]:
            case "text":
                block = {**block, "text": text}
            case "thinking":
                block = {**block, "thinking": text, "signature": UNSIGNED}
                delta = {"type": "signature_delta", "signature": UNSIGNED}
                events.append({"type": "content_block_delta", "index": index, "delta": delta})
            case _:
                block = {**block, "input": whole_members(text)}
        self._blocks.append(block)
        self._texts = []
        self._open = None
        return [*events, {"type": "content_block_stop", "index": index}]


def whole_members(text: str) -> dict[str, Any]:
    """Return the JSON object in a text. If the text is cut off, return its complete members."""
    try:
        value = json.loads(text) if text else {}
    except ValueError:
        return _members(text)
    return value if isinstance(value, dict) else {}


def _members(text: str) -> dict[str, Any]:
    decoder = json.JSONDecoder()
    members: dict[str, Any] = {}
    at = len(text) - len(text.lstrip(" \t\n\r{"))
    try:
        while True:
            key, at = decoder.raw_decode(text, at)
            colon = _SEPARATOR.match(text, at)
            if colon is None or colon[1] != ":" or not isinstance(key, str):
                return members
            value, at = decoder.raw_decode(text, colon.end())
            end = _SEPARATOR.match(text, at)  # a number at the end of the text may be cut
            if end is None or end[1] == ":":
                return members
            members[key] = value
            at = end.end()
    except ValueError:
        return members
