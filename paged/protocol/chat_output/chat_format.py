"""ChatFormat: how a model writes tool calls and reasoning, from the options of a server."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError, RequestError
from .reasoning import END_THINK, ends_in_reasoning
from .response_template import ResponseTemplate
from .tool_formats import HermesFormat, JsonFormat, Llama3Format, MistralFormat, TemplateFormat, ToolFormat

if TYPE_CHECKING:
    from ...engine.model_text import ModelText

logger = logging.getLogger(__name__)

FROM_CHECKPOINT = "response_template"  # the name of the parser that the checkpoint itself describes
TOOL_PARSERS = ("hermes", "llama3_json", "mistral", FROM_CHECKPOINT)
# Whether answers begin inside of reasoning even where the prompt does not say so.
REASONING_PARSERS = {"deepseek_r1": True, "qwen3": False, "think": False}
AUTO = "auto"  # the name of the parser that the chat template tells
# Texts that only the chat template of one family has.
_FAMILIES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "hermes": (("<tool_call>", "</tool_call>", "arguments"), ("<function=", "<arg_key>", "[TOOL_CALLS]")),
    "llama3_json": (("<|start_header_id|>", "ipython", '"parameters"'), ("<tool_call>",)),
    "mistral": (("[TOOL_CALLS]",), ("<tool_call>",)),
}


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
            f"{', '.join(_FAMILIES)}"
        )
    return names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """How a model writes tool calls and reasoning, and what a server makes of that.

    tools: None if the server was given no tool parser.
    auto_tool_choice: whether a model may decide for itself to call tools.
    has_reasoning_parser: whether there is reasoning to separate from the answer.
    starts_in_reasoning: whether answers begin inside of reasoning even where the prompt does not say so.
    special_tokens: the texts of the tokenizer's special tokens.
    """

    tools: ToolFormat | None = None
    auto_tool_choice: bool = False
    has_reasoning_parser: bool = False
    starts_in_reasoning: bool = False
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
        directory: Path | None = None,
    ) -> ChatFormat:
        """Return the format of a server's options.

        tool_call_parser: one of TOOL_PARSERS, or AUTO to find out from the template.
        reasoning_parser: one of REASONING_PARSERS.
        template: the source of the chat template; "" if there is none.
        directory: of the tokenizer, where a response_template is looked for.

        Raises ConfigError or CheckpointError.
        """
        check_parsers(tool_call_parser, reasoning_parser, auto_tool_choice=enable_auto_tool_choice)
        tools = None
        if tool_call_parser is not None:
            tools = _tool_format(tool_call_parser, template, special_tokens, directory)
        if tools is not None and tools.READS_REASONING and reasoning_parser is not None:
            raise ConfigError(
                f"tool_call_parser {tool_call_parser!r} finds reasoning itself; leave reasoning_parser out"
            )
        return cls(
            tools=tools,
            auto_tool_choice=enable_auto_tool_choice,
            has_reasoning_parser=reasoning_parser is not None,
            starts_in_reasoning=reasoning_parser is not None and REASONING_PARSERS[reasoning_parser],
            special_tokens=frozenset(special_tokens),
        )

    @classmethod
    def of_model(
        cls,
        text: ModelText,
        *,
        chat_template: str | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        enable_auto_tool_choice: bool = False,
    ) -> ChatFormat:
        """Return the format of a model and a server's options, as `of` does.

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
        found = cls.of(
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
            enable_auto_tool_choice=enable_auto_tool_choice,
            template=template,
            special_tokens=frozenset(special),
            directory=None if tokenizer is None else tokenizer.directory,
        )
        if not shows_tools and tool_call_parser is not None:  # who asked for none need not know
            form = JsonFormat() if found.tools is None else found.tools
            what = "requests with tools are refused" if form.prompt is None else "messages describe them"
            logger.warning(
                "the chat template does not show tools to the model: %s. --chat-template sets another", what
            )
        return found

    def is_in_reasoning(self, prompt: str, *, continues_answer: bool = False) -> bool:
        """Return whether an answer to this prompt begins inside of reasoning."""
        if not self.has_reasoning_parser:
            return False
        if ends_in_reasoning(prompt, continues_answer=continues_answer):
            return True
        # An answer that the prompt has begun says itself whether it reasons.
        return (
            self.starts_in_reasoning
            and not continues_answer
            and END_THINK not in prompt[-2 * len(END_THINK) :]
        )


def check_parsers(
    tool_call_parser: str | None, reasoning_parser: str | None, *, auto_tool_choice: bool
) -> None:
    """Raise ConfigError for a parser that does not exist, or auto_tool_choice without one of tool calls."""
    known = f"{', '.join(TOOL_PARSERS)} or {AUTO}, which finds out from the chat template"
    if auto_tool_choice and tool_call_parser is None:
        raise ConfigError(f"enable_auto_tool_choice needs tool_call_parser: {known}")
    if tool_call_parser not in (None, AUTO, *TOOL_PARSERS):
        raise ConfigError(f"tool_call_parser must be {known}; got {tool_call_parser!r}")
    if reasoning_parser not in (None, *REASONING_PARSERS):
        raise ConfigError(
            f"reasoning_parser must be one of {', '.join(REASONING_PARSERS)}, got {reasoning_parser!r}"
        )


def _tool_format(
    name: str, template: str, special_tokens: Collection[str], directory: Path | None
) -> ToolFormat:
    match family_of(template) if name == AUTO else name:
        case "hermes":
            return HermesFormat()
        case "llama3_json":
            return Llama3Format(special_tokens)
        case "mistral":
            return MistralFormat(template)
        case "response_template" if directory is not None:
            return TemplateFormat(ResponseTemplate.of(directory))
    raise ConfigError(f"tool_call_parser {name!r} needs a tokenizer's files, and there are none")
