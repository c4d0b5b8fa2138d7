"""Tokenizer: text to token ids and back. `detokenizer` decodes incrementally."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..base.errors import CheckpointError, RequestError
from ..checkpoints.tokenizer_patterns import RUNS
from .tokenizer_files import (
    DirectTokenizer,
    check_tokenizer,
    damaged_tokenizer,
    first_line,
    may_load_here,
    source_of,
)
from .tokenizer_published import has_published_parts, parts_of
from .tokenizer_source import PROBE, is_panic

if TYPE_CHECKING:
    from .marked_text import MarkedText

# Tokens decoded before the first new one, so that it is spaced as it would be inside the text.
CONTEXT_TOKENS = 5
MAX_CHARACTER_TOKENS = 4  # a character has at most 4 bytes in UTF-8
REPLACEMENT = "\ufffd"


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
        """Make the table of a tokenizer. Return None if a token's text depends on the tokens next to it.

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


# A text that may be too long is tokenized in growing pieces from its beginning.
FIRST_CHARACTERS = 4096
CHARACTERS_PER_TOKEN = 8
GROWTH = 4
# A cut changes the tokens around it, so a text is refused only if a piece has this many tokens too many.
SPARE_TOKENS = 256
SPARE_SHARE = 0.25


class Tokenizer:
    """The checkpoint's tokenizer: transformers', or an equivalent one that loads faster."""

    def __init__(self, directory: Path) -> None:
        """Load the tokenizer of a directory. Raises CheckpointError for files that are missing or wrong."""
        check_tokenizer(directory)
        self.directory = directory
        # Its thread pool deadlocks in forked children and gains nothing on single prompts.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._why_remote: str | None = None
        try:
            self._tokenizer: Any = self._loaded()
            self._probe()
        except BaseException as error:  # of any kind, as the libraries do not validate the files
            raise _damaged(directory, error) from error
        self.special_token_ids = frozenset(
            token_id for token_id, token in self._tokenizer.added_tokens_decoder.items() if token.special
        )
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self.token_bytes = TokenBytes.of(backend)  # None: tokens must be decoded together
        self._is_local = _is_local(
            parts_of(backend) if self._why_remote is None else self._tokenizer.description
        )
        self._token_texts: dict[int, str] = {}

    def _loaded(self) -> Any:
        """Return the tokenizer. It runs in this process if its time and memory are known to be bounded."""
        source = source_of(self.directory)
        if may_load_here(source):
            found = DirectTokenizer.of(self.directory) or self.hf
            if _has_bounded_parts(found.backend_tokenizer):
                return found
            self.__dict__.pop("hf", None)
        from .remote_tokenizer import RemoteTokenizer

        remote = RemoteTokenizer(source)
        if remote.why_unbounded is None:  # its files or its class are unusual, but not what they describe
            remote.close()
            return self.hf
        self._why_remote = remote.why_unbounded
        return remote

    def _probe(self) -> None:
        special = " ".join(str(token) for token in [*self._tokenizer.special_tokens_map.values()][:16])
        ids = self._tokenizer(PROBE + special)["input_ids"]
        self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @cached_property
    def hf(self) -> Any:
        """The tokenizer of transformers.

        Raises CheckpointError if the tokenizer runs in a separate process.
        """
        from .tokenizer_worker import load

        if self._why_remote is not None:
            raise CheckpointError(
                f"{self.directory}: the tokenizer works in a process of bounded time and memory, because "
                f"{self._why_remote}; if you trust the checkpoint, "
                "load it with transformers.AutoTokenizer.from_pretrained"
            )
        return load(source_of(self.directory))

    def __len__(self) -> int:
        return len(self._tokenizer)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The ids of the special tokens, by text."""
        return {self.token_text(token_id): token_id for token_id in self.special_token_ids}

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens by their names; empty if the tokenizer runs in a separate process."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            return dict(backend.get_vocab(with_added_tokens=True))
        return {} if self._why_remote is not None else dict(self._tokenizer.get_vocab())

    @property
    def chat_templates(self) -> dict[str, str]:
        """The checkpoint's chat templates by name. A single template has the name "default"."""
        templates = self._tokenizer.chat_template
        return {"default": templates} if isinstance(templates, str) else dict(templates or {})

    @property
    def special_tokens(self) -> dict[str, str]:
        """The variables bos_token, eos_token and so on for chat templates."""
        return dict(self._tokenizer.special_tokens_map)

    def encode(self, text: str, *, add_special_tokens: bool = True, name: str = "the prompt") -> list[int]:
        """Return the token ids of a prompt, by default with the special tokens that the checkpoint adds.

        The plain spans of a MarkedText are encoded with ordinary tokens.
        """
        try:
            if getattr(text, "plain", ()):
                return self._encode_marked(cast("MarkedText", text), add_special_tokens)
            # Making the masks would take three times as long.
            encoded = self._tokenizer(
                text,
                add_special_tokens=add_special_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # a text that is too long for the model raises an error elsewhere
            )
            return list(encoded["input_ids"])
        except BaseException as error:  # of any kind: see `_is_of_library`
            if not _is_of_library(error):
                raise
            lone = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if lone is None:
                raise RequestError(f"{name} cannot be tokenized: {first_line(error)}") from error
            raise RequestError(
                f"{name} is not valid Unicode text: character {lone} is the lone surrogate {text[lone]!r}"
            ) from error

    def _encode_marked(self, text: MarkedText, add_special_tokens: bool) -> list[int]:
        backend = None if self._why_remote else getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:
            from .marked_text import encode_marked

            return encode_marked(text, backend, add_special_tokens=add_special_tokens)
        # Cut within each span, none of the pieces has the text of a special token.
        cuts = [0, *(start + 1 for start, _ in text.plain), len(text)]
        ids = list[int]()
        for i, (start, end) in enumerate(itertools.pairwise(cuts)):
            is_first = add_special_tokens and i == 0
            ids += self.encode(str(text[start:end]), add_special_tokens=is_first)
        return ids

    @cached_property
    def added_texts(self) -> frozenset[str]:
        """The texts of all added tokens; only of the special tokens if the others are unknown."""
        backend = None if self._why_remote else getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return frozenset(self.special_ids)
        return frozenset(token.content for token in backend.get_added_tokens_decoder().values())

    def least_tokens(self, text: str, most: int) -> int:
        """Return a lower bound of a text's number of tokens if the bound exceeds `most`; otherwise 0.

        The time depends on `most`, not on the text, so that refusing ten megabytes does not delay other
        requests. Raises RequestError as `encode` does.
        """
        enough = most + int(most * SPARE_SHARE) + SPARE_TOKENS
        length = max(FIRST_CHARACTERS, CHARACTERS_PER_TOKEN * most)
        while self._is_local and GROWTH * length < len(text):
            num_tokens = len(self.encode(text[:length], add_special_tokens=False))
            if num_tokens > enough:
                return num_tokens - SPARE_TOKENS
            length *= GROWTH  # perhaps the tokenizer drops blanks
        return 0

    def encode_bare(self, text: str) -> list[int]:
        """Return the token ids of a piece of text, without special tokens."""
        return self.encode(text, add_special_tokens=False, name=repr(text))

    @cached_property
    def token_texts(self) -> list[str]:
        """The text of each token of the vocabulary inside a text, with U+FFFD for partial characters."""
        return [self._text_within(token) for token in range(len(self))]

    @cached_property
    def _before(self) -> tuple[list[int], int]:
        """Tokens after which others are decoded, and the length of their text."""
        before = self.encode_bare("a")
        return before, len(self.decode(before))

    def _text_within(self, token_id: int) -> str:
        # Decoded after another token: at the beginning of a text, some tokenizers drop spaces.
        before, start = self._before
        return self.decode([*before, token_id])[start:]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        try:
            text = self._tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        except BaseException as error:  # a Rust panic is not an Exception
            if not is_panic(error):
                raise
            raise RequestError(f"the tokenizer cannot decode this: {first_line(error)}") from error
        return str(text)

    def token_text(self, token_id: int, *, first: bool = False) -> str:
        """Return the text of a single token, special or not, within a text or, with `first`, at its start."""
        if first or token_id in self.special_token_ids:
            return self.decode([token_id], skip_special_tokens=False)
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._text_within(token_id)
        return text


def _is_of_library(error: BaseException) -> bool:
    """Return whether an error may come from the tokenizers library, which also panics with BaseExceptions."""
    return isinstance(error, Exception) or is_panic(error)


def _damaged(directory: Path, error: BaseException) -> BaseException:
    """Return the error to raise when a tokenizer is not loaded. An interrupt is returned unchanged."""
    return damaged_tokenizer(directory, error) if _is_of_library(error) else error


def _has_bounded_parts(backend: Any) -> bool:
    """Return whether the time of a tokenizer's parts besides its model is known to be bounded."""
    parts = parts_of(backend)
    if has_published_parts(parts):
        return True
    from .tokenizer_bounds import why_unbounded

    return why_unbounded(parts, has_model=False) is None


def _is_local(parts: Mapping[str, Any]) -> bool:
    """Return whether the first tokens of a text do not depend on text far after them.

    They may if a regular expression removes text that is more than a run of blanks or the like.

    parts: empty if unknown.
    """
    if not parts:
        return False
    removing = [parts["normalizer"]]
    if '"Removed"' in json.dumps(parts["pre_tokenizer"]):
        removing.append(parts["pre_tokenizer"])
    return all(expression in RUNS for expression in _expressions(removing))


def _expressions(part: Any) -> Iterator[str]:
    """Yield all regular expressions of a part."""
    if isinstance(part, list):
        for each in part:
            yield from _expressions(each)
    elif isinstance(part, dict):
        if isinstance(expression := part.get("Regex"), str):
            yield expression
        yield from _expressions([*part.values()])
