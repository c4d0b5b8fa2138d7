"""Transcript: the text of one request, and how much of it is final."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..requests.request import Request
from .detokenizer import Detokenizer
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..requests.answer_start import AnswerStart
    from ..requests.stop_strings import Match, StopStrings


class Transcript:
    """The text of a request, updated by `read`.

    The longest suffix that may become a stop string is held back. If stop strings end only the answer, text
    is also held back while it may still be either reasoning or answer. Visible text never changes.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        params = request.inputs.params
        self.request = request
        self.num_tokens = 0  # output tokens read so far
        self._detokenizer = Detokenizer(
            tokenizer,
            request.inputs.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._text = ""
        self._shown = ""  # with stop strings: the text that was visible in the last call
        self._is_complete = False
        self._stops = request.inputs.stops
        self._state = 0  # of the automaton in _stops
        self._found: str | None = None  # the stop string at which the text ends
        self._num_unread = 0  # characters in which stop strings are not searched: of a fork's parent
        self._num_early = 0  # characters of the first min_tokens tokens
        tags = params.no_stop_within if self._stops is not None else None
        self._answer_start: AnswerStart | None = None  # until the answer begins
        if tags is not None:
            from ..requests.answer_start import AnswerStart

            self._answer_start = AnswerStart(*tags)

    @property
    def visible(self) -> str:
        """The text that can no longer change."""
        if self._stops is None or self._is_complete:
            return self._text
        # Extended in place as in `_append`: a slice would copy the whole text for every token.
        shown = self._shown
        self._shown = ""
        shown += self.since(len(shown))
        self._shown = shown
        return shown

    @property
    def num_visible(self) -> int:
        """The number of characters that can no longer change."""
        if self._stops is None or self._is_complete:
            return len(self._text)
        if self._answer_start is not None and self._answer_start.is_open:
            return 0
        return len(self._text) - self._stops.num_open(self._state)

    def since(self, start: int) -> str:
        """Return the visible text from this character index on."""
        return self._text[start : self.num_visible]

    def read_given(self, num_tokens: int) -> None:
        """Read the first output tokens, which another engine generated."""
        first = self.request.num_prompt_tokens
        self._read(self.request.token_ids[first : first + num_tokens])

    def read(self) -> str | None:
        """Read the newest tokens. Return the stop string that ends the text; None if there is none.

        A stop string is ignored if it ends within the first min_tokens tokens. In a fork with its own stop
        strings, a stop string is ignored if it begins in the parent's text.
        """
        request = self.request
        # The token that ended the request is part of its text only with include_stop_str_in_output.
        ends = request.ended_by_token and not self._is_complete
        start = request.num_prompt_tokens + self.num_tokens
        end = request.num_tokens - ends
        self._read(request.token_ids[start:end])
        if request.finish_reason is not None and not self._is_complete:
            self._complete(ends)
        return self._found

    def _read(self, token_ids: list[int]) -> None:
        if self._stops is not None:
            self._read_until_stop(token_ids, self._stops)
        elif token_ids and not self._is_complete:
            self.num_tokens += len(token_ids)
            self._append(self._detokenizer.extend(token_ids))

    def _complete(self, ends_with_a_token: bool) -> None:
        """Show all text, as the request has finished."""
        if self._answer_start is not None and self._stops is not None:
            self._search(self._stops, len(self._text) - len(self._answer_start.finish()))
            if self._is_complete:
                return
        if ends_with_a_token and self.request.inputs.params.include_stop_str_in_output:
            self._append(self._detokenizer.append(self.request.token_ids[-1]))
        self._append(self._detokenizer.finish())
        self._is_complete = True

    def _read_until_stop(self, token_ids: list[int], stops: StopStrings) -> None:
        inputs = self.request.inputs
        for token_id in token_ids:
            if self._is_complete:
                break
            self.num_tokens += 1
            start = len(self._text)
            text = self._detokenizer.append(token_id)
            self._append(text)
            if self.num_tokens <= inputs.num_unstopped_tokens:
                self._num_unread = len(self._text)
            elif self.num_tokens <= inputs.params.min_tokens:
                self._num_early = len(self._text)
            if self._answer_start is not None:
                answer = self._answer_start.read(text)
                if answer is None:
                    continue
                self._answer_start = None
                start = len(self._text) - len(answer)
            self._search(stops, start)

    def _search(self, stops: StopStrings, start: int) -> None:
        """Search the text from `start` on, and end it at the first stop string."""
        start = max(start, self._num_unread)
        if start < self._num_early:
            self._state = stops.skip(self._state, self._text[start : self._num_early])
            start = self._num_early
        self._state, match = stops.read(self._state, self._text[start:])
        if match is not None:
            self._cut(start, match)

    def _cut(self, start: int, match: Match) -> None:
        """End the text at a match whose positions count from `start`."""
        self._is_complete = True
        end = start + match.end
        self._found = self._text[end - match.length : end]
        if not self.request.inputs.params.include_stop_str_in_output:
            end -= match.length
        self._text = self._text[:end]

    def _append(self, text: str) -> None:
        # CPython extends a string in place only if nothing else refers to it; otherwise it copies the text.
        whole = self._text
        self._text = ""
        whole += text
        self._text = whole
