"""ImagePrompts: images that come with a prompt, and the tokens that stand for them."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from ..architectures.towers import VisionSpec
from ..base.errors import CheckpointError, RequestError, ResourceError, UnsupportedModelError, reject_unknown
from ..base.validation import shown
from ..images.decoding import check_size, in_rgb, pillow
from ..images.families import PROMPT_FAMILIES, ImageTokens, with_boundaries
from ..images.processing import processing_of, resizing_of, sha256_of, values_of
from ..images.sizes import Pixels, Resizing, Size
from ..requests.request import PromptImage
from .marked_text import substituted
from .tokenizer import Tokenizer
from .worker import Worker, WorkerLimits, Workers

if TYPE_CHECKING:
    from ..images.fetching import Fetcher

IMAGE_LIMITS = WorkerLimits(time_s=4.0, wall_s=30.0, memory=2 * 2**30, characters=128 * 2**20)
MOST_DECODING = 2  # images at once, each by a process
MOST_FILE_BYTES = 64 * 2**20
DATA = "data:"
HTTPS = "https:"
FILE_URL = "file:"
NO_IMAGE_OF_UUID = "each prompt brings its images, as a uuid tells images apart and finds none"


class NamedImage(NamedTuple):
    """An image under the name that messages call it by.

    uuid: the user's name of the image. vision: what the model sees it with, if not as other images.
    """

    name: str
    image: Any
    uuid: str | None = None
    vision: VisionSpec | None = None


class Parsed(NamedTuple):
    """A prompt in which tokens stand for its images."""

    text: str | None
    token_ids: list[int]
    images: tuple[PromptImage, ...]


def is_remote(url: str) -> bool:
    """Return whether a URL is one of an image that may be fetched."""
    return url[: len(HTTPS)].lower() == HTTPS


def is_file_url(url: str) -> bool:
    """Return whether a URL names a file on this machine, which the library and the commands read."""
    return url[: len(FILE_URL)].lower() == FILE_URL


def path_of_url(name: str, url: str) -> str:
    """Return the path in a file: URL. Raises RequestError for one of another machine."""
    host, _, path = url[len(FILE_URL) :].removeprefix("//").partition("/")
    if not url[len(FILE_URL) :].startswith("/") or host.lower() not in ("", "localhost") or {*"?#"} & {*path}:
        raise RequestError(f"{name} must be a file: URL such as file:///folder/x.png, got {shown(url)}")
    return unquote(f"/{path}")


def check_url(name: str, url: str) -> None:
    """Raise RequestError for a URL that no server takes. Which of https: are fetched is checked later."""
    if not is_remote(url):
        body_of_data_url(name, url)


def body_of_data_url(name: str, url: str) -> str:
    """Return the base64 of an image in a data: URL. Raises RequestError for any other URL."""
    if url[: len(DATA)].lower() != DATA:
        scheme, colon, _ = url[:32].partition(":")
        given = f"one of {scheme}:" if colon else shown(url[:32])
        why = "nothing is fetched"
        if is_remote(url):
            why = f"{why}, as the server names no hosts (--allowed-media-domains)"
        raise RequestError(
            f"{name} must be a data: URL with the image in base64, got {given}; {why}",
            param=name,
        )
    head, comma, body = url[len(DATA) :].partition(",")
    kind, *options = (part.strip().lower() for part in head[:256].split(";"))
    if not comma or "base64" not in options or (kind and not kind.startswith("image/")):
        raise RequestError(
            f"{name} must be a data: URL such as data:image/png;base64,..., got data:{shown(head[:60])}",
            param=name,
        )
    return body


def bytes_of_data_url(name: str, url: str) -> bytes:
    """Return the bytes of an image in a data: URL. Raises RequestError."""
    return bytes_of_base64(name, body_of_data_url(name, url))


def bytes_of_base64(name: str, text: str) -> bytes:
    """Return the bytes that a text has in base64. Raises RequestError."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise RequestError(f"{name} is not base64: {error}") from None


class ImagePrompts:
    """Reads the images of prompts for one model, and writes the tokens that stand for them.

    most: the most images of a prompt.
    media_domains: the hosts from which images are fetched; see `Fetcher`.
    read: see `images.reading.request_reader`.
    """

    def __init__(
        self,
        vision: VisionSpec,
        tokenizer: Tokenizer | None,
        most: int,
        media_domains: Sequence[str] | None = None,
        read: Callable[[VisionSpec, Mapping[str, Any]], VisionSpec] | None = None,
    ) -> None:
        self.vision = vision = with_boundaries(vision, None if tokenizer is None else tokenizer.special_ids)
        self.most = most
        self.fetcher = _new_fetcher(media_domains)
        self._tokenizer = tokenizer
        self._family = PROMPT_FAMILIES[vision.family]
        self._with_kwargs = read

    @cached_property
    def _workers(self) -> Workers:
        return Workers(MOST_DECODING, lambda: Worker("paged.text.image_worker", "decoding it", IMAGE_LIMITS))

    @property
    def placeholder_id(self) -> int:
        """The token that stands for an image in a prompt."""
        return self._family.placeholder(self.vision)

    @cached_property
    def placeholder(self) -> str:
        """The text of that token. Raises RequestError without a tokenizer."""
        return self._token_text(self.placeholder_id)

    @cached_property
    def written(self) -> str:
        """The text of an image in a prompt: the placeholder with the tokens around it."""
        if not self._family.is_wrapped:
            return self.placeholder
        before, behind = map(self._token_text, self.vision.boundary_ids)
        return f"{before}{self.placeholder}{behind}"

    @property
    def known_ids(self) -> frozenset[int]:
        """The tokens that a prompt with images may have besides tokens of text."""
        return frozenset((self.vision.token_id, self.placeholder_id, *self.vision.boundary_ids))

    def given(self, prompt: Mapping[str, Any]) -> list[NamedImage]:
        """Return the images in a prompt dict. Raises RequestError."""
        name = "multi_modal_data"
        vision = self._seen_with(prompt.get("mm_processor_kwargs"))
        images = [
            each if isinstance(each, NamedImage) else NamedImage(f"{name}.image[{i}]", each)
            for i, each in enumerate(_images_of(name, prompt.get(name)) or ())
        ]
        uuids = _uuids_of(prompt.get("multi_modal_uuids"), len(images))
        for i, (uuid, image) in enumerate(zip(uuids, images, strict=True)):
            if image.image is None:
                raise RequestError(f"{image.name} is None; {NO_IMAGE_OF_UUID}", param=name)
            images[i] = image._replace(uuid=uuid or image.uuid, vision=vision)
        return images

    def _seen_with(self, kwargs: Any) -> VisionSpec | None:
        """Return what the images of a prompt with mm_processor_kwargs are seen with. Raises RequestError."""
        name = "mm_processor_kwargs"
        if kwargs is None or kwargs == {}:
            return None
        if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
            raise RequestError(f"{name} must be a dict of names and values, got {shown(kwargs)}", param=name)
        assert self._with_kwargs is not None, "a checkpoint's processor is read"
        try:
            return self._with_kwargs(self.vision, kwargs)
        except (CheckpointError, UnsupportedModelError) as error:
            raise RequestError(f"{name}: {error}", param=name) from None

    def parse(self, prompt: Any, images: Sequence[NamedImage], **options: Any) -> Parsed:
        """Return the prompt with the tokens of its images. Raises RequestError.

        prompt: text or token ids. options: options of `Tokenizer.encode`.
        """
        self.check_number(len(images))
        if isinstance(prompt, str) and self._tokenizer is None:
            raise RequestError(
                "a prompt that is text needs the tokenizer, which skip_tokenizer_init=True left out"
            )
        prompt = prompt if isinstance(prompt, str) else [*prompt]
        self._check_count(self._count(prompt), len(images))
        pixels = [self._read(each) for each in images]
        tokens = [self._family.tokens(self.vision, each.size) for each in pixels]
        if isinstance(prompt, str):
            text = self._in_text(prompt, tokens)
            assert self._tokenizer is not None, "a text was not refused without a tokenizer"
            token_ids = [*self._tokenizer.encode(text, name="the prompt", **options)]
        else:
            token_ids = self._in_tokens(prompt, tokens)
        placed = self._placed(token_ids, tokens, images, pixels)
        return Parsed(prompt if isinstance(prompt, str) else None, token_ids, placed)

    def check_number(self, num_images: int) -> None:
        """Raise RequestError for more images than a prompt may have."""
        if num_images > self.most:
            raise RequestError(
                f"the prompt has {num_images} images, and limit_mm_per_prompt allows {self.most}"
            )

    def with_places(self, prompt: str, num_images: int) -> str:
        """Return a text with placeholders at its beginning if it has none."""
        return prompt if self.count_in(prompt) else self.written * num_images + prompt

    def num_tokens(self, images: Sequence[NamedImage], known: dict[bytes, int]) -> int:
        """Return how many tokens a prompt has at most in place of these images' placeholders.

        known: the numbers that were found before, which are added to: an image is decoded once.

        Raises RequestError.
        """
        total = 0
        for named in images:
            image = named.image
            key = hashlib.sha256(image).digest() if isinstance(image, bytes) else b""
            if not key or key not in known:
                own = self._family.tokens(self.vision, self._read(named).size)
                known[key] = len(own.token_ids) + len(own.before) + len(own.after) - 1
            total += known[key]
        return total

    def count_in(self, text: str) -> int:
        """Return how many images a text has placeholders for."""
        return len(self._places(text))

    # Images

    def _read(self, named: NamedImage) -> Pixels:
        """Return the pixels of an image, resized. Raises RequestError."""
        name, image = named.name, named.image
        resizing = resizing_of(named.vision or self.vision)
        try:
            module = pillow()
        except ResourceError as error:
            raise RequestError(str(error)) from None
        if isinstance(image, module.Image):
            return _resized(name, image, resizing)
        if hasattr(image, "__array_interface__"):
            return _resized(name, _from_array(name, image), resizing)
        if isinstance(image, bytes | bytearray | memoryview):
            return self._decoded(name, bytes(image), resizing)
        if isinstance(image, str) and image[: len(DATA)].lower() == DATA:
            return self._decoded(name, bytes_of_data_url(name, image), resizing)
        if isinstance(image, str) and is_remote(image):
            if self.fetcher is None:
                raise RequestError(
                    f"{name} is a URL of https:, and nothing is fetched; allowed_media_domains names hosts"
                )
            return self._decoded(name, self.fetcher.fetch_now({image: name})[image], resizing)
        if isinstance(image, str) and is_file_url(image):
            return self._decoded(name, bytes_of_file(name, path_of_url(name, image)), resizing)
        if isinstance(image, str | os.PathLike):
            return self._decoded(name, bytes_of_file(name, image), resizing)
        raise RequestError(
            f"{name} must be an image of Pillow or numpy, a path, or the bytes of a file, got {shown(image)}"
        )

    def _decoded(self, name: str, data: bytes, resizing: Resizing) -> Pixels:
        """Decode and resize a file, in a process of bounded time and memory."""
        request = {"data": base64.b64encode(data).decode(), "resizing": [*resizing]}
        try:
            answer = self._workers.ask(request, name)
        except RequestError as error:
            message = str(error)
            raise RequestError(message if message.startswith(name) else f"{name}: {message}") from error
        if "wrong" in answer:
            raise RequestError(f"{name} {answer['wrong']}")
        return Pixels(Size(answer["height"], answer["width"]), base64.b64decode(answer["text"]))

    # Placeholders

    def _token_text(self, token_id: int) -> str:
        if self._tokenizer is None:
            raise RequestError("images in text need the tokenizer, which skip_tokenizer_init=True left out")
        return self._tokenizer.token_text(token_id)

    def _count(self, prompt: str | list[int]) -> int:
        """Return how many images a prompt has places for."""
        if isinstance(prompt, str):
            return len(self._places(prompt))
        marker = self.placeholder_id
        if marker != self.vision.token_id or marker not in prompt:
            return prompt.count(marker)
        return -1  # an image may have one token or many: known once its size is

    def _check_count(self, num_places: int, num_images: int) -> None:
        if num_places not in (-1, num_images):
            name = f"token {self.placeholder_id}"
            if self._tokenizer is not None:
                name = repr(self.placeholder)
            images = "1 image" if num_images == 1 else f"{num_images} images"
            raise RequestError(
                f"the prompt has {num_places} times {name}, which stands for an image, and {images}"
            )

    def _places(self, text: str) -> list[int]:
        """Return where in a text an image stands, but for what users have written as plain text."""
        plain = [*getattr(text, "plain", ())]
        found = []
        at = text.find(self.placeholder)
        while at >= 0:
            if not any(start <= at < end for start, end in plain):
                found.append(at)
            at = text.find(self.placeholder, at + len(self.placeholder))
        return found

    def _in_text(self, text: str, tokens: Sequence[ImageTokens]) -> str:
        """Replace each placeholder by the tokens of an image."""
        length = len(self.placeholder)
        changes = [
            (place, place + length, own.before + "".join(map(self._token_text, own.token_ids)) + own.after)
            for place, own in zip(self._places(text), tokens, strict=True)
        ]
        return substituted(text, changes)

    def _in_tokens(self, prompt: list[int], tokens: Sequence[ImageTokens]) -> list[int]:
        """Replace each placeholder by the tokens of an image, unless these are there already."""
        left = [*tokens]
        marker = self.placeholder_id
        ids = list[int]()
        at = 0
        while at < len(prompt):
            token_id = prompt[at]
            if token_id not in (marker, self.vision.token_id) or not left:
                ids.append(token_id)
                at += 1
                continue
            own = left[0]
            whole = own.token_ids
            bare = _bare(whole, self.vision.token_id)
            # One token may be all of a small image, or stand for it.
            forms = (whole,) if bare == [marker] else (whole, bare)
            taken = next((each for each in forms if prompt[at : at + len(each)] == each), None)
            if taken is not None:
                ids += taken
                at += len(taken)
            elif token_id == marker:
                ids += [*self._encode(own.before), *whole, *self._encode(own.after)]
                at += 1
            else:
                raise RequestError(
                    f"prompt_token_ids[{at}] is {token_id}, of which image {len(tokens) - len(left)} has "
                    f"{bare.count(token_id)} in a row; give its placeholder {marker} alone"
                )
            del left[0]
        if left:
            self._check_count(len(tokens) - len(left), len(tokens))
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_bare(text) if text and self._tokenizer is not None else []

    def _placed(
        self,
        token_ids: list[int],
        tokens: Sequence[ImageTokens],
        named: Sequence[NamedImage],
        pixels: Sequence[Pixels],
    ) -> tuple[PromptImage, ...]:
        """Return the images with their places among the tokens."""
        marker = self.vision.token_id
        images = []
        at = 0
        for i, (own, each) in enumerate(zip(tokens, pixels, strict=True)):
            bare = _bare(own.token_ids, marker)
            at = token_ids.index(marker, at) if marker in token_ids[at:] else len(token_ids)
            end = at + len(bare)
            if token_ids[at:end] != bare:
                raise RequestError(
                    f"image {i} of the prompt is {len(bare)} tokens from {marker} on, but the prompt has "
                    f"{shown(token_ids[at : at + 8])} in their place"
                )
            vision = named[i].vision or self.vision
            sha256 = sha256_of(vision, each, named[i].uuid)
            values = values_of(processing_of(vision), processing_of(self.vision))
            images.append(PromptImage(at, end, sha256, *each.size, each.data, values))
            at = end
        if marker in token_ids[at:]:
            raise RequestError(
                f"the prompt has {len(images)} images, and more tokens {marker} than these have embeddings"
            )
        return tuple(images)


def _images_of(name: str, data: Any) -> Sequence[Any] | None:
    """Return what multi_modal_data or multi_modal_uuids has for images. Raises RequestError."""
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise RequestError(f'{name} must be a dict such as {{"image": [...]}}, got {shown(data)}')
    for kind in ("audio", "video"):
        if data.get(kind) is not None:
            raise RequestError(f"{name} has {kind}, which is not supported; images are")
    reject_unknown(name, map(str, data), ("image", "audio", "video"))
    images = data.get("image")
    if images is None:
        return None
    return images if isinstance(images, list | tuple) and not isinstance(images, NamedImage) else [images]


def _uuids_of(given: Any, num_images: int) -> Sequence[str | None]:
    """Return the names in multi_modal_uuids, one for each image. Raises RequestError."""
    name = "multi_modal_uuids"
    uuids = _images_of(name, given)
    if uuids is None:
        return [None] * num_images
    for i, uuid in enumerate(uuids):
        if not isinstance(uuid, str | None) or uuid == "":
            raise RequestError(f"{name}.image[{i}] must be a non-empty string or None, got {shown(uuid)}")
    if len(uuids) != num_images:
        raise RequestError(f"{name} has {len(uuids)} names, and multi_modal_data {num_images} images")
    return uuids


def _resized(name: str, image: Any, resizing: Resizing) -> Pixels:
    try:
        check_size(image)
        return resizing.apply(in_rgb(image))
    except RequestError as error:
        raise RequestError(f"{name} {error}") from None
    except (OSError, ValueError, SyntaxError) as error:  # an image that Pillow reads only now
        raise RequestError(f"{name} cannot be read: {error}") from error


def _new_fetcher(domains: Sequence[str] | None) -> Fetcher | None:
    """Return what fetches images from these hosts. Raises ResourceError if h11 is not installed."""
    if not domains:
        return None
    try:
        from ..images.fetching import Fetcher
    except ImportError:
        raise ResourceError(
            "allowed_media_domains needs h11, which is not installed; install paged with the extra 'images'"
        ) from None
    return Fetcher(domains)


def _bare(token_ids: list[int], marker: int) -> list[int]:
    """Return the tokens of an image from its first embedding to its last one."""
    last = len(token_ids) - token_ids[::-1].index(marker)
    return token_ids[token_ids.index(marker) : last]


def _from_array(name: str, array: Any) -> Any:
    """Return an array of numpy as an image of Pillow."""
    shape: Any = getattr(array, "shape", ())
    is_image = len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4))
    if not is_image or str(getattr(array, "dtype", "")) != "uint8":
        raise RequestError(
            f"{name} must be an array uint8[height, width, 3], got {getattr(array, 'dtype', '')}{[*shape]}"
        )
    return pillow().fromarray(array)


def bytes_of_file(name: str, path: str | os.PathLike[str]) -> bytes:
    """Return the contents of a file. Raises RequestError."""
    file = Path(path)
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):  # a device may have no end
            raise RequestError(f"{name}: {shown(str(path))} is no regular file")
        if found.st_size > MOST_FILE_BYTES:
            raise RequestError(f"{name} has {found.st_size:,} bytes; at most {MOST_FILE_BYTES:,} are read")
        return file.read_bytes()
    except RequestError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"{name}: {shown(str(path))} cannot be read: {reason}") from error
