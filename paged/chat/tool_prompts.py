"""ToolPrompt: shows tools, calls and results to a model whose chat template does not, as plain messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]
RESPONSE_START = "<tool_response>"
RESPONSE_END = "</tool_response>"


@dataclass(frozen=True, slots=True)
class ToolPrompt:
    """How a format of tool calls is described to a model.

    example: an example call with the placeholders <name> and <arguments>, or <key> and <value> for one
        argument.
    opening, separator, closing: texts around the calls of an answer.
    """

    example: str
    opening: str = ""
    separator: str = "\n"
    closing: str = ""

    def messages(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        written: Callable[[str, str], str],
        *,
        shows_system: bool,
    ) -> list[Message]:
        """Return a conversation in which plain messages describe tools, calls and results.

        written: returns the text of a call, given a tool's name and the arguments as JSON.
        shows_system: whether the chat template shows system messages; else the first message of another role
            describes the tools.
        """
        described = self._described(tools)
        shown = list[Message]()
        for message in messages:
            if message["role"] == "tool":
                _add_result(shown, message)
            elif message.get("tool_calls"):
                shown.append(self._with_calls(message, written))
            else:
                shown.append(message)
        is_system = shown[0]["role"] in ("system", "developer")
        if shows_system and not is_system:
            return [{"role": "system", "content": described}, *shown]
        at = 0 if shows_system else next((i for i, m in enumerate(shown) if m["role"] == "user"), 0)
        before, after = ("", described) if shows_system else (described, "")
        shown[at] = {**shown[at], "content": _joined(before, shown[at].get("content"), after)}
        return shown

    def _described(self, tools: Sequence[Mapping[str, Any]]) -> str:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{listed}\n</tools>\n\n"
            f"To call functions, answer in this form, where <name> is that of a function and {self._rest}:\n"
            f"{self.opening}{self.example}{self.closing}"
        )

    @property
    def _rest(self) -> str:
        """What the example has besides the name."""
        if "<key>" in self.example:
            return "<key> and <value> stand for each of its arguments"
        return "<arguments> a JSON object of its arguments"

    def _with_calls(self, message: Message, written: Callable[[str, str], str]) -> Message:
        functions = [call.get("function", {}) for call in message["tool_calls"]]
        calls = self.separator.join(
            written(function.get("name", ""), _json_of(function.get("arguments"))) for function in functions
        )
        text = f"{self.opening}{calls}{self.closing}"
        kept = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**kept, "content": _joined("", message.get("content"), text, between="\n")}


def _add_result(shown: list[Message], message: Message) -> None:
    """Add a tool's result to the conversation, in one message with the results before it: roles alternate."""
    content = message.get("content") or ""
    if not isinstance(content, str) and all("text" in part for part in content):
        content = "\n".join(part["text"] for part in content)
    result = _joined(RESPONSE_START, content, RESPONSE_END, between="\n")
    if shown and shown[-1].get("role") == "user" and _end_of(shown[-1]["content"]).endswith(RESPONSE_END):
        result = _both(shown.pop()["content"], result)
    shown.append({"role": "user", "content": result})


def _end_of(content: Any) -> str:
    """Return a content's last text, if nothing is behind it."""
    return content if isinstance(content, str) else content[-1].get("text", "")


def _both(before: Any, after: Any) -> Any:
    """Return one content of two, each a text or parts with images."""
    if isinstance(before, str):
        return _joined(before, after, "", between="\n")
    return [*before, *(_joined("", [after], "") if isinstance(after, str) else after)]


def _json_of(arguments: Any) -> str:
    """Return arguments, which may be text already, as JSON."""
    if isinstance(arguments, str):
        return arguments if arguments.strip() not in ("", "null") else "{}"
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)


def _joined(before: str, content: Any, after: str, between: str = "\n\n") -> Any:
    """Return the content of a message, text or parts, with texts before and after it."""
    if isinstance(content, str | None):
        return between.join(text for text in (before, content, after) if text)
    return [
        {"type": "text", "text": text} if isinstance(text, str) else text
        for text in (before, *content, after)
        if text
    ]
