"""JSON of request bodies: the values are counted before any is made, and long texts are parsed in pieces.

A thread that parses holds the interpreter for one call of C at a time. So that the event loop waits for a few
milliseconds at most, no call gets more than a piece: of the text between two commas or, of a long string, its
next characters. Numbers in a row, as in prompts of token ids, are parsed by msgspec, all else as `parse_json`
does.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...base.errors import RequestError
from ...base.strict_json import (
    MAX_JSON_DEPTH,
    RoundedFloat,
    exact_float,
    exact_int,
    given_twice,
    parse_json,
    refuse_constant,
    too_deep,
    unique_names,
)

# What a body may have. A list takes 72 bytes of memory for the two of its text, and an object of one key 190
# for seven, so the number of objects and arrays is bounded by the length, too.
MAX_VALUES = 2**21
MAX_CONTAINERS = 2**17  # objects and arrays
MAX_NAMES = 2**18  # of one object, which grows in one call
MAX_ROUNDED = 2**16  # numbers that float64 does not have, each an object of three
FREE_CONTAINERS = 2**12  # in a body of any length: 2,048 prompts of one token have half as many
BYTES_PER_CONTAINER = 16  # beyond these
PARSED_AT_ONCE = 2**14  # bytes of a body that is parsed by one call
_PIECE = 2**15  # bytes

_COMMA, _QUOTE, _BACKSLASH = b',"\\'
_OPENED_BY = {ord("]"): ord("["), ord("}"): ord("{")}
_CLOSER = {ord("["): b"]", ord("{"): b"}"}
_SPACE = b" \t\n\r"
_IS_MARK = np.zeros(256, bool)
_IS_MARK[[*b',"\\[]{}']] = True
_IS_BRACKET = np.zeros(256, bool)
_IS_BRACKET[[*b"[]{}"]] = True

# A part of a long string that ends between two characters and within no escape.
_PART_OF_STRING = re.compile(
    rb"(?:[^\\]{1,64}+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.)"
    rb"{1,512}+",
    re.DOTALL,
)
# Stands for the part of an object that an earlier piece has. A body that has this name is refused.
_EARLIER = "\ue000 the part before \ue000"
_EARLIER_JSON = json.dumps(_EARLIER).encode()
_LONG = b"-Infinity"  # stands for a long string; it is no JSON, so that the parser asks what it is
_INTS = msgspec.json.Decoder(list[int])


def parse_body(body: bytes, on_count: Callable[[int], object] = lambda _: None) -> Any:
    """Return the value of a request body.

    on_count: called with the number of objects and arrays, before they are created.

    Raises RequestError as `parse_json` does, and if the body has too many values.
    """
    if len(body) <= PARSED_AT_ONCE:
        num_containers = body.count(b"[") + body.count(b"{")  # or fewer, as some may be in strings
        if num_containers <= most_containers(len(body)):
            on_count(num_containers)
            return parse_json(body)
    marks = _Marks(body)
    pieces = [*_split(body, marks)]
    on_count(marks.num_containers)
    return _Parser(body).parse(pieces)


def most_containers(num_bytes: int) -> int:
    """Return the maximum number of objects and arrays in a body of this size."""
    return min(MAX_CONTAINERS, FREE_CONTAINERS + num_bytes // BYTES_PER_CONTAINER)


class _Piece(NamedTuple):
    """A part of the text that ends before a comma, or with the text.

    opened: the brackets that are open at its end.
    left_out: the places within it that have a long string, or nothing but white space.
    """

    start: int
    end: int
    opened: bytes
    left_out: tuple[slice, ...]


def _split(body: bytes, marks: _Marks) -> Iterator[_Piece]:
    """Yield the pieces of a text. Raises RequestError if it has too many values, or is nested too deep."""
    start = 3 if body.startswith(codecs.BOM_UTF8) else 0
    left_out: list[slice] = []
    for place in range(start, len(body), _PIECE):
        commas = marks.look_at(place, min(place + _PIECE, len(body)), left_out)
        if commas.size:
            cut = int(commas[-1])
            opened = marks.opened_before(cut)
            if not opened:
                raise _wrong("a comma outside of any array and object", cut)
            later = [part for part in left_out if part.start > cut]
            yield _Piece(start, cut, opened, tuple(left_out[: len(left_out) - len(later)]))
            start, left_out = cut + 1, later
    yield _Piece(start, len(body), marks.opened_before(len(body)), tuple(left_out))


class _Marks:
    """Finds the brackets and commas of a text that are in no string, one part after another.

    num_containers: objects and arrays that have begun.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._bytes = np.frombuffer(body, np.uint8)
        self._most_containers = most_containers(len(body))
        self.num_containers = self._num_commas = 0
        self._is_escaped = False  # the first byte of the next part
        self._string: int | None = None  # where the string began that goes on in the next part
        self._opened = bytearray()
        self._brackets: Iterator[tuple[int, int]] = iter(())  # of the last part, with their places
        self._next: tuple[int, int] | None = None

    def look_at(self, start: int, end: int, left_out: list[slice]) -> np.ndarray[Any, Any]:
        """Return the places of the commas of the next part, and add to what is left out."""
        self.opened_before(start)
        part = self._bytes[start:end]
        places = np.flatnonzero(_IS_MARK[part])
        if not places.size:
            self._is_escaped = False
            if self._string is None:
                self._look_at_gap(start, end, left_out)
            return places
        marks = part[places]
        is_quote = marks == _QUOTE
        is_quote &= ~self._escaped(places[marks == _BACKSLASH], len(part))[places]
        is_outside = (np.cumsum(is_quote) + (self._string is not None)) % 2 == 0
        is_outside &= ~is_quote
        self._look_at_strings(start + places[is_quote], left_out)
        is_bracket = is_outside & _IS_BRACKET[marks]
        commas: np.ndarray[Any, Any] = start + places[is_outside & (marks == _COMMA)]
        brackets = marks[is_bracket]
        self._count(brackets, commas.size)
        self._brackets = zip((start + places[is_bracket]).tolist(), brackets.tolist(), strict=True)
        self._next = next(self._brackets, None)
        return commas

    def _escaped(self, backslashes: np.ndarray[Any, Any], length: int) -> np.ndarray[Any, Any]:
        """Return which bytes of a part follow a backslash that is not escaped itself."""
        found = np.zeros(length + 1, bool)
        found[0] = self._is_escaped
        if backslashes.size and backslashes[0] == 0 and self._is_escaped:
            backslashes = backslashes[1:]
        if backslashes.size:
            is_first = np.diff(backslashes, prepend=-2) != 1
            first = np.maximum.accumulate(np.where(is_first, backslashes, 0))
            found[backslashes[(backslashes - first) % 2 == 0] + 1] = True
        self._is_escaped = bool(found[length])
        return found

    def _look_at_strings(self, quotes: np.ndarray[Any, Any], left_out: list[slice]) -> None:
        if not quotes.size:
            return
        is_open = self._string is not None
        if self._string is not None and quotes[0] - self._string > _PIECE:
            end = int(quotes[0])
            left_out.append(slice(self._string, end + 1))
        self._string = int(quotes[-1]) if (quotes.size + is_open) % 2 else None

    def _look_at_gap(self, start: int, end: int, left_out: list[slice]) -> None:
        if end - start < _PIECE:
            return
        gap = self._body[start:end]
        if not gap.strip(_SPACE):
            left_out.append(slice(start, end))
        elif not gap.translate(None, b"0123456789+-.eE"):
            raise RequestError(f"a number has more than {_PIECE:,} characters; none here may be that long")

    def _count(self, brackets: np.ndarray[Any, Any], num_commas: int) -> None:
        self.num_containers += int(np.count_nonzero((brackets == ord("[")) | (brackets == ord("{"))))
        self._num_commas += num_commas
        if self.num_containers > self._most_containers:
            raise RequestError(
                f"the body has more than {self._most_containers:,} objects and arrays, which is the most for "
                f"{len(self._body):,} bytes; send fewer, or several requests"
            )
        if self._num_commas + self.num_containers > MAX_VALUES:
            raise RequestError(
                f"the body has more than {MAX_VALUES:,} values; send fewer, or several requests"
            )

    def opened_before(self, place: int) -> bytes:
        """Return the brackets that are open at a place of the last part. Places rise from call to call.

        Raises RequestError if one closes another kind, or too many are open.
        """
        opened = self._opened
        while self._next is not None and self._next[0] < place:
            at, bracket = self._next
            opener = _OPENED_BY.get(bracket)
            if opener is None:
                opened.append(bracket)
                if len(opened) > MAX_JSON_DEPTH:
                    raise too_deep()
            elif not opened or opened.pop() != opener:
                raise _wrong(f"{chr(bracket)!r} closes nothing", at)
            self._next = next(self._brackets, None)
        return bytes(opened)


class _Parser:
    """Parses the pieces of a text into one value."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._long = deque[str]()  # the long strings of the piece that is parsed
        self._decoder = json.JSONDecoder(
            object_pairs_hook=unique_names,
            parse_int=exact_int,
            parse_float=self._float,
            parse_constant=self._constant,
        )
        self._num_rounded = 0

    def parse(self, pieces: list[_Piece]) -> Any:
        """Return the value of the whole text."""
        value: Any = None
        opened = b""  # the brackets that are open before a piece
        containers: list[Any] = []  # what they have opened, the outermost first
        for piece in pieces:
            is_last = piece is pieces[-1]
            is_within_list = opened[-1:] == b"[" and opened == piece.opened and not is_last
            if is_within_list and (ints := self._ints(piece)):
                containers[-1].extend(ints)
                continue
            parsed = self._value_of(piece, opened, b"" if is_last else piece.opened)
            if not containers:
                value = parsed
            else:
                _add(containers, parsed, piece.start)
            opened = piece.opened
            containers = [] if is_last else _last_of(value, len(opened))
            if containers and not containers[-1]:
                raise _wrong("a comma without a value before it", piece.end)
        return value

    def _ints(self, piece: _Piece) -> list[int] | None:
        """Return the numbers of a piece that has nothing but whole ones."""
        text = self._body[piece.start : piece.end]
        if text.translate(None, b"0123456789,- \t\n\r"):
            return None
        try:
            return _INTS.decode(b"[%b]" % text)
        except msgspec.DecodeError:  # very large, or wrong, of which the other parser tells more
            return None

    def _value_of(self, piece: _Piece, before: bytes, after: bytes) -> Any:
        """Return the value of a piece, together with the containers that are open before and after it."""
        text = b"".join([*_opening(before), *self._text_of(piece), *(_CLOSER[each] for each in after[::-1])])
        try:
            value = self._decoder.decode(text.decode())
        except UnicodeDecodeError as error:
            raise RequestError(
                f"this is not JSON in UTF-8: {error.reason}, near byte {piece.start:,}"
            ) from error
        except json.JSONDecodeError as error:
            added = len(b"".join(_opening(before)))
            raise _wrong(error.msg, min(piece.end, piece.start + max(0, error.pos - added))) from error
        assert not self._long, "each is a value"
        return value

    def _text_of(self, piece: _Piece) -> Iterator[bytes]:
        place = piece.start
        self._long.clear()
        for part in piece.left_out:
            yield self._body[place : part.start]
            if self._body[part.start] == _QUOTE:
                if self._body[part.stop : part.stop + 64].lstrip(_SPACE).startswith(b":"):
                    raise RequestError(
                        f"a name in an object has more than {_PIECE:,} bytes; give shorter ones"
                    )
                self._long.append(self._string_at(part))
                yield _LONG
            place = part.stop
        yield self._body[place : piece.end]

    def _string_at(self, part: slice) -> str:
        """Return a long string."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        place, end = part.start + 1, part.stop - 1
        found = []
        try:
            while place < end:
                match = _PART_OF_STRING.match(self._body, place, end)
                assert match is not None, "no character is left over"
                place = match.end()
                found.append(scanstring(decoder.decode(match[0]) + '"', 0)[0])
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise RequestError(f"this is not JSON in UTF-8: {error.reason}, near byte {place:,}") from error
        except json.JSONDecodeError as error:
            raise _wrong(error.msg, place) from error
        return "".join(found)

    def _float(self, digits: str) -> float:
        number = exact_float(digits)
        if type(number) is RoundedFloat:
            self._num_rounded += 1
            if self._num_rounded > MAX_ROUNDED:
                raise RequestError(
                    f"the body has more than {MAX_ROUNDED:,} numbers with more digits than float64 has; "
                    "round them"
                )
        return number

    def _constant(self, name: str) -> Any:
        if name == _LONG.decode() and self._long:
            return self._long.popleft()
        return refuse_constant(name)


def _opening(opened: bytes) -> Iterator[bytes]:
    """Yield the text that opens containers, each as the first entry of the one before."""
    for i, bracket in enumerate(opened):
        yield bytes([bracket])
        if bracket == ord("{") and i + 1 < len(opened):
            yield _EARLIER_JSON + b":"


def _add(containers: list[Any], parsed: Any, place: int) -> None:
    """Add to the containers that are open what a piece has for each.

    parsed: the outermost, whose first entry has what belongs to the next one, and so on.
    """
    for container in containers:
        is_innermost = container is containers[-1]
        if isinstance(container, list):
            inner = parsed[0] if parsed else None
            container.extend(parsed if is_innermost else parsed[1:])
        else:
            inner = None if is_innermost else parsed.pop(_EARLIER)
            for name in parsed.keys() & container.keys():
                raise given_twice(name)
            container.update(parsed)
            if len(container) > MAX_NAMES:
                raise RequestError(f"an object has more than {MAX_NAMES:,} names; give fewer")
        if is_innermost and not parsed:
            raise _wrong("a comma without a value behind it", place)
        parsed = inner


def _last_of(value: Any, depth: int) -> list[Any]:
    """Return the containers that are open: the value, its last entry, and so on."""
    found = [value]
    while len(found) < depth:
        last = found[-1]
        found.append(last[-1] if isinstance(last, list) else next(reversed(last.values())))
    return found


def _wrong(what: str, place: int) -> RequestError:
    return RequestError(f"this is not JSON: {what}, near byte {place:,}")
