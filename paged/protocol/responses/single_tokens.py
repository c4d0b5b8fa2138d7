"""SingleTokens: an answer token by token, so that what belongs to a token stays with its text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from ...requests.request import CompletionOutput, Logprob
from ..answers.places import Decoding


class SingleTokens:
    """Splits outputs with log-probabilities, deltas or whole ones, into outputs of one token each."""

    def __init__(self, decoding: Decoding) -> None:
        tokenizer = decoding.tokenizer
        before = [] if tokenizer is None else tokenizer.encode_bare("a")  # the answer follows a prompt
        self._detokenizer = decoding.detokenizer(before)
        self._waiting = deque[tuple[int, dict[int, Logprob], int]]()  # tokens whose text has not arrived
        self._text = ""

    def split(self, completion: CompletionOutput) -> Iterator[tuple[CompletionOutput, int]]:
        """Yield outputs of one token each, with the length of its text; the last one has the rest."""
        for token_id, place in zip(completion.token_ids, completion.logprobs or (), strict=False):
            piece = "" if self._detokenizer is None else self._detokenizer.append(token_id)
            self._waiting.append((token_id, place, len(piece)))
        self._text += completion.text
        is_last = completion.finish_reason is not None
        found = list[tuple[CompletionOutput, int]]()
        while self._waiting and (is_last or self._waiting[0][2] <= len(self._text)):
            token_id, place, length = self._waiting.popleft()
            text = self._text[:length]
            self._text = self._text[length:]
            one = replace(completion, text=text, token_ids=[token_id], logprobs=[place], finish_reason=None)
            found.append((one, len(text)))
        if is_last:
            rest = replace(completion, text=self._text, token_ids=[], logprobs=[])
            found.append((rest, len(self._text)))
        yield from found
