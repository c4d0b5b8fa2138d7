"""Conversations and prompts of one call: rendered, and outputs with the answers as messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..base.errors import RequestError
from ..chat.local import LocalChat
from ..requests.request import Prompt, RequestOutput
from ..text.chat_template import conversations_of
from .generation import as_iterable
from .model_text import ModelText


def render_all(
    text: ModelText,
    chat: LocalChat,
    messages: Any,
    tools: Sequence[Mapping[str, Any]] | None,
    template: Mapping[str, Any],
) -> list[Prompt]:
    """Render each conversation to a prompt. Raises RequestError, which names the conversation.

    template: the other arguments of `ChatTemplates.render`.
    """
    prompts = list[Prompt]()
    for i, conversation in enumerate(conversations_of(messages)):
        try:
            shown, shown_tools = chat.shown(conversation, tools)
            prompts.append(text.render_chat(shown, tools=shown_tools, **template))
        except RequestError as error:
            raise RequestError(f"conversation {i}: {error}", param=error.param) from error
    return prompts


def with_processing(prompts: Any, kwargs: Any) -> Iterator[Prompt]:
    """Yield prompts with mm_processor_kwargs, unless they have their own."""
    for prompt in as_iterable(prompts):
        if not isinstance(prompt, Mapping):
            prompt = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        yield {"mm_processor_kwargs": kwargs, **prompt}


def with_messages(
    chat: LocalChat,
    outputs: list[RequestOutput],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    continues_answer: bool,
) -> list[RequestOutput]:
    """Set the message of each completion. Return the outputs.

    continues_answer: whether the prompts end with the beginning of an answer.
    """
    for output in outputs:
        for completion in output.outputs:
            completion.message = chat.message(
                output.prompt or "", completion, tools, continues_answer=continues_answer
            )
    return outputs
