"""Images in bodies: URLs and base64, whose bytes are read once the model is known to see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...base.errors import RequestError
from ...base.json_kinds import Choice, Text
from ...base.kinds import Schema
from ...text.chat_images import DETAILS
from ...text.images import NamedImage, bytes_of_base64, check_url

if TYPE_CHECKING:
    from ...engine.model_text import ModelText

DETAIL = Choice(tuple(each for each in DETAILS if each is not None))
URL_PATTERN = "^(data|https):"
MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


class ImageURL(Text):
    """A data: URL of an image in base64, or an https: URL, which is fetched if the server names its host."""

    def parse(self, name: str, value: Any) -> str:
        url = super().parse(name, value)
        check_url(name, url)
        return url

    def schema(self) -> Schema:
        return {"type": "string", "pattern": URL_PATTERN}

    def __str__(self) -> str:
        return "data: or https: URL"


def image_part(place: str, url: str, detail: str | None = None, *, field: str = "") -> dict[str, Any]:
    """Return the part of a chat's message for an image.

    place: its path in the body, for messages. field: the place's field with the URL; "": none.
    """
    url_place = f"{place}.{field}" if field else place
    part = {"type": "image_url", "image_url": {"url": url, "detail": detail}}
    return {**part, "place": place, "url_place": url_place}


def with_images(text: ModelText, prompt: str, place: str, images: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a prompt that is not a conversation, with images in base64. Raises RequestError.

    place: of the images in the body. A prompt without a place for them shows them at its beginning.
    """
    given = [
        NamedImage(f"{place}[{i}]", bytes_of_base64(f"{place}[{i}]", image)) for i, image in enumerate(images)
    ]
    if text.images is not None:
        prompt = text.images.with_places(prompt, len(given))
    return {"prompt": prompt, "multi_modal_data": {"image": given}}


def is_image(part: Mapping[str, Any]) -> bool:
    """Whether a part of a chat's message is an image."""
    return bool(part["type"] == "image_url")


def refuse_images(name: str, role: str, parts: Any, kind: str) -> None:
    """Raise RequestError if a content of a role has an image, which only users and tools send.

    kind: the type of such parts.
    """
    if isinstance(parts, str):
        return
    for i, part in enumerate(parts):
        if part["type"] == kind:
            where = f"{name}[{i}]"
            raise RequestError(
                f"{where} is an {kind} of role {role!r}; users and tools send images", param=where
            )
