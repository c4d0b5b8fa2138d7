"""The fields of a chat that describe tools, and which of them to call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...base.errors import RequestError
from ...base.fields import Field, FieldTable, ObjectOf, Tagged
from ...base.json_kinds import Choice, JSONObject, ListOf, OneOf, Text
from ...base.kinds import Boolean, Schema
from ...base.validation import shown
from ...chat.tools import MAX_FUNCTION_NAME, MAX_TOOLS


class FunctionName(Text):
    """The name of a function, with at most `longest` characters."""

    def parse(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(self._pattern, value):
            raise RequestError(f"{name} must be {self}, got {shown(value)}")
        return value

    @property
    def _pattern(self) -> str:
        return f"[A-Za-z0-9_-]{{{self.shortest},{self.longest}}}"

    def schema(self) -> Schema:
        return {"type": "string", "pattern": f"^{self._pattern}$"}

    def __str__(self) -> str:
        return f"{self.shortest} to {self.longest} letters, digits, underscores or hyphens"


FUNCTION_NAME = FunctionName(1, MAX_FUNCTION_NAME)
LONG_FUNCTION_NAME = FunctionName(1, 2 * MAX_FUNCTION_NAME)  # in the APIs of agents


class ArgumentsSchema(JSONObject):
    """The JSON schema of a function's arguments."""

    def parse(self, name: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping) or value.get("type", "object") != "object":
            raise RequestError(f"{name} must be a JSON schema of type object, got {shown(value)}")
        return super().parse(name, value)

    def schema(self) -> Schema:
        return {"type": "object", "properties": {"type": {"const": "object"}}}

    def __str__(self) -> str:
        return "JSON schema of type object"


_NAME_FIELD = Field("name", FUNCTION_NAME, "the name of the function", required=True)
_TYPE_FIELD = Field("type", Choice(("function",)), "what the tool is", required=True)
FUNCTION_TABLE = FieldTable(
    "a function",
    [
        _NAME_FIELD,
        Field("description", Text(), "what it does, for the model"),
        Field("parameters", ArgumentsSchema(), "the schema of its arguments; by default it has none"),
        Field("strict", Boolean(), "demand arguments that match the schema also where the model chooses"),
    ],
)
TOOL_TABLE = FieldTable(
    "a tool", [_TYPE_FIELD, Field("function", ObjectOf(FUNCTION_TABLE), "the function", required=True)]
)
TOOLS = Field("tools", ListOf(ObjectOf(TOOL_TABLE), longest=MAX_TOOLS), "functions to call")
_NAMED_FIELD = Field(
    "function", ObjectOf(FieldTable("a named function", [_NAME_FIELD])), "the function", required=True
)
_NAMED_TOOL = ObjectOf(FieldTable("a named tool", [_TYPE_FIELD, _NAMED_FIELD]))
ALLOWED_TABLE = FieldTable(
    "allowed_tools",
    [
        Field("mode", Choice(("auto", "required")), "whether one of them must be called", required=True),
        Field("tools", ListOf(_NAMED_TOOL, 1, MAX_TOOLS), "the tools that may be called", required=True),
    ],
)
CHOICE_TABLES = {
    "function": FieldTable("tool_choice", [_TYPE_FIELD, _NAMED_FIELD]),
    "allowed_tools": FieldTable(
        "tool_choice",
        [
            Field("type", Choice(("allowed_tools",)), "what the choice is", required=True),
            Field("allowed_tools", ObjectOf(ALLOWED_TABLE), "the mode and the tools", required=True),
        ],
    ),
}
TOOL_FIELDS = [
    TOOLS,
    Field(
        "tool_choice",
        OneOf((Choice(("none", "auto", "required")), Tagged("type", CHOICE_TABLES))),
        'whether tools are called: "none", "auto", "required", a named function or allowed_tools; "auto" '
        "is turned off by --no-auto-tool-choice",
    ),
    Field("parallel_tool_calls", Boolean(), "whether an answer may have several calls, by default true"),
]
