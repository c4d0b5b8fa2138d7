"""LocalChat: the conversations of an engine in this process, in the format of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..options.sampling_params import SamplingParams
from ..requests.request import CompletionOutput
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import Tokenizer
from .answer_reader import AnswerReader, TokenText
from .chat_format import ChatFormat, TextOfModel
from .parts import ChatOutput, ContentDelta, ReasoningDelta
from .plan import ToolPlan
from .tool_format import JSON_FORMAT
from .tool_prompts import Message


class LocalChat:
    """Shows tools to a model, and separates its answers into content, reasoning and calls.

    chat_template: the template, as for `ChatTemplates.source`.
    """

    def __init__(self, text: TextOfModel, chat_template: str | None = None) -> None:
        self._text = text
        self._template = chat_template
        self._format = ChatFormat.of_model(text, chat_template=chat_template, is_logged=False)

    def shown(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Sequence[Message], Sequence[Mapping[str, Any]] | None]:
        """Return messages and tools for the template. If it cannot show tools, messages describe them."""
        if not tools:
            return messages, tools
        abilities = self._text.chat_templates.abilities(self._template)
        if abilities.tools:
            return messages, tools
        form = self._format.tools or JSON_FORMAT
        return form.messages_with(messages, tools, shows_system=abilities.system), None

    def params_of(self, params: SamplingParams) -> SamplingParams:
        """Return parameters that keep the marks between reasoning and content in the text of an answer."""
        if not ToolPlan.of(self._format).markers:
            return params
        return replace(params, skip_special_tokens=False, spaces_between_special_tokens=False)

    def growing(self, prompt: str) -> GrowingAnswer:
        """Return a reader for the growing text of an answer to this prompt, without tools."""
        plan = ToolPlan.of(self._format)
        tokenizer = self._text.tokenizer
        tokens = None
        if tokenizer is not None and plan.markers:
            tokens = TokenText(tokenizer, plan.markers, is_skipping=True)
        return GrowingAnswer(AnswerReader(plan.new_parser(prompt), tokens))

    def message(
        self,
        prompt: str,
        completion: CompletionOutput,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        continues_answer: bool,
    ) -> dict[str, Any]:
        """Return an answer as a message of the conversation, in OpenAI's format."""
        plan = ToolPlan.of(self._format, tools=_functions(tools), continues_answer=continues_answer)
        tokenizer = self._text.tokenizer
        text = completion.text
        tokens = None
        if tokenizer is not None and plan.markers:
            text = _with_special_tokens(completion, tokenizer)
            tokens = TokenText(tokenizer, plan.markers, is_skipping=True)
        reader = AnswerReader(plan.new_parser(prompt), tokens)
        ids = completion.token_ids
        whole = CompletionOutput(completion.index, text, ids, completion.finish_reason or "stop")
        return ChatOutput.of(reader.read(whole)).message()


class GrowingAnswer:
    """Reads an answer from outputs that hold all text so far."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._num_read = self._num_tokens = 0
        self._content = self._reasoning = ""

    def read(self, completion: CompletionOutput) -> tuple[str, str]:
        """Return the content and the reasoning so far."""
        text = completion.text[self._num_read :]
        token_ids = completion.token_ids[self._num_tokens :]
        self._num_read = len(completion.text)
        self._num_tokens = len(completion.token_ids)
        more = CompletionOutput(0, text, token_ids, completion.finish_reason)
        for part in self._reader.read(more):
            match part:
                case ContentDelta(text):
                    self._content += text
                case ReasoningDelta(text):
                    self._reasoning += text
        return self._content, self._reasoning


def _functions(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    """Return the tools that are functions with a name; a template may know others."""
    functions = [tool for tool in tools or () if isinstance(tool.get("function"), Mapping)]
    return [tool for tool in functions if isinstance(tool["function"].get("name"), str)]


def _with_special_tokens(completion: CompletionOutput, tokenizer: Tokenizer) -> str:
    """Return the text of an answer with its special tokens, but for the one that ended it."""
    token_ids = [*completion.token_ids]
    if token_ids and completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str):
        token_ids.pop()
    detokenizer = Detokenizer(
        tokenizer,
        tokenizer.encode_bare("a"),  # the answer follows a prompt
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
    )
    text = detokenizer.extend(token_ids) + detokenizer.finish()
    if isinstance(completion.stop_reason, str) and not completion.text.endswith(completion.stop_reason):
        text = text[: text.rfind(completion.stop_reason)] if completion.stop_reason in text else text
    return text
