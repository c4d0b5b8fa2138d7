"""Structural tags in request bodies. `structural_tag.TAG_FORMATS` describes the formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...base.fields import Field, FieldTable, ObjectOf
from ...base.kinds import (
    Boolean,
    Choice,
    Integer,
    JSONObject,
    Kind,
    ListOf,
    Schema,
    Text,
    check_unicode_within,
)
from ...base.strict_json import parse_json
from ...base.validation import shown
from ...errors import RequestError
from ...structural_tag import NAME, TAG_FORMATS, FormatField

SCHEMA_NAME = "StructuralFormat"  # of the formats' JSON schema, which refers to itself


class FormatKind(JSONObject):
    """A format, which `structural_tag_text` validates together with those around it."""

    def schema(self) -> Schema:
        """Return the JSON schema."""
        return {"$ref": f"#/components/schemas/{SCHEMA_NAME}"}

    def __str__(self) -> str:
        return "format"


class _JSONSchema(Kind):
    """A JSON schema, or true for any JSON."""

    types = (dict, bool)

    def parse(self, name: str, value: Any) -> Any:
        """Return the schema."""
        if value is not True and not isinstance(value, Mapping):
            raise RequestError(f"{name} must be a JSON schema, or true for any JSON, got {shown(value)}")
        check_unicode_within(name, value)
        return value

    def schema(self) -> Schema:
        """Return the JSON schema."""
        return {"anyOf": [{"type": "object"}, {"const": True}]}

    def __str__(self) -> str:
        return "JSON schema, or true"


_TEXT = Text(1)
STRUCTURE_TABLE = FieldTable(
    "a structure",
    [
        Field("begin", Text(), "the text before the JSON; it begins with one of the triggers", required=True),
        Field("schema", _JSONSchema(), "the schema of the JSON", required=True),
        Field("end", Text(), "the text after it", required=True),
    ],
)
# Of the two forms: one of format and structures is given.
FORM_FIELDS: Sequence[Field] = [
    Field("format", FormatKind(), "the format of the text, in the newer form"),
    Field("structures", ListOf(ObjectOf(STRUCTURE_TABLE), 1), "what follows the triggers, in the older form"),
    Field("triggers", ListOf(_TEXT, 1), "texts after which a structure follows, in the older form"),
]
TAG_FORMS = ("format", "structures")
TAG_TABLE = FieldTable(
    NAME, [Field("type", Choice((NAME,)), "may be left out"), *FORM_FIELDS], one_of=TAG_FORMS
)


class StructuralTag(ObjectOf):
    """A structural tag, as an object or as JSON text."""

    types = (dict, str)

    def __init__(self) -> None:
        super().__init__(TAG_TABLE)

    def parts(self, name: str, value: Any) -> tuple[dict[str, Any], list[str]]:
        """Return the tag as an object, and the names of fields without effect."""
        if isinstance(value, str):
            try:
                value = parse_json(value)
            except RequestError as error:
                raise RequestError(f"{name} must be an object or JSON text: {error}") from error
        return super().parts(name, value)

    def schema(self) -> Schema:
        """Return the JSON schema."""
        return {"anyOf": [_TEXT.schema(), super().schema()]}

    def __str__(self) -> str:
        return f"{super().__str__()}, or the same as JSON text"


_TEXTS = ListOf(_TEXT, 1)
_PLAIN: dict[str, Kind] = {
    "text": Text(),
    "texts": _TEXTS,
    "schema": _JSONSchema(),
    "switch": Boolean(),
    "count": Integer(1),
    "name": _TEXT,
    "format": FormatKind(),
    "formats": ListOf(FormatKind(), 1),
}


class _TagKind(FormatKind):
    """A format of type tag, which need not say so."""

    def schema(self) -> Schema:
        """Return the JSON schema."""
        return _schema_of("tag", is_typed=False)

    def __str__(self) -> str:
        return "tag"


def kind_of(field: FormatField) -> Kind:
    """Return the kind of a format's field."""
    return ListOf(_TagKind(), 1) if field.kind == "tags" else _PLAIN[field.kind]


def format_schema() -> Schema:
    """Return the JSON schema of all formats, to which those within formats refer."""
    return {"anyOf": [_schema_of(name, is_typed=True) for name in TAG_FORMATS]}


def _schema_of(name: str, *, is_typed: bool) -> Schema:
    meaning, fields, neutral = TAG_FORMATS[name]
    properties: Schema = {"type": {"const": name}}
    properties |= {
        own: {**kind_of(field).schema(), "description": field.meaning} for own, field in fields.items()
    }
    properties |= {own: {"const": value} for own, value in neutral.items()}
    required = [own for own, field in fields.items() if field.is_required]
    return {
        "type": "object",
        "description": meaning,
        "properties": properties,
        "required": [*(["type"] if is_typed else []), *required],
        "additionalProperties": False,
    }
