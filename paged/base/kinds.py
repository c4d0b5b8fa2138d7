"""Kinds: what a value may be, in Python's API, in request bodies, as a flag and in the documentation."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Number as AnyNumber
from types import NoneType
from typing import Any, ClassVar, get_args, get_type_hints

from .errors import RequestError
from .validation import MAX_INT, check_bool, check_int, check_number, number_limits, plain

Schema = dict[str, Any]


class Kind(ABC):
    """The type and range of a field's value. A subclass has `parse`, or `parts` if the value may contain
    fields.

    types: the Python types that JSON values of this kind have.
    """

    types: ClassVar[tuple[type, ...]] = ()

    def parse(self, name: str, value: Any) -> Any:
        """Convert a JSON value to the value that the code uses. Raises RequestError naming the field."""
        return self.parts(name, value)[0]

    def parts(self, name: str, value: Any) -> tuple[Any, list[str]]:
        """Return the result of `parse`, and the names of fields inside the value that have no effect."""
        return self.parse(name, value), []

    def check(self, name: str, value: Any) -> None:
        """Raise RequestError, naming the field, unless a value given in Python is of this kind."""
        self.parse(name, value)

    @property
    def limits(self) -> str:
        """The bounds of the values in words; "" without bounds."""
        return ""

    @abstractmethod
    def schema(self) -> Schema:
        """Return the JSON schema of the values."""

    @abstractmethod
    def __str__(self) -> str:
        """Describe the values in a few words."""


class Boolean(Kind):
    """True or false."""

    types = (bool,)

    def parse(self, name: str, value: Any) -> bool:
        return check_bool(RequestError, name, value)

    def schema(self) -> Schema:
        return {"type": "boolean"}

    def __str__(self) -> str:
        return "boolean"


def integral(value: Any) -> Any:
    """Return a float without a fraction as an int, any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True, slots=True)
class Integer(Kind):
    """An int in [minimum, maximum]. In JSON, 1.0 counts as 1."""

    types = (int, float)
    minimum: int
    maximum: int = MAX_INT

    def parse(self, name: str, value: Any) -> int:
        return check_int(RequestError, name, integral(value), self.minimum, self.maximum)

    def check(self, name: str, value: Any) -> None:
        """Refuse 1.0, which is not an int in Python."""
        check_int(RequestError, name, value, self.minimum, self.maximum)

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.minimum, "maximum": self.maximum}

    @property
    def limits(self) -> str:
        """The bounds in words, without the bounds of 64-bit ints."""
        if self.maximum < MAX_INT:
            return f"from {self.minimum} to {self.maximum}"
        return f"at least {self.minimum}" if self.minimum >= -MAX_INT else ""

    def __str__(self) -> str:
        return f"integer {self.limits}".rstrip()


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A finite number in [minimum, maximum].

    above: exclude the minimum itself.
    """

    types = (int, float)
    minimum: float = -math.inf
    maximum: float = math.inf
    above: bool = False

    def parse(self, name: str, value: Any) -> float:
        """Return the number unchanged; an int of more than 64 bits becomes a float."""
        number = check_number(RequestError, name, value, self.minimum, self.maximum, above=self.above)
        return number if abs(number) > MAX_INT else value

    def schema(self) -> Schema:
        lowest = "exclusiveMinimum" if self.above else "minimum"
        limits = {lowest: self.minimum, "maximum": self.maximum}
        return {"type": "number"} | {name: limit for name, limit in limits.items() if math.isfinite(limit)}

    @property
    def limits(self) -> str:
        """The bounds in words."""
        if math.isfinite(self.minimum) and math.isfinite(self.maximum) and not self.above:
            return f"from {self.minimum:g} to {self.maximum:g}"
        return " and ".join(number_limits(self.minimum, self.maximum, above=self.above))

    def __str__(self) -> str:
        return f"number {self.limits}".rstrip()


def of_kind(kind: Kind, default: Any) -> Any:
    """Declare a dataclass field with values of a kind. None is allowed too if the field's type allows it."""
    return field(default=default, metadata={"kind": kind})


def kinds_of(owner: Any) -> dict[str, Kind]:
    """Return the kind of each field of a dataclass that declares one, by name."""
    return {f.name: f.metadata["kind"] for f in fields(owner) if "kind" in f.metadata}


def check_fields(config: Any) -> None:
    """Check every field of a frozen dataclass that declares a kind, and convert numbers of other libraries,
    such as numpy.

    Raises RequestError naming the field.
    """
    owner: type = type(config)
    for name, kind, is_optional in _fields_of(owner):
        value = getattr(config, name)
        if type(value) not in _PLAIN and isinstance(value, AnyNumber):
            value = plain(value)
            object.__setattr__(config, name, value)
        if kind is not None and not (value is None and is_optional):
            kind.check(name, value)


_PLAIN = (NoneType, bool, int, float, str, tuple)  # types of which no value is a number of numpy


@cache
def _fields_of(owner: type) -> list[tuple[str, Kind | None, bool]]:
    """Return name and kind of each field of a dataclass, and whether its type says that it may be None."""
    hints = get_type_hints(owner)
    return [(f.name, f.metadata.get("kind"), NoneType in get_args(hints[f.name])) for f in fields(owner)]
