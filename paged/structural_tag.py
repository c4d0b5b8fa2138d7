"""Structural tags, for outputs of which some parts are free text and others belong to a grammar.

The JSON form is that of vLLM and xgrammar: {"type": "structural_tag", "format": ...} with a tree of formats,
or the older one with "structures" and "triggers". `sampling.structural_grammar` compiles what is valid.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, NamedTuple

from .base.strict_json import RoundedFloat, exact_decimal
from .base.validation import check_bool, check_int, shown
from .errors import PagedError, RequestError, reject_unknown

NAME = "structural_tag"
OPTIONS_KEY = "x-guidance"  # of llguidance, in a JSON schema
MAX_NESTING = 32  # of formats
# Kinds of fields that may be left out, and their defaults.
OPTIONAL: Mapping[str, Any] = {"switch": False, "count": None, "name": None}
_TAG_OF_STRUCTURE = re.compile(rf"{NAME}\.tags\[(\d+)\]")


class FormatField(NamedTuple):
    """A field of a format.

    kind: "text", "schema" (of JSON), "format", "formats", "tags", "texts", or one of OPTIONAL.
    """

    kind: str
    meaning: str

    @property
    def is_required(self) -> bool:
        """Whether the field must be given."""
        return self.kind not in OPTIONAL


class FormatType(NamedTuple):
    """A type of format. neutral: fields of vLLM that are accepted at this value alone."""

    meaning: str
    fields: Mapping[str, FormatField] = {}
    neutral: Mapping[str, Any] = {}


_CONTENT = FormatField("format", "the format")
_TAGS = FormatField("tags", "the tags, each an object with begin, content and end")
_AT_LEAST_ONE = FormatField("switch", "demand at least one tag")
_STOP_AFTER_FIRST = FormatField("switch", "end after the first tag")
_MAX_TAGS = FormatField("count", "most tags; an extension of paged")
# Every format, described once: for parsing, for the schema of request bodies and for the documentation.
TAG_FORMATS: Mapping[str, FormatType] = {
    "const_string": FormatType("a fixed text", {"value": FormatField("text", "the text")}),
    "json_schema": FormatType(
        "JSON that matches a schema",
        {
            "json_schema": FormatField("schema", "the JSON schema, or true for any JSON"),
            "name": FormatField("name", "what errors call the schema; an extension of paged"),
        },
        {"style": "json", "any_order": False},
    ),
    "regex": FormatType(
        "text that matches a regular expression", {"pattern": FormatField("text", "the expression")}
    ),
    "grammar": FormatType(
        "text of a grammar",
        {"grammar": FormatField("text", "the grammar, in llama.cpp's GBNF or Lark's EBNF")},
    ),
    "any_text": FormatType("free text", {}, {"excludes": [], "max_tokens": None, "max_chars": None}),
    "sequence": FormatType("one after another", {"elements": FormatField("formats", "the formats")}),
    "or": FormatType("one of several", {"elements": FormatField("formats", "the formats")}),
    "optional": FormatType("once or not at all", {"content": _CONTENT}),
    "star": FormatType("any number of times", {"content": _CONTENT}),
    "plus": FormatType("at least once", {"content": _CONTENT}),
    "tag": FormatType(
        "a format between two texts",
        {
            "begin": FormatField("text", "the text before it"),
            "content": _CONTENT,
            "end": FormatField("text", "the text after it"),
        },
    ),
    "triggered_tags": FormatType(
        "free text with tags",
        {
            "triggers": FormatField("texts", "texts after which a tag goes on that begins with one of them"),
            "tags": _TAGS,
            "at_least_one": _AT_LEAST_ONE,
            "stop_after_first": _STOP_AFTER_FIRST,
            "max_tags": _MAX_TAGS,
        },
        {"excludes": []},
    ),
    "tags_with_separator": FormatType(
        "tags with a text between them",
        {
            "tags": _TAGS,
            "separator": FormatField("text", "the text"),
            "at_least_one": _AT_LEAST_ONE,
            "stop_after_first": _STOP_AFTER_FIRST,
            "max_tags": _MAX_TAGS,
        },
    ),
}


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
    """Yield the rounded numbers of a schema with their paths."""
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
    """Return a number of a tag, which is passed on as a float. Raises ValueError if that would round it."""
    number = float(digits)
    if not math.isfinite(number) or Decimal(repr(number)) != exact_decimal(digits):
        raise ValueError(f"{digits} is not exact in float64; it is exact in a schema of its own, as json")
    return number


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
    if "format" in value:
        with _naming(NAME):
            reject_unknown(NAME, value, ("type", "format"))
        found = _format("format", value["format"], is_last=True)
    else:
        found = _from_structures(value)
    try:
        return json.dumps({"type": NAME, "format": found}, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(NAME, f"must be JSON: {error}", value) from error


def _from_structures(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format of the older form."""
    with _naming(NAME):
        reject_unknown(NAME, value, ("type", "structures", "triggers"))
    structures = _list(NAME, "structures", value.get("structures"))
    tags = []
    for i, structure in enumerate(structures):
        where = f"structures[{i}]"
        if not isinstance(structure, Mapping):
            raise _wrong(where, 'must be an object with "begin", "schema" and "end"', structure)
        with _naming(where):
            reject_unknown(where, structure, ("begin", "schema", "end"))
        content = {"type": "json_schema", "json_schema": structure.get("schema")}
        begin = structure.get("begin")
        end = structure.get("end")
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    triggered = {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}
    try:
        return _format(NAME, triggered, is_last=True)
    except PagedError as error:
        path = _TAG_OF_STRUCTURE.sub(rf"{NAME}.structures[\1]", error.param or NAME)
        error.param = path.replace(".content.json_schema", ".schema")
        raise


def grammars_of(
    given: Mapping[str, Any], where: str = f"{NAME}.format"
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parts of a validated format that may be refused by themselves, each with its path or name."""
    for name, field in TAG_FORMATS[given["type"]].fields.items():
        value = given[name]
        path = f"{where}.{name}"
        match field.kind:
            case "schema":
                yield given["name"] or path, given
            case "text" if name in ("pattern", "grammar"):
                yield path, given
            case "format":
                yield from grammars_of(value, path)
            case "formats" | "tags":
                for i, part in enumerate(value):
                    yield from grammars_of(part, f"{path}[{i}]")


def _format(where: str, given: Any, *, is_last: bool, depth: int = 0) -> dict[str, Any]:
    """Return a validated format with all its fields.

    is_last: whether nothing follows it, so that it may be text without an end.
    """
    if depth > MAX_NESTING:
        raise RequestError(f"structural_tag has formats nested deeper than {MAX_NESTING}")
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in TAG_FORMATS:
        raise _wrong(where, f"must be an object whose type is one of {', '.join(TAG_FORMATS)}", given)
    _, fields, neutral = TAG_FORMATS[kind]
    with _naming(where):
        reject_unknown(f"{where} ({kind})", given, ("type", *fields, *neutral))
    for name, value in neutral.items():
        if given.get(name, value) != value:
            raise _wrong(f"{where}.{name}", f"is supported only as {value!r}", given[name])
    found: dict[str, Any] = {"type": kind}
    for name, field in fields.items():
        value = given.get(name, OPTIONAL.get(field.kind))
        if value is None and field.is_required:
            raise _wrong(where, f"of type {kind} needs {name!r}", given)
        if field.kind in ("text", "name") and not isinstance(value, str | None):
            raise _wrong(f"{where}.{name}", "must be a string", value)
        if field.kind == "switch":
            with _naming(f"{where}.{name}"):
                check_bool(RequestError, f"{where}.{name}", value)
        if field.kind == "count" and value is not None:
            with _naming(f"{where}.{name}"):
                check_int(RequestError, f"{where}.{name}", value, 1)
        found[name] = value
    _check_parts(where, found, is_last=is_last, depth=depth + 1)
    return found


def _check_parts(where: str, found: dict[str, Any], *, is_last: bool, depth: int) -> None:
    """Validate what a format consists of, and replace it by its validated form."""
    kind = found["type"]
    if kind == "json_schema":
        schema = found["json_schema"]
        if schema is not True and not isinstance(schema, Mapping):
            raise _wrong(f"{where}.json_schema", "must be a JSON schema", schema)
        name = found["name"]
        try:
            _check_schema(name or f"{NAME}: {where}.json_schema", schema)
        except RequestError as error:
            error.param = name or _path(f"{where}.json_schema")
            raise
    if kind in ("any_text", "triggered_tags") and not is_last:
        raise RequestError(
            f"structural_tag: {where} of type {kind} must be the last format; any_text may also be the "
            "content of a tag with an end",
            param=_path(where),
        )
    if kind in ("sequence", "or"):
        elements = _list(where, "elements", found["elements"])
        last = len(elements) - 1
        found["elements"] = [
            _format(f"{where}.elements[{i}]", e, is_last=is_last and (kind == "or" or i == last), depth=depth)
            for i, e in enumerate(elements)
        ]
    if "content" in found:
        content = found["content"]
        has_end = bool(found.get("end"))
        ends_text = has_end and isinstance(content, Mapping) and content.get("type") == "any_text"
        content_is_last = ends_text or (kind == "tag" and is_last and not has_end)
        found["content"] = _format(f"{where}.content", content, is_last=content_is_last, depth=depth)
    if "tags" in found:
        tags = _list(where, "tags", found["tags"])
        found["tags"] = [
            _tag(f"{where}.tags[{i}]", tag, found.get("triggers"), depth) for i, tag in enumerate(tags)
        ]


def _tag(where: str, given: Any, triggers: Any, depth: int) -> dict[str, Any]:
    """Return a validated tag that begins with exactly one of the triggers, if there are any."""
    tag = _format(
        where, {"type": "tag", **given} if isinstance(given, Mapping) else given, is_last=False, depth=depth
    )
    if tag["type"] != "tag":
        raise _wrong(where, "must be of type tag", given)
    if triggers is not None:
        listed = _list(where, "triggers", triggers)
        if not all(isinstance(trigger, str) and trigger for trigger in listed):
            raise _wrong("triggers", "must be a list of non-empty strings", triggers)
        if sum(tag["begin"].startswith(trigger) for trigger in listed) != 1:
            raise _wrong(
                f"{where}.begin", f"must begin with exactly one of the triggers {listed}", tag["begin"]
            )
    return tag


def _list(where: str, name: str, value: Any) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        raise _wrong(f"{where}.{name}", "must be a list that is not empty", value)
    return value


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Let an error from within name the part of the tag that it is about."""
    try:
        yield
    except PagedError as error:
        error.param = _path(where)
        raise


def _path(where: str) -> str:
    """Return the path of a part of the tag, as errors have it in `param`."""
    return where if where.startswith(NAME) else f"{NAME}.{where}"


def _wrong(where: str, what: str, value: Any) -> RequestError:
    name = where if where.startswith(NAME) else f"structural_tag: {where}"
    return RequestError(f"{name} {what}, got {shown(value)}", param=_path(where))
