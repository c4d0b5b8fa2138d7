"""MessageCall and MessageCountCall: bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...base.fields import FieldTable
from ...requests.request import RequestOutput
from ..answers.chunks import Head
from ..calls.conversation import Conversation
from ..calls.conversation_call import ConversationCall, converse
from ..calls.tokens import TextCall, tokens_of
from ..limits import Limits
from .conversations import MESSAGES_NAMES, chat_of
from .events import MessageEvents
from .fields import COUNT_TABLE, MESSAGES_TABLE

if TYPE_CHECKING:
    from ...engine.model_text import ModelText


def _read(table: FieldTable, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a body, and the names of those without effect, once for all blocks."""
    values, ignored = table.parse(body)
    return values, [*dict.fromkeys(re.sub(r"\[\d+\]", "[]", name) for name in ignored)]


class MessageCall(ConversationCall):
    """A body of /v1/messages."""

    table = MESSAGES_TABLE
    PROMPT_FIELD = "messages"
    NAMES = MESSAGES_NAMES

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        self.limits = limits  # what `read` makes of tools depends on them
        super().__init__(body, limits)
        self.converse(self._chat)

    def read(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of the body under their common names, and the names of fields without effect."""
        values, ignored = _read(self.table, body)
        self._chat, left_out = chat_of(values, self.limits)
        if "stop_sequences" in values:
            values["stop"] = values["stop_sequences"]
        if "response_format" in self._chat:
            values["response_format"] = self._chat["response_format"]
        if "user_id" in values.get("metadata", {}):
            values.setdefault("user", values["metadata"]["user_id"])
        return values, [*ignored, *left_out]

    def body(
        self, outputs: Sequence[RequestOutput], identity: str, created: int, model: str
    ) -> dict[str, Any]:
        """Return the message."""
        (output,) = outputs
        return self.chunks(identity, created, model).whole_of(output)

    def chunks(self, identity: str, created: int, model: str) -> MessageEvents:
        """Return the maker of events for a streamed message."""
        thinking = self.values.get("thinking", {})
        return MessageEvents(
            Head(f"msg_{identity}", "message", created, model),
            self.new_form(
                include_reasoning=thinking.get("type") != "disabled"
                and self.values.get("include_reasoning", True)
            ),
            self.count_tokens,
            shows_thinking=thinking.get("display") != "omitted",
            max_tokens=self.values["max_tokens"],
        )


class MessageCountCall(TextCall):
    """A body of /v1/messages/count_tokens."""

    table = COUNT_TABLE
    PROMPT_FIELD = "messages"
    conversation: Conversation

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        chat, left_out = chat_of(self.values, limits)
        self.ignored += tuple(left_out)
        with MESSAGES_NAMES.in_errors():
            self.conversation, _ = converse(chat, limits)

    def read(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of the body under their common names, and the names of fields without effect."""
        return _read(self.table, body)

    def answer(self, text: ModelText, max_model_len: int) -> dict[str, Any]:
        """Return the response body. Raises RequestError."""
        with self.naming_field("messages"):
            prompt = self.conversation.prompt(text)
        return {"input_tokens": len(tokens_of(self, text, "messages", prompt, max_model_len))}
