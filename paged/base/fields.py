"""FieldTable: the fields of a JSON object, described once for parsing, schemas and documentation."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .errors import RequestError, UnknownArgumentError
from .json_kinds import AnyJSON, check_unicode_within, named_parts, nullable
from .kinds import Kind, Schema
from .validation import shown

# The names of longer fields are not compared with known ones, which takes quadratic time.
MAX_COMPARED = 64


class Effect(enum.Enum):
    """What the server does with a field of a request body."""

    HONOURED = "honoured"
    IGNORED = "no effect"  # accepted, and listed in the header x-paged-ignored
    REFUSED = "refused"  # with status 400 and the reason


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a JSON object. null counts as absent.

    meaning: what the value means. For a refused field: why it is refused, and what to do instead.
    neutral: values of a refused field that are accepted, since they ask for nothing.
    """

    name: str
    kind: Kind
    meaning: str
    effect: Effect = Effect.HONOURED
    required: bool = False
    neutral: tuple[Any, ...] = ()

    def refuses(self, value: Any) -> bool:
        """Return whether this field is refused with this value: the value is not a neutral one."""
        return not any(type(value) is type(known) and value == known for known in self.neutral)


def ignored(names: str, meaning: str) -> Iterator[Field]:
    """Yield fields that have no effect here."""
    yield from (Field(name, AnyJSON(), meaning, Effect.IGNORED) for name in names.split())


def refused(names: str, reason: str, *neutral: Any) -> Iterator[Field]:
    """Yield fields that are refused unless they have a neutral value."""
    for name in names.split():
        yield Field(name, AnyJSON(), reason, Effect.REFUSED, neutral=neutral)


class FieldTable:
    """The fields of a JSON object.

    owner: the name of the object in messages, if it is at the top level.
    is_open: whether unknown fields are passed on unchanged.
    one_of: fields of which exactly one must be given.
    """

    def __init__(
        self, owner: str, fields: Iterable[Field], *, is_open: bool = False, one_of: Sequence[str] = ()
    ) -> None:
        self.owner = owner
        self.fields = tuple(fields)
        self.is_open = is_open
        self._by_name = {field.name: field for field in self.fields}
        assert len(self._by_name) == len(self.fields), f"{owner} has a field twice"
        self._one_of = one_of
        self._required = [field.name for field in self.fields if field.required]

    def with_effect(self, effect: Effect) -> list[Field]:
        """Return the fields with this effect."""
        return [field for field in self.fields if field.effect is effect]

    def parse(self, given: Mapping[str, Any], path: str = "") -> tuple[dict[str, Any], list[str]]:
        """Return the parsed values of the fields that have an effect, and the names of given fields that have
        none.

        path: the name of the object in messages, followed by a dot.

        Raises RequestError or UnknownArgumentError, whose param is the name of the field.
        """
        values = dict[str, Any]()
        without_effect = list[str]()
        for name, value in given.items():
            field = self._by_name.get(name)
            if field is None:
                if not self.is_open:
                    raise self._unknown(name, path)
                check_unicode_within(path + name, value)
                values[name] = value
            elif value is None:
                continue
            elif field.effect is Effect.HONOURED:
                values[name], nested = named_parts(field.kind, path + name, value)
                without_effect += nested
            elif field.effect is Effect.IGNORED:
                without_effect.append(path + name)
            elif field.refuses(value):
                message = f"{path}{name} is not supported: {field.meaning}"
                raise RequestError(message, param=path + name)
        for name in self._required:
            if name not in values:
                raise RequestError(f"{path}{name} is missing", param=path + name)
        if self._one_of and (num_given := sum(name in values for name in self._one_of)) != 1:
            choices = " or ".join(path + name for name in self._one_of)
            message = f"either {choices} must be given, got {num_given} of them"
            raise RequestError(message, param=path + self._one_of[0])
        return values, without_effect

    def _unknown(self, name: str, path: str) -> UnknownArgumentError:
        known = [field.name for field in self.fields if field.effect is not Effect.REFUSED]
        close = difflib.get_close_matches(name, known, n=1) if len(name) <= MAX_COMPARED else []
        hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
        owner = path.removesuffix(".") or self.owner
        message = f"{owner} got an unknown argument {shown(name)}; {hint}"
        return UnknownArgumentError(message, param=path + name if len(name) <= MAX_COMPARED else None)

    def schema(self) -> Schema:
        """Return the JSON schema of the objects. A refused field appears with its neutral values only."""
        properties = {}
        for field in self.fields:
            if field.effect is not Effect.REFUSED:
                schema = field.kind.schema()
                described = {**(schema if field.required else nullable(schema)), "description": field.meaning}
                properties[field.name] = described
            elif field.neutral:
                properties[field.name] = {"enum": [*field.neutral, None]}
        whole: Schema = {"type": "object", "properties": properties, "additionalProperties": self.is_open}
        if self._required:
            whole["required"] = self._required
        if self._one_of:
            given = {"not": {"type": "null"}}
            whole["oneOf"] = [{"required": [name], "properties": {name: given}} for name in self._one_of]
        return whole


@dataclass(frozen=True, slots=True)
class ObjectOf(Kind):
    """An object whose fields a FieldTable describes."""

    types: ClassVar[tuple[type, ...]] = (dict,)
    table: FieldTable

    def parts(self, name: str, value: Any) -> tuple[dict[str, Any], list[str]]:
        if not isinstance(value, Mapping):
            raise RequestError(f"{name} must be an object, got {shown(value)}")
        return self.table.parse(value, f"{name}.")

    def schema(self) -> Schema:
        return self.table.schema()

    def __str__(self) -> str:
        return f"object with {', '.join(field.name for field in self.table.with_effect(Effect.HONOURED))}"


@dataclass(frozen=True, slots=True)
class Tagged(Kind):
    """An object whose field `key` says which FieldTable describes the object."""

    types = (dict,)
    key: str
    tables: Mapping[str, FieldTable]

    def parts(self, name: str, value: Any) -> tuple[dict[str, Any], list[str]]:
        tag = value.get(self.key) if isinstance(value, Mapping) else None
        if not isinstance(tag, str) or tag not in self.tables:
            known = ", ".join(self.tables)
            message = f"{name} must be an object whose {self.key} is one of {known}, got {shown(value)}"
            raise RequestError(message, param=name)
        return self.tables[tag].parse(value, f"{name}.")

    def schema(self) -> Schema:
        schemas = []
        for tag, table in self.tables.items():
            schema = table.schema()
            schema["properties"] = {**schema["properties"], self.key: {"const": tag}}
            schema["required"] = sorted({*schema.get("required", ()), self.key})
            schemas.append(schema)
        return {"anyOf": schemas}

    def __str__(self) -> str:
        return f"object with {self.key} " + " | ".join(f'"{tag}"' for tag in self.tables)
