"""Tools of a chat request: what they are, and which of them the answer may or must call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.errors import RequestError
from ..base.validation import shown

MAX_TOOLS = 128
MAX_FUNCTION_NAME = 64
MAX_CALLS = 16  # in an answer that a grammar constrains: a small model may repeat a call for ever
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    parameters: the JSON schema of its arguments, an object.
    strict: whether the arguments must match the schema.
    place: where the parameters are in the body of the request, for error messages.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False
    place: str | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools an answer may call.

    mode: "none", "auto" (calls or none) or "required" (at least one call).
    names: the names of the tools that may be called; None allows all.
    is_single: whether the answer is one call.
    """

    mode: str
    names: frozenset[str] | None = None
    is_single: bool = False


def tools_of(given: Sequence[Mapping[str, Any]]) -> list[Tool]:
    """Return the tools of a request, given as parsed entries. Raises RequestError if two have one name."""
    tools = list[Tool]()
    names = set[str]()
    for i, function in enumerate(tool["function"] for tool in given):
        name = function["name"]
        if name in names:
            where = f"tools[{i}].function.name"
            raise RequestError(f"{where} is that of another tool, too: {shown(name)}", param=where)
        names.add(name)
        parameters = {"type": "object", **function.get("parameters", NO_PARAMETERS)}
        place = f"tools[{i}].function.parameters"
        tools.append(Tool(name, parameters, function.get("strict", False), place))
    return tools


def tool_choice_of(given: str | Mapping[str, Any] | None, tools: Sequence[Tool]) -> ToolChoice:
    """Return the tool choice of a parsed field. None means "auto" if there are tools, else "none".

    Raises RequestError for a tool that the request does not have.
    """
    if given is None or given == "auto":
        return ToolChoice("auto" if tools else "none")
    if given == "none":
        return ToolChoice("none")
    if not tools:
        kind = given if isinstance(given, str) else given["type"]
        raise RequestError(f"tool_choice {shown(kind)} needs tools", param="tool_choice")
    if isinstance(given, str):
        return ToolChoice(given)
    if given["type"] == "function":
        return ToolChoice("required", frozenset([_name("tool_choice", given, tools)]), is_single=True)
    allowed = given["allowed_tools"]
    places = (f"tool_choice.allowed_tools.tools[{i}]" for i in itertools.count())
    names = (_name(place, tool, tools) for place, tool in zip(places, allowed["tools"], strict=False))
    return ToolChoice(allowed["mode"], frozenset(names))


def _name(place: str, named: Mapping[str, Any], tools: Sequence[Tool]) -> str:
    name = str(named["function"]["name"])
    known = [tool.name for tool in tools]
    if name not in known:
        raise RequestError(
            f"{place} names {shown(name)}, which is not one of the tools {', '.join(known)}",
            param=f"{place}.function.name",
        )
    return name
