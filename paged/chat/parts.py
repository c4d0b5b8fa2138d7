"""Parts: what the text of a chat answer consists of, as a parser finds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A further piece of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A further piece of the reasoning that precedes the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a call. A ToolArgumentsDelta of the same index follows, unless the answer is cut off.

    index: the number of the call in the answer, from 0.
    call_id: the id of the call, unique among calls.
    name: the name of one of the request's tools.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """A further piece of a call's arguments. All pieces joined form a JSON object."""

    index: int
    text: str


Part = ContentDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta


class OutputParser(Protocol):
    """A state machine that finds the parts of one answer.

    How the text is split into pieces does not change the joined parts.
    """

    def feed(self, text: str) -> list[Part]:
        """Take more text. Return the parts of the answer that are complete."""

    def finish(self) -> list[Part]:
        """End the text. Return the remaining parts."""

    @property
    def has_whole_calls(self) -> bool:
        """Whether the answer has a call, and the arguments of all its calls are complete."""


@dataclass(slots=True)
class ToolCall:
    """A complete call.

    arguments: a JSON object as text. It is incomplete if max_tokens cut it off, or malformed if the model
        made a mistake.
    """

    call_id: str
    name: str
    arguments: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the call as an entry of `tool_calls`."""
        return {
            "id": self.call_id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(slots=True)
class ChatOutput:
    """The joined parts of an answer. content and reasoning are empty if the answer has none."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[Part]) -> ChatOutput:
        """Join parts."""
        output = cls()
        content = list[str]()
        reasoning = list[str]()
        arguments = list[list[str]]()
        for part in parts:
            match part:
                case ContentDelta(text):
                    content.append(text)
                case ReasoningDelta(text):
                    reasoning.append(text)
                case ToolCallStart(_, call_id, name):
                    output.tool_calls.append(ToolCall(call_id, name))
                    arguments.append([])
                case ToolArgumentsDelta(index, text):
                    arguments[index].append(text)
        output.content = "".join(content)
        output.reasoning = "".join(reasoning)
        for call, texts in zip(output.tool_calls, arguments, strict=True):
            call.arguments = "".join(texts)
        return output

    def message(self) -> dict[str, Any]:
        """Return the message of a chat.completion, with reasoning under both names that clients use."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [call.as_json() for call in self.tool_calls]
        if self.reasoning:
            message |= {"reasoning": self.reasoning, "reasoning_content": self.reasoning}
        return message


def delta_of(part: Part) -> dict[str, Any]:
    """Return a part as the delta of a chat.completion.chunk."""
    # The most frequent kinds first, and without patterns: this runs for every token of a stream.
    if isinstance(part, ContentDelta):
        return {"content": part.text}
    if isinstance(part, ToolArgumentsDelta):
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}
    if isinstance(part, ReasoningDelta):
        return {"reasoning": part.text, "reasoning_content": part.text}
    function = {"name": part.name, "arguments": ""}
    return {
        "tool_calls": [{"index": part.index, "id": part.call_id, "type": "function", "function": function}]
    }
