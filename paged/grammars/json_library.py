"""JSON schemas that the grammar library compiles: strings, multiples, and `Raw` parts.

The library computes with float64, and does not bound the digits of numbers: here are those schemas in which
it rounds none. What remains without a bound in a `Raw` part: numbers that need not be integers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence, Set
from decimal import Decimal
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from .grammar_text import library_limits
from .json_formats import is_known_format
from .json_numbers import Exact, Interval, constant_text
from .json_references import CONSTANTS, MAPS_OF_SCHEMAS
from .json_schema import NUMBER_KEYS, Raw, SchemaPath, SchemaReader, SchemaTooHardError, Strings, exact

LARGEST_EXACT = 2**53  # of the library's numbers
MAX_BOUNDED_MULTIPLE = 100  # bounds on digits multiply the states of the library's automaton
# Of the raw parts of a schema together, each of which has a copy of what it refers to.
MAX_COPIED_CHARACTERS = 2**16
_LISTS_OR_SCHEMAS = frozenset(
    (
        *("allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "additionalProperties"),
        *("not", "if", "then", "else", "contains", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties"),
    )
)
_NUMBERS = frozenset(
    (
        *NUMBER_KEYS,
        *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
        *("minContains", "maxContains"),
    )
)
_OTHERS = ("type", "required", "pattern", "uniqueItems", "dependentRequired", "$recursiveRef", "$dynamicRef")
_DEFINITIONS = ("$defs", "definitions")


class _Definition(NamedTuple):
    """A definition for the library. needed: the pointers of the definitions that it refers to."""

    schema: Any
    needed: Sequence[str]
    num_characters: int


class RawSchemas:
    """Rewrites the `Raw` parts of a schema as schemas for the library.

    with_values: the pointers to definitions that have a finite value.
    """

    def __init__(self, reader: SchemaReader, with_values: Set[str]) -> None:
        self._reader = reader
        self._with_values = with_values
        self._found = dict[int, dict[str, Any]]()
        self._definitions = dict[str, _Definition]()
        self._names = dict[str, str]()  # of definitions, by pointer
        self._num_copied = 0

    @cached_property
    def _limit(self) -> int:
        return max(MAX_COPIED_CHARACTERS, 2 * len(json.dumps(self._reader.root_node, default=str)))

    def __getitem__(self, raw: Raw) -> dict[str, Any]:
        """Return the schema of a part. Raises RequestError for a number that the library would round.

        Raises SchemaTooHardError if the copies of definitions in different parts are too long.
        """
        if id(raw.node) not in self._found:
            self._found[id(raw.node)] = self._with_definitions(raw)
        return self._found[id(raw.node)]

    def _with_definitions(self, raw: Raw) -> dict[str, Any]:
        """Return a part with all definitions that it reaches."""
        part = _Translation(self._reader, self._names, self._with_values)
        schema = part.schema(raw.node, raw.where)
        schema = {"allOf": [False]} if schema is False else schema
        definitions = dict[str, Any]()
        pending = [*part.needed]
        while pending:
            pointer = pending.pop()
            if self._names[pointer] in definitions:
                continue
            found = self._definition(pointer, raw.where)
            definitions[self._names[pointer]] = found.schema
            pending += found.needed
            if raw.node is not self._reader.root_node:
                self._num_copied += found.num_characters
                if self._num_copied > self._limit:
                    raise SchemaTooHardError
        return {**schema, "$defs": definitions} if definitions else schema

    def _definition(self, pointer: str, place: SchemaPath) -> _Definition:
        if pointer not in self._definitions:
            part = _Translation(self._reader, self._names, self._with_values)
            schema = part.schema(self._reader.target(pointer, place), SchemaPath(pointer))
            size = len(json.dumps(schema, default=float))
            self._definitions[pointer] = _Definition(schema, [*part.needed], size)
        return self._definitions[pointer]


class _Translation:
    """Translates one part of a schema.

    names: the names of definitions, by pointer; new ones are added.
    needed: the pointers of definitions that the part refers to, as keys.
    """

    def __init__(self, reader: SchemaReader, names: dict[str, str], with_values: Set[str]) -> None:
        self.names = names
        self._with_values = with_values
        self.needed = dict[str, None]()
        self._reader = reader

    def schema(self, node: Any, place: SchemaPath) -> Any:
        """Return a schema for the library: without annotations, with exact numbers and bounded integers."""
        if not isinstance(node, Mapping):
            return node
        found = dict[str, Any]()
        if "$ref" in node and self._name(node["$ref"], place / "$ref") is None:
            return False
        for key, value in node.items():
            where = place / key
            if key in CONSTANTS:
                found[key] = _exact_values(value, where)
            elif key == "$ref":
                found[key] = self._name(value, where)
            elif key in _DEFINITIONS:
                continue  # those that are needed are added
            elif key in MAPS_OF_SCHEMAS and isinstance(value, Mapping):
                found[key] = {name: self.schema(part, where / name) for name, part in value.items()}
            elif key in _LISTS_OR_SCHEMAS and isinstance(value, list):
                found[key] = [self.schema(part, where / i) for i, part in enumerate(value)]
            elif key in _LISTS_OR_SCHEMAS:
                found[key] = self.schema(value, where)
            elif key in _NUMBERS:
                found[key] = _exact_values(value, where)
            elif key in _OTHERS or key in MAPS_OF_SCHEMAS or (key == "format" and is_known_format(value)):
                found[key] = value
        types = found.get("type")
        if types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types):
            # The last integers of 64 bits that are float64, too.
            found.setdefault("minimum", 2**10 - 2**63)
            found.setdefault("maximum", 2**63 - 2**10)
        return found

    def _name(self, pointer: Any, place: SchemaPath) -> str | None:
        """Return a reference to a definition; None if that has no finite value."""
        self._reader.target(pointer, place)  # it names a part
        if pointer not in self._with_values:
            return None
        self.needed[pointer] = None
        return f"#/$defs/{self.names.setdefault(pointer, f'd{len(self.names)}')}"


def _exact_values(value: Any, place: SchemaPath) -> Any:
    """Return a constant whose numbers the library has exactly."""
    match value:
        case bool():
            return value
        case int() | Decimal():
            return _float64(value, place)
        case list():
            return [_exact_values(item, place / i) for i, item in enumerate(value)]
        case Mapping():
            return {name: _exact_values(item, place / name) for name, item in value.items()}
    return value


def string_schema(schema: Strings) -> dict[str, Any]:
    """Return the library's schema of strings."""
    rules = [*map(json.loads, schema.rules)]
    if schema.constants is not None:
        rules.append({"enum": [*schema.constants]})
    if len(rules) == 1:
        return {"type": "string", **rules[0]}
    return {"type": "string", "allOf": rules} if rules else {"type": "string"}


def why_unsatisfiable(schema: Mapping[str, Any]) -> str | None:
    """Return the library's reason why a schema has no value; None if it has one, or if it is invalid."""
    return _why_unsatisfiable(json.dumps(schema, ensure_ascii=False, default=float))


@lru_cache(maxsize=1024)
def _why_unsatisfiable(text: str) -> str | None:
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(text)
    error: str = LLMatcher.validate_grammar(grammar, limits=library_limits(grammar))
    return error if error.startswith("Unsatisfiable") else None


def multiples_schema(interval: Interval, place: SchemaPath) -> dict[str, Any]:
    """Return the library's schema for the multiples in an interval, including both ends."""
    step = interval.step
    assert step is not None
    digits = len(str(Decimal(1) / step.denominator).partition(".")[2]) if step.denominator > 1 else 0
    limit = LARGEST_EXACT if interval.is_integer else 10 ** max(0, 15 - digits)
    edge = Fraction(limit) // step * step
    values = {"multipleOf": step}
    is_bounded = int(str(step.numerator).rstrip("0")) <= MAX_BOUNDED_MULTIPLE
    if interval.low is not None:
        values["minimum"] = interval.first(step)
    elif is_bounded:
        values["minimum"] = -edge if interval.high is None else min(-edge, interval.last(step))
    if interval.high is not None:
        values["maximum"] = interval.last(step)
    elif is_bounded:
        values["maximum"] = max(edge, values["minimum"])
    own = {"minimum": ("exclusiveMinimum" if interval.is_low_open else "minimum", interval.low)}
    own["maximum"] = ("exclusiveMaximum" if interval.is_high_open else "maximum", interval.high)
    numbers = dict[str, Any]()
    for key, value in values.items():
        name, given = own.get(key, (key, None))
        numbers[key] = _float64(_decimal(value), place / name, given)
    return {"type": "integer" if step.denominator == 1 else "number", **numbers}


def _decimal(value: Fraction) -> Exact:
    if value.denominator == 1:
        return value.numerator
    # A multiple of a decimal number: its denominator divides a power of 10.
    power = next(10**n for n in itertools.count() if 10**n % value.denominator == 0)
    return Decimal(f"{value.numerator * (power // value.denominator)}e-{len(str(power)) - 1}")


def _float64(value: Exact, place: SchemaPath, given: Exact | None = None) -> int | float:
    """Return a number that the library has exactly. Raises RequestError for another one.

    given: what the schema has in its place.
    """
    exact(value, place)  # not too large to compute with
    number = int(value) if value == int(value) else float(value)
    if abs(Fraction(value)) > LARGEST_EXACT or (isinstance(number, float) and Decimal(repr(number)) != value):
        raise place.error(
            f"{constant_text(value if given is None else given)} is not exact in float64; that is needed "
            "beside multipleOf, patternProperties, minProperties and maxProperties, within a oneOf whose "
            "parts may overlap, and in very large schemas"
        )
    return number
