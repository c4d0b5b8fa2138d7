"""What a JSON schema says about the values of arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from json.encoder import encode_basestring
from typing import Any, Final

MAX_REFERENCES = 16  # that lead from one to the next
_NUMBER = re.compile(r"[+-]?((0|[1-9][\d_]*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_TYPES_OF_VALUES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
MAX_NUMBER = 512  # of a number that Python has to convert
Types = frozenset[str] | None  # of JSON Schema; None for any
NULLABLE_TEXT: Final = frozenset(["string", "null"])
TEXT: Final = frozenset(["string"])


def quoted(text: str) -> str:
    """Escape a text for use inside a JSON string."""
    return encode_basestring(text)[1:-1]


def resolved(schema: Any, root: Any) -> Any:
    """Return a schema with its reference resolved; None if `root` lacks what the reference names."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        if not reference.startswith("#"):
            return None
        schema = root
        for step in filter(None, reference[1:].split("/")):
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(schema, Mapping) or name not in schema:
                return None
            schema = schema[name]
    return None


def types_of(schema: Any, root: Any) -> Types:
    """Return the JSON types that a schema allows; None if the schema does not restrict them.

    root: the schema in which references are resolved.
    """
    return _types_of(schema, root, set())


def _types_of(schema: Any, root: Any, seen: set[int]) -> Types:
    """Return the types that a schema allows. Parts that were seen before add nothing."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return None
    if id(schema) in seen:
        return frozenset()
    seen.add(id(schema))
    if "type" in schema:
        given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return frozenset(name for name in given if isinstance(name, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(_TYPES_OF_VALUES.get(type(value), "string") for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return _union(_types_of(part, root, seen) for part in schema[key])
    if isinstance(schema.get("allOf"), list):
        known = (_types_of(part, root, seen) for part in schema["allOf"])
        return next((types for types in known if types), None)
    if "properties" in schema:
        return frozenset(["object"])
    return frozenset(["array"]) if "items" in schema else None


def _union(parts: Iterator[Types]) -> Types:
    joined = frozenset[str]()
    for types in parts:
        if types is None:
            return None
        joined |= types
    return joined


def property_of(schema: Any, name: str, root: Any) -> Any:
    """Return the schema of an object's property; None if the object's schema says nothing about it."""
    waiting = [schema]
    seen = set[int]()
    others = None
    while waiting:
        schema = resolved(waiting.pop(0), root)
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
        for key in ("allOf", "anyOf", "oneOf"):
            parts = schema.get(key)
            waiting += parts if isinstance(parts, list) else ()
        if others is None and isinstance(schema.get("additionalProperties"), Mapping):
            others = schema["additionalProperties"]
    return others


def number_of(text: str) -> str:
    """Return a number written in JSON or Python as JSON; "" if the text is not a number."""
    if _JSON_NUMBER.fullmatch(text):
        return text
    if not _NUMBER.fullmatch(text) or len(text) > MAX_NUMBER:
        return ""
    try:
        is_whole = re.fullmatch(r"[+-]?\d[\d_]*", text)
        return json.dumps(int(text) if is_whole else float(text), allow_nan=False)
    except ValueError:
        return ""


def is_whole(number: str) -> bool:
    """Return whether a JSON number is an integer."""
    return ("." not in number and "e" not in number.lower()) or float(number).is_integer()
