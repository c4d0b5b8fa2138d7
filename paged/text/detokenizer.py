"""Detokenizer: incremental decoding of tokens to text, at a cost linear in their number.

In most tokenizers each token stands for certain bytes, whatever its neighbours are, and the text is the bytes
decoded as UTF-8 (`_ByteText`). For others, a few context tokens are decoded again with every token
(`WindowText`).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .tokenizer import CONTEXT_TOKENS, MAX_CHARACTER_TOKENS, TokenBytes, Tokenizer

if TYPE_CHECKING:
    from .window_text import WindowText


class Detokenizer:
    """Decodes tokens to the growing text after a prompt. Returned text never changes.

    The text equals the part after the prompt when prompt and output are decoded at once, with one exception:
    a tokenizer with byte fallback would also replace valid characters before invalid UTF-8. Here these
    characters stay, since they may have been shown already.

    skip_special_tokens: leave special tokens out.
    spaces_between_special_tokens: put a space between adjacent special tokens.
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
        self._skip = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        self._after_special = False
        context = self._end_of(prompt_token_ids)
        token_bytes = tokenizer.token_bytes
        self._text: _ByteText | WindowText
        if token_bytes is not None:
            self._text = _ByteText(token_bytes, context)
        else:
            from .window_text import WindowText

            self._text = WindowText(tokenizer, context)

    def append(self, token_id: int) -> str:
        """Add the next token. Return the text that has become final."""
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
        """Add several tokens. Return the text that has become final."""
        if self._special.isdisjoint(token_ids):
            self._after_special = False
            return self._text.extend(token_ids)
        return "".join(map(self.append, token_ids))

    def finish(self) -> str:
        """Return the remaining text: replacement characters for incomplete characters."""
        return self._text.finish()

    def _end_of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the last tokens of a prompt on which the text after it may depend."""
        most = CONTEXT_TOKENS + MAX_CHARACTER_TOKENS
        end = list[int]()
        for token_id in reversed(token_ids):
            if not (self._skip and token_id in self._special):
                end.append(token_id)
                if len(end) == most:
                    break
        return end[::-1]


class _ByteText:
    """The text of all tokens, special ones too: their bytes, decoded as UTF-8."""

    def __init__(self, table: TokenBytes, context: list[int]) -> None:
        self._table = table
        self._is_first = not context
        self._unsettled = b""  # the bytes of an incomplete character
        # The prompt may end within a character that the first tokens complete.
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
