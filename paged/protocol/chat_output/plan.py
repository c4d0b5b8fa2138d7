"""ChatFormat and ToolPlan: how a model writes answers, and what one request makes of that."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import ConfigError, RequestError
from ...sampling_params import StructuredOutputsParams
from ...validation import check_bool
from .parts import ContentDelta, OutputParser, Part
from .reasoning import END_THINK, THINK, ReasoningMachine, ends_in_reasoning
from .tool_formats import Format, HermesFormat, JsonFormat, Llama3Format, MistralFormat, ToolFormat
from .tools import Tool, ToolChoice, tool_choice_of, tools_of

TOOL_PARSERS = ("hermes", "llama3_json", "mistral")
# Whether answers begin inside of reasoning even where the prompt does not say so.
REASONING_PARSERS = {"deepseek_r1": True, "qwen3": False, "think": False}
AUTO = "auto"  # the name of the parser that the chat template tells
# Texts that only the chat template of one family has.
_FAMILIES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "hermes": (("<tool_call>", "</tool_call>", "arguments"), ("<function=", "<arg_key>", "[TOOL_CALLS]")),
    "llama3_json": (("<|start_header_id|>", "ipython", '"parameters"'), ("<tool_call>",)),
    "mistral": (("[TOOL_CALLS]",), ("<tool_call>",)),
}
# Blanks between reasoning and an answer that has a grammar.
_BLANKS: Format = {"type": "regex", "pattern": r"[ \n]{0,4}"}


def family_of(template: str) -> str:
    """Return the tool parser that fits a chat template. Raises ConfigError if none or several do."""
    names = [
        name
        for name, (present, absent) in _FAMILIES.items()
        if all(text in template for text in present) and not any(text in template for text in absent)
    ]
    if len(names) != 1:
        raise ConfigError(
            "the chat template does not tell how the model writes tool calls; name a tool_call_parser: "
            f"{', '.join(TOOL_PARSERS)}"
        )
    return names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """How a model writes tool calls and reasoning, and what a server makes of that.

    tools: None if the server was given no tool parser.
    auto_tool_choice: whether a model may decide for itself to call tools.
    reasons: whether there is reasoning to separate from the answer.
    always_reasons: whether answers begin inside of reasoning even where the prompt does not say so.
    special_tokens: the texts of the tokenizer's special tokens.
    """

    tools: ToolFormat | None = None
    auto_tool_choice: bool = False
    reasons: bool = False
    always_reasons: bool = False
    special_tokens: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        enable_auto_tool_choice: bool = False,
        template: str = "",
        special_tokens: Collection[str] = (),
    ) -> ChatFormat:
        """Return the format of a server's options.

        tool_call_parser: one of TOOL_PARSERS, or AUTO to find out from the template.
        reasoning_parser: one of REASONING_PARSERS.
        template: the source of the chat template; "" if there is none.

        Raises ConfigError.
        """
        if enable_auto_tool_choice and tool_call_parser is None:
            raise ConfigError(
                "enable_auto_tool_choice needs tool_call_parser: "
                f"{', '.join(TOOL_PARSERS)} or {AUTO}, which finds out from the chat template"
            )
        if reasoning_parser is not None and reasoning_parser not in REASONING_PARSERS:
            raise ConfigError(
                f"reasoning_parser must be one of {', '.join(REASONING_PARSERS)}, got {reasoning_parser!r}"
            )
        return cls(
            tools=None
            if tool_call_parser is None
            else _tool_format(tool_call_parser, template, special_tokens),
            auto_tool_choice=enable_auto_tool_choice,
            reasons=reasoning_parser is not None,
            always_reasons=reasoning_parser is not None and REASONING_PARSERS[reasoning_parser],
            special_tokens=frozenset(special_tokens),
        )

    def is_in_reasoning(self, prompt: str, *, continues_answer: bool = False) -> bool:
        """Return whether an answer to this prompt begins inside of reasoning."""
        if not self.reasons:
            return False
        if ends_in_reasoning(prompt, continues_answer=continues_answer):
            return True
        return self.always_reasons and END_THINK not in prompt[-2 * len(END_THINK) :]


def _tool_format(name: str, template: str, special_tokens: Collection[str]) -> ToolFormat:
    match family_of(template) if name == AUTO else name:
        case "hermes":
            return HermesFormat()
        case "llama3_json":
            return Llama3Format(special_tokens)
        case "mistral":
            return MistralFormat(template)
    raise ConfigError(f"tool_call_parser must be one of {', '.join((*TOOL_PARSERS, AUTO))}, got {name!r}")


class PlainText:
    """The parser of answers which are all content."""

    has_whole_calls = False

    def feed(self, text: str) -> list[Part]:
        """Return the text."""
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Part]:
        """Return nothing: nothing was held."""
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPlan:
    """What a chat request makes of its tools and of reasoning.

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
        tools: Any = None,
        tool_choice: Any = None,
        parallel_tool_calls: Any = None,
        continues_answer: bool = False,
    ) -> ToolPlan:
        """Validate the fields of a request; None is one that is not given.

        Raises RequestError or UnknownArgumentError naming the field.
        """
        known = [] if tools is None else tools_of(tools)
        choice = tool_choice_of(tool_choice, known)
        if parallel_tool_calls is not None and not check_bool(
            RequestError, "parallel_tool_calls", parallel_tool_calls
        ):
            choice = ToolChoice(choice.mode, choice.names, is_single=True)
        if choice.mode == "none":
            return cls(chat=chat, choice=choice, continues_answer=continues_answer)
        if choice.mode == "auto" and not (chat.auto_tool_choice and chat.tools is not None):
            raise RequestError(
                "tool_choice 'auto' needs a server started with --enable-auto-tool-choice and "
                "--tool-call-parser; 'required', a named tool and 'none' work without"
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
        return self.chat.reasons or bool(self.tools)

    @property
    def skip_special_tokens(self) -> bool:
        """Whether the text that the parser needs can do without special tokens."""
        markers = [*self._format.MARKERS] if self.tools else []
        markers += [THINK, END_THINK] if self.chat.reasons else []
        return self.chat.special_tokens.isdisjoint(markers)

    def new_parser(self, prompt: str) -> OutputParser:
        """Return the parser of one answer to this prompt."""
        answer = self._format.new_parser([tool.name for tool in self.tools]) if self.tools else None
        if not self.chat.reasons:
            return answer or PlainText()
        return ReasoningMachine(answer, is_inside=self._is_in_reasoning(prompt))

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
        if not self.chat.reasons:
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
                    "else; leave one of them out"
                )
            return self._format.calls(self.tools, is_single=is_single)
        if content is not None:
            return {"type": "or", "elements": [self._format.calls(self.tools, is_single=is_single), content]}
        if is_single or self.choice.names is not None or any(tool.strict for tool in self.tools):
            return self._format.text_with_calls(self.tools, is_single=is_single)
        return None

    def _after_reasoning(self, answer: Format, prompt: str) -> Format:
        is_inside = self._is_in_reasoning(prompt)
        if not is_inside and prompt.rstrip().endswith(END_THINK):
            return answer
        text: Format = {"type": "any_text"}
        reasoning = {"type": "tag", "begin": "" if is_inside else THINK, "content": text, "end": END_THINK}
        reasoned: Format = {"type": "sequence", "elements": [reasoning, _BLANKS, answer]}
        return reasoned if is_inside else {"type": "or", "elements": [reasoned, answer]}

    def _is_in_reasoning(self, prompt: str) -> bool:
        return self.chat.is_in_reasoning(prompt, continues_answer=self.continues_answer)

    @property
    def _format(self) -> ToolFormat:
        return self.chat.tools or JsonFormat()


def _format_of(wanted: StructuredOutputsParams) -> Format:
    """Return the format of a structural tag that is the same language."""
    value: Any = getattr(wanted, wanted.kind)
    match wanted.kind:
        case "json":
            return {"type": "json_schema", "json_schema": json.loads(value)}
        case "regex":
            return {"type": "regex", "pattern": value}
        case "choice":
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in value]}
        case "structural_tag":
            return dict(json.loads(value))
    return {"type": "grammar", "grammar": value}
