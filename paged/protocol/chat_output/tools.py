"""Tools of a chat request: what they are, and which of them the answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import RequestError, reject_unknown
from ...validation import check_bool, shown

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    parameters: the JSON schema of its arguments, an object.
    strict: whether the arguments always match the schema.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools an answer may call.

    mode: "none", "auto" (any number of calls, or none) or "required" (at least one).
    names: of the tools that may be called; None allows all.
    is_single: whether the answer is one call.
    """

    mode: str
    names: frozenset[str] | None = None
    is_single: bool = False


def tools_of(value: Any) -> list[Tool]:
    """Return the tools of a request. Raises RequestError or UnknownArgumentError naming the wrong field."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RequestError(f"tools must be a list, got {shown(value)}")
    if len(value) > MAX_TOOLS:
        raise RequestError(f"tools has {len(value)} entries; {MAX_TOOLS} is the most")
    tools = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(value)]
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise RequestError(f"tools[{i}] has the same name as another tool, {name!r}")
    return tools


def _tool(where: str, value: Any) -> Tool:
    function = _function(where, value)
    reject_unknown(f"{where}.function", function, ("name", "description", "parameters", "strict"))
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name must be 1 to 64 letters, digits, underscores or hyphens, "
            f"got {shown(name)}"
        )
    if not isinstance(function.get("description"), str | None):
        raise RequestError(
            f"{where}.function.description must be a string, got {shown(function['description'])}"
        )
    if parameters is None:
        parameters = NO_PARAMETERS
    elif not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError(
            f"{where}.function.parameters must be a JSON schema of type object, got {shown(parameters)}"
        )
    strict = function.get("strict")
    is_strict = strict is not None and check_bool(RequestError, f"{where}.function.strict", strict)
    return Tool(name, {"type": "object", **parameters}, is_strict)


def _function(where: str, value: Any) -> Mapping[str, Any]:
    """Return the function of {"type": "function", "function": {...}}."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind != "function" or not isinstance(value.get("function"), Mapping):
        raise RequestError(
            f'{where} must be {{"type": "function", "function": {{"name": ...}}}}, got {shown(value)}'
        )
    reject_unknown(where, value, ("type", "function"))
    function: Mapping[str, Any] = value["function"]
    return function


def tool_choice_of(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """Return the choice of a request; None is "auto" if there are tools. Raises RequestError."""
    if value is None or value == "auto":
        return ToolChoice("auto" if tools else "none")
    if value == "none":
        return ToolChoice("none")
    if not tools:
        raise RequestError(f"tool_choice {shown(value)} needs tools")
    if value == "required":
        return ToolChoice("required")
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "function":
        return ToolChoice("required", frozenset([_name("tool_choice", value, tools)]), is_single=True)
    if kind == "allowed_tools":
        return _allowed(value, tools)
    raise RequestError(
        "tool_choice must be 'none', 'auto', 'required', "
        '{"type": "function", "function": {"name": ...}} or '
        f'{{"type": "allowed_tools", "allowed_tools": {{"mode": ..., "tools": [...]}}}}, got {shown(value)}'
    )


def _allowed(value: Mapping[str, Any], tools: Sequence[Tool]) -> ToolChoice:
    reject_unknown("tool_choice", value, ("type", "allowed_tools"))
    allowed = value.get("allowed_tools")
    allowed = allowed if isinstance(allowed, Mapping) else {}
    mode, listed = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, Sequence) or not listed:
        raise RequestError(
            'tool_choice.allowed_tools must be {"mode": "auto" or "required", "tools": [...]}, '
            f"got {shown(value.get('allowed_tools'))}"
        )
    reject_unknown("tool_choice.allowed_tools", allowed, ("mode", "tools"))
    names = (_name(f"tool_choice.allowed_tools.tools[{i}]", tool, tools) for i, tool in enumerate(listed))
    return ToolChoice(mode, frozenset(names))


def _name(where: str, value: Any, tools: Sequence[Tool]) -> str:
    function = _function(where, value)
    reject_unknown(f"{where}.function", function, ("name",))
    name = function.get("name")
    known = [tool.name for tool in tools]
    if name not in known:
        raise RequestError(f"{where} names {shown(name)}, which is not one of the tools {', '.join(known)}")
    return str(name)
