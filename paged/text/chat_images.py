"""Images in the messages of a conversation: taken out of it, and written where its template shows them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..base.errors import RequestError
from ..base.validation import shown
from .images import (
    NO_IMAGE_OF_UUID,
    ImagePrompts,
    NamedImage,
    bytes_of_data_url,
    bytes_of_file,
    check_url,
    is_file_url,
    is_remote,
    path_of_url,
)
from .marked_text import substituted

# Stands for an image in contents that are text: in no ordinary text, and no special token.
IMAGE_MARK = "\ue200image\ue200"
IMAGE_KINDS = ("image_url", "image", "image_pil")
DETAILS = (None, "auto", "low", "high", "original")
_KEYS = {
    "image_url": ("type", "image_url", "detail", "uuid"),
    "image": ("type", "image", "url", "path", "base64", "uuid"),
    "image_pil": ("type", "image_pil", "uuid"),
}
_DATA_KEYS = ("image_url", "image", "image_pil", "url", "path", "base64", "text")
Message = Mapping[str, Any]


def has_images(messages: Sequence[Any]) -> bool:
    """Return whether any message has a part that is an image."""
    return next(_image_parts(messages), None) is not None


def _image_parts(messages: Sequence[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts that are images, with their paths in the messages."""
    for i, message in enumerate(messages):
        for j, part in enumerate(_parts_of(message)):
            if isinstance(part, Mapping) and part.get("type") in IMAGE_KINDS:
                yield f"messages[{i}].content[{j}]", part


def _remote_urls(parts: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, str]:
    urls = dict[str, str]()
    for name, part in parts:
        if part["type"] == "image_url":
            _, url_name, part = _named(name, part)
            url = _url_of(f"{name}.image_url", part["image_url"], part.get("detail"))
            if is_remote(url):
                urls.setdefault(url, url_name)
    return urls


def urls_to_fetch(messages: Sequence[Any], prompts: ImagePrompts) -> dict[str, str]:
    """Return the URLs of a conversation's images that are to be fetched, with their names in messages.

    Raises RequestError for URLs that are not fetched, and for more images than a prompt may have.
    """
    if prompts.fetcher is None:
        return {}
    parts = [*_image_parts(messages)]
    prompts.check_number(len(parts))
    urls = _remote_urls(parts)
    for url, name in urls.items():
        prompts.fetcher.check(name, url)
    return urls


def _parts_of(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    is_list = isinstance(content, Sequence) and not isinstance(content, str | bytes)
    return content if is_list else ()  # type: ignore[return-value]


def take_images(
    messages: Sequence[Message], fetched: Mapping[str, bytes]
) -> tuple[list[Message], list[NamedImage]]:
    """Return a conversation whose images are {"type": "image"}, and the images. Raises RequestError.

    fetched: the images at URLs.
    """
    images = list[NamedImage]()
    found = list[Message]()
    for i, message in enumerate(messages):
        parts = list[Any]()
        for j, part in enumerate(_parts_of(message)):
            if isinstance(part, Mapping) and part.get("type") in IMAGE_KINDS:
                images.append(image_of(f"messages[{i}].content[{j}]", part, fetched))
                part = {"type": "image"}
            parts.append(part)
        found.append({**message, "content": parts} if parts else message)
    return found, images


def image_of(name: str, part: Mapping[str, Any], fetched: Mapping[str, bytes]) -> NamedImage:
    """Decode the image in a part of a message. Raises RequestError, which names the wrong field.

    name: the path of the part in the request, such as messages[0].content[1], for errors. If the part has a
        "place", that path is used instead; if it has a "url_place", that one is used for its URL.
    """
    name, url_name, part = _named(name, part)
    key = _check_part(name, part)
    value = part[key]
    if key == "image_url":
        url = _url_of(f"{name}.image_url", value, part.get("detail"))
        if is_file_url(url):  # of the library: `check_url` refuses them in requests to a server
            value = bytes_of_file(url_name, path_of_url(url_name, url))
        else:
            value = fetched[url] if url in fetched else bytes_of_data_url(url_name, url)
    elif key == "base64":
        value = f"data:;base64,{value}"
    return NamedImage(name, value, part.get("uuid") or None)


def _named(name: str, part: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any]]:
    """Return the names of a part and of its URL, and the part without them. See `image_of`."""
    name = str(part.get("place", name))
    url_name = str(part.get("url_place", f"{name}.image_url.url"))
    return name, url_name, {key: value for key, value in part.items() if key not in ("place", "url_place")}


def check_image_url(name: str, part: Mapping[str, Any]) -> None:
    """Raise RequestError for a part of type image_url that no model could see. Its image is not read yet."""
    key = _check_part(name, part)
    url = _url_of(f"{name}.{key}", part[key], part.get("detail"))
    check_url(f"{name}.{key}.url", url)


def _check_part(name: str, part: Mapping[str, Any]) -> str:
    """Return the key of a part's only image. Raises RequestError."""
    kind = part["type"]
    data = [key for key in _DATA_KEYS if part.get(key) is not None]
    if len(data) != 1:
        given = " and ".join(data) or "none"
        why = f"; {NO_IMAGE_OF_UUID}" if not data and part.get("uuid") else ""
        raise RequestError(
            f"{name} is of type {kind!r} and must have one image, got {given}{why}", param=name
        )
    for key in part:
        if key not in _KEYS[kind]:
            known = ", ".join(_KEYS[kind])
            raise RequestError(
                f"{name} has an unknown field {shown(key)}; a part of type {kind!r} has {known}", param=name
            )
    if not isinstance(part.get("uuid"), str | None):
        raise RequestError(f"{name}.uuid must be a string, got {shown(part['uuid'])}", param=name)
    return data[0]


def _url_of(name: str, value: Any, detail: Any) -> str:
    """Return the URL of an image_url, which is text or an object with url and detail."""
    if isinstance(value, Mapping):
        for key in value:
            if key not in ("url", "detail"):
                raise RequestError(
                    f"{name} has an unknown field {shown(key)}; it has url and detail", param=name
                )
        detail = value.get("detail", detail)
        value = value.get("url")
    if detail not in DETAILS:
        known = ", ".join(repr(each) for each in DETAILS if each)
        raise RequestError(f"{name}.detail must be one of {known}, got {shown(detail)}", param=name)
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a URL or an object with a url, got {shown(value)}", param=name)
    return value


def written(
    messages: list[Message],
    images: Sequence[NamedImage],
    prompts: ImagePrompts,
    write: Callable[[Sequence[Message]], str],
) -> str:
    """Return the text of a conversation in which the placeholder of each image stands once.

    write: renders a conversation. Raises RequestError.

    A template that does not show image parts gets contents as text, with the placeholders in it.
    """
    try:
        text = write(messages)
        if prompts.count_in(text) == len(images):
            return text
        refusal = None
    except RequestError as error:
        if error.param == "continue_final_message":  # no other form of the messages helps
            raise
        refusal = error
    try:
        text = write([_as_text(message) for message in messages])
    except RequestError as error:
        raise refusal or error from None
    marks = [(found.start(), found.end(), prompts.written) for found in re.finditer(IMAGE_MARK, text)]
    text = substituted(text, marks)
    if prompts.count_in(text) != len(images):
        raise RequestError(
            f"the chat template does not show the {len(images)} images of the conversation once each; show "
            "them in messages of the user, or give a template that does as chat_template (--chat-template)",
            param="messages",
        )
    return text


def _as_text(message: Message) -> Message:
    """Return a message whose content is text, with a mark for each image."""
    parts = _parts_of(message)
    if not parts:
        return message
    texts = [IMAGE_MARK if part.get("type") == "image" else str(part.get("text", "")) for part in parts]
    return {**message, "content": "\n".join(texts)}
