"""Files of images, and parts of messages, that a seed damages."""

from __future__ import annotations

import base64
import copy
import functools
import io
import random
import struct
import warnings
import zlib
from collections.abc import Callable
from typing import Any

from PIL import Image

from paged.images.decoding import IMAGE_FORMATS
from tests.support.images import data_url, picture, png
from tests.support.mutations import damage_bytes, damage_value

PNG_HEAD = b"\x89PNG\r\n\x1a\n"
# Sizes that a header may claim.
SIDES = (0, 1, 2, 199, 4000, 8000, 16384, 16385, 65535, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
OTHER_FILES = (
    b"",
    b"%PDF-1.7\n",
    b"BM" + bytes(80),
    b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    b"II*\x00\x08\x00",
)


def chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def small_png(
    width: int, height: int, depth: int = 8, colour: int = 2, *, data: bytes = b"", more: bytes = b""
) -> bytes:
    """Return a PNG that claims a size, with few bytes. more: chunks before its data."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    packed = data or zlib.compress(bytes(1000))
    return PNG_HEAD + chunk(b"IHDR", head) + more + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


@functools.cache
def whole_files() -> tuple[bytes, ...]:
    """Return images of each format and mode."""
    rgb, alpha, grey = picture(1), picture(2, 40, 31, "RGBA"), picture(3, 17, 50, "L")
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "x" * 500
    frames = [picture(i, 12, 9) for i in range(3)]
    palette = rgb.quantize(16)
    files = [
        png(rgb),
        png(alpha),
        png(grey),
        png(rgb.convert("1")),
        png(palette),
        png(palette, transparency=3),
    ]
    files += [
        png(Image.fromarray(bytes_16(20, 30)).convert("I;16")),
        png(rgb, exif=exif),
        png(grey.convert("LA")),
    ]
    files += [png(rgb, "JPEG", exif=exif, quality=80), png(rgb, "JPEG", progressive=True), png(grey, "JPEG")]
    files += [png(rgb.convert("CMYK"), "JPEG"), png(rgb, "WEBP"), png(alpha, "WEBP", lossless=True)]
    files += [png(frames[0], "WEBP", save_all=True, append_images=frames[1:])]
    files += [
        png(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        png(palette, "GIF", transparency=3),
    ]
    return tuple(files)


def bytes_16(width: int, height: int) -> Any:
    """Return numbers of 16 bits."""
    import numpy as np

    return np.random.default_rng(4).integers(0, 65536, (height, width), dtype=np.uint16)


def _bombs(choose: random.Random) -> bytes:
    """Return a small file that claims to be, or unpacks to be, a large one."""
    width, height = choose.choice(SIDES), choose.choice(SIDES)
    depth, colour = choose.choice((1, 2, 4, 8, 16, 3)), choose.choice((0, 2, 3, 4, 6, 7))
    much = zlib.compress(bytes(choose.choice((10**4, 10**6, 3 * 10**7))))
    more = choose.choice(
        (
            b"",
            chunk(b"zTXt", b"a\0\0" + much),
            chunk(b"iCCP", b"a\0\0" + much),
            chunk(b"iTXt", b"a\0\1\0\0\0" + much),
            chunk(b"eXIf", b"II*\0\x08\0\0\0" + struct.pack("<H", 65535) + bytes(100)),
            chunk(b"PLTE", bytes(choose.choice((3, 768, 770, 3000)))),
            chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0)),
            chunk(b"tEXt", b"a\0" + b"b" * 10**6),
        )
    )
    return small_png(width, height, depth, colour, data=much if choose.random() < 0.5 else b"", more=more)


def _number(choose: random.Random, data: bytes) -> bytes:
    """Write a number into the head of a file, mostly where sizes and lengths are."""
    file = bytearray(data)
    form = choose.choice((">I", "<I", ">H", "<H", "B"))
    number = choose.choice(SIDES) % (1 << 8 * struct.calcsize(form))
    at = choose.randrange(min(len(file), choose.choice((40, 400)))) if file else 0
    file[at : at + struct.calcsize(form)] = struct.pack(form, number)
    return bytes(file)


def _spliced(choose: random.Random, data: bytes) -> bytes:
    other = choose.choice(whole_files())
    return data[: choose.randrange(len(data) + 1)] + other[choose.randrange(len(other)) :]


def _with_sums(data: bytes) -> bytes:
    """Return a PNG whose chunks have the sums of what is in them, so that its decoder reads on."""
    at = len(PNG_HEAD)
    file = bytearray(data)
    while at + 12 <= len(file):
        (length,) = struct.unpack_from(">I", file, at)
        end = at + 8 + length
        if end + 4 > len(file):
            break
        struct.pack_into(">I", file, end, zlib.crc32(file[at + 4 : end]))
        at = end + 4
    return bytes(file)


Damage = Callable[[random.Random, bytes], bytes]
DAMAGES: tuple[Damage, ...] = (
    lambda choose, data: damage_bytes(choose, data)[0],
    _number,
    _number,
    _spliced,
    lambda choose, data: data[: choose.randrange(len(data) + 1)],
    lambda choose, data: data + choose.randbytes(choose.randrange(2000)),
    lambda choose, data: data * choose.randint(2, 4),
)


def damaged_image(seed: int) -> bytes:
    """Return the file that a seed stands for; a few are whole."""
    choose = random.Random(seed)
    kind = choose.random()
    if kind < 0.02:
        return choose.choice(whole_files())
    if kind < 0.04:
        return choose.choice(OTHER_FILES) + choose.randbytes(choose.randrange(100))
    if kind < 0.14:
        return _bombs(choose)
    data = choose.choice(whole_files())
    for _ in range(choose.choice((1, 1, 1, 2, 3))):
        data = choose.choice(DAMAGES)(choose, data)
    return _with_sums(data) if data.startswith(PNG_HEAD) and choose.random() < 0.7 else data


# Parts

URL = data_url(picture(1))
BASE64 = URL.partition(",")[2]
_CHAT_PART = {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}}
_SOURCE = {"type": "base64", "media_type": "image/png", "data": BASE64}
_USER = {"role": "user"}
_TEXT = {"type": "text", "text": "x"}
# Valid bodies with images, by path, and where the damage goes.
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": [{**_USER, "content": [_TEXT, _CHAT_PART]}], "max_tokens": 1}),
    (
        "/v1/responses",
        {
            "input": [{**_USER, "content": [{"type": "input_image", "image_url": URL, "detail": "low"}]}],
            "max_output_tokens": 1,
        },
    ),
    (
        "/v1/messages",
        {"messages": [{**_USER, "content": [_TEXT, {"type": "image", "source": _SOURCE}]}], "max_tokens": 1},
    ),
    (
        "/api/chat",
        {"messages": [{**_USER, "content": "x", "images": [BASE64]}], "options": {"num_predict": 1}},
    ),
    ("/api/generate", {"prompt": "x", "images": [BASE64], "options": {"num_predict": 1}}),
    (
        "/completion",
        {"prompt": {"prompt_string": "<__media__>x", "multimodal_data": [BASE64]}, "n_predict": 1},
    ),
    ("/tokenize", {"messages": [{**_USER, "content": [_CHAT_PART]}]}),
)
URLS = (
    "https://images.example/x.png",
    "https://127.0.0.1/x",
    "http://169.254.169.254/latest/meta-data",
    "file:///etc/passwd",
    "/etc/passwd",
    "data:",
    "data:,",
    "data:;base64",
    "data:;base64,",
    "data:image/png;base64,\ud800",
    "data:text/plain;base64,AAAA",
    "data:image/png;base64," + "A" * 4097,
    "data:image/png;charset=x;base64,AAAA",
    "DATA:IMAGE/PNG;BASE64,AAAA",
    "javascript:x",
    "blob:x",
)
PLACEHOLDERS = ("[IMG]", "[IMG_END]", "<__media__>", "[IMG]" * 7)
PARTS: tuple[Any, ...] = (
    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
    {"type": "video_url", "video_url": {"url": URL}},
    {"type": "image_pil", "image_pil": "/etc/passwd"},
    {"type": "image", "image": "/etc/passwd"},
    {"type": "image", "path": "/etc/passwd"},
    {"type": "image", "place": "x"},
    {**_CHAT_PART, "place": "x"},
    {**_CHAT_PART, "url_place": "x"},
    {**_CHAT_PART, "text": "x"},
    {**_CHAT_PART, "image": URL},
    None,
    [],
    "x",
    7,
)


def _lists(value: Any) -> list[list[Any]]:
    """Return the lists in a value in which parts or images are."""
    found = []
    if isinstance(value, list):
        found.append(value)
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            found += _lists(each)
    return found


def _strings(value: Any) -> list[tuple[Any, Any]]:
    """Return where the URLs and the base64 in a value are."""
    found = []
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, each in entries:
        if isinstance(each, str) and each.endswith(BASE64):
            found.append((value, key))
        found += _strings(each)
    return found


def damaged_part(seed: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the body that a seed stands for."""
    choose = random.Random(f"part {seed}")
    path, body = choose.choice(BODIES)
    body = copy.deepcopy(body)
    for _ in range(choose.choice((1, 1, 2))):
        kind = choose.randrange(6)
        places = _strings(body)
        lists = _lists(body)
        if kind == 0 and places:  # another URL
            owner, key = choose.choice(places)
            owner[key] = choose.choice(URLS)
        elif kind == 1 and places:  # a damaged file
            owner, key = choose.choice(places)
            file = base64.b64encode(damaged_image(choose.randrange(10**6))).decode()
            owner[key] = owner[key].removesuffix(BASE64) + file
        elif kind == 2 and places:  # damaged base64
            owner, key = choose.choice(places)
            at = choose.randrange(len(owner[key]))
            owner[key] = (
                owner[key][:at]
                + choose.choice(("=", "*", "é", "\n", "", "====", "\x00"))
                + owner[key][at + 1 :]
            )
        elif kind == 3 and lists:  # a wrong part, or many
            choose.choice(lists).append(choose.choice(PARTS))
        elif kind == 4 and lists:
            chosen = choose.choice(lists)
            chosen *= choose.randint(2, 6)
        else:
            damage_value(choose, body)
    if choose.random() < 0.1:
        body["prompt" if "prompt" in body else "messages"] = choose.choice(PLACEHOLDERS)
    return path, body


def size_of(data: bytes) -> tuple[int, int] | None:
    """Return the size that a file declares; None if Pillow does not read one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return Image.open(io.BytesIO(data), formats=IMAGE_FORMATS).size
        except Exception:
            return None
