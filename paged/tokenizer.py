"""Tokenizer: text to token ids and back, also a few tokens at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .errors import CheckpointError, RequestError

# Tokens decoded before the first new one, so that it is spaced as it would be inside the text.
CONTEXT_TOKENS = 5
MAX_CHARACTER_TOKENS = 4  # the bytes of one
REPLACEMENT = "\ufffd"


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

    @property
    def chat_templates(self) -> dict[str, str]:
        """The checkpoint's chat templates by name; a single one is "default"."""
        templates = self.hf.chat_template
        return {"default": templates} if isinstance(templates, str) else dict(templates or {})

    @property
    def special_tokens(self) -> dict[str, str]:
        """What chat templates know as bos_token, eos_token and so on."""
        return dict(self.hf.special_tokens_map)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt; add_special_tokens: with those that the checkpoint puts in front."""
        try:
            return list(self.hf(text, add_special_tokens=add_special_tokens)["input_ids"])
        except (UnicodeEncodeError, TypeError) as error:  # lone surrogates: no Unicode text has them
            raise RequestError(f"the prompt is not valid Unicode text: {text!r}") from error

    def decode(self, token_ids: list[int]) -> str:
        """Text of these ids, without special tokens."""
        return str(self.hf.decode(token_ids, skip_special_tokens=True))


class Detokenizer:
    """The text of one growing list of token ids, at a cost linear in its length.

    A character may need several tokens, and a token's text may depend on the one before it. So each step
    decodes from a little before the new tokens, and waits while the end is half a character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        self.text = ""  # what can no longer change
        self.num_tokens = 0  # taken so far
        self.num_searched = 0  # characters of the text where no stop string may end any more
        self._pending = ""  # the tail that may change: half characters
        self._ids = _context(tokenizer, prompt_token_ids)  # context, then tokens not yet settled
        self._num_context = len(self._ids)
        self._context_text = tokenizer.decode(self._ids)

    def append(self, token_ids: list[int]) -> None:
        """Take more tokens."""
        if not token_ids:
            return
        self.num_tokens += len(token_ids)
        self._ids += token_ids
        self._pending = self._tokenizer.decode(self._ids)[len(self._context_text) :]
        if not self._pending:
            # Special tokens: as context they would hide the text before them.
            del self._ids[-len(token_ids) :]
        elif not self._pending.endswith(REPLACEMENT):
            self.text += self._pending
            self._pending = ""
            # The settled tokens begin and end with whole characters; a part of them might not.
            self._ids = self._ids[self._num_context :]
            self._num_context = len(self._ids)
            self._context_text = self._tokenizer.decode(self._ids)

    def finish(self) -> None:
        """Settle the tail: a replacement character stands for bytes that never became one."""
        self.text += self._pending
        self._pending = ""


def _context(tokenizer: Tokenizer, token_ids: list[int]) -> list[int]:
    """The last tokens, from the beginning of a character: a cut one spoils all that are bytes behind it."""
    for length in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MAX_CHARACTER_TOKENS):
        context = token_ids[-length:]
        if not tokenizer.decode(context).startswith(REPLACEMENT):
            return context
    return token_ids[-CONTEXT_TOKENS:]
