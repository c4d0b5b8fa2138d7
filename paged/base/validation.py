"""Checks of values that users pass."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from numbers import Integral, Real
from typing import Any

from .errors import PagedError

_INDEX = re.compile(r"(\[[^\[\]]*\])+$")
_PATH = re.compile(r"[A-Za-z_][\w.\[\]]*")

# The default maximum of an int: a tensor holds no more, and Python refuses to print much longer ints.
MAX_INT = 2**63 - 1
MAX_SHOWN = 300  # characters of a value in a message


def shown(value: object) -> str:
    """Return repr(value), cut to MAX_SHOWN characters, also where repr itself fails: for huge ints and deep
    nesting.

    Only the beginning of a large value is read.
    """
    text = ""
    try:
        for part in _repr_parts(value):
            text += part
            if len(text) > MAX_SHOWN:
                break
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deep to print"
    except ValueError:
        if isinstance(value, int):
            kind = "a negative int" if value < 0 else "an int"
            return f"{kind} of about {math.log10(abs(value)):,.0f} digits"
        return f"a {type(value).__name__} with an int that is too long to print"
    if len(text) <= MAX_SHOWN:
        return text
    if isinstance(value, list | dict):
        return f"{text[:MAX_SHOWN]}… ({len(value):,} entries)"
    length = len(value) if isinstance(value, str) else len(text)
    return f"{text[:MAX_SHOWN]}… ({length:,} characters)"


def _repr_parts(value: object) -> Iterator[str]:
    """Yield the parts of repr(value); for a JSON value, the parts of one entry after the other."""
    if type(value) is str:
        yield repr(value[: MAX_SHOWN + 1])
    elif type(value) is list:
        yield "["
        for i, entry in enumerate(value):
            yield ", " if i else ""
            yield from _repr_parts(entry)
        yield "]"
    elif type(value) is dict:
        yield "{"
        for i, (name, entry) in enumerate(value.items()):
            yield ", " if i else ""
            yield from _repr_parts(name)
            yield ": "
            yield from _repr_parts(entry)
        yield "}"
    else:
        yield repr(value)


def field_of(name: str) -> str | None:
    """Return the field that a name in a message refers to: stop_token_ids for stop_token_ids[2].

    Return None for a phrase that names no field.
    """
    return _INDEX.sub("", name) if _PATH.fullmatch(name) else None


def plain(value: Any) -> Any:
    """Convert a number of another library, such as numpy, to int or float. Return other values unchanged."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def check_int(error: type[PagedError], name: str, value: object, minimum: int, maximum: int = MAX_INT) -> int:
    """Return `value` if it is an int in [minimum, maximum], else raise `error`. A bool is not an int here."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, int) and is_int and minimum <= value <= maximum:
        return value
    at_least = maximum == MAX_INT and not (isinstance(value, int) and value > maximum)
    wanted = f"at least {minimum}" if at_least else f"from {minimum} to {maximum}"
    message = f"{name} must be {wanted if is_int else f'an int, {wanted}'}, got {shown(value)}"
    raise error(message, param=field_of(name))


def check_number(
    error: type[PagedError],
    name: str,
    value: object,
    minimum: float,
    maximum: float = math.inf,
    *,
    above: bool = False,
) -> float:
    """Return `value` if it is finite and in [minimum, maximum], else raise `error`.

    above: exclude the minimum itself.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        wanted = ["a number"]
    elif not -sys.float_info.max <= value <= sys.float_info.max:  # an int may be too large for a float
        wanted = ["finite"]
    elif minimum <= value <= maximum and not (above and value == minimum):
        return float(value)
    else:
        wanted = []
    limits = number_limits(minimum, maximum, above=above)
    text = ", ".join([*wanted, *limits]) if wanted else " and ".join(limits)
    raise error(f"{name} must be {text}, got {shown(value)}", param=field_of(name))


def number_limits(minimum: float, maximum: float, *, above: bool) -> list[str]:
    """Return the finite bounds of a number in words.

    above: exclude the minimum itself.
    """
    limits = [f"{'above' if above else 'at least'} {minimum:g}"] if minimum > -math.inf else []
    return limits + ([f"at most {maximum:g}"] if maximum < math.inf else [])


def check_bool(error: type[PagedError], name: str, value: object) -> bool:
    """Return `value` if it is True or False, else raise `error`."""
    if not isinstance(value, bool):
        raise error(f"{name} must be True or False, got {shown(value)}", param=field_of(name))
    return value


def changed(config: Any) -> list[str]:
    """Return the names of the fields that differ from their defaults. Every field must have a default."""
    defaults = {
        f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(config)
    }
    return [name for name, default in defaults.items() if getattr(config, name) != default]
