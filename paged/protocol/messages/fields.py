"""The fields of bodies of /v1/messages, and of their blocks."""

from __future__ import annotations

import re

from ...base.fields import Field, FieldTable, ObjectOf, Tagged, ignored, refused
from ...base.json_kinds import Choice, JSONObject, ListOf, OneOf, Text
from ...base.kinds import Boolean, Integer
from ...chat.tools import MAX_TOOLS
from ..fields.builtin_tools import FunctionOrBuiltin
from ..fields.common import COMMON_FIELDS, INCLUDE_REASONING, NO_THINKING_FIELD, TEMPLATE_KWARGS
from ..fields.images import MEDIA_TYPES, ImageURL
from ..fields.sampling import TOKEN_FIELDS
from ..fields.tools import LONG_FUNCTION_NAME, ArgumentsSchema
from ..limits import MAX_MESSAGES, MAX_NAME_LENGTH, MAX_STOP_STRINGS

BILLING_HEADER = "x-anthropic-billing-header:"  # of a text for the hosted API, not for the model
_CACHED = [*ignored("cache_control", "prefixes are always cached")]
_DIRECT = [*refused("caller", "only the model calls functions", {"type": "direct"})]


def _type(name: str) -> Field:
    return Field("type", Choice((name,)), "what it is", required=True)


TEXT_BLOCK = FieldTable(
    "a block",
    [
        _type("text"),
        Field("text", Text(), "the text", required=True),
        *_CACHED,
        *ignored("citations", "they are not shown to the model"),
    ],
)
_TEXTS = OneOf((Text(), ListOf(Tagged("type", {"text": TEXT_BLOCK}))))
REFERENCE_BLOCK = FieldTable(
    "a block",
    [
        _type("tool_reference"),
        Field("tool_name", Text(1), "a tool that was found, which tools shows", required=True),
        *_CACHED,
    ],
)
_SOURCES = {
    "base64": FieldTable(
        "a source",
        [
            _type("base64"),
            Field("media_type", Choice(MEDIA_TYPES), "the format of the file", required=True),
            Field("data", Text(1), "the file in base64", required=True),
        ],
    ),
    "url": FieldTable("a source", [_type("url"), Field("url", ImageURL(), "the image", required=True)]),
}
IMAGE_BLOCK = FieldTable(
    "a block",
    [_type("image"), Field("source", Tagged("type", _SOURCES), "the image", required=True), *_CACHED],
)
_RESULT_BLOCKS = {"text": TEXT_BLOCK, "image": IMAGE_BLOCK, "tool_reference": REFERENCE_BLOCK}
_RESULTS = OneOf((Text(), ListOf(Tagged("type", _RESULT_BLOCKS))))
RESULT_BLOCK = FieldTable(
    "a block",
    [
        _type("tool_result"),
        Field("tool_use_id", Text(1), "the call that it answers", required=True),
        Field("content", _RESULTS, "text, or blocks of text, images and names of tools"),
        *_CACHED,
        *ignored("is_error", "the content says so"),
        *refused("toolset_name", "functions are in no set"),
    ],
)
USE_BLOCK = FieldTable(
    "a block",
    [
        _type("tool_use"),
        Field("id", Text(1), "what the tool_use_id of its result repeats", required=True),
        Field("name", Text(1), "the function", required=True),
        Field("input", JSONObject('{"city": "Paris"}'), "its arguments", required=True),
        *_CACHED,
        *_DIRECT,
        *refused("toolset_name", "functions are in no set"),
    ],
)
THINKING_BLOCK = FieldTable(
    "a block",
    [
        _type("thinking"),
        Field("thinking", Text(), "the assistant's reasoning", required=True),
        *ignored("signature", "reasoning is not signed"),
    ],
)
REDACTED_BLOCK = FieldTable(
    "a block", [_type("redacted_thinking"), *ignored("data", "only its server can read it")]
)
USER_BLOCKS = {"text": TEXT_BLOCK, "image": IMAGE_BLOCK, "tool_result": RESULT_BLOCK}
ASSISTANT_BLOCKS = {
    "text": TEXT_BLOCK,
    "tool_use": USE_BLOCK,
    "thinking": THINKING_BLOCK,
    "redacted_thinking": REDACTED_BLOCK,
}


def _message(role: str, blocks: dict[str, FieldTable]) -> FieldTable:
    content = OneOf((Text(), ListOf(Tagged("type", blocks))))
    return FieldTable(
        "a message",
        [
            Field("role", Choice((role,)), "whose it is", required=True),
            Field("content", content, f"text, or blocks of type {', '.join(blocks)}", required=True),
        ],
    )


MESSAGES_BY_ROLE = {
    "user": _message("user", USER_BLOCKS),
    "assistant": _message("assistant", ASSISTANT_BLOCKS),
    "system": _message("system", {"text": TEXT_BLOCK}),
}
CUSTOM_TOOL = FieldTable(
    "a tool",
    [
        Field("type", Choice(("custom",)), "what it is; may be left out"),
        Field("name", LONG_FUNCTION_NAME, "the name of the function", required=True),
        Field("description", Text(), "what it does, for the model"),
        Field("input_schema", ArgumentsSchema(), "the schema of its arguments", required=True),
        Field("strict", Boolean(), "demand arguments that match the schema also where the model chooses"),
        *_CACHED,
        *ignored("input_examples", "they are not shown to the model"),
        *ignored("eager_input_streaming", "arguments are always streamed as they come"),
        *ignored("allowed_callers", "only the model calls functions"),
        *ignored("defer_loading", "all tools are shown from the beginning"),
    ],
)
MESSAGE_BUILTINS = re.compile(r"[a-z0-9_]{1,64}_20\d{6}|tool_search_tool_(bm25|regex)|mcp_toolset")
_SINGLE = Field("disable_parallel_tool_use", Boolean(), "at most one call")
TOOL_CHOICES = {
    "auto": FieldTable("tool_choice", [_type("auto"), _SINGLE]),
    "any": FieldTable("tool_choice", [_type("any"), _SINGLE]),
    "none": FieldTable("tool_choice", [_type("none")]),
    "tool": FieldTable(
        "tool_choice",
        [_type("tool"), Field("name", LONG_FUNCTION_NAME, "the function", required=True), _SINGLE],
    ),
}
_DISPLAY = Field(
    "display", Choice(("summarized", "updates", "omitted")), '"omitted" leaves the text of thinking out'
)
_UNBOUND = [*ignored("block_binding", "thinking of any conversation is accepted")]
THINKING_KINDS = {
    "enabled": FieldTable(
        "thinking",
        [
            _type("enabled"),
            _DISPLAY,
            *_UNBOUND,
            *ignored("budget_tokens", "thinking ends with max_tokens alone"),
        ],
    ),
    "adaptive": FieldTable("thinking", [_type("adaptive"), _DISPLAY, *_UNBOUND]),
    "disabled": FieldTable("thinking", [_type("disabled")]),
}
OUTPUT_TABLE = FieldTable(
    "output_config",
    [
        Field(
            "effort",
            Choice(("low", "medium", "high", "xhigh", "max")),
            "the variable reasoning_effort of the template",
        ),
        Field(
            "format",
            ObjectOf(
                FieldTable(
                    "output_config.format",
                    [
                        _type("json_schema"),
                        Field("schema", JSONObject('{"type": "object"}'), "of the answer", required=True),
                    ],
                )
            ),
            "the form of the answer",
        ),
        *ignored("task_budget", "it is not shown to the model"),
    ],
)
METADATA_TABLE = FieldTable(
    "metadata",
    [Field("user_id", Text(longest=MAX_NAME_LENGTH), "the tenant, as user is")],
)
# In both bodies: what makes the prompt.
_PROMPT_FIELDS = [
    Field(
        "messages",
        ListOf(Tagged("role", MESSAGES_BY_ROLE), 1, MAX_MESSAGES),
        "the conversation, whose consecutive messages of one role are one turn; an assistant's message at "
        "its end is continued",
        required=True,
    ),
    Field(
        "system",
        _TEXTS,
        f"the system message; a block that begins with {BILLING_HEADER} is left out, as it differs from "
        "conversation to conversation and would keep them from sharing a prefix",
    ),
    Field(
        "tools",
        ListOf(FunctionOrBuiltin(CUSTOM_TOOL, "custom", True, MESSAGE_BUILTINS), longest=MAX_TOOLS),
        "functions to call; built-in tools are refused, or left out with --ignore-builtin-tools",
    ),
    Field(
        "tool_choice",
        Tagged("type", TOOL_CHOICES),
        'whether tools are called; "auto", the default, is turned off by --no-auto-tool-choice',
    ),
    Field(
        "thinking",
        Tagged("type", THINKING_KINDS),
        "the variable enable_thinking of the template; disabled also leaves thinking out of the answer",
    ),
    Field("output_config", ObjectOf(OUTPUT_TABLE), "the form of the answer, and how much to think"),
    TEMPLATE_KWARGS,
    *NO_THINKING_FIELD,
    *_CACHED,
    *ignored("speed inference_geo user_profile_id workspace_id", "all requests are served alike"),
    *ignored("context_management", "the conversation is used as it is sent"),
    *ignored("billing_policy", "it belongs to a hosted API"),
    *refused("mcp_servers", "the caller's own tools can call them", []),
    *refused("compaction thread", "conversations are stored nowhere: send all messages"),
    *refused("output_format", 'its place is output_config: {"format": ...}'),
]
MESSAGES_TABLE = FieldTable(
    "/v1/messages",
    [
        *_PROMPT_FIELDS,
        Field("max_tokens", Integer(1), "most tokens to generate", required=True),
        *COMMON_FIELDS,
        *TOKEN_FIELDS,
        Field("stop_sequences", ListOf(Text(1), longest=MAX_STOP_STRINGS), "texts that end the answer"),
        Field("metadata", ObjectOf(METADATA_TABLE), "whose request it is"),
        INCLUDE_REASONING,
        Field("stream", Boolean(), "send the answer as server-sent events while it is generated"),
        *ignored("service_tier", "all requests are served alike; see priority"),
        *ignored("diagnostics fallbacks fallback_credit_token", "they belong to a hosted API"),
        *refused("container", "no code runs here"),
        *refused("stop", "its name is stop_sequences"),
        *refused("n", "a message is one answer", 1),
    ],
)
COUNT_TABLE = FieldTable("/v1/messages/count_tokens", [*_PROMPT_FIELDS, *COMMON_FIELDS])
