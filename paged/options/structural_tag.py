"""Structural tags: outputs in which some parts are free text and others must match a grammar.

The JSON form is that of vLLM and xgrammar: {"type": "structural_tag", "format": ...} with a tree of formats,
or the older one with "structures" and "triggers". `grammars.library_grammar` compiles what is valid.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from ..base.errors import PagedError, RequestError
from ..base.fields import Field, FieldTable, ObjectOf, Tagged, refused
from ..base.json_kinds import Choice, ListOf, Text, check_unicode_within
from ..base.kinds import Boolean, Integer, Kind, Schema
from ..base.strict_json import RoundedFloat, exact_decimal, parse_json
from ..base.validation import shown

NAME = "structural_tag"
SCHEMA_NAME = "StructuralFormat"  # of the formats' JSON schema, which refers to itself
OPTIONS_KEY = "x-guidance"  # of llguidance, in a JSON schema
MAX_NESTING = 32  # of formats
_TAG_OF_STRUCTURE = re.compile(rf"{NAME}\.tags\[(\d+)\]")


class _JSONSchema(Kind):
    """A JSON schema, or true for any JSON."""

    types = (dict, bool)

    def parse(self, name: str, value: Any) -> Any:
        if value is not True and not isinstance(value, Mapping):
            raise RequestError(f"{name} must be a JSON schema, or true for any JSON, got {shown(value)}")
        check_unicode_within(name, value)
        return value

    def schema(self) -> Schema:
        return {"anyOf": [{"type": "object"}, {"const": True}]}

    def __str__(self) -> str:
        return "JSON schema, or true"


class _Format(Tagged):
    """A format of any type."""

    def schema(self) -> Schema:
        return {"$ref": f"#/components/schemas/{SCHEMA_NAME}"}

    def __str__(self) -> str:
        return "format"


class _Tag(_Format):
    """A format of type tag; its "type" may be left out."""

    def parts(self, name: str, value: Any) -> tuple[dict[str, Any], list[str]]:
        tag = {"type": "tag", **value} if isinstance(value, Mapping) else value
        if not isinstance(tag, Mapping) or tag["type"] != "tag":
            raise RequestError(f"{name} must be of type tag, got {shown(value)}", param=name)
        return super().parts(name, tag)

    def schema(self) -> Schema:
        schema = self.tables["tag"].schema()
        return {**schema, "required": [name for name in schema["required"] if name != "type"]}

    def __str__(self) -> str:
        return "tag"


def _needed(name: str, kind: Kind, meaning: str) -> Field:
    return Field(name, kind, meaning, required=True)


# Every format, described once: for parsing, for the schema of request bodies and for the documentation.
TAG_FORMATS: dict[str, FieldTable] = {}
_FORMAT = _Format("type", TAG_FORMATS)
_CONTENT = _needed("content", _FORMAT, "the format")
_ELEMENTS = _needed("elements", ListOf(_FORMAT, 1), "the formats")
_TAGS = _needed(
    "tags", ListOf(_Tag("type", TAG_FORMATS), 1), "the tags, each an object with begin, content and end"
)
_COUNTS = (
    Field("at_least_one", Boolean(), "demand at least one tag"),
    Field("stop_after_first", Boolean(), "end after the first tag"),
    Field("max_tags", Integer(1), "most tags; an extension of paged"),
)


def _add(name: str, meaning: str, *fields: Field) -> None:
    kind = _needed("type", Choice((name,)), meaning)
    TAG_FORMATS[name] = FieldTable(f"a format of type {name}", [kind, *fields])


_add("const_string", "a fixed text", _needed("value", Text(), "the text"))
_add(
    "json_schema",
    "JSON that matches a schema",
    _needed("json_schema", _JSONSchema(), "the JSON schema, or true for any JSON"),
    Field("name", Text(1), "what errors call the schema; an extension of paged"),
    *refused("style", "the style is always json", "json"),
    *refused("any_order", "properties have the order of the schema", False),
)
_add("regex", "text that matches a regular expression", _needed("pattern", Text(), "the expression"))
_add(
    "grammar",
    "text of a grammar",
    _needed("grammar", Text(), "the grammar, in llama.cpp's GBNF or Lark's EBNF"),
)
_add(
    "any_text",
    "free text",
    *refused("excludes", "free text ends where what follows it begins", []),
    *refused("max_tokens max_chars", "free text has no bound of its own; max_tokens of the request is one"),
)
_add("sequence", "one after another", _ELEMENTS)
_add("or", "one of several", _ELEMENTS)
_add("optional", "once or not at all", _CONTENT)
_add("star", "any number of times", _CONTENT)
_add("plus", "at least once", _CONTENT)
_add(
    "tag",
    "a format between two texts",
    _needed("begin", Text(), "the text before it"),
    _CONTENT,
    _needed("end", Text(), "the text after it"),
)
_add(
    "triggered_tags",
    "free text with tags",
    _needed("triggers", ListOf(Text(1), 1), "texts after which a tag goes on that begins with one of them"),
    _TAGS,
    *_COUNTS,
    *refused("excludes", "the text between tags is free", []),
)
_add(
    "tags_with_separator",
    "tags with a text between them",
    _TAGS,
    _needed("separator", Text(), "the text"),
    *_COUNTS,
)
STRUCTURE_TABLE = FieldTable(
    "a structure",
    [
        _needed("begin", Text(), "the text before the JSON; it begins with one of the triggers"),
        _needed("schema", _JSONSchema(), "the schema of the JSON"),
        _needed("end", Text(), "the text after it"),
    ],
)
# Of the two forms: one of format and structures is given.
FORM_FIELDS = (
    Field("format", _FORMAT, "the format of the text, in the newer form"),
    Field("structures", ListOf(ObjectOf(STRUCTURE_TABLE), 1), "what follows the triggers, in the older form"),
    Field("triggers", ListOf(Text(1), 1), "texts after which a structure follows, in the older form"),
)
TAG_FORMS = ("format", "structures")
_TAG_TABLE = FieldTable(
    NAME, [Field("type", Choice((NAME,)), "may be left out"), *FORM_FIELDS], one_of=TAG_FORMS
)


class StructuralTag(ObjectOf):
    """A structural tag, as an object or as JSON text."""

    types = (dict, str)

    def __init__(self) -> None:
        super().__init__(_TAG_TABLE)

    def parts(self, name: str, value: Any) -> tuple[dict[str, Any], list[str]]:
        if isinstance(value, str):
            try:
                value = parse_json(value)
            except RequestError as error:
                raise RequestError(f"{name} must be an object or JSON text: {error}") from error
        return super().parts(name, value)

    def schema(self) -> Schema:
        return {"anyOf": [Text(1).schema(), super().schema()]}

    def __str__(self) -> str:
        return f"{super().__str__()}, or the same as JSON text"


def format_schema() -> Schema:
    """Return the JSON schema of every format. Formats within formats refer to it by $ref."""
    return Tagged("type", TAG_FORMATS).schema()


def structural_tag_text(value: Any) -> str:
    """Return a structural tag, given as JSON text or a dict in either form, as JSON text in the newer form.

    Raises RequestError or UnknownArgumentError naming the wrong part.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_float=_float64, parse_constant=no_constant)
        except (ValueError, RecursionError) as error:
            raise _wrong(NAME, f"must be JSON: {error}", value) from error
    if not isinstance(value, Mapping) or value.get("type", NAME) != NAME:
        raise _wrong(NAME, 'must be an object {"type": "structural_tag", "format": ...}', value)
    try:
        given, _ = _TAG_TABLE.parse(value, f"{NAME}.")
        if "format" not in given:
            found = _from_structures(given)
        elif "triggers" in given:
            raise _wrong(f"{NAME}.triggers", "belongs to the older form, with structures", given["triggers"])
        else:
            found = given["format"]
            _check(f"{NAME}.format", found, is_last=True)
        return json.dumps({"type": NAME, "format": found}, ensure_ascii=False, allow_nan=False)
    except PagedError:
        raise
    except RecursionError as error:
        raise _too_deep() from error
    except (TypeError, ValueError) as error:
        raise _wrong(NAME, f"must be JSON: {error}", value) from error


def _from_structures(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format of a tag in the older form, checked."""
    tags = [
        {
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure["schema"]},
            "end": structure["end"],
        }
        for structure in given["structures"]
    ]
    triggered = {"type": "triggered_tags", "triggers": given.get("triggers"), "tags": tags}
    try:
        found: dict[str, Any] = _FORMAT.parse(NAME, triggered)
        _check(NAME, found, is_last=True)
    except PagedError as error:
        path = _TAG_OF_STRUCTURE.sub(rf"{NAME}.structures[\1]", error.param or NAME)
        error.param = path.replace(".content.json_schema", ".schema")
        raise
    return found


def _check(where: str, given: Mapping[str, Any], *, is_last: bool, depth: int = 0) -> None:
    """Check what the table of fields does not: the places of free text, triggers, schemas and nesting.

    is_last: whether nothing follows the format, so that it may be text without an end.
    """
    if depth > MAX_NESTING:
        raise _too_deep()
    kind = given["type"]
    if kind in ("any_text", "triggered_tags") and not is_last:
        raise RequestError(
            f"{where} of type {kind} must be the last format; any_text may also be the content of a tag with "
            "an end",
            param=where,
        )
    if kind == "json_schema":
        name = given.get("name") or f"{where}.json_schema"
        try:
            _check_schema(name, given["json_schema"])
        except RequestError as error:
            error.param = name
            raise
    parts = [*_parts(where, given)]
    for i, (path, part) in enumerate(parts):
        if kind == "triggered_tags":
            begin = part["begin"]
            if sum(begin.startswith(trigger) for trigger in given["triggers"]) != 1:
                listed = given["triggers"]
                raise _wrong(f"{path}.begin", f"must begin with exactly one of the triggers {listed}", begin)
        match kind:
            case "sequence":
                part_is_last = is_last and i == len(parts) - 1
            case "or":
                part_is_last = is_last
            case "tag":
                part_is_last = part["type"] == "any_text" if given["end"] else is_last
            case _:
                part_is_last = False
        _check(path, part, is_last=part_is_last, depth=depth + 1)


def _parts(where: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the formats directly within a format, each with its path."""
    if "content" in given:
        yield f"{where}.content", given["content"]
    for name in ("elements", "tags"):
        for i, part in enumerate(given.get(name, ())):
            yield f"{where}.{name}[{i}]", part


def grammars_of(
    given: Mapping[str, Any], where: str = f"{NAME}.format"
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each grammar inside a validated format, with its path or name."""
    field = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar"}.get(given["type"])
    if field is not None:
        yield given.get("name") or f"{where}.{field}", given
    for path, part in _parts(where, given):
        yield from grammars_of(part, path)


def _too_deep() -> RequestError:
    return RequestError(f"{NAME} has formats nested deeper than {MAX_NESTING}", param=NAME)


def _wrong(where: str, what: str, value: Any) -> RequestError:
    return RequestError(f"{where} {what}, got {shown(value)}", param=where)


def schema_text(schema: Any) -> str:
    """Return a JSON schema, given as JSON text or a dict, as JSON text. Raises RequestError."""
    if not isinstance(schema, str | Mapping):
        raise RequestError(f"json must be a JSON schema as text or a dict, got {shown(schema)}")
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        parsed = exact_json(text)
        _check_schema("json", schema if isinstance(schema, Mapping) else parsed)
    except RequestError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json must be a JSON schema: {error}; got {shown(schema)}") from error
    return text


def _check_schema(where: str, schema: Any) -> None:
    """Raise RequestError for the grammar library's own options in a schema, which may undo bounds.

    Also for numbers that were rounded when the body of a request was parsed.
    """
    if isinstance(schema, Mapping) and OPTIONS_KEY in schema:
        raise RequestError(f"{where} must not have {OPTIONS_KEY!r}, whose options are set by paged")
    for path, number in _rounded(where, schema):
        raise RequestError(
            f"{path}: {number.digits} is not exact in float64; a schema that is given as JSON text keeps it",
            param=path,
        )


def _rounded(where: str, value: Any) -> Iterator[tuple[str, RoundedFloat]]:
    """Yield the path and value of each number in a schema that parsing has rounded."""
    if isinstance(value, RoundedFloat):
        yield where, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _rounded(f"{where}.{key}", part)
    elif isinstance(value, list):
        for i, part in enumerate(value):
            yield from _rounded(f"{where}[{i}]", part)


def exact_json(text: str) -> Any:
    """Parse JSON without rounding numbers: those with a fraction are Decimals. Raises ValueError."""
    return json.loads(text, parse_float=exact_decimal, parse_constant=no_constant)


def no_constant(name: str) -> Any:
    """Raise ValueError for a constant that Python reads in JSON, such as NaN."""
    raise ValueError(f"{name} is not JSON; numbers are finite")


def _float64(digits: str) -> float:
    """Return a number in a tag as a float. Raises ValueError if float64 would round it."""
    number = float(digits)
    if not math.isfinite(number) or Decimal(repr(number)) != exact_decimal(digits):
        raise ValueError(f"{digits} is not exact in float64; it is exact in a schema of its own, as json")
    return number
