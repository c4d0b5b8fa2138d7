"""ResponseCall: a body of /v1/responses; and conversations whose oldest messages are left out to fit."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...base.errors import RequestError
from ...options.sampling_params import SamplingParams
from ...requests.request import Prompt, RequestOutput
from ..answers.chunks import Head
from ..calls.call import OwnNames
from ..calls.conversation_call import ConversationCall
from ..fields.builtin_tools import functions_of
from ..fields.sampling import check_most_logprobs
from ..limits import Limits
from .events import RESPONSE_PREFIX, ResponseEvents
from .fields import RESPONSE_TABLE, TEXT_LOGPROBS
from .items import Item, Message, messages_of, num_system, turn_of, with_instructions

if TYPE_CHECKING:
    from ...engine.model_text import ModelText


def fitting(messages: Sequence[Message], fits: Callable[[Sequence[Message]], bool]) -> Sequence[Message]:
    """Drop the oldest messages until the rest fits.

    System messages at the beginning and the last message are not dropped. A tool result is dropped together
    with its call.

    fits: returns whether messages fit. If messages fit, any subset of them must fit too.
    """
    if fits(messages):
        return messages
    num_kept = num_system(messages)
    kept = messages[:num_kept]
    cuts = [cut for cut in _cuts(messages) if cut > num_kept]
    if not cuts:
        return messages
    at = bisect_left(cuts, True, key=lambda cut: fits([*kept, *messages[cut:]]))
    return [*kept, *messages[cuts[min(at, len(cuts) - 1)] :]]  # the engine says by how much it is too long


def _cuts(messages: Sequence[Message]) -> list[int]:
    """Return where a conversation can begin: no call before has its result after."""
    results = {message["tool_call_id"] for message in messages if message["role"] == "tool"}
    waiting = set[str]()
    cuts = []
    for i, message in enumerate(messages):
        if not waiting:
            cuts.append(i)
        if message["role"] == "tool":
            waiting.discard(message["tool_call_id"])
        waiting |= results & {call["id"] for call in message.get("tool_calls", ())}
    return cuts


Keep = Callable[[dict[str, Any], Sequence[Message]], bool]


class ResponseCall(ConversationCall):
    """A body of /v1/responses.

    previous_response_id: the stored response that this one continues.
    references: the items of stored responses that the input refers to, by their index in the input.
    needs_stored: whether the conversation continues stored responses; `go_on` must then be called first.
    wants_store: whether the response should be stored, if possible.
    keep: stores the response with its conversation, and returns whether there was room; None if responses are
        not stored.
    is_cancelled: whether the client has cancelled the response.
    """

    table = RESPONSE_TABLE
    PROMPT_FIELD = "input"
    NAMES = OwnNames(
        (r"^messages(\[.*)?$", "input"),
        (r"^max_tokens$", "max_output_tokens"),
        (r"^logprobs$", "top_logprobs"),
        (r"\bresponse_format\.json_schema\.schema\b", "text.format.schema"),
        (r"\bresponse_format\b", "text.format"),
        (r"\btools\[(\d+)\]\.function\.", r"tools[\1]."),
        (r"\btool_choice\.function\.name\b", "tool_choice.name"),
        (r"\btool_choice\.allowed_tools\.tools\[(\d+)\](\.function)?", r"tool_choice.tools[\1]"),
    )

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        values = self.values
        if "logprobs" in values:
            check_most_logprobs("top_logprobs", values["logprobs"], limits.max_logprobs)
        tools, left_out = functions_of(
            values.get("tools", ()), "function", ignores_builtin=limits.ignore_builtin_tools
        )
        self.ignored += tuple(left_out)
        self._tools = tools
        self.previous_response_id: str | None = values.get("previous_response_id")
        self.wants_store: bool = values.get("store", True)
        self.keep: Keep | None = None
        self.is_cancelled = False
        self._params: SamplingParams | None = None
        self._messages: list[Message] | None = None
        given = values["input"]
        items = () if isinstance(given, str) else given
        self.references: dict[int, str] = {
            i: item["id"] for i, item in enumerate(items) if item["type"] == "item_reference"
        }
        if not self.needs_stored:
            self.go_on(())

    def read(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of the body under their common names, and the names of fields without effect."""
        values, ignored = super().read(body)
        self._format: dict[str, Any] = {"type": "text"}
        if "max_output_tokens" in values:
            values["max_tokens"] = values["max_output_tokens"]
        if values.get("top_logprobs", 0) or TEXT_LOGPROBS in values.get("include", ()):
            values["logprobs"] = values.get("top_logprobs", 0)
        if "effort" in values.get("reasoning", {}):
            values["reasoning_effort"] = values["reasoning"]["effort"]
        form = values.get("text", {}).get("format")
        if form is not None:
            is_schema = form["type"] == "json_schema"
            inner = {"json_schema": {"schema": form["schema"]}} if is_schema else {}
            values["response_format"] = {**form, **inner}
            self._format = {**body["text"]["format"]}  # as it is given: its name is returned
        # Items repeat what outputs have: a name for all.
        return values, [*dict.fromkeys(re.sub(r"\[\d+\]", "[]", name) for name in ignored)]

    @property
    def needs_stored(self) -> bool:
        """Whether the conversation continues or refers to stored responses."""
        return self.previous_response_id is not None or bool(self.references)

    def go_on(self, earlier: Sequence[Message], referred: Mapping[int, Item] = MappingProxyType({})) -> None:
        """Set the conversation as a continuation of an earlier one. Raises RequestError naming the field.

        referred: the items that the input refers to, by their index in the input.
        """
        values = self.values
        given = values["input"]
        if referred:
            given = [referred.get(i, item) for i, item in enumerate(given)]
        self._messages = messages_of(given, earlier)
        messages = self._with_instructions(self._messages)
        if not messages:
            raise RequestError("input is empty, and there are no instructions", param="input")
        self.converse({**values, "messages": messages, **_chosen(values, self._tools)})
        if "logprobs" in self.sampling and self.may_call_tools:
            raise RequestError(
                "top_logprobs and include have no log-probabilities of answers that may call tools: leave "
                "the tools out, or give tool_choice: none",
                param="top_logprobs" if "top_logprobs" in values else "include",
            )

    def prompts(self, text: ModelText) -> Sequence[Prompt]:
        """Return the rendered conversation."""
        if self._messages is None:
            param = "input" if self.previous_response_id is None else "previous_response_id"
            raise RequestError(
                f"{param} is about stored responses, of which there are none here", param=param
            )
        if self.values.get("truncation") == "auto":
            self._truncate(self._messages, text)
        return super().prompts(text)

    def _with_instructions(self, messages: Sequence[Message]) -> list[Message]:
        return with_instructions(messages, self.values.get("instructions"))

    def _truncate(self, messages: Sequence[Message], text: ModelText) -> None:
        """Leave out as few of the oldest messages as makes the rest fit the context. Raises RequestError."""
        context = self.limits.max_model_len
        tokenizer = text.tokenizer
        if context is None or tokenizer is None:
            raise RequestError(
                "truncation 'auto' needs a server that has a tokenizer: send fewer items", param="truncation"
            )
        room: int = self.values.get("max_output_tokens", 1)
        most = context - min(room, context // 2)

        known: dict[bytes, int] = {}  # the tokens of images

        def fits(cut: Sequence[Message]) -> bool:
            self.conversation.messages = self._with_instructions(cut)
            prompt = self.conversation.prompt(text)
            rendered = prompt["prompt"]
            images = prompt.get("multi_modal_data", {}).get("image", ())
            if tokenizer.least_tokens(rendered, most) or (images and len(images) > text.most_images):
                return False
            tokens = tokenizer.encode(rendered, add_special_tokens=prompt["add_special_tokens"])
            num_tokens = len(tokens)
            if images and text.images is not None and num_tokens <= most:
                num_tokens += text.images.num_tokens(images, known)
            return num_tokens <= most

        with self.naming_field(self.PROMPT_FIELD):
            self.conversation.messages = self._with_instructions(fitting(messages, fits))

    def params(self, text: ModelText, *, stream: bool | None = None) -> SamplingParams:
        """Return the sampling parameters with the model's defaults. Call `prompts` before this.

        Raises RequestError.
        """
        self._params = super().params(text, stream=stream)
        return self._params

    @staticmethod
    def response_id(identity: str) -> str:
        """Return the response's id as it appears in paths."""
        return f"{RESPONSE_PREFIX}{identity.replace('/', '_')}"

    def body(
        self, outputs: Sequence[RequestOutput], identity: str, created: int, model: str
    ) -> dict[str, Any]:
        """Return the whole response."""
        (output,) = outputs
        return self.chunks(identity, created, model).whole_of(output)

    def chunks(self, identity: str, created: int, model: str) -> ResponseEvents:
        """Return the maker of events for a streamed response."""
        head = _Head(self.response_id(identity), "response", created, model)
        return ResponseEvents(
            head,
            self.new_form(include_reasoning=self.values.get("include_reasoning", True)),
            self.count_tokens,
            terms=self._terms(),
            on_end=self._on_end,
            is_cancelled=lambda: self.is_cancelled,
        )

    def _on_end(self, response: dict[str, Any]) -> None:
        if self.keep is not None and self._messages is not None:
            response["store"] = self.keep(response, [*self._messages, *turn_of(response["output"])])

    def _terms(self) -> dict[str, Any]:
        """Return the fields of the response that repeat what was asked for."""
        values = self.values
        params = self._params
        return {
            "background": False,
            "instructions": values.get("instructions"),
            "max_output_tokens": values.get("max_output_tokens"),
            "metadata": values.get("metadata", {}),
            "parallel_tool_calls": values.get("parallel_tool_calls", True),
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": values.get("reasoning", {}).get("effort"), "summary": None},
            "store": self.keep is not None,
            "temperature": None if params is None else params.temperature,
            "text": {"format": self._format},
            "tool_choice": values.get("tool_choice", "auto"),
            "tools": [{"parameters": None, "strict": False, **tool} for tool in self._tools],
            "top_logprobs": values.get("top_logprobs", 0),
            "top_p": None if params is None else params.top_p,
            "truncation": values.get("truncation", "disabled"),
            "user": values.get("user"),
        }


class _Head(Head):
    """The first fields of a response."""

    __slots__ = ()

    def as_json(self) -> dict[str, Any]:
        """Return the fields of a body."""
        return {"id": self.id, "object": self.object, "created_at": self.created, "model": self.model}


def _chosen(values: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tools and the choice among them, in the form of a chat's."""
    chat: dict[str, Any] = {"tools": [{"type": "function", "function": _function(tool)} for tool in tools]}
    choice = values.get("tool_choice")
    if isinstance(choice, Mapping):
        chat["tool_choice"] = _choice(choice)
    return chat


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in tool.items() if name != "type"}


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    if choice["type"] == "function":
        return {"type": "function", "function": {"name": choice["name"]}}
    named = [{"type": "function", "function": {"name": tool["name"]}} for tool in choice["tools"]]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": named}}
