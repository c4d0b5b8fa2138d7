"""JSON schemas to grammars of llguidance, in its variant of Lark's syntax.

Structure and numbers are written here: numbers exactly, and with a bound on their digits. Strings, multiples
and what `SchemaReader` does not combine are schemas within the grammar, which the library compiles.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from ..errors import RequestError
from .json_formats import is_known_format
from .json_numbers import Exact, Interval, constant_text, terminal
from .json_schema import (
    ANYTHING,
    AnyOf,
    Anything,
    Arrays,
    Booleans,
    Never,
    Null,
    Numbers,
    Objects,
    Raw,
    Ref,
    Schema,
    SchemaPath,
    SchemaReader,
    Strings,
)
from .lark_text import quoted

# One space, or a line break and indentation. Without a bound, a model may write blanks forever.
WHITESPACE = r"[ ]|\n[ ]{0,32}"
LARGEST_EXACT = 2**53  # of the library's numbers, which are float64
MAX_BOUNDED_MULTIPLE = 100  # bounds on digits multiply the states of the library's automaton
WHERE = "path of this part"  # a key that is not passed on
MAX_PASSES = 64  # over references, to find those that have a value
# Every string has one spelling, so that a name that is taken cannot be written another way.
_NAME = r'NAME: /"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/'


_PARTS_OF_ANYTHING = (
    *(Null(), Booleans(), Numbers(Interval()), Strings()),
    *(Arrays((), ANYTHING), Objects({}, ANYTHING)),
)


class JsonGrammar:
    """The grammar of one JSON schema.

    schema: the schema, parsed by `structural_tag.exact_json`.
    leaves: the schemas that the library compiles, by their paths.
    lark: the grammar of all values.
    at_start: those of `leaves` that are values of the whole schema.
    others: the grammar of the values that are not of `at_start`; None if there are none.
    whitespace: a regular expression of the blanks that may be between JSON tokens.

    Raises RequestError naming the part that is wrong, or that has no finite value.
    """

    def __init__(self, schema: Any, whitespace: str = WHITESPACE) -> None:
        self._reader = SchemaReader(schema)
        self._whitespace = whitespace
        self.leaves = dict[str, str]()
        self._finite = self._with_values()
        self._rules = list[str]()
        self._names = (f"r{number}" for number in itertools.count())
        self._terminals = dict[tuple[Interval, ...], str]()
        self._json = dict[str, str]()
        self._references = dict[str, str]()
        self._anything: str | None = None
        root = self._reader.root
        if not self._has_value(root):
            raise self._no_value(root)
        library, own = self._split(self._options(root), SchemaPath(""))
        self.at_start = [self._text(SchemaPath(""), leaf) for leaf in library]
        start = self._expressions(own, SchemaPath(""))
        self._write_references()
        self.others = self._grammar(start) if start else None
        self.lark = self._grammar([*start, *(self._rule(f"%json {text}") for text in self.at_start)])

    def _write_references(self) -> None:
        """Write the rules of references, which may find more of them."""
        written = set[str]()
        while pending := self._references.keys() - written:
            for pointer in sorted(pending):
                expression = self._expression(self._reader.definitions[pointer], SchemaPath(pointer))
                self._rules.append(f"{self._references[pointer]}: {expression}")
            written |= pending

    def _grammar(self, start: Sequence[str]) -> str:
        head = [
            '%llguidance {"ignore_once": true}',
            f"%ignore /{self._whitespace}/",
            f"start: {' | '.join(start)}",
        ]
        return "\n".join([*head, _NAME, *self._rules])

    def _options(self, root: Schema) -> Iterator[Schema]:
        """Yield the schemas of which any may be the whole value."""
        pending, seen = [root], set[str]()
        while pending:
            match pending.pop():
                case AnyOf(options):
                    pending += reversed(options)
                case Anything():
                    yield from _PARTS_OF_ANYTHING
                case Ref(pointer):
                    if pointer not in seen:
                        seen.add(pointer)
                        pending.append(self._reader.definitions[pointer])
                case option:
                    yield option

    # Which schemas have a finite value

    def _with_values(self) -> set[str]:
        """Return the pointers of references that have a finite value."""
        self._finite = set[str]()
        waiting = [*reversed(self._reader.definitions)]
        for _ in range(MAX_PASSES):
            found = [p for p in waiting if self._add_if_finite(p)]
            if not found:
                return self._finite
            waiting = [p for p in waiting if p not in self._finite]
        raise RequestError(f"the schema has references that are nested more than {MAX_PASSES} deep")

    def _add_if_finite(self, pointer: str) -> bool:
        has_value = self._has_value(self._reader.definitions[pointer])
        if has_value:
            self._finite.add(pointer)
        return has_value

    def _has_value(self, schema: Schema) -> bool:
        match schema:
            case Never():
                return False
            case Ref():
                return schema.pointer in self._finite
            case AnyOf():
                return any(map(self._has_value, schema.options))
            case Arrays() | Objects():
                return all(map(self._has_value, _needed(schema)))
        return True

    def _no_value(self, schema: Schema) -> RequestError:
        """Return the error of a schema without a value: why, or where it refers to itself."""
        path, seen = list[str](), {"#"}
        while True:
            match schema:
                case Never():
                    return SchemaPath(schema.where).error(schema.reason)
                case Ref():
                    if schema.pointer in seen:
                        where = SchemaPath(".".join(path))
                        return where.error(
                            f"no finite value matches the schema: {schema.pointer} needs itself, without end"
                        )
                    seen.add(schema.pointer)
                    schema = self._reader.definitions[schema.pointer]
                case Objects():
                    name = next(
                        n
                        for n in schema.properties
                        if n in schema.required and not self._has_value(schema.properties[n])
                    )
                    path += ["properties", name]
                    schema = schema.properties[name]
                case Arrays():
                    path.append("items")
                    schema = next(part for part in _needed(schema) if not self._has_value(part))
                case AnyOf():
                    path.append("anyOf")
                    schema = schema.options[0]
                case _:
                    raise AssertionError(schema)

    # Expressions in Lark's syntax, of schemas that have a value

    def _expression(self, schema: Schema, place: SchemaPath) -> str:
        leaf = self._leaf(schema, place)
        if leaf is not None:
            return self._library(place, leaf)
        match schema:
            case Anything():
                return self._any_value()
            case Null():
                return '"null"'
            case Booleans():
                return _either(f'"{json.dumps(value)}"' for value in sorted(schema.values))
            case Numbers():
                return self._number([schema.interval])
            case Arrays():
                return self._array(schema, place)
            case Objects():
                return self._object(schema, place)
            case AnyOf():
                library, own = self._split(schema.options, place)
                expressions = [self._library(place, leaf) for leaf in library]
                return _either([*expressions, *self._expressions(own, place)])
            case Ref():
                return self._references.setdefault(schema.pointer, f"ref{len(self._references)}")
        raise AssertionError(schema)

    def _split(
        self, options: Iterable[Schema], place: SchemaPath
    ) -> tuple[list[Mapping[str, Any]], list[Schema]]:
        """Return the schemas of options that the library compiles, and the options that it does not."""
        library, strings, own = list[Mapping[str, Any]](), list[Mapping[str, Any]](), list[Schema]()
        for option in filter(self._has_value, options):
            leaf = self._leaf(option, place)
            if leaf is None:
                own.append(option)
            else:
                (strings if isinstance(option, Strings) else library).append(leaf)
        # All strings together, so that thousands of them are as fast as a few.
        if strings:
            library.append(strings[0] if len(strings) == 1 else {"anyOf": strings})
        return library, own

    def _leaf(self, schema: Schema, place: SchemaPath) -> Mapping[str, Any] | None:
        """Return the library's schema of what it compiles; None for what is written here."""
        match schema:
            case Strings():
                return _string_schema(schema)
            case Numbers() if schema.interval.multiple is not None and schema.interval.step != 1:
                return _multiples(schema.interval, place)
            case Raw():
                return self._raw(schema)
        return None

    def _any_value(self) -> str:
        if self._anything is None:
            self._anything = next(self._names)
            body = self._expression(AnyOf(_PARTS_OF_ANYTHING), SchemaPath(""))
            self._rules.append(f"{self._anything}: {body}")
        return self._anything

    def _array(self, array: Arrays, place: SchemaPath) -> str:
        most = array.most
        first = array.prefix[:most]
        items = list[str]()
        for i, schema in enumerate(first):
            if not self._has_value(schema):  # one that is not needed, so nothing can be there
                most = i
                break
            items.append(self._expression(schema, place / i))
        rest = self._rest_of(array, len(items), most, place)
        # From the last to the first: what may follow the i-th item.
        tail = rest if items else ""
        for i, item in reversed([*enumerate(items)]):
            comma = '"," ' if i else ""
            tail = f"{comma}{item} {tail}".rstrip()
            if i >= array.least:
                tail = self._rule(f"({tail})?")
        return f'"[" {tail if items else rest} "]"'

    def _rest_of(self, array: Arrays, num_first: int, most: int | None, place: SchemaPath) -> str:
        """Return an expression of the items after the first ones, with a comma before each but the first."""
        least = max(0, array.least - num_first)
        most = None if most is None else max(0, most - num_first)
        if most == 0 or not self._has_value(array.rest):
            return ""
        item = self._expression(array.rest, place / "items")
        if num_first:
            return _times(f'("," {item})', least, most)
        others = _times(f'("," {item})', max(0, least - 1), None if most is None else most - 1)
        more = f"{item} {others}".rstrip()
        return more if least else f"({more})?"

    def _object(self, schema: Objects, place: SchemaPath) -> str:
        members = list[tuple[str, bool]]()
        for name, value in schema.properties.items():
            if self._has_value(value):
                expression = self._expression(value, place / "properties" / name)
                members.append((f'{quoted(_json(name))} ":" {expression}', name in schema.required))
        if self._has_value(schema.rest):
            expression = self._expression(schema.rest, place / "additionalProperties")
            other = self._rule(f'{self._other_name([*schema.properties])} ":" {expression}')
            members.append((f'{other} ("," {other})*', False))
        return f'"{{" {self._members(members)} "}}"'

    def _members(self, members: Sequence[tuple[str, bool]]) -> str:
        """Return an expression of members in this order, of which some are needed.

        From the last to the first: `after` is what follows a member, `fresh` what begins an object.
        """
        after = fresh = '""'
        for expression, is_needed in reversed(members):
            member = self._rule(expression)
            begun = self._rule(f"{member} {after}")
            fresh = begun if is_needed else self._rule(f"{begun} | {fresh}")
            after = self._rule(f'"," {begun}' if is_needed else f'("," {member})? {after}')
        return fresh

    def _other_name(self, taken: Sequence[str]) -> str:
        """Return a terminal of the names that properties do not have."""
        if not taken:
            return "NAME"
        terminal_name = f"NAME_{next(self._names)}".upper()
        names = " | ".join(quoted(_json(name)) for name in taken)
        self._rules.append(f"{terminal_name}: NAME & ~({names})")
        return terminal_name

    def _expressions(self, options: Sequence[Schema], place: SchemaPath) -> list[str]:
        """Return the expressions of options: of all numbers together, as of thousands of constants."""
        numbers = [option.interval for option in options if isinstance(option, Numbers)]
        found = [self._expression(o, place) for o in options if not isinstance(o, Numbers)]
        return [*found, self._number(numbers)] if numbers else found

    def _number(self, intervals: Sequence[Interval]) -> str:
        """Return a terminal of the numbers in any of the intervals."""
        key = tuple(intervals)
        if key not in self._terminals:
            name = self._terminals[key] = f"NUMBER_{len(self._terminals)}"
            self._rules.append(f"{name}: {' | '.join(terminal(one) for one in dict.fromkeys(key))}")
        return self._terminals[key]

    def _raw(self, raw: Raw) -> Mapping[str, Any]:
        node = _for_library(raw.node, SchemaPath(raw.where))
        root = self._reader.root_node
        if raw.node is not root and "$ref" in json.dumps(node):
            # References lead from the root of what the library compiles.
            for key in ("$defs", "definitions"):
                if key in root:
                    node[key] = _definitions(root[key], SchemaPath(key))
        return {**node, WHERE: raw.where}

    def _library(self, place: SchemaPath, schema: Mapping[str, Any]) -> str:
        """Return a rule that the library compiles."""
        text = self._text(place, schema)
        if text not in self._json:
            self._json[text] = self._rule(f"%json {text}")
        return self._json[text]

    def _text(self, place: SchemaPath, schema: Mapping[str, Any]) -> str:
        """Return a schema for the library as JSON, and note its path."""
        own = {**schema, "x-guidance": {"whitespace_pattern": self._whitespace}}
        path = own.pop(WHERE, place.path)
        text = json.dumps(own, ensure_ascii=False)
        self.leaves.setdefault(path, text)
        return text

    def _rule(self, body: str) -> str:
        name = next(self._names)
        self._rules.append(f"{name}: {body}")
        return name


def _needed(schema: Arrays | Objects) -> Iterator[Schema]:
    """Yield the parts that every value of an array or object schema has."""
    if isinstance(schema, Objects):
        yield from (schema.properties[name] for name in sorted(schema.required))
        return
    yield from schema.prefix[: schema.least]
    if schema.least > len(schema.prefix):
        yield schema.rest


def _either(expressions: Iterator[str] | Sequence[str]) -> str:
    return f"({' | '.join(expressions)})"


def _times(expression: str, least: int, most: int | None) -> str:
    if most is None:
        return f"{expression}{{{least},}}" if least else f"{expression}*"
    return f"{expression}{{{least},{most}}}" if most else ""


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _string_schema(schema: Strings) -> dict[str, Any]:
    """Return the library's schema of strings."""
    rules = [*map(json.loads, schema.rules)]
    if schema.constants is not None:
        rules.append({"enum": [*schema.constants]})
    if len(rules) == 1:
        return {"type": "string", **rules[0]}
    return {"type": "string", "allOf": rules} if rules else {"type": "string"}


# Numbers of the library


def _multiples(interval: Interval, place: SchemaPath) -> dict[str, Any]:
    """Return the library's schema of multiples: from the first to the last one, both included."""
    step = interval.step
    assert step is not None
    digits = len(str(Decimal(1) / step.denominator).partition(".")[2]) if step.denominator > 1 else 0
    limit = LARGEST_EXACT if interval.is_integer else 10 ** max(0, 15 - digits)
    edge = Fraction(limit) // step * step
    values = {"multipleOf": step}
    is_bounded = step.numerator <= MAX_BOUNDED_MULTIPLE
    if interval.low is not None:
        values["minimum"] = interval.first(step)
    elif is_bounded:
        values["minimum"] = -edge if interval.high is None else min(-edge, interval.last(step))
    if interval.high is not None:
        values["maximum"] = interval.last(step)
    elif is_bounded:
        values["maximum"] = max(edge, values["minimum"])
    numbers = {key: _float64(_decimal(value), place / key) for key, value in values.items()}
    return {"type": "integer" if step.denominator == 1 else "number", **numbers}


def _decimal(value: Fraction) -> Exact:
    if value.denominator == 1:
        return value.numerator
    # A multiple of a decimal number: its denominator divides a power of 10.
    power = next(10**n for n in itertools.count() if 10**n % value.denominator == 0)
    return Decimal(f"{value.numerator * (power // value.denominator)}e-{len(str(power)) - 1}")


def _float64(value: Exact, place: SchemaPath) -> int | float:
    """Return a number that the library has exactly. Raises RequestError for another one."""
    number = int(value) if value == int(value) else float(value)
    if abs(Fraction(value)) > LARGEST_EXACT or (isinstance(number, float) and Decimal(repr(number)) != value):
        raise place.error(
            f"{constant_text(value)} is not exact in float64; that is needed beside multipleOf, "
            "patternProperties, minProperties and maxProperties, and within a oneOf whose parts may overlap"
        )
    return number


# Schemas that only the library combines


def _for_library(node: Any, place: SchemaPath) -> Any:
    """Return a part for the library: with exact numbers, bounded integers and formats that it knows.

    Raises RequestError for a number that it would round.
    """
    if not isinstance(node, Mapping):
        return node
    found = dict[str, Any]()
    for key, value in node.items():
        where = place / key
        if key in ("enum", "const", "default", "examples"):
            found[key] = _exact_values(value, where)
        elif key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"):
            found[key] = _definitions(value, where)
        elif isinstance(value, list):
            found[key] = [_for_library(item, where / i) for i, item in enumerate(value)]
        elif isinstance(value, Mapping):
            found[key] = _for_library(value, where)
        elif isinstance(value, int | Decimal) and not isinstance(value, bool):
            found[key] = _float64(value, where)
        elif key != "format" or is_known_format(value):
            found[key] = value
    if found.get("type") == "integer":
        # The last integers of 64 bits that are float64, too.
        found.setdefault("minimum", 2**10 - 2**63)
        found.setdefault("maximum", 2**63 - 2**10)
    return found


def _definitions(value: Any, place: SchemaPath) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: _for_library(part, place / name) for name, part in value.items()}


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
