"""TokenBytes: the bytes that each token of a tokenizer stands for."""

from __future__ import annotations

import json
import re
from typing import Any


class TokenBytes(dict[int, bytes]):
    """The bytes of each token id, looked up when first used."""

    def __init__(self, backend: Any, steps: list[dict[str, Any]]) -> None:
        super().__init__()
        self._backend = backend
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._strips_first = any(step["type"] == "Strip" and step["start"] for step in steps)
        self._replacements: dict[str, str] = {}
        self._dropped = ""  # the marks that Metaspace drops from the first token of a text
        for step in steps:
            if step["type"] == "Replace":
                self._replacements[step["pattern"]["String"]] = step["content"]
            elif step["type"] == "Metaspace":
                self._replacements[step["replacement"]] = " "
                if step["prepend_scheme"] != "never":
                    self._dropped += step["replacement"]

    @classmethod
    def of(cls, backend: Any) -> TokenBytes | None:
        """Make the table of a tokenizer; None where a token's text depends on its neighbours.

        backend: the `tokenizers.Tokenizer`, or None for a tokenizer that is not from that library.
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
        """Return the bytes of a token at the beginning of a text."""
        return self._look_up(token_id, first=True)

    def _look_up(self, token_id: int, *, first: bool) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:  # the model's vocabulary may be larger than the tokenizer's
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


def _is_understood(steps: list[dict[str, Any]]) -> bool:
    """Return whether a decoder's steps make each token's text independently, except for the first token."""
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
        # It must strip a space at the beginning of the whole text, not of each token, nor at the end.
        if step["type"] == "Strip" and not (
            "Fuse" in kinds[:i] and (step["content"], step["stop"]) == (" ", 0) and step["start"] <= 1
        ):
            return False
    return bool({"Replace", "Metaspace", "Fuse"} & set(kinds))


def _fallback_byte(token: str) -> bytes | None:
    """Return the byte of a token such as <0x0A>; None for any other token."""
    match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", token)
    return None if match is None else bytes.fromhex(match[1])


def _byte_level_characters() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable bytes as themselves, the others from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_characters()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # an added token, which is plain text
        return token.encode()
