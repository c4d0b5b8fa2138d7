"""Kinds of texts, lists and objects, which request bodies and structural tags have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import PagedError, RequestError
from .kinds import Kind, Schema, integral
from .validation import MAX_INT, check_int, shown


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """A string of valid Unicode; its length in characters is in [shortest, longest]."""

    types = (str,)
    shortest: int = 0
    longest: int | None = None

    def parse(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise RequestError(f"{name} must be a string, got {shown(value)}")
        if len(value) < self.shortest:
            raise RequestError(f"{name} must be a non-empty string, got {shown(value)}")
        if self.longest is not None and len(value) > self.longest:
            raise RequestError(
                f"{name} has {len(value):,} characters; {self.longest:,} is the most: {shown(value)}"
            )
        check_unicode(name, value)
        return value

    def schema(self) -> Schema:
        limits = {"minLength": self.shortest or None, "maxLength": self.longest}
        return {"type": "string"} | {name: limit for name, limit in limits.items() if limit is not None}

    def __str__(self) -> str:
        return "string" if self.longest is None else f"string of at most {self.longest} characters"


class PrintableText(Text):
    """A string of printable ASCII, which fits headers and logs."""

    def parse(self, name: str, value: Any) -> str:
        text = super().parse(name, value)
        if not (text.isascii() and text.isprintable()):
            raise RequestError(f"{name} must be printable ASCII, got {shown(value)}")
        return text

    def schema(self) -> Schema:
        return {**super().schema(), "pattern": "^[ -~]*$"}

    def __str__(self) -> str:
        return f"string of at most {self.longest} printable ASCII characters"


def check_unicode(name: str, text: str) -> None:
    """Raise RequestError, naming the field, if a text has a lone surrogate, which UTF-8 cannot encode."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} is not valid Unicode: character {error.start} is the lone surrogate "
            f"{text[error.start]!r}"
        ) from error


def check_unicode_within(name: str, value: Any) -> None:
    """Raise RequestError, naming the field, if a text in a JSON value is not valid Unicode."""
    if isinstance(value, str):
        check_unicode(name, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            check_unicode_within(name, key)
            check_unicode_within(f"{name}.{key}", item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            check_unicode_within(f"{name}[{i}]", item)


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    """One of several strings."""

    types = (str,)
    values: tuple[str, ...]

    def parse(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in self.values:
            known = ", ".join(map(repr, self.values))
            raise RequestError(f"{name} must be one of {known}, got {shown(value)}")
        return value

    def schema(self) -> Schema:
        return {"type": "string", "enum": [*self.values]}

    def __str__(self) -> str:
        return " | ".join(f'"{value}"' for value in self.values)


@dataclass(frozen=True, slots=True)
class ListOf(Kind):
    """A list of values of one kind; its length is in [shortest, longest]."""

    types = (list,)
    item: Kind
    shortest: int = 0
    longest: int | None = None

    def parts(self, name: str, value: Any) -> tuple[list[Any], list[str]]:
        check_length(name, value, self.shortest, self.longest)
        found = [self.item.parts(f"{name}[{i}]", item) for i, item in enumerate(value)]
        return [part for part, _ in found], [ignored for _, names in found for ignored in names]

    def schema(self) -> Schema:
        return {"type": "array", "items": self.item.schema()} | length_schema(self.shortest, self.longest)

    def __str__(self) -> str:
        return f"list of {self.item}"


def named_parts(kind: Kind, name: str, value: Any) -> tuple[Any, list[str]]:
    """Return the result of `kind.parts`. Prefix an error with the name, unless it names a part."""
    try:
        return kind.parts(name, value)
    except PagedError as error:
        error.param = error.param or name
        raise


def check_length(name: str, value: Any, shortest: int, longest: int | None) -> None:
    """Raise RequestError, naming the field, unless it is a list with a length in [shortest, longest]."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise RequestError(f"{name} must be a list, got {shown(value)}")
    if len(value) < shortest:
        raise RequestError(f"{name} must have at least {shortest} entry, got {len(value)}")
    if longest is not None and len(value) > longest:
        raise RequestError(f"{name} has {len(value):,} entries; {longest:,} is the most")


def length_schema(shortest: int, longest: int | None) -> Schema:
    """Return the keywords of a JSON schema for lists with a length in [shortest, longest]."""
    return ({"minItems": shortest} if shortest else {}) | ({} if longest is None else {"maxItems": longest})


@dataclass(frozen=True, slots=True)
class TokenIds(Kind):
    """A list of token ids. All items are checked in one pass, as a prompt may have a hundred thousand."""

    types = (list,)
    shortest: int = 0
    longest: int | None = None

    def parse(self, name: str, value: Any) -> list[int]:
        check_length(name, value, self.shortest, self.longest)
        if {*map(type, value)} == {float, int} or {*map(type, value)} == {float}:  # all of them at once
            value = [*map(integral, value)]
        if value and ({*map(type, value)} != {int} or min(value) < 0 or max(value) > MAX_INT):
            return [check_int(RequestError, f"{name}[{i}]", integral(v), 0) for i, v in enumerate(value)]
        return value  # type: ignore[no-any-return]

    def schema(self) -> Schema:
        item = {"type": "integer", "minimum": 0, "maximum": MAX_INT}
        return {"type": "array", "items": item} | length_schema(self.shortest, self.longest)

    def __str__(self) -> str:
        return "list of token ids"


@dataclass(frozen=True, slots=True)
class OneOf(Kind):
    """A value of the first kind in a list that accepts the value's type."""

    kinds: tuple[Kind, ...]

    def parts(self, name: str, value: Any) -> tuple[Any, list[str]]:
        for kind in self.kinds:
            if type(value) in kind.types and (kind is self.kinds[-1] or _may_be(kind, value)):
                return kind.parts(name, value)
        raise RequestError(f"{name} must be {self}, got {shown(value)}")

    def schema(self) -> Schema:
        return {"anyOf": [kind.schema() for kind in self.kinds]}

    def __str__(self) -> str:
        return ", or ".join(map(str, self.kinds))


def _may_be(kind: Kind, value: Any) -> bool:
    """Return whether a value of the right type may be of a kind: lists differ in their first item."""
    if isinstance(kind, Choice):
        return value in kind.values
    if not value or not isinstance(value, list):
        return True
    if isinstance(kind, TokenIds):
        return type(value[0]) in (int, float, bool)
    return not isinstance(kind, ListOf) or type(value[0]) in kind.item.types


class AnyJSON(Kind):
    """Any JSON value."""

    types = (bool, int, float, str, list, dict)

    def parse(self, name: str, value: Any) -> Any:  # noqa: ARG002
        return value

    def schema(self) -> Schema:
        return {}

    def __str__(self) -> str:
        return "any"


@dataclass(frozen=True, slots=True)
class JSONObject(Kind):
    """An object with any fields.

    example: an object of this kind, for messages.
    """

    types = (dict,)
    example: str = "{...}"

    def parse(self, name: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise RequestError(f"{name} must be an object such as {self.example}, got {shown(value)}")
        check_unicode_within(name, value)
        return value

    def schema(self) -> Schema:
        return {"type": "object"}

    def __str__(self) -> str:
        return "object"


def nullable(schema: Schema) -> Schema:
    """Return a schema that also allows null, for a field that is absent."""
    if isinstance(schema.get("type"), str) and "enum" not in schema:
        return {**schema, "type": [schema["type"], "null"]}
    if not schema:
        return schema
    return {"anyOf": [schema, {"type": "null"}]}
