"""Marker texts in what users and tools say: they reach the model as plain text, never as special tokens.

A chat template puts contents between special tokens and gives one text. So a content that has the text of
such a token passes the template with a placeholder in its place, and `Tokenizer.encode` spells the text with
ordinary tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

MAX_SHARED = 128  # characters of a marker that shares its beginning: as deep is the expression at most
_ROLES = ("user", "tool")
_PRIVATE = [chr(code) for code in range(0xE100, 0xE200)]  # in no ordinary text


class MarkedText(str):
    """A text in which some spans are plain text, even if they look like special tokens."""

    __slots__ = ("plain",)
    plain: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, text: str, plain: Sequence[tuple[int, int]]) -> MarkedText:
        """Return a text with these plain spans."""
        marked = cls(text)
        marked.plain = tuple(plain)
        return marked


def substituted(text: str, changes: Sequence[tuple[int, int, str]]) -> str:
    """Return a text with other texts in the place of spans, in order; its plain spans stay plain.

    changes: the start and the end of each span, and what takes its place.
    """
    pieces = list[str]()
    moves = list[tuple[int, int]]()  # from a place on, by how much the text moves
    at = moved = 0
    for start, end, new in changes:
        pieces += [str(text[at:start]), new]
        at = end
        moved += len(new) - (end - start)
        moves.append((start, moved))
    whole = "".join([*pieces, str(text[at:])])
    plain = [
        (start + by, end + by)
        for start, end in getattr(text, "plain", ())
        for by in [next((by for place, by in reversed(moves) if place < start), 0)]
    ]
    return MarkedText.of(whole, plain) if plain else whole


class Placeholders:
    """Placeholders for the special tokens in the messages of one conversation.

    messages: the messages with placeholders; unchanged if they contain no special tokens.
    """

    def __init__(self, messages: Sequence[Any], markers: re.Pattern[str]) -> None:
        self.messages = messages
        self._texts = list[str]()
        if any(markers.search(text) for text in _texts(messages)):
            known = "".join(_texts(messages))
            self._begin, self._end = [char for char in _PRIVATE if char not in known][:2]
            self.messages = [self._replaced(message, markers) for message in messages]

    def restored(self, text: str) -> str:
        """Replace placeholders in a rendered text by the original texts, marked as plain."""
        if not self._texts:
            return text
        # A template may have escaped the placeholders, as JSON in ASCII has them.
        begin, end = (f"(?:{char}|\\\\u{ord(char):04x})" for char in (self._begin, self._end))
        pieces = list[str]()
        plain = list[tuple[int, int]]()
        at = length = 0
        for found in re.finditer(rf"{begin}(\d+){end}", text):
            marker = self._texts[int(found[1])]
            pieces += [text[at : found.start()], marker]
            length += found.start() - at
            plain.append((length, length + len(marker)))
            length += len(marker)
            at = found.end()
        return MarkedText.of("".join([*pieces, text[at:]]), plain)

    def _replaced(self, message: Any, markers: re.Pattern[str]) -> Any:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            return message
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": markers.sub(self._placeholder, content)}
        if not isinstance(content, Sequence):
            return message
        parts = [
            {**part, "text": markers.sub(self._placeholder, part["text"])} if _has_text(part) else part
            for part in content
        ]
        return {**message, "content": parts}

    def _placeholder(self, found: re.Match[str]) -> str:
        self._texts.append(found[0])
        return f"{self._begin}{len(self._texts) - 1}{self._end}"


def pattern_of(markers: Collection[str]) -> re.Pattern[str]:
    """Return a regular expression that finds the longest marker at each position.

    Markers with the same beginning share it in the expression: a tokenizer may have thousands.
    """
    known = [marker for marker in markers if marker.strip()]
    root: dict[str, Any] = {}
    for marker in known:
        if len(marker) <= MAX_SHARED:
            node = root
            for character in marker:
                node = node.setdefault(character, {})
            node[""] = {}
    longest_first = sorted((marker for marker in known if len(marker) > MAX_SHARED), key=len, reverse=True)
    expressions = [*map(re.escape, longest_first), *([_expression(root)] if root else [])]
    return re.compile("|".join(expressions) or "(?!)")


def _expression(node: dict[str, Any]) -> str:
    """Return the expression of what follows a beginning; "" is its end."""
    texts = list[str]()
    for character, following in node.items():
        text = re.escape(character)
        # A run of characters without a choice, so that the nesting is that of the choices.
        while len(following) == 1 and "" not in following:
            ((character, following),) = following.items()
            text += re.escape(character)
        texts += [text + _expression(following)] if character else []
    if not texts:
        return ""
    joined = f"(?:{'|'.join(sorted(texts))})"
    return f"{joined}?" if "" in node else joined


def _texts(messages: Sequence[Any]) -> Iterator[str]:
    for message in messages:
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            continue
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, Sequence):
            yield from (part["text"] for part in content if _has_text(part))


def _has_text(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def encode_marked(text: MarkedText, backend: Any, *, add_special_tokens: bool) -> list[int]:
    """Return the token ids of a text. Plain spans are encoded with ordinary tokens.

    backend: a tokenizer of the tokenizers library. Only segments (from one added token to the next) with
        plain spans are encoded in this way; the tokenizer encodes the others as usual.
    """
    neutral = list(text)
    for start, end in text.plain:
        neutral[start:end] = "x" * (end - start)
    encoded = backend.encode("".join(neutral), add_special_tokens=add_special_tokens)
    added = backend.get_added_tokens_decoder()
    ids = list[int]()
    run = list[int]()
    at = 0  # the end of the last added token
    for token_id, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
        if token_id not in added:
            run.append(token_id)
            continue
        ids += _segment(text, (at, start), run, backend) if end > start else run
        ids.append(token_id)
        run.clear()
        at = max(at, end)
    return ids + _segment(text, (at, len(text)), run, backend)


def _segment(text: MarkedText, span: tuple[int, int], ids: list[int], backend: Any) -> list[int]:
    """Return the ids of a part of a text between added tokens; they are given, unless it has plain spans."""
    begin, end = span
    if not any(begin <= start < end for start, _ in text.plain):
        return [*ids]
    return ordinary_ids(text[begin:end], backend, is_first=begin == 0)


def ordinary_ids(text: str, backend: Any, *, is_first: bool) -> list[int]:
    """Encode a text with ordinary tokens only, even if it contains the text of added tokens."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    pieces = [text]
    if backend.pre_tokenizer is not None:
        pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        if not is_first and pieces and pieces[0].startswith("▁") and not text.startswith((" ", "▁")):
            pieces[0] = pieces[0][1:]  # which is put before the beginning of a whole text alone
    return [token.id for piece in pieces if piece for token in backend.model.tokenize(piece)]
