"""Structural tags, for outputs of which some parts are free text and others belong to a grammar.

The JSON form is that of vLLM and xgrammar: {"type": "structural_tag", "format": ...} with a tree of formats,
or the older one with "structures" and "triggers". `sampling.structural_grammar` compiles what is valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import RequestError, reject_unknown
from .validation import check_bool, shown

NAME = "structural_tag"
OPTIONS_KEY = "x-guidance"  # of llguidance, in a JSON schema
MAX_NESTING = 32  # of formats
# The fields of each format. Those with a value have it as default; None marks those that must be given.
_FORMATS: dict[str, dict[str, Any]] = {
    "const_string": {"value": None},
    "json_schema": {"json_schema": None},
    "regex": {"pattern": None},
    "grammar": {"grammar": None},
    "any_text": {},
    "sequence": {"elements": None},
    "or": {"elements": None},
    "optional": {"content": None},
    "star": {"content": None},
    "plus": {"content": None},
    "tag": {"begin": None, "content": None, "end": None},
    "triggered_tags": {"triggers": None, "tags": None, "at_least_one": False, "stop_after_first": False},
    "tags_with_separator": {
        "tags": None,
        "separator": None,
        "at_least_one": False,
        "stop_after_first": False,
    },
}
# Fields of vLLM that mean something only with other values.
_NEUTRAL: dict[str, dict[str, Any]] = {
    "json_schema": {"style": "json", "any_order": False},
    "any_text": {"excludes": [], "max_tokens": None, "max_chars": None},
    "triggered_tags": {"excludes": []},
}
_TEXTS = ("value", "pattern", "grammar", "begin", "end", "separator")


def schema_text(schema: Any) -> str:
    """Return a JSON schema, given as JSON text or a dict, as JSON text. Raises RequestError."""
    if not isinstance(schema, str | Mapping):
        raise RequestError(f"json must be a JSON schema as text or a dict, got {shown(schema)}")
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        parsed = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"json must be a JSON schema: {error}; got {shown(schema)}") from error
    _check_options("json", parsed)
    return text


def _check_options(where: str, schema: Any) -> None:
    """Raise RequestError for the grammar library's own options in a schema, which may undo bounds."""
    if isinstance(schema, Mapping) and OPTIONS_KEY in schema:
        raise RequestError(f"{where} must not have {OPTIONS_KEY!r}, whose options are set by paged")


def structural_tag_text(value: Any) -> str:
    """Return a structural tag, given as JSON text or a dict in either form, as JSON text in the newer form.

    Raises RequestError or UnknownArgumentError naming the wrong part.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _wrong(NAME, f"must be JSON: {error}", value) from error
    if not isinstance(value, Mapping) or value.get("type", NAME) != NAME:
        raise _wrong(NAME, 'must be an object {"type": "structural_tag", "format": ...}', value)
    if "format" in value:
        reject_unknown(NAME, value, ("type", "format"))
        found = _format("format", value["format"], is_last=True)
    else:
        found = _from_structures(value)
    try:
        return json.dumps({"type": NAME, "format": found}, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(NAME, f"must be JSON: {error}", value) from error


def _from_structures(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format of the older form."""
    reject_unknown(NAME, value, ("type", "structures", "triggers"))
    structures = _list(NAME, "structures", value.get("structures"))
    tags = []
    for i, structure in enumerate(structures):
        where = f"structures[{i}]"
        if not isinstance(structure, Mapping):
            raise _wrong(where, 'must be an object with "begin", "schema" and "end"', structure)
        reject_unknown(where, structure, ("begin", "schema", "end"))
        content = {"type": "json_schema", "json_schema": structure.get("schema")}
        begin, end = structure.get("begin"), structure.get("end")
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    triggered = {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}
    return _format(NAME, triggered, is_last=True)


def _format(where: str, given: Any, *, is_last: bool, depth: int = 0) -> dict[str, Any]:
    """Return a validated format with all its fields.

    is_last: whether nothing follows it, so that it may be text without an end.
    """
    if depth > MAX_NESTING:
        raise RequestError(f"structural_tag has formats nested deeper than {MAX_NESTING}")
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise _wrong(where, f"must be an object whose type is one of {', '.join(_FORMATS)}", given)
    fields, neutral = _FORMATS[kind], _NEUTRAL.get(kind, {})
    reject_unknown(f"{where} ({kind})", given, ("type", *fields, *neutral))
    for name, value in neutral.items():
        if given.get(name, value) != value:
            raise _wrong(f"{where}.{name}", f"is supported only as {value!r}", given[name])
    found: dict[str, Any] = {"type": kind}
    for name, default in fields.items():
        value = given.get(name, default)
        if value is None:
            raise _wrong(where, f"of type {kind} needs {name!r}", given)
        if name in _TEXTS and not isinstance(value, str):
            raise _wrong(f"{where}.{name}", "must be a string", value)
        found[name] = (
            check_bool(RequestError, f"{where}.{name}", value) if isinstance(default, bool) else value
        )
    _check_parts(where, found, is_last=is_last, depth=depth + 1)
    return found


def _check_parts(where: str, found: dict[str, Any], *, is_last: bool, depth: int) -> None:
    """Validate what a format consists of, and replace it by its validated form."""
    kind = found["type"]
    if kind == "json_schema":
        schema = found["json_schema"]
        if schema is not True and not isinstance(schema, Mapping):
            raise _wrong(f"{where}.json_schema", "must be a JSON schema", schema)
        _check_options(f"structural_tag: {where}.json_schema", schema)
    if kind in ("any_text", "triggered_tags") and not is_last:
        raise RequestError(
            f"structural_tag: {where} of type {kind} must be the last format; any_text may also be the "
            "content of a tag with an end"
        )
    if kind in ("sequence", "or"):
        elements = _list(where, "elements", found["elements"])
        last = len(elements) - 1
        found["elements"] = [
            _format(f"{where}.elements[{i}]", e, is_last=is_last and (kind == "or" or i == last), depth=depth)
            for i, e in enumerate(elements)
        ]
    if "content" in found:
        content, has_end = found["content"], bool(found.get("end"))
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


def _wrong(where: str, what: str, value: Any) -> RequestError:
    name = where if where.startswith(NAME) else f"structural_tag: {where}"
    return RequestError(f"{name} {what}, got {shown(value)}")
