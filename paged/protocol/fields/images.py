"""Images in bodies: data: URLs and base64, whose bytes are read once the model is known to see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...base.errors import RequestError
from ...base.json_kinds import Choice, Text
from ...base.kinds import Schema
from ...text.chat_images import DETAILS
from ...text.images import body_of_data_url

DETAIL = Choice(tuple(each for each in DETAILS if each is not None))
MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


class DataURL(Text):
    """A data: URL of an image in base64. Nothing is fetched."""

    def parse(self, name: str, value: Any) -> str:
        url = super().parse(name, value)
        body_of_data_url(name, url)
        return url

    def schema(self) -> Schema:
        return {"type": "string", "pattern": "^data:"}

    def __str__(self) -> str:
        return "data: URL"


def image_part(place: str, url: str, detail: str | None = None) -> dict[str, Any]:
    """Return the part of a chat's message for an image.

    place: its path in the body, for messages.
    """
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}, "place": place}


def is_image(part: Mapping[str, Any]) -> bool:
    """Whether a part of a chat's message is an image."""
    return bool(part["type"] == "image_url")


def refuse_images(name: str, role: str, parts: Any, kind: str) -> None:
    """Raise RequestError if a content of a role has an image, which only users send.

    kind: the type of such parts.
    """
    if isinstance(parts, str):
        return
    for i, part in enumerate(parts):
        if part["type"] == kind:
            where = f"{name}[{i}]"
            raise RequestError(f"{where} is an {kind} of role {role!r}; users send images", param=where)
