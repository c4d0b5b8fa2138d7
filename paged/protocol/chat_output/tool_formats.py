"""Formats of tool calls: for each family of models, the parser of calls and structural tags to force them."""

from __future__ import annotations

import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from ...errors import RequestError
from .call_parsers import HermesCalls, JsonCalls, Llama3Calls, MistralCalls
from .forced_calls import ForcedCalls
from .machine import CallMachine
from .parts import OutputParser
from .reasoning import THINK
from .response_template import ResponseTemplate
from .template_calls import TemplateMachine
from .tool_prompts import Message, ToolPrompt
from .tools import ANY_OBJECT, MAX_CALLS, Tool

Format = dict[str, Any]  # of a structural tag
ALPHANUMERIC = string.ascii_letters + string.digits


class ToolFormat(ABC):
    """How a family of models writes tool calls.

    MACHINE: the parser of calls.
    MARKERS: texts which may be special tokens; then special tokens must stay in the text of an output.
    READS_REASONING: whether the parser finds reasoning, too.
    HAS_GRAMMAR: whether `calls` and `text_with_calls` exist.
    """

    MACHINE: ClassVar[type[CallMachine]]
    MARKERS: ClassVar[Sequence[str]] = ()
    READS_REASONING: ClassVar[bool] = False
    HAS_GRAMMAR: ClassVar[bool] = True

    def new_parser(self, tools: Sequence[Tool], prompt: str) -> OutputParser:  # noqa: ARG002
        """Return a parser of one answer to a prompt, with calls of these tools."""
        return self.MACHINE([tool.name for tool in tools], self.new_id)

    def new_forced_parser(self, tools: Sequence[Tool], prompt: str) -> OutputParser:
        """Return a parser of one answer which `calls` describes."""
        begins = {tool.name: self._call(tool)["begin"] for tool in tools}
        name_at = self._call(Tool("\0", ANY_OBJECT))["begin"].index("\0")  # no name has this character
        return ForcedCalls(self.new_parser(tools, prompt), begins, name_at, self.new_id)

    @property
    @abstractmethod
    def prompt(self) -> ToolPrompt | None:
        """How to show tools to a model whose chat template does not; None if that is not known."""

    def messages_with(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, shows_system: bool
    ) -> list[Message]:
        """Return a conversation with its tools, calls and results in the texts of messages."""
        assert self.prompt is not None
        return self.prompt.messages(messages, tools, self._written, shows_system=shows_system)

    def reasoning_tags(self, prompt: str) -> tuple[str, str] | None:  # noqa: ARG002
        """Return what begins and ends reasoning, for a format that reads it; see `ToolPlan`."""
        return None

    def _written(self, name: str, arguments: str) -> str:
        """Return the text of a call."""
        tag = self._call(Tool(name, ANY_OBJECT))
        return f"{tag['begin']}{arguments}{tag['end']}"

    @abstractmethod
    def _call(self, tool: Tool) -> Format:
        """Return the format of one call, a tag."""

    @abstractmethod
    def calls(self, tools: Sequence[Tool], *, is_single: bool) -> Format:
        """Return the format of one call, or of 1 to MAX_CALLS, whose arguments match their schemas."""

    @abstractmethod
    def text_with_calls(self, tools: Sequence[Tool], *, is_single: bool) -> Format:
        """Return the format of text with calls, perhaps none. A single call ends the text.

        The arguments of strict tools match their schemas, those of others are any object.
        """

    def new_id(self) -> str:
        """Return an id for a call."""
        return f"call_{secrets.token_hex(12)}"


class HermesFormat(ToolFormat):
    """Calls in <tool_call> tags: Hermes, Qwen 2.5, Qwen 3."""

    MACHINE = HermesCalls
    MARKERS = ("<tool_call>", "</tool_call>")

    @property
    def prompt(self) -> ToolPrompt | None:
        """How to show tools to a model whose chat template does not."""
        return ToolPrompt(self._written("<name>", "<arguments>"))

    def calls(self, tools: Sequence[Tool], *, is_single: bool) -> Format:
        """Return the format of tags on lines of their own."""
        return _separated(map(self._call, tools), "\n", is_single=is_single)

    def text_with_calls(self, tools: Sequence[Tool], *, is_single: bool) -> Format:
        """Return the format of text with tags."""
        return _triggered("<tool_call>", map(self._call, map(_loose, tools)), is_single=is_single)

    def _call(self, tool: Tool) -> Format:
        return _tag(f'<tool_call>\n{{"name": "{tool.name}", "arguments": ', tool, "}\n</tool_call>")


class Llama3Format(ToolFormat):
    """The answer is JSON objects, perhaps after <|python_tag|>: Llama 3.1 to 3.3.

    special_tokens: those of the tokenizer.
    """

    MACHINE = Llama3Calls
    MARKERS = ("<|python_tag|>",)

    def __init__(self, special_tokens: Collection[str]) -> None:
        self._tags = [tag for tag in self.MARKERS if tag in special_tokens]

    def new_parser(self, tools: Sequence[Tool], prompt: str) -> OutputParser:  # noqa: ARG002
        """Return a parser to which <|python_tag|> means something only if it is a special token."""
        return Llama3Calls([tool.name for tool in tools], self.new_id, self._tags)

    @property
    def prompt(self) -> ToolPrompt | None:
        """How to show tools to a model whose chat template does not."""
        return ToolPrompt(self._written("<name>", "<arguments>"), separator="; ")

    def calls(self, tools: Sequence[Tool], *, is_single: bool) -> Format:
        """Return the format of objects with semicolons between them."""
        return _separated(map(self._call, tools), "; ", is_single=is_single)

    def text_with_calls(self, tools: Sequence[Tool], *, is_single: bool) -> Format:
        """Return the format of text that does not begin as an object does, or of calls."""
        calls = self.calls([*map(_loose, tools)], is_single=is_single)
        tagged = [_sequence(_text(tag), calls) for tag in self._tags]
        return _either(_text_that_is_no_call("{", [*self.MARKERS, THINK]), calls, *tagged)

    def _call(self, tool: Tool) -> Format:
        return _tag(f'{{"name": "{tool.name}", "parameters": ', tool, "}")


class MistralFormat(ToolFormat):
    """Calls after [TOOL_CALLS]: Mistral.

    template: the chat template, whose form of calls the grammar takes.
    """

    MACHINE = MistralCalls
    MARKERS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def __init__(self, template: str) -> None:
        self._has_names = "[ARGS]" in template
        self._list_start = "[TOOL_CALLS] [" if "[TOOL_CALLS] [" in template else "[TOOL_CALLS]["

    @property
    def prompt(self) -> ToolPrompt | None:
        """How to show tools to a model whose chat template does not."""
        example = self._written("<name>", "<arguments>")
        if self._has_names:
            return ToolPrompt(example, separator="")
        return ToolPrompt(example, self._list_start, ", ", "]")

    def calls(self, tools: Sequence[Tool], *, is_single: bool) -> Format:
        """Return the format of names and arguments, or of a list of objects."""
        if self._has_names:
            return _separated(map(self._call, tools), "", is_single=is_single)
        return self._list(tools, is_single=is_single)

    def text_with_calls(self, tools: Sequence[Tool], *, is_single: bool) -> Format:
        """Return the format of text that ends with calls."""
        tools = [*map(_loose, tools)]
        if self._has_names:
            return _triggered("[TOOL_CALLS]", map(self._call, tools), is_single=is_single)
        return _triggered("[TOOL_CALLS]", [self._list(tools, is_single=is_single)], is_single=True)

    def new_id(self) -> str:
        """Return an id as Mistral's templates demand it."""
        return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))

    def _call(self, tool: Tool) -> Format:
        return _tag(f"[TOOL_CALLS]{tool.name}[ARGS]", tool, "") if self._has_names else _object(tool)

    def _list(self, tools: Sequence[Tool], *, is_single: bool) -> Format:
        return {
            "type": "tag",
            "begin": self._list_start,
            "content": _separated(map(self._call, tools), ", ", is_single=is_single),
            "end": "]",
        }


class JsonFormat(ToolFormat):
    """The answer is a JSON list of calls: for models whose own format is not known."""

    MACHINE = JsonCalls

    @property
    def prompt(self) -> ToolPrompt | None:
        """How to show tools to a model whose chat template does not."""
        return ToolPrompt(self._written("<name>", "<arguments>"), "[", ", ", "]")

    def calls(self, tools: Sequence[Tool], *, is_single: bool) -> Format:
        """Return the format of a list of objects."""
        content = _separated(map(self._call, tools), ", ", is_single=is_single)
        return {"type": "tag", "begin": "[", "content": content, "end": "]"}

    def text_with_calls(self, tools: Sequence[Tool], *, is_single: bool) -> Format:
        """Return the format of text that does not begin as a list does, or of calls."""
        calls = self.calls([*map(_loose, tools)], is_single=is_single)
        return _either(_text_that_is_no_call("[", [THINK]), calls)

    def _call(self, tool: Tool) -> Format:
        return _object(tool)


class TemplateFormat(ToolFormat):
    """What the checkpoint's own response_template describes: how to read calls, but not a grammar of them."""

    READS_REASONING = True
    HAS_GRAMMAR = False

    def __init__(self, template: ResponseTemplate) -> None:
        self._template = template

    def new_parser(self, tools: Sequence[Tool], prompt: str) -> OutputParser:
        """Return a parser that calls transformers."""
        return TemplateMachine(self._template, prompt, tools, self.new_id)

    def reasoning_tags(self, prompt: str) -> tuple[str, str] | None:
        """Return what begins and ends the reasoning of an answer; None if the template does not tell."""
        return self._template.reasoning_tags(prompt)

    @property
    def prompt(self) -> ToolPrompt | None:
        """How to show tools to a model whose chat template does not."""
        return None

    def calls(self, tools: Sequence[Tool], *, is_single: bool) -> Format:  # noqa: ARG002
        """Raise RequestError: there is no grammar."""
        raise self._no_grammar()

    def text_with_calls(self, tools: Sequence[Tool], *, is_single: bool) -> Format:  # noqa: ARG002
        """Raise RequestError: there is no grammar."""
        raise self._no_grammar()

    def _call(self, tool: Tool) -> Format:  # noqa: ARG002
        raise self._no_grammar()

    @staticmethod
    def _no_grammar() -> RequestError:
        return RequestError(
            "the checkpoint's response_template says how to read tool calls, not how to constrain them: "
            "strict, allowed_tools, parallel_tool_calls: false and response_format beside tools need another "
            "--tool-call-parser"
        )


def _loose(tool: Tool) -> Tool:
    """Return a tool whose arguments may be any object, unless it is strict."""
    return tool if tool.strict else Tool(tool.name, ANY_OBJECT)


def _object(tool: Tool) -> Format:
    return _tag(f'{{"name": "{tool.name}", "arguments": ', tool, "}")


def _tag(begin: str, tool: Tool, end: str) -> Format:
    content = {"type": "json_schema", "json_schema": tool.parameters, "name": tool.place}
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _separated(tags: Iterable[Format], separator: str, *, is_single: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": [*tags],
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": is_single,
        "max_tags": MAX_CALLS,
    }


def _triggered(trigger: str, tags: Iterable[Format], *, is_single: bool) -> Format:
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": [*tags],
        "stop_after_first": is_single,
        "max_tags": MAX_CALLS,
    }


def _text_that_is_no_call(begin: str, tags: Iterable[str]) -> Format:
    """Return the format of text that does not begin as a call does, also after blanks or reasoning.

    begin: the first character of a call.
    tags: texts that begin calls or reasoning anywhere, which the text does not have.
    """
    first = rf"[^{re.escape(begin)} \t\n\r]"  # machine.BLANKS
    without = "".join(rf" & ~/(.|\n)*{re.escape(tag)}(.|\n)*/" for tag in tags)
    return {"type": "grammar", "grammar": f"start: TEXT\nTEXT: /({first}(.|\n)*)?/{without}\n"}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": [*elements]}


def _either(*elements: Format) -> Format:
    return {"type": "or", "elements": [*elements]}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}
