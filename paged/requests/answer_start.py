"""AnswerStart: finds where the answer begins in a growing text that may begin with reasoning."""

from __future__ import annotations

_BLANKS = " \t\n\r"


class AnswerStart:
    """Finds where the answer begins in a text: after the reasoning and the blanks that follow it.

    Reasoning stands between two tags at the beginning of the text, perhaps after blanks. Without reasoning,
    the whole text is the answer.

    begin: the first tag; "" if the text begins inside reasoning.
    end: the second tag.
    """

    def __init__(self, begin: str, end: str) -> None:
        self._begin = begin
        self._end = end
        self._is_open = bool(begin)
        self._is_inside = not begin
        self._text = ""  # that is read and may be the answer, or the beginning of a tag

    @property
    def is_open(self) -> bool:
        """Whether the text so far may still be either reasoning or answer."""
        return self._is_open

    def read(self, text: str) -> str | None:
        """Read more text. Return the answer so far; None if the answer has not begun."""
        self._text += text
        if self._is_open and not self._find_begin():
            return None if self._is_open else self._text
        if self._is_inside and not self._find_end():
            return None
        self._text = self._text.lstrip(_BLANKS)
        return self._text or None

    def finish(self) -> str:
        """End a text in which the answer has not begun. Return the answer."""
        return self._text if self._is_open else ""

    def _find_begin(self) -> bool:
        """Return whether the text has begun with the first tag, which is then dropped."""
        settled = self._text.lstrip(_BLANKS)
        self._is_inside = settled.startswith(self._begin)
        self._is_open = not self._is_inside and self._begin.startswith(settled)
        if self._is_inside:
            self._text = settled[len(self._begin) :]
        return self._is_inside

    def _find_end(self) -> bool:
        """Return whether the text has the second tag, up to which it is then dropped."""
        at = self._text.find(self._end)
        self._is_inside = at < 0
        # The last characters may begin the tag.
        rest = len(self._text) - len(self._end) + 1 if at < 0 else at + len(self._end)
        self._text = self._text[max(0, rest) :]
        return at >= 0
