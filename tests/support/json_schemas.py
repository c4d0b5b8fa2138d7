"""200 JSON schemas in the style of the libraries' own tests, all bounded.

Numbers have a range, strings a maxLength, objects a number of properties: a random model would take long to
end an unbounded value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
INT = {"type": "integer", "minimum": -20, "maximum": 300}
WORD = {"type": "string", "minLength": 1, "maxLength": 6}
NUM_VARIANTS = 8


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Schema:
    """Return an object schema of these properties and no others, all required by default."""
    names = list(properties) if required is None else required
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
        **more,
    }


def listed(item: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


def nested(depth: int) -> Schema:
    return closed({"level": {"const": depth}, "child": nested(depth - 1)} if depth else {"leaf": INT})


def linked(name: str, value: Schema) -> Schema:
    """Return a linked list in which most alternatives end the list, so that a random one ends soon."""
    ends: list[Schema] = [{"type": "null"}, {"type": "boolean"}, INT, WORD]
    link = closed({"value": value, "next": {"anyOf": [*ends, {"$ref": f"#/$defs/{name}"}]}})
    return {"$ref": f"#/$defs/{name}", "$defs": {name: link}}


FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "duration", "hostname", "email"]
# llguidance allows 29 February in every year, and the year 0000.
NO_FEBRUARY = {"pattern": "^[12][0-9]{3}-(0[13-9]|1)"}
PATTERNS = [
    "^[a-z]{2,5}$",
    "^(foo|bar)-[0-9]{3}$",
    "^[A-Z][a-z]{1,8}( [A-Z][a-z]{1,8}){0,2}$",
    r"^\d{4}-\d{2}$",
    "^(a|b){4}c?$",
    '^[^"\\\\]{1,5}$',
    "^#[0-9a-fA-F]{6}$",
    r"^\+?[0-9]{7,10}$",
]
UNIONS: list[list[Schema]] = [
    [INT, {"type": "null"}],
    [{"type": "boolean"}, WORD],
    [listed(INT, 1, 2), INT],
    [closed({"kind": {"const": "a"}, "x": INT}), closed({"kind": {"const": "b"}, "y": WORD})],
    [{"enum": ["low", "high"]}, {"const": 0}],
    [closed({}), listed({"type": "null"}, 0, 2)],
    [WORD, {"type": "null"}, {"type": "boolean"}],
    [closed({"a": INT}), closed({"a": INT, "b": INT})],
]
CONSTANTS: list[Any] = [None, True, 0, -1.5, 'é "q" \\ \n', [], {"a": [1, {"b": None}]}, "\U0001f600"]

FAMILIES: list[Callable[[int], Schema]] = [
    lambda i: {"type": ["boolean", "null"][: i % 3] or "null", "title": f"title {i}"},
    lambda i: {"enum": ["red", "green", None, 1.5, [], {"x": i}, True, -3][: i + 1]},
    lambda i: {"const": CONSTANTS[i]},
    lambda i: {"type": "integer", "minimum": -(10**i), "maximum": 7 * 10**i},
    lambda i: {"type": "integer", "exclusiveMinimum": i, "exclusiveMaximum": i + 2 + i * i},
    lambda i: {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 3 + i},
    lambda i: {"type": "number", "minimum": 0, "maximum": 10 * (i + 1), "multipleOf": 0.25},
    lambda i: {"type": "string", "minLength": i, "maxLength": 2 * i + 1},
    lambda i: {"type": "string", "pattern": PATTERNS[i]},
    lambda i: {"type": "string", "pattern": "^[ab]+$", "minLength": i + 1, "maxLength": i + 4},
    lambda i: {"type": "string", "format": FORMATS[i], "maxLength": 40, **(NO_FEBRUARY if i == 0 else {})},
    lambda i: listed(INT, i % 3, i % 3 + i),
    lambda i: listed(listed({"type": "boolean"}, 1, 1 + i % 3), i % 2, 2 + i // 6),
    lambda i: {"type": "array", "prefixItems": [INT, WORD, {"const": i}], "items": False, "minItems": i % 4},
    lambda i: listed({"enum": [f"v{j}" for j in range(i + 2)]}, 1, i + 1),
    lambda i: closed({f"key_{j}": [INT, WORD, {"type": "boolean"}][j % 3] for j in range(i)}),
    lambda i: closed({"a": INT, "b": WORD, "c": {"const": i}}, ["a", "b", "c"][: i % 4]),
    lambda i: nested(i),
    lambda i: closed({"items": listed(closed({"id": INT, "tag": {"enum": ["x", i]}}), i % 2, 2)}),
    lambda i: {"anyOf": UNIONS[i]},
    lambda i: {"oneOf": [closed({"t": {"const": f"k{j}"}, "v": INT}) for j in range(i + 1)]},
    lambda i: {"allOf": [INT, {"minimum": i}, {"maximum": 3 * i + 5}]},
    lambda i: {
        "$defs": {"point": closed({"x": INT, "y": INT})},
        **closed({f"p{i}{j}": {"$ref": "#/$defs/point"} for j in range(i % 3 + 1)}),
    },
    lambda i: linked(f"node{i}", [INT, WORD, {"type": "boolean"}, {"enum": ["p", i]}][i % 4]),
    lambda i: {
        "type": "object",
        "patternProperties": {"^[xyz]{1,2}$": {"type": "integer", "minimum": 0, "maximum": i}},
        "maxProperties": 2,
        "additionalProperties": False,
    },
]
SCHEMAS = [family(i) for family in FAMILIES for i in range(NUM_VARIANTS)]
