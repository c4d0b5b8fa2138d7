"""Formats of structural tags for arguments that are not one JSON text: each value by its schema."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..base.errors import RequestError
from ..grammars.json_references import references
from .formats import CallSyntax
from .tagged import value_of
from .tools import Tool
from .values import TEXT, Types, resolved, types_of
from .writing import gemma_literal

Format = dict[str, Any]  # of a structural tag
ANNOTATIONS: Final = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment")
)
# What a schema of arguments may say: each parameter by itself.
_OBJECT_KEYS: Final = ANNOTATIONS | {
    *("type", "properties", "required", "additionalProperties", "minProperties", "maxProperties"),
    *("$defs", "definitions", "$schema", "$id", "$anchor", "unevaluatedProperties", "strict"),
}
_NESTED_KEYS: Final = frozenset(("properties", "required", "additionalProperties"))
_NAMES: Final = {
    "tagged": re.compile(r"[^<>\s\"'](?:[^<>\n\"']*[^<>\s\"'])?"),
    "python": re.compile(r"[A-Za-z_][A-Za-z0-9_]*"),
    "gemma": re.compile(r"[^:{}\[\],\"'\s<]+"),
}
_LENGTHS: Final = frozenset(("minLength", "maxLength"))
_VALUES: Final = frozenset(("enum", "const"))
_UNIONS: Final = ("anyOf", "oneOf")
_MOST_PARTS: Final = 10_000  # of a schema that is written out
_MOST_ITEMS: Final = 8  # of an array whose length is bounded, written out
_MOST_DEPTH: Final = 5  # of Gemma's braces; what is deeper is JSON
_ROOT: Final = "paged_root"
# Keyword arguments of Python with any literals.
ANY_KEYWORDS: Final[Format] = {
    "type": "grammar",
    "grammar": r"""start: (pair (", " pair)*)?
pair: NAME "=" value
value: NUMBER | TEXT | "True" | "False" | "None" | list | dict
list: "[" (value (", " value)*)? "]"
dict: "{" (item (", " item)*)? "}"
item: TEXT ": " value
NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/
NUMBER: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?/
TEXT: /"([^"\\\x00-\x1f]|\\["\\nrt])*"/
""",
}


def text(value: str) -> Format:
    """Return the format of exactly this text."""
    return {"type": "const_string", "value": value}


def sequence(*elements: Format) -> Format:
    """Return the format of several formats in sequence."""
    return {"type": "sequence", "elements": [*elements]}


def either(*elements: Format) -> Format:
    """Return a format that matches any one of several formats."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": [*elements]}


def optional(content: Format) -> Format:
    """Return a format that matches `content` or nothing."""
    return {"type": "optional", "content": content}


def in_slashes(words: str) -> str:
    """Return a regular expression for exactly this text, escaped for use between slashes."""
    return re.escape(words).replace("/", r"\/").replace("\n", r"\n")


def tag(begin: str, content: Format, end: str) -> Format:
    """Return the format of `content` between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def any_arguments(syntax: CallSyntax) -> Format:
    """Return the format of any arguments."""
    free: Format = {"type": "any_text"}
    if syntax.arguments == "tagged":
        before, between, after = syntax.parameter_texts
        key: Format = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_.-]{0,63}"}
        end = after.strip()
        value = tag("", free, end)
        rest = [text(after.removeprefix("\n").removeprefix(end))] if after.strip() != after.lstrip() else []
        return {"type": "star", "content": sequence(text(before), key, text(between), value, *rest)}
    if syntax.arguments == "python":
        return ANY_KEYWORDS
    quoted = tag(syntax.quote, free, syntax.quote)
    rest_of = {"type": "regex", "pattern": r"[A-Za-z0-9_.:,\[\]{} +-]{1,64}"}
    return sequence(text("{"), {"type": "star", "content": either(quoted, rest_of)}, text("}"))


def arguments_of(syntax: CallSyntax, tool: Tool) -> Format:
    """Return the format of arguments that match the schema of a tool.

    Raises RequestError naming the part of the schema that the format cannot express.
    """
    arguments = _Arguments(syntax, tool)
    try:
        return arguments.format()
    except RequestError:
        raise
    except RecursionError:
        raise arguments.unsaid(arguments.place, "it refers to itself without end") from None
    except (TypeError, ValueError, AttributeError) as error:  # keys of a schema with values of other kinds
        raise arguments.unsaid(arguments.place, f"it is no JSON schema: {error}") from error


class _Arguments:
    """The format of the arguments of one tool."""

    def __init__(self, syntax: CallSyntax, tool: Tool) -> None:
        self._syntax = syntax
        self.place = tool.place or f"the parameters of {tool.name}"
        self._root = tool.parameters
        self._num_parts = 0
        rebased = [
            name
            for name in references(tool.parameters)
            if not name.startswith(("#/$defs/", "#/definitions/"))
        ]
        self._defs: dict[str, Any] = {
            name: self._root[name] for name in ("$defs", "definitions") if name in self._root
        }
        self._is_rebased = any(name.startswith("#") for name in rebased)
        if self._is_rebased:
            root = copy.deepcopy(dict(self._root))
            _rebase(root)
            self._defs = {"$defs": {_ROOT: root}}

    def format(self) -> Format:
        """Return the format of all arguments."""
        schema = resolved(self._root, self._root)
        members = [*self._members(schema, self.place)]
        match self._syntax.arguments:
            case "tagged":
                elements = [self._parameter(name, part, place) for name, part, _, place in members]
                pairs = zip(elements, (member[2] for member in members), strict=True)
                return sequence(*(each if needed else optional(each) for each, needed in pairs), text(""))
            case "python":
                parts = [
                    sequence(text(f"{name}="), self._python(part, place)) for name, part, _, place in members
                ]
                return _listed(parts, [member[2] for member in members], ", ")
        return self._braces(members, 0)

    def _members(self, schema: Any, place: str) -> Iterator[tuple[str, Any, bool, str]]:
        """Yield the properties of an object: name, schema, whether it is required, and place."""
        if not isinstance(schema, Mapping):
            raise self.unsaid(place, "it refers to nothing that is in the schema")
        for key in schema:
            if key not in _OBJECT_KEYS and key != "$ref":
                raise self.unsaid(f"{place}.{key}", "only properties by themselves are written out")
        properties = schema.get("properties", {})
        required = [name for name in schema.get("required", ()) if isinstance(name, str)]
        names = [*properties, *(name for name in required if name not in properties)]
        if len(required) < schema.get("minProperties", 0) or len(names) > schema.get(
            "maxProperties", len(names)
        ):
            raise self.unsaid(f"{place}.minProperties", "the number of properties is not counted")
        others = schema.get("additionalProperties", True)
        for name in names:
            if not _NAMES[self._syntax.arguments].fullmatch(name):
                raise self.unsaid(f"{place}.properties.{name}", "the name would need quotes")
            if name not in properties and others is False:
                raise self.unsaid(f"{place}.required", f"{name!r} is no property")
            yield name, properties.get(name, others), name in required, f"{place}.properties.{name}"

    def unsaid(self, place: str, why: str) -> RequestError:
        """Return the error of what cannot be said in the format."""
        return RequestError(
            f"{place} cannot be forced in the model's own format of arguments "
            f"({self._syntax.arguments}): {why}",
            param=place,
        )

    # Tagged

    def _parameter(self, name: str, schema: Any, place: str) -> Format:
        before, between, after = self._syntax.parameter_texts
        begin = f"{before}{name}{between}"
        return either(*(self._element(begin, after, part, place) for part in self._branches(schema, place)))

    def _element(self, begin: str, after: str, schema: Any, place: str) -> Format:
        """Return one element whose schema is no union."""
        types = self._types(schema)
        end = after.strip()
        if types != TEXT and not (isinstance(schema, Mapping) and _VALUES & schema.keys()):
            return tag(begin, self._json(schema, place), after)
        keys = self._keys(schema)
        if values := self._values(schema):
            texts = [
                _plain(value)
                for value in values
                if end not in _plain(value)
                and (types == TEXT or json.loads(value_of(_plain(value), types)) == value)
            ]
            if not texts:
                raise self.unsaid(place, "none of its values can be written as plain text")
            return tag(begin, either(*map(text, texts)), after)
        if wrong := sorted(keys - _LENGTHS - ANNOTATIONS - {"type"}):
            raise self.unsaid(
                f"{place}.{wrong[0]}", "the value is plain text, of which only the length is bounded"
            )
        if keys & _LENGTHS:
            return tag(begin, _bounded(schema, [end]), after)
        rest = after.lstrip()[len(end) :]
        # The end is looked for without the line break before it: the parser takes either for the end.
        return sequence(tag(begin, {"type": "any_text"}, end), *([text(rest)] if rest else []))

    def _branches(self, schema: Any, place: str) -> list[Any]:
        """Return the schemas of a union if no text of one schema can be taken for a text of another.

        A text is read as null, a number and so on where the schema allows them. So there is no plain text
        besides values with bounds, which it might not keep.
        """
        schema = self._known(schema, place)
        types = self._types(schema)
        if not isinstance(schema, Mapping) or types is None or types == TEXT or "string" not in types:
            if isinstance(schema, Mapping) and types == TEXT and any(key in schema for key in _UNIONS):
                return [
                    part
                    for key in _UNIONS
                    if key in schema
                    for one in schema[key]
                    for part in self._branches(one, place)
                ]
            return [schema]
        if _VALUES & schema.keys():
            return [schema]
        if isinstance(schema.get("type"), list):
            kinds = schema["type"]
            is_bare = not (schema.keys() - ANNOTATIONS - {"type"})
            others = [{**schema, "type": [kind for kind in kinds if kind != "string"]}]
            return [*others, {"type": "string"}] if is_bare else others
        for key in _UNIONS:
            if isinstance(schema.get(key), list):
                parts = [part for one in schema[key] for part in self._branches(one, place)]
                others = [part for part in parts if self._types(part) != TEXT]
                is_bare = all(not (part.keys() - ANNOTATIONS - {"type"}) for part in others)
                return parts if is_bare else others
        return [schema]

    # Python

    def _python(self, schema: Any, place: str) -> Format:
        """Return the format of a value: JSON, but for the words that Python writes otherwise."""
        words = {"boolean": ["True", "False"], "null": ["None"]}
        known = self._known(schema, place)
        if not isinstance(known, Mapping) or _VALUES & known.keys():
            return self._json(schema, place)
        if isinstance(known.get("type"), list) and not (known.keys() - ANNOTATIONS - {"type"}):
            return either(*(self._python({"type": kind}, place) for kind in known["type"]))
        for key in _UNIONS[:1]:
            if isinstance(known.get(key), list) and not (known.keys() - ANNOTATIONS - {key}):
                return either(*(self._python(part, place) for part in known[key]))
        kind = known.get("type")
        if isinstance(kind, str) and kind in words and not (known.keys() - ANNOTATIONS - {"type"}):
            return either(*map(text, words[kind]))
        return self._json(schema, place)

    # Gemma

    def _braces(self, members: Sequence[tuple[str, Any, bool, str]], depth: int) -> Format:
        parts = [
            sequence(text(f"{name}:"), self._gemma(part, place, depth)) for name, part, _, place in members
        ]
        return sequence(text("{"), _listed(parts, [member[2] for member in members], ","), text("}"))

    def _gemma(self, schema: Any, place: str, depth: int) -> Format:
        """Return the format of a value: JSON where Gemma's notation cannot say the schema."""
        known = self._known(schema, place)
        if not isinstance(known, Mapping) or depth > _MOST_DEPTH:
            return self._json(schema, place)
        keys = self._keys(known)
        quote = self._syntax.quote
        if _VALUES & keys:
            values = self._values(known)
            if not values:
                raise self.unsaid(place, "there is no value")
            return either(*(text(gemma_literal(value, quote)) for value in values))
        for key in _UNIONS[:1]:
            if isinstance(known.get(key), list) and not (keys - ANNOTATIONS - {key}):
                return either(*(self._gemma(part, place, depth + 1) for part in known[key]))
        bare = keys - ANNOTATIONS - {"type"}
        match known.get("type"):
            case "string" if not bare:
                return tag(quote, {"type": "any_text"}, quote)
            case "string" if not bare - _LENGTHS:
                return tag(quote, _bounded(known, [quote]), quote)
            case "array" if not bare - {"items", "minItems", "maxItems"}:
                return self._list(known, place, depth)
            case "object" if bare <= _NESTED_KEYS and _has_names(known.get("properties")):
                return self._braces([*self._members(known, place)], depth + 1)
            case [*kinds] if not bare:
                return either(*(self._gemma({"type": kind}, place, depth) for kind in kinds))
        return self._json(schema, place)

    def _list(self, schema: Mapping[str, Any], place: str, depth: int) -> Format:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if least > _MOST_ITEMS or (most is not None and not least <= most <= _MOST_ITEMS):
            return self._json(schema, place)
        item = self._gemma(schema.get("items", True), f"{place}.items", depth + 1)
        following = sequence(text(","), item)
        more: Format = {"type": "star", "content": following}
        if most is not None:
            more = text("")
            for _ in range(most - max(least, 1)):
                more = optional(sequence(following, more))
        inside = sequence(item, *[following] * (least - 1), more)
        inside = inside if least else optional(inside)
        return sequence(text("["), text("") if most == 0 else inside, text("]"))

    # JSON

    def _known(self, schema: Any, place: str) -> Any:
        """Return a part of the schema, or what it refers to. Raises RequestError for too many parts."""
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS:
            raise self.unsaid(place, f"written out, the schema has more than {_MOST_PARTS:,} parts")
        return resolved(schema, self._root)

    def _json(self, schema: Any, place: str) -> Format:
        if isinstance(schema, Mapping):
            if self._is_rebased:
                schema = copy.deepcopy(dict(schema))
                _rebase(schema)
            schema = {**schema, **self._defs}
        return {"type": "json_schema", "json_schema": schema if schema is not None else True, "name": place}

    def _types(self, schema: Any) -> Types:
        return types_of(schema, self._root)

    def _keys(self, schema: Any) -> frozenset[str]:
        return frozenset(schema) if isinstance(schema, Mapping) else frozenset()

    def _values(self, schema: Mapping[str, Any]) -> list[Any]:
        """Return the values that a schema lists."""
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        return [value for value in values if "const" not in schema or value == schema["const"]]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _has_names(properties: Any) -> bool:
    """Return whether there are properties, all with names that need no quotes."""
    return bool(properties) and all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name) for name in properties)


def _bounded(schema: Mapping[str, Any], without: Sequence[str]) -> Format:
    """Return the format of a text of a bounded length that does not have some texts."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    excluded = "".join(rf" & ~/(.|\n)*{in_slashes(each)}(.|\n)*/" for each in without)
    return {"type": "grammar", "grammar": f"start: TEXT\nTEXT: /(.|\\n){{{least},{most}}}/{excluded}\n"}


def _listed(parts: Sequence[Format], required: Sequence[bool], separator: str) -> Format:
    """Return members with a text between them. Members that are not required may be left out."""
    needed = [part for part, is_needed in zip(parts, required, strict=True) if is_needed]
    others = [part for part, is_needed in zip(parts, required, strict=True) if not is_needed]
    following = [optional(sequence(text(separator), part)) for part in others]
    if needed:
        between = [element for part in needed[1:] for element in (text(separator), part)]
        return sequence(needed[0], *between, *following)
    if not others:
        return text("")
    # The first of the optional ones has no text before it.
    return optional(either(*(sequence(part, *following[i + 1 :]) for i, part in enumerate(others))))


def _rebase(node: Any) -> None:
    """Let references from the root of a schema begin from a definition that holds it."""
    if isinstance(node, dict):
        reference = node.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            node["$ref"] = f"#/$defs/{_ROOT}{reference[1:]}"
        for part in node.values():
            _rebase(part)
    elif isinstance(node, list):
        for part in node:
            _rebase(part)
