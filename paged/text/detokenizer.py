"""Detokenizer: the text of tokens, a few at a time, at a cost linear in their number.

Most tokenizers make text of tokens one by one: each stands for bytes, whatever is beside it, and text is
what the bytes are in UTF-8 (`TokenBytes`). Where that is not known, a little context is decoded again with
every token (`_Window`).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

# Tokens decoded before the first new one, so that it is spaced as it would be inside the text.
CONTEXT_TOKENS = 5
MAX_CHARACTER_TOKENS = 4  # the bytes of one
MAX_UNSETTLED_TOKENS = 16  # so many replacement characters in a row will not become anything else
REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text that follows a prompt, as it grows. What was given out is never taken back.

    It is what decoding prompt and output at once puts behind the prompt, but for bytes that are not UTF-8
    in a tokenizer with byte fallback: decoding at once spoils the characters before them too, which may have
    been shown already. Here they stay.

    skip_special_tokens: leave special tokens out.
    spaces_between_special_tokens: put a space between special tokens that follow each other.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._special = tokenizer.special_token_ids
        self._skip, self._spaces = skip_special_tokens, spaces_between_special_tokens
        self._after_special = False
        context = self._end_of(prompt_token_ids)
        known = tokenizer.token_bytes
        self._text: _Text = _Window(tokenizer, context) if known is None else _Bytes(known, context)

    def append(self, token_id: int) -> str:
        """Take the next token. Returns the text that is certain now and was not before."""
        if token_id not in self._special:
            self._after_special = False
            return self._text.append(token_id)
        if self._skip:
            return ""
        text = self._text.append(token_id)
        if self._after_special and self._spaces:
            text = " " + text
        self._after_special = True
        return text

    def extend(self, token_ids: Sequence[int]) -> str:
        """`append` of several tokens."""
        if self._special.isdisjoint(token_ids):
            self._after_special = False
            return self._text.extend(token_ids)
        return "".join(map(self.append, token_ids))

    def finish(self) -> str:
        """The rest: replacement characters for bytes that never became a character."""
        return self._text.finish()

    def _end_of(self, token_ids: Sequence[int]) -> list[int]:
        """As much of the end of a prompt as the text behind it may depend on, without what is left out."""
        most = CONTEXT_TOKENS + MAX_CHARACTER_TOKENS
        end = list[int]()
        for token_id in reversed(token_ids):
            if not (self._skip and token_id in self._special):
                end.append(token_id)
                if len(end) == most:
                    break
        return end[::-1]


class _Text(Protocol):
    """Text of tokens, none of which is left out."""

    def append(self, token_id: int) -> str: ...

    def extend(self, token_ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class TokenBytes(dict[int, bytes]):
    """The bytes that each token of a tokenizer stands for, looked up when they are first asked for."""

    def __init__(self, backend: Any, steps: list[dict[str, Any]]) -> None:
        super().__init__()
        self._backend = backend
        kinds = {step["type"] for step in steps}
        self._byte_level, self._byte_fallback = "ByteLevel" in kinds, "ByteFallback" in kinds
        self._replacements = dict(_replacements(steps))
        self._strips_first = any(step["type"] == "Strip" and step["start"] for step in steps)
        # Metaspace drops its marks in the first token of a text.
        self._dropped = "".join(
            step["replacement"]
            for step in steps
            if step["type"] == "Metaspace" and step["prepend_scheme"] != "never"
        )

    @classmethod
    def of(cls, backend: Any) -> TokenBytes | None:
        """The table of a tokenizer of the library `tokenizers`; None where tokens depend on their neighbours.

        backend: its `Tokenizer`, or None for a tokenizer that is from elsewhere.
        """
        if backend is None or backend.decoder is None:
            return None
        decoder = json.loads(backend.decoder.__getstate__())
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        return cls(backend, steps) if _is_understood(steps) else None

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._look_up(token_id, first=False)
        return found

    def first(self, token_id: int) -> bytes:
        """What the token stands for at the beginning of a text."""
        return self._look_up(token_id, first=True)

    def _look_up(self, token_id: int, *, first: bool) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:  # the model's vocabulary may be larger
            return b""
        if self._byte_level:
            return _byte_level_bytes(token)
        if self._byte_fallback and (byte := _fallback_byte(token)) is not None:
            return byte.removeprefix(b" ") if first and self._strips_first else byte
        if first:
            token = token.translate(dict.fromkeys(map(ord, self._dropped)))
        for mark, text in self._replacements.items():
            token = token.replace(mark, text)
        if first and self._strips_first:
            token = token.removeprefix(" ")
        return str(token).encode()


class _Bytes:
    """UTF-8 that grows by the bytes of tokens."""

    def __init__(self, table: TokenBytes, context: list[int]) -> None:
        self._table = table
        self._is_first = not context
        self._unsettled = b""  # the beginning of a character
        # Where the prompt ends in half a character, the rest of it may follow.
        for token_id in context:
            self._take(table[token_id])

    def append(self, token_id: int) -> str:
        if self._is_first:
            self._is_first = False
            return self._take(self._table.first(token_id))
        return self._take(self._table[token_id])

    def extend(self, token_ids: Sequence[int]) -> str:
        if self._is_first:
            return "".join(map(self.append, token_ids))
        return self._take(b"".join(map(self._table.__getitem__, token_ids)))

    def finish(self) -> str:
        return self._take(b"", final=True)

    def _take(self, data: bytes, *, final: bool = False) -> str:
        data = self._unsettled + data
        text, num_settled = codecs.utf_8_decode(data, "replace", final)
        self._unsettled = data[num_settled:]
        return text


class _Window:
    """Text by decoding a little context with every token.

    A character may need several tokens, and a token's text may depend on the one before it. So each step
    decodes from a little before the new tokens, and waits while the end is half a character.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = self._from_a_character_on(context)  # context, then tokens not yet settled
        self._num_context = len(self._ids)
        self._context_text = self._decode(self._ids)
        self._unsettled = ""  # their text, which may change

    def append(self, token_id: int) -> str:
        self._ids.append(token_id)
        self._unsettled = self._decode(self._ids)[len(self._context_text) :]
        is_open = not self._unsettled or self._unsettled.endswith(REPLACEMENT)
        if is_open and len(self._ids) - self._num_context < MAX_UNSETTLED_TOKENS:
            return ""
        # What is settled begins and ends with whole characters; a part of it might not.
        self._ids = self._ids[self._num_context :]
        self._num_context = len(self._ids)
        self._context_text = self._decode(self._ids)
        return self.finish()

    def extend(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.append, token_ids))

    def finish(self) -> str:
        text, self._unsettled = self._unsettled, ""
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _from_a_character_on(self, token_ids: list[int]) -> list[int]:
        """The last tokens: a cut character at their beginning spoils all that are bytes behind it."""
        for length in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MAX_CHARACTER_TOKENS):
            context = token_ids[-length:]
            if not self._decode(context).startswith(REPLACEMENT):
                return context
        return token_ids[-CONTEXT_TOKENS:]


def _is_understood(steps: list[dict[str, Any]]) -> bool:
    """Whether the steps of a decoder make each token's text by itself, but for the beginning."""
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return set(kinds) <= {"ByteLevel", "Fuse"}
    if not set(kinds) <= {"Replace", "ByteFallback", "Metaspace", "Fuse", "Strip"}:
        return False
    for i, step in enumerate(steps):
        if step["type"] == "Replace" and ("String" not in step["pattern"] or "Fuse" in kinds[:i]):
            return False
        if step["type"] == "Metaspace" and "Fuse" in kinds[:i]:
            return False
        # A space at the beginning of the whole text, not of each token, nor at its end.
        if step["type"] == "Strip" and not (
            "Fuse" in kinds[:i] and (step["content"], step["stop"]) == (" ", 0) and step["start"] <= 1
        ):
            return False
    return bool({"Replace", "Metaspace", "Fuse"} & set(kinds))


def _replacements(steps: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    for step in steps:
        if step["type"] == "Replace":
            yield step["pattern"]["String"], step["content"]
        elif step["type"] == "Metaspace":
            yield step["replacement"], " "


def _fallback_byte(token: str) -> bytes | None:
    """The byte of a token such as <0x0A>."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return None
    return None


def _byte_level_characters() -> dict[str, int]:
    """GPT-2's characters for bytes (Radford et al., 2019): what prints is itself, the rest comes after."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_characters()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # an added token, which is plain text
        return token.encode()
