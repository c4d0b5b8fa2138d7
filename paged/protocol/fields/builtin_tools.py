"""Tools that a hosted API has built in, such as a web search: known by name, and never called here."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...base.errors import RequestError
from ...base.fields import FieldTable
from ...base.kinds import Kind, Schema
from ...base.validation import shown

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FunctionOrBuiltin(Kind):
    """A function, or a built-in tool of a hosted API. Of a built-in tool only the type is parsed.

    own_type: the `type` of functions.
    is_optional: whether a function may omit `type`.
    builtin: a pattern that matches the types of built-in tools.
    """

    types: ClassVar[tuple[type, ...]] = (dict,)
    table: FieldTable
    own_type: str
    is_optional: bool
    builtin: re.Pattern[str]

    def parts(self, name: str, value: Any) -> tuple[dict[str, Any], list[str]]:
        kind = value.get("type") if isinstance(value, Mapping) else ""
        if kind == self.own_type or (kind is None and self.is_optional):
            return self.table.parse(value, f"{name}.")
        if isinstance(kind, str) and self.builtin.fullmatch(kind):
            return {"type": kind}, []
        raise RequestError(f"{name} must be {self}, got {shown(value)}", param=name)

    def schema(self) -> Schema:
        builtin = {"type": {"type": "string", "pattern": f"^({self.builtin.pattern})$"}}
        function = self.table.schema()
        return {"anyOf": [function, {"type": "object", "properties": builtin, "required": ["type"]}]}

    def __str__(self) -> str:
        return f'object whose type is "{self.own_type}", or the name of a built-in tool'


def functions_of(
    tools: Sequence[dict[str, Any]], own_type: str, *, ignores_builtin: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the functions among a body's tools, and the names of the built-in tools that are left out.

    Raises RequestError for a built-in tool if ignores_builtin is False.
    """
    functions = []
    left_out = dict[str, str]()
    for i, tool in enumerate(tools):
        kind = tool.get("type", own_type)
        if kind == own_type:
            functions.append(tool)
        elif ignores_builtin:
            left_out[f"tools[{i}]"] = kind
        else:
            raise RequestError(
                f"tools[{i}] is the built-in tool {shown(kind)}, which this server does not have: leave it "
                "out, or let --ignore-builtin-tools leave out all of them",
                param=f"tools[{i}].type",
            )
    if left_out:
        kinds = ", ".join(dict.fromkeys(left_out.values()))
        logger.warning("built-in tools of a request are left out: %s", kinds)  # a server shows nothing below
    return functions, [*left_out]
