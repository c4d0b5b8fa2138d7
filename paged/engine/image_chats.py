"""ImageChats: conversations with images, rendered to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..base.errors import RequestError
from ..text.chat_images import has_images, take_images, urls_to_fetch, written
from ..text.chat_template import Message
from ..text.images import ImagePrompts
from .chat_renderer import ChatRenderer, is_conversation


class ImageChats(NamedTuple):
    """Renders conversations of one model.

    images: None if the model takes none. no_images: why.
    """

    chat: ChatRenderer
    images: ImagePrompts | None
    no_images: str

    def render(
        self,
        messages: Sequence[Message],
        fetched: Mapping[str, bytes] | None,
        kwargs: Mapping[str, Any] | None,
        template: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Render a conversation; see `ModelText.render_chat`. Raises RequestError.

        kwargs: mm_processor_kwargs. template: the arguments of `ChatTemplates.render`.
        """
        images = self.images
        if kwargs and images is None:
            name = "mm_processor_kwargs"
            raise RequestError(f"{name} is refused: {self.no_images}", param=name)
        more: dict[str, Any] = {"mm_processor_kwargs": kwargs} if kwargs else {}
        if not is_conversation(messages) or not has_images(messages):
            return self.chat.render(messages, **template) | more
        if images is None:
            raise RequestError(f"messages with images are refused: {self.no_images}", param="messages")
        if fetched is None:
            urls = urls_to_fetch(messages, images)
            fetched = images.fetcher.fetch_now(urls) if images.fetcher and urls else {}
        messages, given = take_images(messages, fetched)
        prompt = written(messages, given, images, partial(self.chat.write, **template))
        return {"prompt": prompt, "add_special_tokens": False, "multi_modal_data": {"image": given}} | more
