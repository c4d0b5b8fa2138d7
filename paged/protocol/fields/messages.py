"""The messages of a conversation."""

from __future__ import annotations

from ...base.errors import RequestError
from ...base.fields import Field, FieldTable, ObjectOf, refused
from ...base.json_kinds import Choice, JSONObject, ListOf, OneOf, Text
from ...base.kinds import Kind, Schema
from ...base.validation import shown
from ..limits import MAX_MESSAGES

ROLES = ("system", "developer", "user", "assistant", "tool")


class _Role(Text):
    """A role: any text, but the schema lists the roles that all templates know."""

    def schema(self) -> Schema:
        return {"type": "string", "enum": [*ROLES]}


class _PartKind(JSONObject):
    """A part of a message's content: text, or an image, which is read once the model is known."""

    def parse(self, name: str, value: object) -> dict[str, object]:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(value, dict) or not isinstance(kind, str):
            example = '{"type": "text", "text": ...}'
            raise RequestError(f"{name} must be an object such as {example}, got {shown(value)}")
        if kind == "image_url":
            from ...text.chat_images import check_image_url

            check_image_url(name, value)
            return value
        if kind not in ("text", "refusal"):
            raise RequestError(
                f"{name} is of type {shown(kind)}; parts of type 'text' and 'image_url' are supported"
            )
        if not isinstance(value.get(kind), str):
            raise RequestError(f"{name}.{kind} must be a string, got {shown(value.get(kind))}")
        return value if kind == "text" else {"type": "text", "text": value[kind]}

    def schema(self) -> Schema:
        text = {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
            "required": ["type", "text"],
        }
        url = {"type": "string", "pattern": "^(data|https):"}
        detail = {"enum": ["auto", "low", "high", "original"]}
        image_url = {"type": "object", "properties": {"url": url, "detail": detail}, "required": ["url"]}
        image = {
            "type": "object",
            "properties": {"type": {"const": "image_url"}, "image_url": image_url},
            "required": ["type", "image_url"],
        }
        return {"anyOf": [text, image]}

    def __str__(self) -> str:
        return "text or image_url part"


_ARGUMENTS = OneOf((Text(), JSONObject('{"city": "Paris"}')))
CALLED_TABLE = FieldTable(
    "a called function",
    [
        Field("name", Text(1), "its name", required=True),
        Field("arguments", _ARGUMENTS, "its arguments, as text or parsed"),
    ],
    is_open=True,
)
CALL_TABLE = FieldTable(
    "a call",
    [
        Field("id", Text(), "what the tool_call_id of its answer repeats"),
        Field("type", Choice(("function",)), "what is called"),
        Field("function", ObjectOf(CALLED_TABLE), "the function, and with what it was called"),
    ],
    is_open=True,
)
_NO_MEDIA = "models see text and images alone"
CONTENT: Kind = OneOf((Text(), ListOf(_PartKind())))
MESSAGE_TABLE = FieldTable(
    "a message",
    [
        Field("role", _Role(1), f"{', '.join(ROLES)}, or a role that the chat template names", required=True),
        Field("content", CONTENT, "text, or parts of type text and image_url"),
        Field("name", Text(), "a name, for templates that show it"),
        Field("tool_calls", ListOf(ObjectOf(CALL_TABLE)), "calls that the assistant made"),
        Field("tool_call_id", Text(), "the call that a tool's message answers"),
        Field("reasoning", Text(), "the assistant's reasoning"),
        Field("reasoning_content", Text(), "another name of reasoning"),
        *refused("audio", _NO_MEDIA),
        *refused("function_call", "its name is tool_calls"),
    ],
    is_open=True,  # a template may know more
)


MESSAGES = Field(
    "messages",
    ListOf(ObjectOf(MESSAGE_TABLE), 1, MAX_MESSAGES),
    "the conversation; other fields of a message are passed to the chat template",
    required=True,
)
