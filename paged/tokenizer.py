"""Tokenizer: text to token ids and back. A few tokens at a time, back is `detokenizer`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .detokenizer import TokenBytes
from .errors import CheckpointError, RequestError


class Tokenizer:
    """The checkpoint's tokenizer, from transformers."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        # Its thread pool deadlocks in forked children and gains nothing on single prompts.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            self.hf: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{directory}: the tokenizer cannot be loaded ({error}); "
                "skip_tokenizer_init=True does without one"
            ) from error
        self.special_token_ids = frozenset(
            token_id for token_id, token in self.hf.added_tokens_decoder.items() if token.special
        )
        backend = getattr(self.hf, "backend_tokenizer", None)
        self.token_bytes = TokenBytes.of(backend)  # None: only `decode` knows what tokens make together
        # Its first call may change settings of its own. None after it does: threads may encode at once.
        self.hf("")
        self._token_texts: dict[int, str] = {}

    @property
    def chat_templates(self) -> dict[str, str]:
        """The checkpoint's chat templates by name; a single one is "default"."""
        templates = self.hf.chat_template
        return {"default": templates} if isinstance(templates, str) else dict(templates or {})

    @property
    def special_tokens(self) -> dict[str, str]:
        """What chat templates know as bos_token, eos_token and so on."""
        return dict(self.hf.special_tokens_map)

    def encode(self, text: str, *, add_special_tokens: bool = True, name: str = "the prompt") -> list[int]:
        """Token ids of a prompt, with the special tokens that the checkpoint puts in front, if wanted."""
        try:
            # Lists of ones as long as that of the ids would take three times as long.
            encoded = self.hf(
                text,
                add_special_tokens=add_special_tokens,
                return_attention_mask=False,
                return_token_type_ids=False,
            )
            return list(encoded["input_ids"])
        except (UnicodeEncodeError, TypeError) as error:
            lone = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if lone is None:
                raise
            raise RequestError(
                f"{name} is not valid Unicode text: character {lone} is the lone surrogate {text[lone]!r}"
            ) from error

    def encode_bare(self, text: str) -> list[int]:
        """Token ids of a piece of text, without special tokens around it."""
        return self.encode(text, add_special_tokens=False, name=repr(text))

    @cached_property
    def token_texts(self) -> list[str]:
        """What each token of the vocabulary adds to a text; a replacement for half characters."""
        # Behind another token: at the beginning of a text, some tokenizers take spaces away.
        before = self.encode_bare("a")
        start = len(self.decode(before))
        return [self.decode([*before, token])[start:] for token in range(len(self.hf))]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of these ids."""
        text = self.hf.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, special or not."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text
