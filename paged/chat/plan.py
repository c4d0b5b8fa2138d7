"""ToolPlan: what a chat request makes of its tools, and of reasoning."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..base.errors import RequestError
from ..options.sampling_params import StructuredOutputsParams
from .chat_format import ChatFormat
from .forced_arguments import Format, optional, sequence, tag, text
from .formats import REASONING_BY_NAME
from .harmony import ROLE
from .parts import ContentDelta, OutputParser, Part
from .reasoning import ReasoningMachine
from .tool_format import FINAL, JSON_FORMAT, ToolFormat
from .tools import Tool, ToolChoice, tool_choice_of, tools_of

# Blanks between reasoning and an answer that has a grammar.
_BLANKS: Format = {"type": "regex", "pattern": r"[ \n]{0,4}"}


class PlainText:
    """The parser of answers that are content only."""

    has_whole_calls = False

    def feed(self, text: str) -> list[Part]:
        """Return the text."""
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Part]:
        """Return nothing, since `feed` holds nothing back."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """How the tools and the reasoning of a chat request shape its prompt, its grammar and its parser.

    template_tools: the tools that the chat template shows; None for none.
    tools: the tools that the answer may call.
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
        """Return the plan for the parsed fields of a request.

        Raises RequestError naming the field if fields contradict each other.
        """
        known = [] if tools is None else tools_of(tools)
        choice = tool_choice_of(tool_choice, known)
        if not parallel_tool_calls:
            choice = ToolChoice(choice.mode, choice.names, is_single=True)
        if choice.mode == "none":
            return cls(chat=chat, choice=choice, continues_answer=continues_answer)
        if choice.mode == "auto" and not chat.auto_tool_choice:
            raise RequestError(
                "tool_choice 'auto' is turned off by --no-auto-tool-choice; 'required', a named tool and "
                "'none' work",
                param="tool_choice",
            )
        if choice.mode == "auto" and chat.tools is None:
            # The model sees the tools, but how it writes calls is not known: its answer is content.
            choice = ToolChoice("none")
            return cls(chat=chat, choice=choice, template_tools=tools, continues_answer=continues_answer)
        return cls(
            chat=chat,
            choice=choice,
            template_tools=tools,
            tools=[tool for tool in known if choice.names is None or tool.name in choice.names],
            continues_answer=continues_answer,
        )

    @property
    def parses(self) -> bool:
        """Whether an answer may contain reasoning or calls besides content."""
        return self.chat.reasoning is not None or bool(self.tools) or self.chat.channels is not None

    @property
    def markers(self) -> frozenset[str]:
        """The special tokens that the parser needs to see in the text of an answer."""
        texts = [*self.format.markers] if self.tools or self.chat.channels is not None else []
        texts += [] if self.chat.reasoning is None else self.chat.reasoning.markers
        return self.chat.special_tokens.intersection(texts)

    @property
    def skip_special_tokens(self) -> bool:
        """Whether special tokens may be left out of the text that the parser reads."""
        return not self.markers

    def new_parser(self, prompt: str) -> OutputParser:
        """Return the parser of one answer to this prompt."""
        reasoning = self.chat.reasoning
        answer = None
        if self.tools or self.chat.channels is not None:
            is_forced = self.choice.mode == "required"
            parser_of = self.format.new_forced_parser if is_forced else self.format.new_parser
            answer = parser_of(self.tools, prompt, is_split=reasoning is not None)
        if reasoning is None or self.format.has_channels:
            return answer or PlainText()
        return ReasoningMachine(reasoning, answer, is_inside=self._is_in_reasoning(prompt))

    def reasoning_tags(self, prompt: str) -> tuple[str, str] | None:
        """Return the tags that begin and end reasoning in an answer to this prompt; None if it has none.

        The first tag is "" if the answer begins inside reasoning.
        """
        if self.format.has_channels:
            return REASONING_BY_NAME[self.format.name].begins[0], FINAL
        reasoning = self.chat.reasoning
        if reasoning is None:
            return None
        return ("" if self._is_in_reasoning(prompt) else reasoning.begins[0]), reasoning.ends[0]

    def structured_outputs(
        self, prompt: str, wanted: StructuredOutputsParams | None = None
    ) -> StructuredOutputsParams | None:
        """Return the language that an answer to this prompt must belong to; None if it may be any text.

        wanted: the language that response_format demands of content. The answer is then either such content
            or tool calls.

        Raises RequestError if the answer must be a call and `wanted` demands something else.
        """
        answer = self._answer(wanted)
        if answer is None:
            return None
        if self.chat.reasoning is None and not self.format.has_channels:
            return wanted if not self.tools else StructuredOutputsParams(structural_tag={"format": answer})
        return StructuredOutputsParams(structural_tag={"format": self._after_reasoning(answer, prompt)})

    def _answer(self, wanted: StructuredOutputsParams | None) -> Format | None:
        """Return the format of an answer without reasoning; None if it may be any text."""
        content = None if wanted is None else _format_of(wanted)
        if content is not None and self.format.has_channels:
            content = sequence(text(FINAL), content)
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
            reasoning = [] if self.chat.reasoning is None else self.chat.reasoning.begins
            return self.format.text_with_calls(self.tools, is_single=is_single, reasoning=reasoning)
        return None

    def _after_reasoning(self, answer: Format, prompt: str) -> Format:
        """Return the format of an answer with the reasoning that may precede it."""
        reasoning = self.chat.reasoning or REASONING_BY_NAME[self.format.name]
        is_inside = self._is_in_reasoning(prompt)
        begin, end = reasoning.begins[0], reasoning.ends[0]
        between = text(ROLE) if reasoning.has_channels else _BLANKS
        if not is_inside and prompt.rstrip().endswith((end, FINAL)):
            return answer
        inside = tag("" if is_inside else begin, {"type": "any_text"}, end)
        if is_inside:
            return sequence(inside, between, answer)
        # The answer is there once: a grammar with two of it would be twice as large.
        return sequence(optional(sequence(inside, between)), answer)

    def _is_in_reasoning(self, prompt: str) -> bool:
        return self.chat.is_in_reasoning(prompt, continues_answer=self.continues_answer)

    @property
    def format(self) -> ToolFormat:
        """The format in which the answer writes calls."""
        return self.chat.tools or self.chat.channels or JSON_FORMAT


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
