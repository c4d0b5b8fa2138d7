"""ChatCall: a body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...base.errors import PagedError, RequestError
from ...base.fields import Field, FieldTable, ignored, refused
from ...base.kinds import Boolean, Integer
from ...requests.request import RequestOutput
from ..answers.chats import ChatChunks, ChatForm, chat_body
from ..answers.chunks import Head
from ..fields.common import (
    ADD_SPECIAL_TOKENS,
    ANSWER_FIELDS,
    INCLUDE_REASONING,
    NO_THINKING_FIELD,
    SEEING_FIELDS,
    TEMPLATE_FIELDS,
)
from ..fields.messages import MESSAGES
from ..fields.sampling import SAMPLING_FIELDS, check_most_logprobs
from ..fields.tools import TOOL_FIELDS
from ..limits import MAX_TOP_LOGPROBS, Limits
from .conversation_call import ConversationCall

CHAT_TABLE = FieldTable(
    "/v1/chat/completions",
    [
        MESSAGES,
        *SEEING_FIELDS,
        *SAMPLING_FIELDS,
        Field(
            "max_completion_tokens",
            Integer(1),
            "the newer name of max_tokens; by default up to the context's end",
        ),
        Field("logprobs", Boolean(), "report the log-probability of every token"),
        Field(
            "top_logprobs",
            Integer(0, MAX_TOP_LOGPROBS),
            "report this many most likely tokens at each position, too; needs logprobs",
        ),
        Field("return_prompt_text", Boolean(), "return the rendered conversation as prompt_text"),
        *TOOL_FIELDS,
        INCLUDE_REASONING,
        *TEMPLATE_FIELDS,
        ADD_SPECIAL_TOKENS,
        *ANSWER_FIELDS,
        *ignored("verbosity", "ask for it in a message"),
        *refused("functions function_call", "their names are tools and tool_choice"),
        *refused("modalities", "answers are text alone", ["text"]),
        *refused("audio", "answers are text alone"),
        *refused("web_search_options", "there is no web search"),
        *NO_THINKING_FIELD,
        *refused("thinking", 'its place is chat_template_kwargs: {"enable_thinking": ...}'),
        *refused("prompt", "text to complete belongs to /v1/completions"),
        *refused("echo", "prompts are repeated by /v1/completions alone; see return_prompt_text", False),
        *refused("detokenize", "an answer is text; /v1/completions takes it", True),
    ],
)


class ChatCall(ConversationCall):
    """A body of /v1/chat/completions."""

    table = CHAT_TABLE
    PROMPT_FIELD = "messages"

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        values = self.values
        sampling = self.sampling
        if "max_completion_tokens" in values:
            if "max_tokens" in values:
                raise RequestError(
                    "max_tokens is the old name of max_completion_tokens; give one of them",
                    param="max_tokens",
                )
            sampling["max_tokens"] = values["max_completion_tokens"]
        sampling.pop("logprobs", None)
        if values.get("logprobs", False):
            sampling["logprobs"] = values.get("top_logprobs", 0)
            check_most_logprobs("top_logprobs", sampling["logprobs"], limits.max_logprobs)
        elif values.get("top_logprobs", 0):
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        self.converse(values)

    def param_of(self, error: PagedError) -> str | None:
        """Return the field of the body that caused an error; None if no field did."""
        param = super().param_of(error)
        is_newer = param == "max_tokens" and "max_completion_tokens" in self.values
        return "max_completion_tokens" if is_newer else param

    def body(
        self, outputs: Sequence[RequestOutput], identity: str, created: int, model: str
    ) -> dict[str, Any]:
        """Return a chat.completion."""
        return chat_body(outputs, self._head("", identity, created, model), self._form)

    def chunks(self, identity: str, created: int, model: str) -> ChatChunks:
        """Return the maker of chunks for a streamed chat.completion."""
        return ChatChunks(self._head(".chunk", identity, created, model), self._form)

    @staticmethod
    def _head(suffix: str, identity: str, created: int, model: str) -> Head:
        return Head(f"chatcmpl-{identity}", f"chat.completion{suffix}", created, model)

    @property
    def _form(self) -> ChatForm:
        return self.new_form(
            prompt_text=self.values.get("return_prompt_text", False),
            include_reasoning=self.values.get("include_reasoning", True),
        )
