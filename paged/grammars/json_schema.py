"""JSON schemas as sets of JSON values, in exact arithmetic.

`SchemaReader` reads a schema into the classes below. What it does not combine itself is `Raw`, which the
grammar library compiles.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from ..base.errors import RequestError
from ..base.validation import shown
from .json_formats import is_known_format
from .json_numbers import MAX_MAGNITUDE, Exact, Interval, constant_text, why_no_bound
from .json_references import references, with_pointers

MAX_NODES = 50_000  # of a schema, also where parts that are combined are read several times
MAX_SCHEMA_DEPTH = 128
TYPES = ("null", "boolean", "number", "string", "array", "object")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
NUMBER_KEYS = (*BOUNDS, "multipleOf")
STRING_KEYS = ("minLength", "maxLength", "pattern", "format")
ARRAY_KEYS = ("items", "prefixItems", "minItems", "maxItems")
OBJECT_KEYS = ("properties", "additionalProperties", "required")
BASE_KEYS = frozenset(("type", *NUMBER_KEYS, *STRING_KEYS, *ARRAY_KEYS, *OBJECT_KEYS))
# Those that only the library knows, or refuses.
RAW_KEYS = frozenset(
    (
        "patternProperties",
        "minProperties",
        "maxProperties",
        "additionalItems",
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "propertyNames",
        "$recursiveRef",
        "$dynamicRef",
        "unevaluatedItems",
        "unevaluatedProperties",
    )
)


class SchemaTooHardError(Exception):
    """Raised for a combination of schemas that only the library can handle."""


@dataclass(frozen=True, slots=True)
class Never:
    """A schema without any value.

    where: the part of the schema that excludes all values.
    """

    reason: str
    where: SchemaPath


@dataclass(frozen=True, slots=True)
class Anything:
    """A schema of any value."""


@dataclass(frozen=True, slots=True)
class Null:
    """The schema of null."""


@dataclass(frozen=True, slots=True)
class Booleans:
    """A schema of true, false, or both."""

    values: frozenset[bool] = frozenset((True, False))


@dataclass(frozen=True, slots=True)
class Numbers:
    """A schema of the numbers in an interval."""

    interval: Interval


@dataclass(frozen=True, slots=True)
class Strings:
    """A schema of strings.

    constants: the only allowed strings; None allows all.
    rules: schemas as JSON texts, all of which a string must satisfy.
    """

    constants: tuple[str, ...] | None = None
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Arrays:
    """A schema of arrays.

    prefix: the schemas of the first items, in order.
    rest: the schema of every later item.
    """

    prefix: tuple[Schema, ...]
    rest: Schema
    least: int = 0
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Objects:
    """A schema of objects.

    properties: the properties in the order of generation, including properties that only `required` names.
    """

    properties: Mapping[str, Schema]
    rest: Schema
    required: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class AnyOf:
    """A schema of the values that match at least one of several schemas."""

    options: tuple[Schema, ...]


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a schema, which may contain the reference itself.

    pointer: the place of the schema, such as #/$defs/a.
    """

    pointer: str


@dataclass(frozen=True, slots=True)
class Raw:
    """A part of a schema that the library compiles.

    where: the path of the part.
    """

    node: Mapping[str, Any]
    where: SchemaPath


Schema = Never | Anything | Null | Booleans | Numbers | Strings | Arrays | Objects | AnyOf | Ref | Raw
ANYTHING = Anything()
FALSE = "the schema is false"


@dataclass(frozen=True, slots=True, eq=False)
class SchemaPath:
    """The path and depth of a part of a schema, as a link to its parent and a step.

    A link avoids copying whole paths.
    """

    step: str = ""
    parent: SchemaPath | None = None
    depth: int = 0

    def __truediv__(self, key: str | int) -> SchemaPath:
        if self.depth >= MAX_SCHEMA_DEPTH:
            raise RequestError(f"recursion limit exceeded: schemas may be nested {MAX_SCHEMA_DEPTH} deep")
        return SchemaPath(f"[{key}]" if isinstance(key, int) else f".{key}", self, self.depth + 1)

    @property
    def path(self) -> str:
        """The path as text, such as properties.a.anyOf[0]."""
        steps = list[str]()
        place: SchemaPath | None = self
        while place is not None:
            steps.append(place.step)
            place = place.parent
        return "".join(reversed(steps)).removeprefix(".")

    def error(self, message: str) -> RequestError:
        """Return an error about this part."""
        path = self.path
        return RequestError(f"{path}: {message}" if path else message, param=path or None)


class SchemaReader:
    """Reads a schema and the schemas that it refers to.

    definitions: the definitions of all `Ref`, by pointer.
    """

    def __init__(self, root: Any) -> None:
        self.root_node = root = with_pointers(root)
        self.definitions = dict[str, Schema]()
        self._num_nodes = 0
        self._pending = list[str]()
        self._resolving = list[str]()
        self._resolved = dict[str, Schema]()  # of references, by pointer
        self._comparing = set[tuple[str | int, ...]]()
        self.root = self._read(root, SchemaPath())
        while self._pending:
            pointer = self._pending.pop()
            if pointer not in self.definitions:
                self.definitions[pointer] = self._read(
                    self.target(pointer, SchemaPath()), SchemaPath(pointer)
                )

    def _count(self, place: SchemaPath, num: int = 1) -> None:
        self._num_nodes += num
        if self._num_nodes > MAX_NODES:
            raise place.error(f"the schema is too large: it combines more than {MAX_NODES:,} parts")

    def _read(self, node: Any, place: SchemaPath) -> Schema:
        """Read a part; as a raw one if parts of it cannot be combined here."""
        try:
            return self._combined(node, place)
        except SchemaTooHardError:
            for pointer in dict.fromkeys(references(node)):
                # One that is wrong is refused with its path, when the part is translated.
                with suppress(RequestError):
                    self._ref(pointer, place)
            return Raw(node, place)

    def _combined(self, node: Any, place: SchemaPath) -> Schema:
        self._count(place)
        if isinstance(node, bool):
            return ANYTHING if node else Never(FALSE, place)
        if not isinstance(node, Mapping):
            raise place.error(f"a schema must be an object or a boolean, got {shown(node)}")
        if not RAW_KEYS.isdisjoint(node) or isinstance(node.get("items"), list):
            raise SchemaTooHardError
        found: Schema = ANYTHING
        has_base = False
        for key, value in node.items():
            if key in BASE_KEYS and not has_base:
                has_base = True
                found = self.intersect(found, self._base(node, place), place)
            elif key in APPLICATORS:
                found = self.intersect(found, APPLICATORS[key](self, value, place / key), place)
        return found

    # What a schema says without applicators

    def _base(self, node: Mapping[str, Any], place: SchemaPath) -> Schema:
        types = node.get("type", TYPES)
        names = [types] if isinstance(types, str) else types
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise (place / "type").error(f"type must be a string or a list of strings, got {shown(types)}")
        options = [self._of_type(name, node, place) for name in names]
        is_free = all(option in _FREE for option in options) and "type" not in node
        return ANYTHING if is_free else any_of(options, place)

    def _of_type(self, name: str, node: Mapping[str, Any], place: SchemaPath) -> Schema:
        match name:
            case "null":
                return Null()
            case "boolean":
                return Booleans()
            case "number" | "integer":
                return _number(self._interval(node, place, is_integer=name == "integer"), place)
            case "string":
                return self._string(node, place)
            case "array":
                return self._array(node, place)
            case "object":
                return self._object(node, place)
        raise (place / "type").error(f"Invalid type: {name}")

    def _interval(self, node: Mapping[str, Any], place: SchemaPath, *, is_integer: bool) -> Interval:
        found = Interval(is_integer=is_integer)
        for key in BOUNDS:
            value = node.get(key)
            is_low = key.lower().endswith("minimum")
            if value is None and key not in node:
                continue
            is_open = key.startswith("exclusive")
            if is_open and isinstance(value, bool):  # as in draft 4
                value = node.get("minimum" if is_low else "maximum") if value else None
                if value is None:
                    continue
            bound = exact(value, place / key)
            if why := why_no_bound(bound, is_low=is_low):
                raise (place / key).error(f"{constant_text(bound)} {why}")
            found = found.intersect(
                Interval(low=bound, is_low_open=is_open)
                if is_low
                else Interval(high=bound, is_high_open=is_open)
            )
        if "multipleOf" in node:
            multiple = Fraction(exact(node["multipleOf"], place / "multipleOf"))
            if not multiple:
                raise (place / "multipleOf").error("multipleOf must not be 0")
            found = found.intersect(Interval(multiple=abs(multiple)))
        return found

    def _string(self, node: Mapping[str, Any], place: SchemaPath) -> Schema:
        rules = {key: node[key] for key in STRING_KEYS if key in node}
        least, most = (self._size(node, key, place) for key in ("minLength", "maxLength"))
        if most is not None and most < (least or 0):
            return Never(f"minLength ({least}) is greater than maxLength ({most})", place)
        rules |= {k: v for k, v in (("minLength", least), ("maxLength", most)) if v is not None}
        if "format" in rules and not is_known_format(rules["format"]):
            del rules["format"]
        return Strings(rules=(json.dumps(rules, ensure_ascii=False),) if rules else ())

    def _array(self, node: Mapping[str, Any], place: SchemaPath) -> Schema:
        prefix = node.get("prefixItems", [])
        if not isinstance(prefix, list):
            raise (place / "prefixItems").error(f"prefixItems must be a list, got {shown(prefix)}")
        first = tuple(self._read(item, place / "prefixItems" / i) for i, item in enumerate(prefix))
        rest = self._read(node.get("items", True), place / "items")
        least = self._size(node, "minItems", place) or 0
        return _array(first, rest, least, self._size(node, "maxItems", place), place)

    def _object(self, node: Mapping[str, Any], place: SchemaPath) -> Schema:
        properties = node.get("properties", {})
        if not isinstance(properties, Mapping):
            raise (place / "properties").error(f"properties must be an object, got {shown(properties)}")
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise (place / "required").error(f"required must be a list of strings, got {shown(required)}")
        rest = self._read(node.get("additionalProperties", True), place / "additionalProperties")
        inside = place / "properties"
        own = {name: self._read(value, inside / name) for name, value in properties.items()}
        own |= {name: rest for name in required if name not in own}
        return Objects(own, rest, frozenset(required))

    def _size(self, node: Mapping[str, Any], key: str, place: SchemaPath) -> int | None:
        if key not in node:
            return None
        value = node[key]
        if isinstance(value, Decimal) and value == value.to_integral_value() and value < 2**63:
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
            raise (place / key).error(f"{key} must be an int of at least 0, got {shown(node[key])}")
        return value

    # Applicators

    def _const(self, value: Any, place: SchemaPath) -> Schema:
        return self._constants([value], place)

    def _enum(self, values: Any, place: SchemaPath) -> Schema:
        if not isinstance(values, list):
            raise place.error(f"enum must be a list, got {shown(values)}")
        return self._constants(values, place)

    def _constants(self, values: Iterable[Any], place: SchemaPath) -> Schema:
        strings = list[str]()
        options = list[Schema]()
        for value in values:
            self._count(place)
            match value:
                case None:
                    options.append(Null())
                case bool():
                    options.append(Booleans(frozenset((value,))))
                case str():
                    strings.append(value)
                case int() | Decimal():
                    number = exact(value, place)
                    options.append(Numbers(Interval(low=number, high=number)))
                case list():
                    items = tuple(self._const(item, place / "items") for item in value)
                    options.append(Arrays(items, Never(FALSE, place), len(items), len(items)))
                case Mapping():
                    own = {name: self._const(item, place / name) for name, item in value.items()}
                    options.append(Objects(own, Never(FALSE, place), frozenset(own)))
        if strings:
            options.append(Strings(tuple(dict.fromkeys(strings))))
        return any_of(options, place)

    def _all_of(self, values: Any, place: SchemaPath) -> Schema:
        found: Schema = ANYTHING
        for i, value in enumerate(_list("allOf", values, place)):
            found = self.intersect(found, self._combined(value, place / i), place)
        return found

    def _any_of(self, values: Any, place: SchemaPath) -> Schema:
        options = [self._read(value, place / i) for i, value in enumerate(_list("anyOf", values, place))]
        return any_of(options, place)

    def _one_of(self, values: Any, place: SchemaPath) -> Schema:
        options = [self._read(value, place / i) for i, value in enumerate(_list("oneOf", values, place))]
        options = [option for option in options if not isinstance(option, Never)] or options
        for i, one in enumerate(options):
            if not all(self._is_disjoint(one, other, place) for other in options[i + 1 :]):
                raise SchemaTooHardError
        return any_of(options, place)

    def _ref(self, pointer: Any, place: SchemaPath) -> Schema:
        self.target(pointer, place)
        self._pending.append(pointer)
        return Ref(pointer)

    def target(self, pointer: Any, place: SchemaPath) -> Any:
        """Return the part of the schema that a reference points to."""
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise place.error(f"$ref {shown(pointer)} is not of this schema: it must be #, or begin with #/")
        node = self.root_node
        for key in pointer[2:].split("/") if len(pointer) > 2 else ():
            name = unquote(key).replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(name)] if isinstance(node, list) else node[name]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise place.error(f"$ref {shown(pointer)} names nothing in this schema") from error
        return node

    def resolved(self, schema: Schema, place: SchemaPath) -> Schema:
        """Return the schema at the end of a chain of references. Raises RequestError for a circle."""
        if not isinstance(schema, Ref):
            return schema
        if schema.pointer in self._resolving:
            raise place.error(f"circular references with sibling keys are not supported: {schema.pointer}")
        if schema.pointer not in self._resolved:
            self._resolving.append(schema.pointer)
            try:
                found = self._combined(self.target(schema.pointer, place), place)
                self._resolved[schema.pointer] = self.resolved(found, place)
            finally:
                self._resolving.pop()
        return self._resolved[schema.pointer]

    # Sets

    def intersect(self, one: Schema, other: Schema, place: SchemaPath) -> Schema:
        """Return the schema of the values that match both schemas."""
        self._count(place)
        match one, other:
            case (Anything(), _):
                return other
            case (_, Anything()):
                return one
            case (Never(), _):
                return one
            case (_, Never()):
                return other
            case (Raw(), _) | (_, Raw()):
                raise SchemaTooHardError
            case (Ref(), _) | (_, Ref()):
                if one == other:
                    return one
                return self.intersect(self.resolved(one, place), self.resolved(other, place), place / "$ref")
            case (AnyOf(options), _):
                return any_of([self.intersect(option, other, place) for option in options], place)
            case (_, AnyOf(options)):
                return any_of([self.intersect(one, option, place) for option in options], place)
            case (Booleans(values), Booleans(others)) if values & others:
                return Booleans(values & others)
            case (Null(), Null()):
                return one
            case (Numbers(), Numbers()):
                return _number(one.interval.intersect(other.interval), place)
            case (Strings(), Strings()):
                return self._both_strings(one, other, place)
            case (Arrays(), Arrays()):
                return self._both_arrays(one, other, place)
            case (Objects(), Objects()):
                return self._both_objects(one, other, place)
        return Never("nothing matches all of its parts", place)

    def _both_strings(self, one: Strings, other: Strings, place: SchemaPath) -> Schema:
        # Each constant is tried with the other's rules: a hundred cost about as much as a part.
        self._count(place, max(len(s.constants or ()) for s in (one, other)) // 100)
        constants = one.constants if other.constants is None else other.constants
        if one.constants is not None and other.constants is not None:
            known = frozenset(other.constants)
            constants = tuple(text for text in one.constants if text in known)
        rules = tuple(dict.fromkeys((*one.rules, *other.rules)))
        if constants is not None:
            tried = frozenset(one.rules if one.constants is not None else other.rules)
            for rule in (json.loads(rule) for rule in rules if rule not in tried):
                least = rule.get("minLength", 0)
                most = rule.get("maxLength")
                constants = tuple(
                    c for c in constants if least <= len(c) and (most is None or len(c) <= most)
                )
            if not constants:
                return Never("no string matches all of its parts", place)
        return Strings(constants, rules)

    def _both_arrays(self, one: Arrays, other: Arrays, place: SchemaPath) -> Schema:
        length = max(len(one.prefix), len(other.prefix))
        pairs = zip(_padded(one, length), _padded(other, length), strict=True)
        prefix = tuple(self.intersect(a, b, place / i) for i, (a, b) in enumerate(pairs))
        rest = self.intersect(one.rest, other.rest, place / "items")
        mosts = [most for most in (one.most, other.most) if most is not None]
        return _array(prefix, rest, max(one.least, other.least), min(mosts, default=None), place)

    def _both_objects(self, one: Objects, other: Objects, place: SchemaPath) -> Schema:
        properties = {
            name: self.intersect(
                one.properties.get(name, one.rest), other.properties.get(name, other.rest), place / name
            )
            for name in {**one.properties, **other.properties}
        }
        rest = self.intersect(one.rest, other.rest, place / "additionalProperties")
        return Objects(properties, rest, one.required | other.required)

    def _is_disjoint(self, one: Schema, other: Schema, place: SchemaPath) -> bool:
        """Return whether it is certain that no value is in both."""
        self._count(place)
        match one, other:
            case (Never(), _) | (_, Never()):
                return True
            case (Anything() | Raw(), _) | (_, Anything() | Raw()):
                return False
            case (Ref(), _) | (_, Ref()):
                return self._are_references_disjoint(one, other, place)
            case (AnyOf(options), _):
                return all(self._is_disjoint(option, other, place) for option in options)
            case (_, AnyOf(options)):
                return all(self._is_disjoint(one, option, place) for option in options)
            case (Booleans(values), Booleans(others)):
                return not values & others
            case (Numbers(), Numbers()):
                return one.interval.intersect(other.interval).why_empty() is not None
            case (Strings(), Strings()):
                return isinstance(self._both_strings(one, other, place), Never)
            case (Objects(), Objects()):
                names = one.required | other.required
                return any(
                    self._is_disjoint(
                        one.properties.get(n, one.rest), other.properties.get(n, other.rest), place / n
                    )
                    for n in sorted(names)
                )
        return type(one) is not type(other)

    def _are_references_disjoint(self, one: Schema, other: Schema, place: SchemaPath) -> bool:
        pair = tuple(s.pointer if isinstance(s, Ref) else id(s) for s in (one, other))
        if pair in self._comparing:  # they refer to themselves
            return False
        self._comparing.add(pair)
        try:
            return self._is_disjoint(self.resolved(one, place), self.resolved(other, place), place)
        finally:
            self._comparing.discard(pair)


APPLICATORS: Mapping[str, Callable[[SchemaReader, Any, SchemaPath], Schema]] = {
    "const": SchemaReader._const,
    "enum": SchemaReader._enum,
    "allOf": SchemaReader._all_of,
    "anyOf": SchemaReader._any_of,
    "oneOf": SchemaReader._one_of,
    "$ref": SchemaReader._ref,
}
_FREE = (Null(), Booleans(), Numbers(Interval()), Strings(), Arrays((), ANYTHING), Objects({}, ANYTHING))


def exact(value: Any, place: SchemaPath) -> Exact:
    """Return a number of a schema without rounding it.

    Raises RequestError if the value is not a number, or is huge.
    """
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise place.error(f"must be a number, got {shown(value)}")
    is_large = value.bit_length() > 4 * MAX_MAGNITUDE if isinstance(value, int) else _is_large(value)
    if is_large:
        raise place.error(f"{shown(value)} is not supported: it may have at most {MAX_MAGNITUDE} digits")
    return value


def _is_large(value: Decimal) -> bool:
    return abs(value.adjusted()) > MAX_MAGNITUDE or len(value.as_tuple().digits) > MAX_MAGNITUDE


def any_of(options: Iterable[Schema], place: SchemaPath) -> Schema:
    """Return the schema of the values that match at least one of the schemas."""
    found = list[Schema]()
    nevers = list[Never]()
    for option in options:
        match option:
            case Anything():
                return option
            case Never():
                nevers.append(option)
            case AnyOf():
                found.extend(option.options)
            case _:
                found.append(option)
    if len(found) > 1:
        return AnyOf(tuple(found))
    return found[0] if found else next(iter(nevers), Never("there is nothing to choose", place))


def _number(interval: Interval, place: SchemaPath) -> Schema:
    why = interval.why_empty()
    return Numbers(interval) if why is None else Never(why, place)


def _array(
    prefix: tuple[Schema, ...], rest: Schema, least: int, most: int | None, place: SchemaPath
) -> Schema:
    if most is not None and least > most:
        return Never(f"minItems ({least}) is greater than maxItems ({most})", place)
    return Arrays(prefix, rest, least, most)


def _padded(array: Arrays, length: int) -> Sequence[Schema]:
    return [*array.prefix, *[array.rest] * (length - len(array.prefix))]


def _list(name: str, values: Any, place: SchemaPath) -> list[Any]:
    if not isinstance(values, list):
        raise place.error(f"{name} must be a list, got {shown(values)}")
    return values
