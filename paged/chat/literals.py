"""Values in the notations of Python and Gemma, read as they arrive and passed on as JSON."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass

from .json_scanner import MAX_DEPTH
from .machine import BLANKS, MAX_KEY, CallMachine, Reading, Step
from .values import number_of, quoted

_BARE = re.compile(r"[A-Za-z0-9_.+-]*")
_KEY = re.compile(r"[^:{}\[\],\"'\s]*")
_IDENTIFIER = re.compile(r"[A-Za-z0-9_]*")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
# Escapes of Python, as JSON writes them; \/ is one of JSON alone.
_ESCAPES = {
    "n": "\\n",
    "t": "\\t",
    "r": "\\r",
    "b": "\\b",
    "f": "\\f",
    "\\": "\\\\",
    '"': '\\"',
    "'": "'",
    "/": "/",
    "\n": "",
    "a": "\\u0007",
    "v": "\\u000b",
    "0": "\\u0000",
}
_HEX = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True, slots=True)
class Notation:
    """How values are written. Words without quotes are texts if `quote` is set, and errors otherwise.

    quote: the quotation mark of texts without escapes; "" if there are none.
    """

    quote: str = ""

    def closer(self, opener: str) -> str:
        """Return the bracket that closes a list, tuple or mapping; "" if `opener` opens none of these."""
        known = {"[": "]", "{": "}"} if self.quote else {"[": "]", "{": "}", "(": ")"}
        return known.get(opener, "")


PYTHON = Notation()


def read_value(machine: CallMachine, notation: Notation, depth: int = 0) -> Reading:
    """Read a value and emit it as JSON. Return whether it was valid; on an error, stop reading there."""
    character = yield from machine.next_character()
    if notation.quote and character == notation.quote[0]:
        return (yield from _quoted_text(machine, notation.quote))
    if character in ("'", '"') and character:
        machine.at += 1
        machine.emit_arguments('"')
        if not (yield from _text(machine, character)):
            return False
        machine.emit_arguments('"')
        return True
    if closer := notation.closer(character):
        if depth == MAX_DEPTH:
            return False
        machine.at += 1
        return (yield from _container(machine, notation, closer, depth + 1))
    return (yield from _word(machine, notation))


def read_members(machine: CallMachine, notation: Notation, depth: int) -> Reading:
    """Read the members of a mapping, from after the opening brace to the closing brace."""
    separator = "{"
    while True:
        yield from machine.blanks()
        if (yield from machine.literal("}")):
            machine.emit_arguments("{}" if separator == "{" else "}")
            return True
        machine.emit_arguments(separator)
        if not (yield from _key(machine, notation)):
            return False
        yield from machine.blanks()
        if not (yield from machine.literal(":")):
            return False
        machine.emit_arguments(": ")
        yield from machine.blanks()
        if not (yield from read_value(machine, notation, depth)):
            return False
        if not (yield from _comma(machine, "}")):
            return False
        separator = ", "


def read_keywords(machine: CallMachine) -> Generator[None, None, str | None]:
    """Read the name of a keyword argument and the equals sign. Return the name; None if there is none."""
    name = yield from machine.word(_IDENTIFIER)
    yield from machine.blanks()
    if not name or len(name) > MAX_KEY or not (yield from machine.literal("=")):
        return None
    yield from machine.blanks()
    return name


def _container(machine: CallMachine, notation: Notation, closer: str, depth: int) -> Reading:
    if closer == "}":
        return (yield from read_members(machine, notation, depth))
    machine.emit_arguments("[")
    is_first = True
    while True:
        yield from machine.blanks()
        if (yield from machine.literal(closer)):
            machine.emit_arguments("]")
            return True
        machine.emit_arguments("" if is_first else ", ")
        is_first = False
        if not (yield from read_value(machine, notation, depth)):
            return False
        if not (yield from _comma(machine, closer)):
            return False


def _comma(machine: CallMachine, closer: str) -> Reading:
    """Read the comma after a member. Return whether there is one, or the container ends."""
    yield from machine.blanks()
    return (yield from machine.literal(",")) or (yield from machine.next_character()) == closer


def _key(machine: CallMachine, notation: Notation) -> Reading:
    character = yield from machine.next_character()
    if character in ("'", '"') and character:
        return (yield from read_value(machine, notation))
    if not notation.quote:
        return False
    if character == notation.quote[0]:
        return (yield from _quoted_text(machine, notation.quote))
    name = yield from machine.word(_KEY)
    machine.emit_arguments(f'"{quoted(name)}"')
    return 0 < len(name) <= MAX_KEY


def _quoted_text(machine: CallMachine, quote: str) -> Reading:
    """Read a text without escapes, and its quotes."""
    if not (yield from machine.literal(quote)):
        return False
    machine.emit_arguments('"')
    marker = yield from machine.read_to([quote], lambda text: machine.emit_arguments(quoted(text)))
    if not marker:
        return False
    machine.at += len(marker)
    machine.emit_arguments('"')
    return True


def _text(machine: CallMachine, quote: str) -> Reading:
    """Read a text with escapes up to its quote."""
    while True:
        marker = yield from machine.read_to([quote, "\\"], lambda text: machine.emit_arguments(quoted(text)))
        if not marker:
            return False
        machine.at += 1
        if marker == quote:
            return True
        if not (yield from _escape(machine)):
            return False


def _escape(machine: CallMachine) -> Reading:
    """Read what follows a backslash."""
    character = yield from machine.next_character()
    if not character:
        return False
    machine.at += 1
    if character in _HEX:
        return (yield from _hex(machine, character))
    # Python keeps the backslash of an escape that it does not know.
    machine.emit_arguments(_ESCAPES.get(character, f"\\\\{quoted(character)}"))
    return True


def _hex(machine: CallMachine, kind: str) -> Reading:
    digits = ""
    while len(digits) < _HEX[kind]:
        digit = yield from machine.next_character()
        if not digit or digit not in "0123456789abcdefABCDEF":
            return False
        digits += digit
        machine.at += 1
    code = int(digits, 16)
    if code > 0x10FFFF:
        return False
    machine.emit_arguments(f"\\u{code:04x}" if code <= 0xFFFF else quoted(chr(code)))
    return True


def _word(machine: CallMachine, notation: Notation) -> Reading:
    """Read a number, or a word that stands for a value."""
    machine.hold()
    word = yield from machine.word(_BARE)
    value = _WORDS.get(word) or number_of(word)
    if not value and notation.quote and word:
        value = f'"{quoted(word)}"'
    if not value or len(word) > MAX_KEY:
        machine.go_back()
        return False
    machine.held = None
    if machine.ended and machine.at == len(machine.text):
        return False  # it may be cut
    machine.emit_arguments(value)
    return True


class _Reader(CallMachine):
    """Reads one whole value."""

    def __init__(self, text: str, notation: Notation) -> None:
        super().__init__((), str)
        self.pieces = list[str]()
        self._notation = notation
        self.is_value = False
        self.feed(text + "\n")

    def emit_arguments(self, text: str) -> None:
        """Keep a piece of the value."""
        self.pieces.append(text)

    def _run(self) -> Step:
        is_value = yield from read_value(self, self._notation)
        self.is_value = is_value and not self.text[self.at :].strip(BLANKS)


def json_of(text: str, notation: Notation) -> str:
    """Return a value as JSON; "" if the text is not a value."""
    reader = _Reader(text, notation)
    return "".join(reader.pieces) if reader.is_value else ""
