"""Transcript: what one request has said so far, and what of it may be shown."""

from __future__ import annotations

from ..requests.request import Request
from ..requests.stop_strings import Match, StopStrings
from .detokenizer import Detokenizer
from .tokenizer import Tokenizer


class Transcript:
    """The text of a request, brought up to its tokens where somebody looks at it.

    The end of the text is held back while it may become a stop string: exactly the longest end that begins
    one. What was shown stays.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        params = request.inputs.params
        self.request = request
        self.num_tokens = 0  # of its output, read so far
        self._detokenizer = Detokenizer(
            tokenizer,
            request.inputs.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._text = ""
        self._shown = ""  # the beginning of it that was visible the last time, where there are stop strings
        self._is_complete = False
        self._stops = request.inputs.stops
        self._state = 0  # of these
        self._found: str | None = None  # the one at which the text ends

    @property
    def visible(self) -> str:
        """The text as far as it will not change."""
        if self._stops is None or self._is_complete:
            return self._text
        # Not cut out of the text, all of which would be copied for every token. In place as in `_append`.
        shown, self._shown = self._shown, ""
        shown += self.since(len(shown))
        self._shown = shown
        return shown

    @property
    def num_visible(self) -> int:
        """How many characters of the text will not change."""
        if self._stops is None or self._is_complete:
            return len(self._text)
        return len(self._text) - self._stops.num_open(self._state)

    def since(self, start: int) -> str:
        """What is visible from a character on."""
        return self._text[start : self.num_visible]

    def read(self) -> str | None:
        """Take the newest tokens. Returns the stop string at which the text ends, once there is one.

        One that ends within min_tokens does not count, but may be the beginning of one that does.
        """
        request = self.request
        # The token that ended the request is part of its text only if that is asked for.
        ends = request.ended_by_token and not self._is_complete
        start, end = request.num_prompt_tokens + self.num_tokens, request.num_tokens - ends
        if self._stops is None:
            if start < end and not self._is_complete:
                self.num_tokens += end - start
                self._append(self._detokenizer.extend(request.token_ids[start:end]))
        else:
            self._read_until_stop(request.token_ids[start:end], self._stops)
        if request.finish_reason is not None and not self._is_complete:
            self._complete(ends)
        return self._found

    def _complete(self, ends_with_a_token: bool) -> None:
        """The request has finished by itself: nothing is held back any more."""
        if ends_with_a_token and self.request.inputs.params.include_stop_str_in_output:
            self._append(self._detokenizer.append(self.request.token_ids[-1]))
        self._append(self._detokenizer.finish())
        self._is_complete = True

    def _read_until_stop(self, token_ids: list[int], stops: StopStrings) -> None:
        for token_id in token_ids:
            if self._is_complete:
                break
            self.num_tokens += 1
            text = self._detokenizer.append(token_id)
            self._append(text)
            if self.num_tokens <= self.request.inputs.params.min_tokens:
                self._state = stops.skip(self._state, text)
                continue
            self._state, match = stops.read(self._state, text)
            if match is not None:
                self._cut(len(self._text) - len(text), match)

    def _cut(self, start: int, match: Match) -> None:
        """End the text at a match in what begins at `start`."""
        self._is_complete = True
        end = start + match.end
        self._found = self._text[end - match.length : end]
        if not self.request.inputs.params.include_stop_str_in_output:
            end -= match.length
        self._text = self._text[:end]

    def _append(self, text: str) -> None:
        # Only a string that nothing else refers to grows in place: a long text would be copied each time.
        whole, self._text = self._text, ""
        whole += text
        self._text = whole
