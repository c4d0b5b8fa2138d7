"""Conversations with images, rendered to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..base.errors import RequestError
from ..text.chat_images import has_images, take_images, urls_to_fetch, written
from ..text.chat_template import Message
from .chat_renderer import is_conversation
from .model_text import ModelText


def render(
    text: ModelText,
    messages: Sequence[Message],
    fetched: Mapping[str, bytes] | None,
    kwargs: Mapping[str, Any] | None,
    template: Mapping[str, Any],
) -> dict[str, Any]:
    """Render a conversation; see `ModelText.render_chat`. Raises RequestError.

    kwargs: mm_processor_kwargs. template: the arguments of `ChatTemplates.render`.
    """
    if kwargs and text.images is None:
        raise RequestError(f"mm_processor_kwargs is refused: {text.no_images}", param="mm_processor_kwargs")
    more: dict[str, Any] = {"mm_processor_kwargs": kwargs} if kwargs else {}
    if not is_conversation(messages) or not has_images(messages):
        return text.chat.render(messages, **template) | more
    if text.images is None:
        raise RequestError(f"messages with images are refused: {text.no_images}", param="messages")
    if fetched is None:
        urls = urls_to_fetch(messages, text.images)
        fetched = text.images.fetcher.fetch_now(urls) if text.images.fetcher and urls else {}
    messages, images = take_images(messages, fetched)
    prompt = written(messages, images, text.images, partial(text.chat.write, **template))
    return {"prompt": prompt, "add_special_tokens": False, "multi_modal_data": {"image": images}} | more
