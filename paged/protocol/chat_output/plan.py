"""ToolPlan: what a chat request makes of its tools, and of reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import RequestError
from ...sampling_params import StructuredOutputsParams
from .chat_format import ChatFormat
from .parts import ContentDelta, OutputParser, Part
from .reasoning import END_THINK, THINK, ReasoningMachine
from .tool_formats import Format, JsonFormat, ToolFormat
from .tools import Tool, ToolChoice, tool_choice_of, tools_of

# Blanks between reasoning and an answer that has a grammar.
_BLANKS: Format = {"type": "regex", "pattern": r"[ \n]{0,4}"}


class PlainText:
    """The parser of answers which are all content."""

    has_whole_calls = False

    def feed(self, text: str) -> list[Part]:
        """Return the text."""
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Part]:
        """Return nothing, as `feed` holds nothing back."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """How the tools and the reasoning of a chat request shape its prompt, its grammar and its parser.

    template_tools: the tools to show to the chat template; None for none.
    tools: those that the answer may call.
    continues_answer: whether the prompt ends with the beginning of the answer.
    """

    chat: ChatFormat
    choice: ToolChoice
    template_tools: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Tool] = field(default=())
    continues_answer: bool = False

    @classmethod
    def of(
        cls,
        chat: ChatFormat,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        continues_answer: bool = False,
    ) -> ToolPlan:
        """Return the plan for the fields of a request, as their tables parse them.

        Raises RequestError naming the field for those that do not go together.
        """
        known = [] if tools is None else tools_of(tools)
        choice = tool_choice_of(tool_choice, known)
        if not parallel_tool_calls:
            choice = ToolChoice(choice.mode, choice.names, is_single=True)
        if choice.mode == "none":
            return cls(chat=chat, choice=choice, continues_answer=continues_answer)
        if choice.mode == "auto" and not (chat.auto_tool_choice and chat.tools is not None):
            raise RequestError(
                "tool_choice 'auto' needs a server started with --enable-auto-tool-choice and "
                "--tool-call-parser; 'required', a named tool and 'none' work without",
                param="tool_choice",
            )
        return cls(
            chat=chat,
            choice=choice,
            template_tools=tools,
            tools=[tool for tool in known if choice.names is None or tool.name in choice.names],
            continues_answer=continues_answer,
        )

    @property
    def parses(self) -> bool:
        """Whether an answer may be more than content."""
        return self.chat.has_reasoning_parser or bool(self.tools) or self.format.READS_REASONING

    @property
    def skip_special_tokens(self) -> bool:
        """Whether the text that the parser needs can do without special tokens."""
        if self.format.READS_REASONING:  # its tags are not known
            return False
        markers = [*self.format.MARKERS] if self.tools else []
        markers += [THINK, END_THINK] if self.chat.has_reasoning_parser else []
        return self.chat.special_tokens.isdisjoint(markers)

    def new_parser(self, prompt: str) -> OutputParser:
        """Return the parser of one answer to this prompt."""
        answer = None
        if self.choice.mode == "required":
            answer = self.format.new_forced_parser(self.tools, prompt)
        elif self.tools or self.format.READS_REASONING:
            answer = self.format.new_parser(self.tools, prompt)
        if not self.chat.has_reasoning_parser:
            return answer or PlainText()
        return ReasoningMachine(answer, is_inside=self._is_in_reasoning(prompt))

    def reasoning_tags(self, prompt: str) -> tuple[str, str] | None:
        """Return what begins and ends the reasoning of an answer to this prompt; None if there is none.

        The first tag is "" if the answer begins inside of the reasoning.
        """
        if not self.chat.has_reasoning_parser:
            return self.format.reasoning_tags(prompt)
        return ("" if self._is_in_reasoning(prompt) else THINK), END_THINK

    def structured_outputs(
        self, prompt: str, wanted: StructuredOutputsParams | None = None
    ) -> StructuredOutputsParams | None:
        """Return the language that an answer to this prompt must belong to; None if it may be any text.

        wanted: the language of content, as response_format gives it. An answer is then that or tool calls.

        Raises RequestError if the answer must be a call and something else, too.
        """
        answer = self._answer(wanted)
        if answer is None:
            return None
        if not self.chat.has_reasoning_parser:
            return wanted if not self.tools else StructuredOutputsParams(structural_tag={"format": answer})
        return StructuredOutputsParams(structural_tag={"format": self._after_reasoning(answer, prompt)})

    def _answer(self, wanted: StructuredOutputsParams | None) -> Format | None:
        """Return the format of an answer without reasoning; None if it may be any text."""
        content = None if wanted is None else _format_of(wanted)
        if not self.tools:
            return content
        is_single = self.choice.is_single
        if self.choice.mode == "required":
            if content is not None:
                raise RequestError(
                    "tool_choice demands a tool call, and response_format or structured_outputs something "
                    "else; leave one of them out",
                    param="tool_choice",
                )
            return self.format.calls(self.tools, is_single=is_single)
        if content is not None:
            return {"type": "or", "elements": [self.format.calls(self.tools, is_single=is_single), content]}
        if is_single or self.choice.names is not None or any(tool.strict for tool in self.tools):
            return self.format.text_with_calls(self.tools, is_single=is_single)
        return None

    def _after_reasoning(self, answer: Format, prompt: str) -> Format:
        """Return the format of an answer with the reasoning that may precede it."""
        is_inside = self._is_in_reasoning(prompt)
        if not is_inside and prompt.rstrip().endswith(END_THINK):
            return answer
        text: Format = {"type": "any_text"}
        reasoning = {"type": "tag", "begin": "" if is_inside else THINK, "content": text, "end": END_THINK}
        if is_inside:
            return {"type": "sequence", "elements": [reasoning, _BLANKS, answer]}
        # The answer is there once: a grammar with two of it would be twice as large.
        before: Format = {"type": "sequence", "elements": [reasoning, _BLANKS]}
        return {"type": "sequence", "elements": [{"type": "optional", "content": before}, answer]}

    def _is_in_reasoning(self, prompt: str) -> bool:
        return self.chat.is_in_reasoning(prompt, continues_answer=self.continues_answer)

    @property
    def format(self) -> ToolFormat:
        """How the answer writes calls."""
        tools = self.chat.tools
        if tools is None or (self.choice.mode == "required" and not tools.HAS_GRAMMAR):
            return JsonFormat()
        return tools


def _format_of(wanted: StructuredOutputsParams) -> Format:
    """Return the language as the format of a structural tag."""
    value: Any = getattr(wanted, wanted.kind)
    match wanted.kind:
        case "json":
            return {"type": "json_schema", "json_schema": json.loads(value)}
        case "regex":
            return {"type": "regex", "pattern": value}
        case "choice":
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in value]}
        case "structural_tag":
            return dict(json.loads(value)["format"])
    return {"type": "grammar", "grammar": value}
