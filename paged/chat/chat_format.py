"""ChatFormat: how a model writes tool calls and reasoning, from the options of a server."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ..architectures.config import ModelConfig
from ..architectures.families.multimodal import NATIVE
from ..base.errors import ConfigError, RequestError
from ..text.chat_template import ChatTemplates
from ..text.tokenizer import Tokenizer
from .formats import (
    BEGIN_INSIDE,
    BY_NAME,
    CHAT_FORMATS,
    JSON_CALLS,
    REASONING_BY_NAME,
    ChatSyntax,
    ReasoningSyntax,
    formats_of,
    reasoning_of,
)
from .reasoning import ends_in_reasoning
from .tool_format import ToolFormat

logger = logging.getLogger(__name__)

AUTO = "auto"  # chooses the parser by the chat template
NO_PARSER = "none"  # turns parsing off
TOOL_PARSERS = tuple(BY_NAME)
REASONING_PARSERS = tuple(REASONING_BY_NAME)


class TextOfModel(Protocol):
    """The methods of `engine.model_text` that this package uses."""

    model_config: ModelConfig
    tokenizer: Tokenizer | None

    @property
    def chat_templates(self) -> ChatTemplates:
        """The chat templates of the tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """The syntax in which a model writes tool calls and reasoning.

    tools: the syntax of tool calls; None if calls stay text in the answer.
    auto_tool_choice: whether tool_choice "auto" is allowed, so that the model decides whether to call a tool.
    reasoning: the tags around reasoning; None if reasoning is not separated from the answer.
    starts_in_reasoning: whether an answer begins with reasoning although the prompt has no opening tag.
    special_tokens: the texts of the tokenizer's special tokens.
    """

    tools: ToolFormat | None = None
    auto_tool_choice: bool = True
    reasoning: ReasoningSyntax | None = None
    starts_in_reasoning: bool = False
    special_tokens: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        enable_auto_tool_choice: bool = True,
        template: str = "",
        special_tokens: Collection[str] = (),
        model_type: str | None = None,
        shows_tools: bool = True,
    ) -> ChatFormat:
        """Return the format that a server's options select.

        tool_call_parser: one of TOOL_PARSERS, AUTO to detect it from the template, or NO_PARSER or None for
            no calls.
        reasoning_parser: one of REASONING_PARSERS, AUTO, or NO_PARSER or None.
        template: the source of the chat template; "" if there is none.
        model_type: the model_type of config.json, which selects the format if there is no template.
        shows_tools: whether the template shows tools to the model.

        Raises ConfigError for an unknown parser.
        """
        check_parsers(tool_call_parser, reasoning_parser)
        fitting = formats_of(template, model_type)
        entry = BY_NAME.get(tool_call_parser or NO_PARSER)
        if tool_call_parser == AUTO:
            entry = fitting[0] if fitting else (None if shows_tools else JSON_CALLS)
        reasoning = REASONING_BY_NAME.get(reasoning_parser or NO_PARSER)
        if reasoning_parser == AUTO:
            reasoning = reasoning_of(template, fitting[0] if fitting else None)
        return cls(
            tools=None if entry is None else ToolFormat(entry, template, special_tokens),
            auto_tool_choice=enable_auto_tool_choice,
            reasoning=reasoning,
            starts_in_reasoning=reasoning_parser in BEGIN_INSIDE,
            special_tokens=frozenset(special_tokens),
        )

    @classmethod
    def of_model(
        cls,
        text: TextOfModel,
        *,
        chat_template: str | None = None,
        tool_call_parser: str | None = AUTO,
        reasoning_parser: str | None = AUTO,
        enable_auto_tool_choice: bool = True,
        is_logged: bool = True,
    ) -> ChatFormat:
        """Return the format for a model and a server's options, as `of` does. Log what was chosen and why.

        chat_template: as of `ChatTemplates.source`.
        """
        template = ""
        tokenizer = text.tokenizer
        shows_tools = True
        if tokenizer is not None:
            with suppress(RequestError):  # there is none: an error of chat requests alone
                template = text.chat_templates.source(chat_template, has_tools=True)
                shows_tools = text.chat_templates.abilities(chat_template).tools
        special = () if tokenizer is None else map(tokenizer.token_text, tokenizer.special_token_ids)
        model_type = NATIVE[text.model_config.architecture].model_type
        found = cls.of(
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            enable_auto_tool_choice=enable_auto_tool_choice,
            template=template,
            special_tokens=frozenset(special),
            model_type=model_type,
            shows_tools=shows_tools,
        )
        if is_logged:
            fitting = formats_of(template, model_type)
            _log(found, fitting, is_auto=tool_call_parser == AUTO, template=template)
            if not shows_tools and tool_call_parser not in (
                AUTO,
                NO_PARSER,
                None,
            ):  # else no parser was chosen
                logger.warning(
                    "the chat template does not show tools to the model: messages describe them. "
                    "--chat-template sets another"
                )
        return found

    @property
    def channels(self) -> ToolFormat | None:
        """The format of answers made of messages with channels; None for other answers."""
        if self.tools is not None:
            return self.tools if self.tools.has_channels else None
        if self.reasoning is not None and self.reasoning.has_channels:
            return ToolFormat(BY_NAME[self.reasoning.name], "", self.special_tokens)
        return None

    def is_in_reasoning(self, prompt: str, *, continues_answer: bool = False) -> bool:
        """Return whether an answer to this prompt begins inside reasoning."""
        syntax = self.reasoning
        if syntax is None:
            return False
        if ends_in_reasoning(syntax, prompt, continues_answer=continues_answer):
            return True
        # An answer that the prompt has begun says itself whether it reasons.
        end = syntax.ends[0]
        return self.starts_in_reasoning and not continues_answer and end not in prompt[-2 * len(end) :]


def check_parsers(tool_call_parser: str | None, reasoning_parser: str | None) -> None:
    """Raise ConfigError for a parser that does not exist."""
    for option, name, known in (
        ("tool_call_parser", tool_call_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        if name not in (None, AUTO, NO_PARSER, *known):
            raise ConfigError(
                f"{option} must be one of {', '.join(known)}, or {AUTO}, which finds out from the chat "
                f"template, or {NO_PARSER}; got {name!r}"
            )


def _log(found: ChatFormat, fitting: list[ChatSyntax], *, is_auto: bool, template: str) -> None:
    """Say which formats were chosen and why."""
    by_template = found.tools is not None and found.tools.entry.fits(template)
    source = "the chat template" if by_template else "model_type"
    if is_auto and template and not fitting and found.tools is None:
        logger.warning(
            "the chat template fits no format of tool calls, so answers are content alone; "
            "--tool-call-parser names one: %s",
            ", ".join(entry.name for entry in CHAT_FORMATS),
        )
    elif found.tools is not None:
        entry = found.tools.entry
        has = ", ".join(entry.marks_in(template) if by_template else entry.model_types)
        why = f" ({source} has {has})" if is_auto and fitting else ""
        others = ", ".join(entry.name for entry in fitting[1:])
        more = f"; {others} would fit, too" if is_auto and others else ""
        logger.info("tool calls: format %s%s%s", found.tools.name, why, more)
    if found.reasoning is not None:
        logger.info("reasoning: format %s, from %s", found.reasoning.name, found.reasoning.begins[0].strip())
