"""ForcedText: how the grammar library spells text that is certain to follow."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any


class ForcedText:
    """A tokenizer for the grammar library that never returns a special token for text.

    The library asks for the tokens of text that a grammar forces, and then allows only these tokens. The
    model's own encoding is used if it decodes to exactly that text. Otherwise (the text contains an added
    token, or a normalizer changes the text), the text is encoded with the longest ordinary tokens.

    The library reads the public attributes.

    library_tokenizer: the library's own tokenizer of the same vocabulary.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, library_tokenizer: Any, backend: Any, ends: Sequence[int]) -> None:
        ids = range(library_tokenizer.vocab_size)
        self.eos_token_id = ends[0]
        self.special_token_ids = [i for i in ids if library_tokenizer.is_special_token(i)]
        self._special = frozenset(self.special_token_ids)
        self.tokens = [self._bytes(library_tokenizer, i) for i in ids]
        self._greedy = library_tokenizer.greedy_tokenize
        self._backend = _without_prefixes(backend)
        added = backend.get_added_tokens_decoder()
        texts = sorted({added[i].content for i in added if i in self._special}, key=len, reverse=True)
        self._special_texts = re.compile("|".join(map(re.escape, filter(None, texts))) or "(?!)")

    def __call__(self, text: str) -> list[int]:
        """Return ordinary tokens that spell the text."""
        ids = list[int]()
        start = 0
        for found in self._special_texts.finditer(text):
            ids += self._spelled(text[start : found.start()])
            ids += self._greedy(found[0])
            start = found.end()
        return ids + self._spelled(text[start:])

    def _bytes(self, library_tokenizer: Any, token_id: int) -> bytes:
        found: bytes = library_tokenizer.decode_bytes([token_id])
        # The library shows a token without a text, as of a hole in the vocabulary, by its number.
        is_hole = token_id not in self._special and found == b"<[%d]>" % token_id
        return b"" if is_hole else found

    def _spelled(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids if text else []
        known = self._special.isdisjoint(ids) and all(i < len(self.tokens) for i in ids)
        if known and b"".join(self.tokens[i] for i in ids) == text.encode():
            return ids
        return list(self._greedy(text))


def _without_prefixes(backend: Any) -> Any:
    """Return a copy of a tokenizer that puts no blank before a text, and neither cuts nor pads it.

    backend: a tokenizer of the tokenizers library.
    """
    from tokenizers import Tokenizer

    description = json.loads(backend.to_str())
    description["truncation"] = description["padding"] = None
    description["normalizer"] = _without_prefix(description["normalizer"])
    description["pre_tokenizer"] = _without_prefix(description["pre_tokenizer"])
    return Tokenizer.from_str(json.dumps(description))


def _without_prefix(part: Any) -> Any:
    """Return the description of a normalizer or pre-tokenizer that puts nothing before a text."""
    if not isinstance(part, Mapping):
        return part
    kind = part.get("type")
    if kind == "Prepend":
        return None
    if kind == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if kind == "ByteLevel":
        return {**part, "add_prefix_space": False}
    parts = {}
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            parts[name] = [p for p in map(_without_prefix, part[name]) if p is not None]
    return {**part, **parts}
