"""JSON from others: bounded in depth, without what Python's parser takes beyond the standard."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from decimal import Decimal
from typing import Any

from .errors import RequestError
from .validation import shown

MAX_JSON_DEPTH = 64  # of objects and arrays in a JSON text
MAX_NUMBER_LENGTH = 4_300  # characters of a number in a JSON text; Python itself refuses longer ints
MAX_JSON_EXPONENT = 100_000  # of an exact number, with which Python computes in no time
MOST_EXACT_LENGTH = 15  # every number of so few characters is exact in float64
# Other threads wait for a match: texts are looked through in pieces.
_PIECE = 2**16
_PART_OF_STRING = r'(?:[^"\\]{1,64}+|\\.){0,1024}+("?)'
# Strings, whose brackets do not count, and brackets. A string may go on, or a wrong text end in it.
_BRACKETS = re.compile(rf'"{_PART_OF_STRING}|([\[\]{{}}])', re.DOTALL)
_REST_OF_STRING = re.compile(_PART_OF_STRING, re.DOTALL)


class RoundedFloat(float):
    """A number of a JSON text that float64 cannot represent exactly.

    digits: the number as written in the text.
    """

    __slots__ = ("digits",)
    digits: str


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises RequestError if the text is not JSON in UTF-8, if an object has a name twice, if a number is too
    large, NaN or infinite, or if the nesting is deeper than MAX_JSON_DEPTH.
    """
    try:
        if isinstance(text, bytes | bytearray):
            text = text.decode("utf-8-sig")
        _check_depth(text)
        return json.loads(
            text,
            object_pairs_hook=unique_names,
            parse_int=exact_int,
            parse_float=exact_float,
            parse_constant=refuse_constant,
        )
    except UnicodeDecodeError as error:
        raise RequestError(f"this is not JSON in UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"this is not JSON: {error}") from error


def _check_depth(text: str) -> None:
    # Most texts have too few brackets to be deep, and counting them is quick.
    if text.count("[") + text.count("{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    place = 0
    while place < len(text):
        end = place + _PIECE
        for match in _BRACKETS.finditer(text, place, end):
            quote, bracket = match.groups()
            if bracket is not None:
                depth += 1 if bracket in "[{" else -1
                if depth > MAX_JSON_DEPTH:
                    raise too_deep()
            elif not quote:
                end = _end_of_string(text, match.end())
                break
        place = end


def _end_of_string(text: str, place: int) -> int:
    """Return the place after the string that `place` is inside of."""
    while place < len(text):
        match = _REST_OF_STRING.match(text, place)
        assert match is not None, "it may be empty"
        if match[1]:
            return match.end()
        place = max(match.end(), place + 1)  # past a backslash that ends a wrong text
    return place


def exact_decimal(digits: str) -> Decimal:
    """Return a number of a JSON text as an exact Decimal. Raises RequestError for a huge exponent."""
    try:
        number = Decimal(digits)
        if abs(number.adjusted()) <= MAX_JSON_EXPONENT:
            return number
    except ArithmeticError:  # an exponent that a Decimal cannot have
        pass
    raise RequestError(f"the number {shown(digits)} has an exponent of more than {MAX_JSON_EXPONENT:,}")


def too_deep() -> RequestError:
    """Return the error of a text that is nested too deep."""
    return RequestError(
        f"objects and arrays are nested more than {MAX_JSON_DEPTH} deep; make the JSON flatter"
    )


def given_twice(name: str) -> RequestError:
    """Return the error of an object that has a name twice."""
    return RequestError(f"{shown(name)} is given twice in one object; give it once")


# What the parser of a JSON text calls.


def exact_float(digits: str) -> float:
    """Parse a number with a fraction or an exponent. Return a RoundedFloat if float64 cannot hold it."""
    if len(digits) > MAX_NUMBER_LENGTH:
        raise _too_long(digits)
    number = float(digits)
    if not math.isfinite(number):
        raise RequestError(f"{shown(digits)} is too large for a number")
    if len(digits) > MOST_EXACT_LENGTH and exact_decimal(digits) != Decimal(repr(number)):
        number = RoundedFloat(digits)
        number.digits = digits
    return number


def exact_int(digits: str) -> int:
    """Parse an int. Raises RequestError if it has too many digits, since parsing takes quadratic time."""
    if len(digits) > MAX_NUMBER_LENGTH:
        raise _too_long(digits)
    return int(digits)


def _too_long(digits: str) -> RequestError:
    return RequestError(f"{digits[:16]}... has {len(digits):,} characters; no number here may be that long")


def refuse_constant(name: str) -> float:
    """Raise RequestError for NaN and the infinities, which Python's parser would accept."""
    raise RequestError(f"{name} is not JSON; numbers are finite")


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of the pairs. Raises RequestError if a name occurs twice."""
    value = dict(pairs)
    if len(value) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise given_twice(twice)
    return value
