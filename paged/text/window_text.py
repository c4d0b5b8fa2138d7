"""WindowText: incremental decoding where a token's text depends on the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import CONTEXT_TOKENS, MAX_CHARACTER_TOKENS, REPLACEMENT, Tokenizer

MAX_UNSETTLED_TOKENS = 16  # after so many tokens a replacement character is taken to be final


class WindowText:
    """The text of all tokens, special ones too, each decoded together with a few tokens before it.

    A character may need several tokens, and a token's text may depend on the one before it. So each step
    decodes from a few tokens before the new ones, and waits while the text ends within a character.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = self._whole_characters(context)  # context, then tokens whose text is not final
        self._num_context = len(self._ids)
        self._context_text = self._decode(self._ids)
        self._unsettled = ""  # text that is not final

    def append(self, token_id: int) -> str:
        self._ids.append(token_id)
        self._unsettled = self._decode(self._ids)[len(self._context_text) :]
        is_open = not self._unsettled or self._unsettled.endswith(REPLACEMENT)
        if is_open and len(self._ids) - self._num_context < MAX_UNSETTLED_TOKENS:
            return ""
        # All new tokens become context: they begin and end with whole characters, a part of them might not.
        self._ids = self._ids[self._num_context :]
        self._num_context = len(self._ids)
        self._context_text = self._decode(self._ids)
        return self.finish()

    def extend(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.append, token_ids))

    def finish(self) -> str:
        text = self._unsettled
        self._unsettled = ""
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def _whole_characters(self, token_ids: list[int]) -> list[int]:
        """Return the last tokens, from the start of a character: a partial one garbles the bytes after it."""
        for length in range(CONTEXT_TOKENS, CONTEXT_TOKENS + MAX_CHARACTER_TOKENS):
            context = token_ids[-length:]
            if not self._decode(context).startswith(REPLACEMENT):
                return context
        return token_ids[-CONTEXT_TOKENS:]
