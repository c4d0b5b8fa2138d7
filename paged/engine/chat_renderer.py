"""ChatRenderer: conversations to prompts, in the form that the model's template demands."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ..chat.formats import MARKERS, formats_of
from ..chat.turns import has_repeated_roles, merged, with_short_ids, with_single_calls
from ..text.chat_template import ChatTemplates, Message
from ..text.marked_text import Placeholders, pattern_of
from ..text.tokenizer import Tokenizer


class ChatRenderer:
    """Renders conversations with the chat templates of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.templates = ChatTemplates(tokenizer.chat_templates, tokenizer.special_tokens)

    def render(self, messages: Sequence[Message], **template: Any) -> dict[str, Any]:
        """Render a conversation to a prompt, with the arguments of `ChatTemplates.render`.

        If users or tools write the text of a special token, it stays plain text in the prompt.
        """
        if not is_conversation(messages):
            return {"prompt": self.templates.render(messages, **template), "add_special_tokens": False}
        return {"prompt": self.write(messages, **template), "add_special_tokens": False}

    def write(self, messages: Sequence[Message], **template: Any) -> str:
        """Return the text of a conversation, with the arguments of `ChatTemplates.render`."""
        conversation = Placeholders(self._turns(messages, template), self._markers)
        return conversation.restored(self.templates.render(conversation.messages, **template))

    def _turns(self, messages: Sequence[Message], template: Mapping[str, Any]) -> Sequence[Message]:
        """Return a conversation in the form that its template demands."""
        name = template.get("chat_template")
        if any(message.get("tool_calls") for message in messages):
            formats = formats_of(self.templates.source(name, has_tools=True))
            if formats and formats[0].has_channels:
                messages = with_single_calls(messages)
            elif formats and formats[0].id_length is not None:
                messages = with_short_ids(messages, formats[0].id_length)
        if has_repeated_roles(messages) and self.templates.refuses_repeated_roles(name):
            return merged(messages)
        return messages

    @cached_property
    def _markers(self) -> re.Pattern[str]:
        """Finds the texts of special tokens, and of added tokens that a chat format reads."""
        return pattern_of(self._tokenizer.special_ids.keys() | (self._tokenizer.added_texts & MARKERS))


def is_conversation(messages: Any) -> bool:
    """Return whether `messages` looks like one conversation. The templates report what is wrong with it."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    return is_list and all(isinstance(message, Mapping) for message in messages)
