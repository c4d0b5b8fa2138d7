"""JsonScanner: follows one JSON value as its text arrives, so that what it lets pass is sure to be JSON."""

from __future__ import annotations

import re
from typing import Final

MAX_DEPTH = 64  # of objects and arrays, as in request bodies

_BLANKS = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # of a string, between escapes
# What text within a string is not, or does not go on as it is.
STRING_MARKS = frozenset(['"', "\\", *map(chr, range(32))])
_LITERALS = {"t": "true", "f": "false", "n": "null"}
# The states of a number, and where a character leads; the first letter of those that may end it is upper.
_NUMBER: Final = {
    "minus": {"0": "Zero", "1-9": "Integer"},
    "Zero": {".": "point", "e": "e"},
    "Integer": {"0": "Integer", "1-9": "Integer", ".": "point", "e": "e"},
    "point": {"0": "Fraction", "1-9": "Fraction"},
    "Fraction": {"0": "Fraction", "1-9": "Fraction", "e": "e"},
    "e": {"0": "Exponent", "1-9": "Exponent", "+": "sign"},
    "sign": {"0": "Exponent", "1-9": "Exponent"},
    "Exponent": {"0": "Exponent", "1-9": "Exponent"},
}
_CLASS = {"0": "0", ".": ".", "e": "e", "E": "e", "+": "+", "-": "+", **dict.fromkeys("123456789", "1-9")}


class JsonScanner:
    """The position in one JSON value (RFC 8259) whose text arrives in pieces.

    done: whether the value is complete.
    failed: whether the last character was not allowed in its place. Nothing can be scanned after `done` or
        `failed`.
    """

    def __init__(self) -> None:
        self.done = self.failed = False
        self._closers = list[str]()  # of the objects and arrays that are open
        self._state = "value"
        self._rest = ""  # of a literal
        self._number = ""
        self._num_hex = 0  # digits that a \u escape lacks
        self._is_key = False

    @property
    def is_in_string(self) -> bool:
        """Whether the position is inside a string. Text without STRING_MARKS then need not be scanned."""
        return self._state == "string"

    def scan(self, text: str, start: int = 0) -> int:
        """Scan `text` from `start`. Return where scanning stops: see `done` and `failed`."""
        at = start
        while at < len(text) and not (self.done or self.failed):
            if self._state == "string":
                at = self._in_string(text, at)
            elif self._state == "number":
                at = self._in_number(text, at)
            elif self._state in ("escape", "hex", "literal"):
                at = self._one(text, at)
            else:
                at = _end(_BLANKS, text, at)
                if at < len(text):
                    at = self._between(text[at], at)
        return at

    def finish(self) -> None:
        """End the text. A number is complete only then."""
        if self._state == "number" and self._number[0].isupper() and not self._closers:
            self.done = True
        self.failed = not self.done

    def _between(self, character: str, at: int) -> int:
        """Take a character that begins or follows a value."""
        state = self._state
        if state in ("value", "first value") and self._begins(character):
            return at + 1
        if state in ("key", "first key") and character == '"':
            self._state = "string"
            self._is_key = True
        elif state == "colon" and character == ":":
            self._state = "value"
        elif state == "comma" and character == ",":
            self._state = "key" if self._closers[-1] == "}" else "value"
        elif state in ("comma", "first key", "first value") and character == self._closers[-1]:
            self._closers.pop()
            self._ended()
        else:
            self.failed = True
            return at
        return at + 1

    def _begins(self, character: str) -> bool:
        """Begin a value. Return whether the character can."""
        if character == '"':
            self._state = "string"
            self._is_key = False
        elif character in "{[":
            if len(self._closers) == MAX_DEPTH:
                return False
            self._closers.append("}" if character == "{" else "]")
            self._state = "first key" if character == "{" else "first value"
        elif character in _LITERALS:
            self._state = "literal"
            self._rest = _LITERALS[character][1:]
        elif character == "-":
            self._state = "number"
            self._number = "minus"
        elif (next_state := _NUMBER["minus"].get(_CLASS.get(character, ""))) is not None:
            self._state = "number"
            self._number = next_state
        else:
            return False
        return True

    def _ended(self) -> None:
        """Note the end of a value."""
        self._state = "comma"
        self.done = not self._closers

    def _in_string(self, text: str, at: int) -> int:
        at = _end(_PLAIN, text, at)
        if at == len(text):
            return at
        if text[at] == '"':
            if self._is_key:
                self._state = "colon"
            else:
                self._ended()
        elif text[at] == "\\":
            self._state = "escape"
        else:
            self.failed = True
            return at
        return at + 1

    def _in_number(self, text: str, at: int) -> int:
        while at < len(text):
            following = _NUMBER[self._number].get(_CLASS.get(text[at], ""))
            if following is None:
                if self._number[0].isupper():
                    self._ended()
                else:
                    self.failed = True
                break
            self._number = following
            at += 1
        return at

    def _one(self, text: str, at: int) -> int:
        """Take one character of an escape or a literal."""
        character = text[at]
        if self._state == "escape" and character in '"\\/bfnrt':
            self._state = "string"
        elif self._state == "escape" and character == "u":
            self._state = "hex"
            self._num_hex = 4
        elif self._state == "hex" and character in "0123456789abcdefABCDEF":
            self._num_hex -= 1
            self._state = "hex" if self._num_hex else "string"
        elif self._state == "literal" and character == self._rest[0]:
            self._rest = self._rest[1:]
            if not self._rest:
                self._ended()
        else:
            self.failed = True
            return at
        return at + 1


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None  # both may match nothing
    return found.end()


def is_json(text: str) -> bool:
    """Return whether a text is one JSON value."""
    scanner = JsonScanner()
    end = scanner.scan(text)
    scanner.finish()
    return scanner.done and end == len(text)
