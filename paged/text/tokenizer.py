"""Tokenizer: text to token ids and back. `detokenizer` decodes incrementally."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..model.hf_config import read_json
from .direct_tokenizer import DirectTokenizer
from .token_bytes import TokenBytes
from .tokenizer_files import check_tokenizer, damaged_tokenizer

# A text that may be too long is tokenized in growing pieces from its beginning.
FIRST_CHARACTERS, CHARACTERS_PER_TOKEN, GROWTH = 4096, 8, 4
# A cut changes the tokens around it, so a text is refused only if a piece has this many tokens too many.
SPARE_TOKENS, SPARE_SHARE = 256, 0.25


class Tokenizer:
    """The checkpoint's tokenizer: the one of transformers, or one that is equal and quicker to load."""

    def __init__(self, directory: Path) -> None:
        check_tokenizer(directory)
        self.directory = directory
        # Its thread pool deadlocks in forked children and gains nothing on single prompts.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            self._tokenizer: Any = DirectTokenizer.of(directory) or self.hf
        except Exception as error:  # of any kind, as the libraries do not validate the files
            raise damaged_tokenizer(directory, error) from error
        self.special_token_ids = frozenset(
            token_id for token_id, token in self._tokenizer.added_tokens_decoder.items() if token.special
        )
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        self.token_bytes = TokenBytes.of(backend)  # None: tokens must be decoded together
        self._is_local = _is_local(backend)
        self._token_texts: dict[int, str] = {}

    @cached_property
    def hf(self) -> Any:
        """The tokenizer of transformers."""
        from transformers import AutoTokenizer, PreTrainedConfig

        config = _config_for(self.directory, PreTrainedConfig)
        hf = AutoTokenizer.from_pretrained(self.directory, config=config, trust_remote_code=False)
        # The first call may change the tokenizer's settings. No later one does, so threads may share it.
        hf("")
        return hf

    def __len__(self) -> int:
        return len(self._tokenizer)

    @property
    def chat_templates(self) -> dict[str, str]:
        """The checkpoint's chat templates by name; a single one is "default"."""
        templates = self._tokenizer.chat_template
        return {"default": templates} if isinstance(templates, str) else dict(templates or {})

    @property
    def special_tokens(self) -> dict[str, str]:
        """The variables bos_token, eos_token and so on of chat templates."""
        return dict(self._tokenizer.special_tokens_map)

    def encode(self, text: str, *, add_special_tokens: bool = True, name: str = "the prompt") -> list[int]:
        """Return the token ids of a prompt, by default with the special tokens that the checkpoint adds."""
        try:
            # Making the masks would take three times as long.
            encoded = self._tokenizer(
                text,
                add_special_tokens=add_special_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # a text that is too long for the model raises an error elsewhere
            )
            return list(encoded["input_ids"])
        except (UnicodeEncodeError, TypeError) as error:
            lone = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if lone is None:
                raise
            raise RequestError(
                f"{name} is not valid Unicode text: character {lone} is the lone surrogate {text[lone]!r}"
            ) from error

    def least_tokens(self, text: str, most: int) -> int:
        """Return a lower bound of a text's number of tokens if that is more than `most`; otherwise 0.

        The cost depends on `most`, not on the text, so that refusing ten megabytes does not delay the other
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
        """The text of each token of the vocabulary within a text, with U+FFFD for partial characters."""
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
        text = self._tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def token_text(self, token_id: int, *, first: bool = False) -> str:
        """Return the text of a single token, special or not, within a text or as its first token."""
        if first or token_id in self.special_token_ids:
            return self.decode([token_id], skip_special_tokens=False)
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self._text_within(token_id)
        return text


def _config_for(directory: Path, new_config: Any) -> Any:
    """Return a stand-in for the model's config, or None if AutoTokenizer must read the real one.

    AutoTokenizer would import the config's class, and with it torch's compiler, which is slow to load. It
    needs that class only if no file names the tokenizer's class.
    """
    names = [directory / name for name in ("tokenizer_config.json", "config.json")]
    if not all(file.exists() for file in names):
        return None
    for_tokenizer, for_model = map(read_json, names)
    tokenizer_class = for_model.get("tokenizer_class")
    is_named = for_tokenizer.get("tokenizer_class") or tokenizer_class
    if not is_named or "auto_map" in for_tokenizer or "model_name" in for_model:
        return None
    config = new_config(tokenizer_class=tokenizer_class, name_or_path=str(directory))
    config.model_type = for_model.get("model_type")
    return config


def _is_local(backend: Any) -> bool:
    """Return whether the first tokens of a text do not depend on text far after them.

    They may if a regular expression removes text.
    """
    if backend is None:
        return False
    parts = (backend.normalizer, backend.pre_tokenizer)
    normalizer, splitter = (b"" if part is None else part.__getstate__() for part in parts)
    return b'"Regex"' not in normalizer and not (b'"Regex"' in splitter and b'"Removed"' in splitter)
