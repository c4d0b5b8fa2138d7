"""The fields of a body of /v1/responses, and of its items."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ...base.errors import RequestError
from ...base.fields import Field, FieldTable, ObjectOf, Tagged, ignored, refused
from ...base.json_kinds import Choice, JSONObject, ListOf, OneOf, Text, named_parts
from ...base.kinds import Boolean, Integer, Kind, Schema
from ...base.validation import shown
from ...chat.tools import MAX_TOOLS
from ..fields.builtin_tools import FunctionOrBuiltin
from ..fields.common import COMMON_FIELDS, EFFORTS, INCLUDE_REASONING, NO_THINKING_FIELD, TEMPLATE_KWARGS
from ..fields.images import DETAIL, ImageURL
from ..fields.sampling import TOKEN_FIELDS, sampling_field
from ..fields.tools import LONG_FUNCTION_NAME, ArgumentsSchema
from ..limits import MAX_MESSAGES, MAX_TOP_LOGPROBS

MAX_METADATA = 16  # entries
_OF_OUTPUTS = "outputs have it; it is not shown to the model"
_OF_CLIENTS = "clients that parse outputs add it"
_TEXT_FIELD = Field("text", Text(), "the text", required=True)


def _type(name: str) -> Field:
    return Field("type", Choice((name,)), "what it is", required=True)


_INPUT_TEXT = FieldTable(
    "a part", [_type("input_text"), _TEXT_FIELD, *ignored("prompt_cache_breakpoint", "prefixes are cached")]
)
_INPUT_IMAGE = FieldTable(
    "a part",
    [
        _type("input_image"),
        Field("image_url", ImageURL(), "the image", required=True),
        Field("detail", DETAIL, "has no effect: an image is shown as the model's processor does"),
        *refused("file_id", "there are no uploaded files"),
        *ignored("prompt_cache_breakpoint", "prefixes are cached"),
    ],
)
_PARTS = {
    "input_text": _INPUT_TEXT,
    "input_image": _INPUT_IMAGE,
    "output_text": FieldTable(
        "a part",
        [
            _type("output_text"),
            _TEXT_FIELD,
            *ignored("annotations logprobs", _OF_OUTPUTS),
            *ignored("parsed", _OF_CLIENTS),
        ],
    ),
    "refusal": FieldTable("a part", [_type("refusal"), Field("refusal", Text(), "the text", required=True)]),
}
MESSAGE_ITEM = FieldTable(
    "an item",
    [
        Field("type", Choice(("message",)), "what it is; may be left out"),
        Field("role", Choice(("user", "assistant", "system", "developer")), "whose it is", required=True),
        Field(
            "content",
            OneOf((Text(), ListOf(Tagged("type", _PARTS)))),
            "text, or parts of text and images",
            required=True,
        ),
        *ignored("id status phase", _OF_OUTPUTS),
    ],
)
CALL_ITEM = FieldTable(
    "an item",
    [
        _type("function_call"),
        Field("call_id", Text(1), "what the call_id of its output repeats", required=True),
        Field("name", Text(1), "the function", required=True),
        Field("arguments", Text(), "its arguments as JSON", required=True),
        *ignored("id status", _OF_OUTPUTS),
        *ignored("parsed_arguments", _OF_CLIENTS),
        *refused("async", "calls are answered one after the other", False),
        *refused("namespace", "functions have none"),
        *refused("caller", "only the model calls functions", {"type": "direct"}),
    ],
)
OUTPUT_ITEM = FieldTable(
    "an item",
    [
        _type("function_call_output"),
        Field("call_id", Text(1), "the call that it answers", required=True),
        Field(
            "output",
            OneOf((Text(), ListOf(Tagged("type", {"input_text": _INPUT_TEXT, "input_image": _INPUT_IMAGE})))),
            "text, or parts of text and images",
            required=True,
        ),
        *ignored("id status name", _OF_OUTPUTS),
        *refused("namespace", "functions have none"),
        *refused("caller", "only the model calls functions", {"type": "direct"}),
    ],
)


def _text_parts(kind: str) -> Kind:
    return ListOf(Tagged("type", {kind: FieldTable("a part", [_type(kind), _TEXT_FIELD])}))


REASONING_ITEM = FieldTable(
    "an item",
    [
        _type("reasoning"),
        Field("content", _text_parts("reasoning_text"), "the assistant's reasoning"),
        Field("summary", _text_parts("summary_text"), "stands for the reasoning where there is no content"),
        *ignored("id status", _OF_OUTPUTS),
        *ignored("encrypted_content", "reasoning is sent as content"),
    ],
)
REFERENCE_ITEM = FieldTable(
    "an item",
    [
        Field("type", Choice(("item_reference",)), "what it is; may be left out"),
        Field("id", Text(1, 256), "of an item of a stored response, which it stands for", required=True),
    ],
)
ITEMS = {
    "message": MESSAGE_ITEM,
    "function_call": CALL_ITEM,
    "function_call_output": OUTPUT_ITEM,
    "reasoning": REASONING_ITEM,
    "item_reference": REFERENCE_ITEM,
}


class _Item(Tagged):
    """An item. A message and a reference may come without their type."""

    def parts(self, name: str, value: Any) -> tuple[dict[str, Any], list[str]]:
        if isinstance(value, Mapping) and value.get("type") is None:
            if "role" in value:
                value = {**value, "type": "message"}
            elif "id" in value:
                value = {**value, "type": "item_reference"}
        return super().parts(name, value)

    def schema(self) -> Schema:
        untyped = [MESSAGE_ITEM.schema(), REFERENCE_ITEM.schema()]
        return {"anyOf": [*untyped, *super().schema()["anyOf"]]}


FUNCTION_TOOL = FieldTable(
    "a tool",
    [
        _type("function"),
        Field("name", LONG_FUNCTION_NAME, "the name of the function", required=True),
        Field("description", Text(), "what it does, for the model"),
        Field("parameters", ArgumentsSchema(), "the schema of its arguments; by default it has none"),
        Field("strict", Boolean(), "demand arguments that match the schema also where the model chooses"),
        *ignored("output_schema", "it is not shown to the model"),
        *ignored("allowed_callers", "only the model calls functions"),
        *refused("defer_loading async", "all tools are shown, and the caller waits for none", False),
    ],
)
RESPONSE_BUILTINS = re.compile(
    r"(web_search|file_search|computer|code_interpreter|image_generation|mcp|custom|namespace|tool_search"
    r"|local_shell|shell|apply_patch|programmatic_tool_calling)[a-z0-9_]{0,64}"
)
_NAMED = Field("name", LONG_FUNCTION_NAME, "the function", required=True)
RESPONSE_CHOICES = {
    "function": FieldTable("tool_choice", [_type("function"), _NAMED]),
    "allowed_tools": FieldTable(
        "tool_choice",
        [
            _type("allowed_tools"),
            Field("mode", Choice(("auto", "required")), "whether one of them must be called", required=True),
            Field(
                "tools",
                ListOf(ObjectOf(FieldTable("a named tool", [_type("function"), _NAMED])), 1, MAX_TOOLS),
                "the tools that may be called",
                required=True,
            ),
        ],
    ),
}
_UNSEEN = "it is not shown to the model"
TEXT_FORMATS = {
    "text": FieldTable("text.format", [_type("text")]),
    "json_object": FieldTable("text.format", [_type("json_object")]),
    "json_schema": FieldTable(
        "text.format",
        [
            _type("json_schema"),
            Field("schema", JSONObject('{"type": "object"}'), "the JSON schema of the answer", required=True),
            *ignored("name description", _UNSEEN),
            *ignored("strict", "the answer always matches the schema, also with false"),
        ],
    ),
}
TEXT_TABLE = FieldTable(
    "text",
    [
        Field("format", Tagged("type", TEXT_FORMATS), "the form of the answer"),
        *ignored("verbosity", "ask for it in a message"),
    ],
)
REASONING_TABLE = FieldTable(
    "reasoning",
    [
        Field("effort", EFFORTS, "the variable reasoning_effort of the template"),
        *ignored("summary generate_summary", "the reasoning itself is returned"),
        *ignored("context mode", "the template says what it shows"),
    ],
)
TEXT_LOGPROBS = "message.output_text.logprobs"
_NO_EFFECT = "reasoning is returned as text, and no other output has such a part"
_INCLUDABLE = (
    TEXT_LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


class _Includable(Choice):
    """A part of an output that `include` may ask for; only log-probabilities are returned."""

    def parts(self, name: str, value: Any) -> tuple[str, list[str]]:
        found, _ = named_parts(Choice(self.values), name, value)
        return found, [] if found == TEXT_LOGPROBS else [name]


@dataclass(frozen=True, slots=True)
class ResponseMetadata(Kind):
    """An object of a few names and texts."""

    types: ClassVar[tuple[type, ...]] = (dict,)

    def parse(self, name: str, value: Any) -> dict[str, str]:
        if not isinstance(value, Mapping) or len(value) > MAX_METADATA:
            raise RequestError(
                f"{name} must be an object of at most {MAX_METADATA} texts, got {shown(value)}"
            )
        found = {}
        for key, text in value.items():
            Text(longest=64).parse(f"{name}'s key", key)
            found[key], _ = named_parts(Text(longest=512), f"{name}.{key}", text)
        return found

    def schema(self) -> Schema:
        names = {"type": "string", "maxLength": 64}
        texts = {"type": "string", "maxLength": 512}
        return {
            "type": "object",
            "maxProperties": MAX_METADATA,
            "propertyNames": names,
            "additionalProperties": texts,
        }

    def __str__(self) -> str:
        return f"object of at most {MAX_METADATA} texts"


STREAM_TABLE = FieldTable("stream_options", [*ignored("include_obfuscation", "events are not padded")])
RESPONSE_TABLE = FieldTable(
    "/v1/responses",
    [
        Field(
            "input",
            OneOf((Text(), ListOf(_Item("type", ITEMS), 0, MAX_MESSAGES))),
            "a text, or the items of a conversation: messages, function calls, their outputs and reasoning",
            required=True,
        ),
        Field("instructions", Text(), "the system message; those of an earlier response are not repeated"),
        *COMMON_FIELDS,
        *TOKEN_FIELDS,
        sampling_field("stop"),
        Field("max_output_tokens", Integer(1), "most tokens to generate, by default up to the context's end"),
        Field(
            "top_logprobs",
            Integer(0, MAX_TOP_LOGPROBS),
            "report the log-probability of every token, and this many most likely ones; with 0 only with "
            f'include: ["{TEXT_LOGPROBS}"]. There are none in answers that may call tools',
        ),
        Field(
            "include",
            ListOf(_Includable(_INCLUDABLE)),
            f'"{TEXT_LOGPROBS}"; others have no effect: {_NO_EFFECT}',
        ),
        Field(
            "tools",
            ListOf(FunctionOrBuiltin(FUNCTION_TOOL, "function", False, RESPONSE_BUILTINS), longest=MAX_TOOLS),
            "functions to call; built-in tools are refused, or left out with --ignore-builtin-tools",
        ),
        Field(
            "tool_choice",
            OneOf((Choice(("none", "auto", "required")), Tagged("type", RESPONSE_CHOICES))),
            'whether tools are called: "none", "auto", "required", a named function or allowed_tools; "auto" '
            "is turned off by --no-auto-tool-choice",
        ),
        Field("parallel_tool_calls", Boolean(), "whether an answer may have several calls, by default true"),
        Field("text", ObjectOf(TEXT_TABLE), "the form of the answer"),
        Field("reasoning", ObjectOf(REASONING_TABLE), "how much to reason"),
        Field("metadata", ResponseMetadata(), "is returned with the response"),
        Field(
            "store",
            Boolean(),
            "keep the response for previous_response_id, by default true; only with --response-store, else "
            "the response says false",
        ),
        Field("previous_response_id", Text(1, 256), "the stored response that the input goes on from"),
        Field(
            "truncation",
            Choice(("auto", "disabled")),
            '"auto" leaves out as few of the oldest items as makes the input and max_output_tokens (at '
            "most half the context) fit the context, but no instructions, no system messages at the "
            "beginning, not the last item, and no call without its output; by default it is an error",
        ),
        Field("stream", Boolean(), "send the answer as server-sent events while it is generated"),
        Field("stream_options", ObjectOf(STREAM_TABLE), "needs stream"),
        INCLUDE_REASONING,
        TEMPLATE_KWARGS,
        *NO_THINKING_FIELD,
        *ignored("service_tier", "all requests are served alike; see priority"),
        *ignored(
            "prompt_cache_key prompt_cache_retention prompt_cache_options", "prefixes are always cached"
        ),
        *ignored("moderation access_programs", "nothing is moderated"),
        *ignored("max_tool_calls", "it limits built-in tools, of which there are none"),
        *ignored("client_metadata", "it describes the program that asks"),
        *refused("background background_options", "send the request with stream: true instead", False),
        *refused("conversation", "it is stored nowhere: send its items, or a previous_response_id"),
        *refused("prompt", "prompts are not stored: send the text as input and instructions"),
        *refused("context_management", "items are not compacted: send fewer", []),
        *refused("image", "a message of input shows it as a part of type input_image"),
        *refused("messages", "its name is input"),
        *refused("max_tokens max_completion_tokens", "its name is max_output_tokens"),
        *refused("response_format", 'its place is text: {"format": ...}'),
        *refused("logprobs", "its place is top_logprobs and include"),
        *refused("reasoning_effort", 'its place is reasoning: {"effort": ...}'),
        *refused("n best_of", "a response has one answer", 1),
    ],
)
