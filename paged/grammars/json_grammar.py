"""JSON schemas to grammars of llguidance, in its variant of Lark's syntax.

Structure and numbers are written here: numbers exactly, and with a bound on their digits. Strings, multiples
and what `SchemaReader` does not combine are schemas within the grammar, which the library compiles: see
`json_library`.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.errors import RequestError
from .grammar_text import quoted
from .json_library import RawSchemas, multiples_schema, string_schema, why_unsatisfiable
from .json_numbers import Interval, terminal
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
    SchemaTooHardError,
    Strings,
)

# One space, or a line break and indentation. Without a bound, a model may write blanks forever.
WHITESPACE = r"[ ]|\n[ ]{0,32}"
MAX_RULES = 20_000  # the library panics at 65,525 symbols, of which most rules have one or two
MAX_LEAVES = 1_000  # the library takes quadratic time to combine what it compiles
WHERE = "path of this part"  # a key that is not passed on
# Every string has one spelling, so that a name that is taken cannot be written another way.
_NAME = r'NAME: /"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt]|\\u00(0[0-7bef]|1[0-9a-f]))*"/'


_PARTS_OF_ANYTHING = (
    *(Null(), Booleans(), Numbers(Interval()), Strings()),
    *(Arrays((), ANYTHING), Objects({}, ANYTHING)),
)


class JsonGrammar:
    """The grammar of one JSON schema.

    schema: the schema, parsed by `structural_tag.exact_json`.
    leaves: the schemas that the library compiles, as JSON texts, each with its path.
    lark: the grammar of all values.
    at_start: the leaves that may describe the whole value.
    others: the grammar of the values that match none of `at_start`; None if there are no such values.

    A schema that is too large for such a grammar is passed to the library as a whole, provided that the
    library rounds none of its numbers.

    Raises RequestError naming a part that is wrong or has no finite value.
    """

    def __init__(self, schema: Any) -> None:
        self._reader = SchemaReader(schema)
        self._raw: RawSchemas | None = None
        # At first as if all that the library compiles had a value: it runs into definitions that have none.
        self._definitions: Mapping[str, Schema] = self._reader.definitions
        self._raw = RawSchemas(self._reader, self._with_values())
        try:
            self._write(self._reader.root, self._reader.definitions)
        except SchemaTooHardError:  # as a whole, it takes fewer rules and one copy of each definition
            self._write(Raw(self._reader.root_node, SchemaPath()), {})

    def _write(self, root: Schema, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self.leaves = dict[str, SchemaPath]()
        self._why_no_value = dict[int, str | None]()  # of what the library compiles
        self._finite = self._with_values()
        self._rules = list[str]()
        self._rule_names = dict[str, str]()  # by their bodies
        self._names = (f"r{number}" for number in itertools.count())
        self._terminals = dict[tuple[Interval, ...], str]()
        self._references = dict[str, str]()
        self._anything: str | None = None
        if not self._has_value(root):
            raise self._no_value(root)
        library, own = self._split(self._options(root), SchemaPath())
        self.at_start = [self._text(SchemaPath(), leaf) for leaf in library]
        start = self._expressions(own, SchemaPath())
        self._write_references()
        self.others = self._grammar(start) if start else None
        self.lark = self._grammar([*start, *(self._rule(f"%json {text}") for text in self.at_start)])

    def _write_references(self) -> None:
        """Write the rules of references, which may find more of them."""
        written = set[str]()
        while pending := self._references.keys() - written:
            for pointer in sorted(pending):
                expression = self._expression(self._definitions[pointer], SchemaPath(pointer))
                self._rules.append(f"{self._references[pointer]}: {expression}")
            written |= pending

    def _grammar(self, start: Sequence[str]) -> str:
        head = [
            '%llguidance {"ignore_once": true}',
            f"%ignore /{WHITESPACE}/",
            f"start: {' | '.join(start)}",
        ]
        return "\n".join([*head, _NAME, *self._rules])

    def _options(self, root: Schema) -> Iterator[Schema]:
        """Yield the alternatives for the whole value, as schemas."""
        pending = [root]
        seen = set[str]()
        while pending:
            match pending.pop():
                case AnyOf(options):
                    pending += reversed(options)
                case Anything():
                    yield from _PARTS_OF_ANYTHING
                case Ref(pointer):
                    if pointer not in seen:
                        seen.add(pointer)
                        pending.append(self._definitions[pointer])
                case option:
                    yield option

    # Which schemas have a finite value

    def _with_values(self) -> set[str]:
        """Return the pointers of references that have a finite value, in linear time."""
        self._finite = found = set[str]()
        users = defaultdict[str, list[_Need]](list)
        ready = list[str]()
        for pointer, schema in self._definitions.items():
            self._need(schema, _Need(1, pointer), users, ready)
        while ready:
            pointer = ready.pop()
            found.add(pointer)
            for need in users.pop(pointer, ()):
                need.meet(ready)
        return found

    def _need(
        self, schema: Schema, needed_by: _Need, users: Mapping[str, list[_Need]], ready: list[str]
    ) -> None:
        """Register `needed_by` with the parts of a schema, and meet it if the schema has a value already.

        users: what waits for each reference. ready: references that have a value since now.
        """
        match schema:
            case Ref():
                users[schema.pointer].append(needed_by)
            case AnyOf():
                any_one = _Need(1, needed_by)
                for option in schema.options:
                    self._need(option, any_one, users, ready)
            case Arrays() | Objects():
                parts = [*_needed(schema)]
                all_parts = _Need(len(parts) + 1, needed_by)
                for part in parts:
                    self._need(part, all_parts, users, ready)
                all_parts.meet(ready)
            case _ if self._has_value(schema):
                needed_by.meet(ready)

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
        return self._why_empty(schema) is None

    def _why_empty(self, schema: Schema) -> str | None:
        """Return the library's reason why what it compiles has no value; None if it has one."""
        if self._raw is None or not isinstance(schema, Strings | Raw):
            return None
        if id(schema) not in self._why_no_value:
            why = None
            if isinstance(schema, Strings) and _has_pattern_and_more(schema):
                why = why_unsatisfiable(string_schema(schema))
            elif isinstance(schema, Raw) and schema.node is not self._reader.root_node:
                why = why_unsatisfiable(self._raw[schema])
            self._why_no_value[id(schema)] = why
        return self._why_no_value[id(schema)]

    def _no_value(self, schema: Schema) -> RequestError:
        """Return the error of a schema without a value: why, or where it refers to itself."""
        path = list[str]()
        seen = {"#"}
        while True:
            match schema:
                case Never():
                    return schema.where.error(schema.reason)
                case Ref():
                    if schema.pointer in seen:
                        where = SchemaPath(".".join(path))
                        return where.error(
                            f"no finite value matches the schema: {schema.pointer} needs itself, without end"
                        )
                    seen.add(schema.pointer)
                    schema = self._definitions[schema.pointer]
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
                    where = schema.where if isinstance(schema, Raw) else SchemaPath(".".join(path))
                    return where.error(self._why_empty(schema) or "nothing matches it")

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
        library = list[Mapping[str, Any]]()
        strings = list[Mapping[str, Any]]()
        own = list[Schema]()
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
                return string_schema(schema)
            case Numbers() if schema.interval.multiple is not None and schema.interval.step != 1:
                return multiples_schema(schema.interval, place)
            case Raw():
                assert self._raw is not None
                return {**self._raw[schema], WHERE: schema.where}
        return None

    def _any_value(self) -> str:
        if self._anything is None:
            self._anything = next(self._names)
            body = self._expression(AnyOf(_PARTS_OF_ANYTHING), SchemaPath())
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
        """Return an expression of members in this order; some of them are required.

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
        names = " | ".join(quoted(_json(name)) for name in taken)
        body = f"NAME & ~({names})"
        if body not in self._rule_names:
            self._rule_names[body] = f"NAME_{next(self._names)}".upper()
            self._rules.append(f"{self._rule_names[body]}: {body}")
        return self._rule_names[body]

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

    def _library(self, place: SchemaPath, schema: Mapping[str, Any]) -> str:
        """Return a rule that the library compiles."""
        return self._rule(f"%json {self._text(place, schema)}")

    def _text(self, place: SchemaPath, schema: Mapping[str, Any]) -> str:
        """Return a schema for the library as JSON, and note its path."""
        own = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        where = own.pop(WHERE, place)
        text = json.dumps(own, ensure_ascii=False, default=float)
        self.leaves.setdefault(text, where)
        if len(self.leaves) > MAX_LEAVES:
            raise SchemaTooHardError
        return text

    def _rule(self, body: str) -> str:
        if body not in self._rule_names:
            name = self._rule_names[body] = next(self._names)
            self._rules.append(f"{name}: {body}")
            if len(self._rules) > MAX_RULES:
                raise SchemaTooHardError
        return self._rule_names[body]


@dataclass(slots=True, eq=False)
class _Need:
    """A schema that waits for its parts to have a value.

    of: what waits for it in turn, or the pointer of a reference.
    """

    num_missing: int
    of: _Need | str

    def meet(self, ready: list[str]) -> None:
        """Count a part that has a value. Add the pointer of a reference that has one now."""
        need: _Need | str = self
        while isinstance(need, _Need):
            need.num_missing -= 1
            if need.num_missing:
                return
            need = need.of
        ready.append(need)


def _has_pattern_and_more(strings: Strings) -> bool:
    """Return whether strings must match a pattern or a format, and something else."""
    rules = [*map(json.loads, strings.rules)]
    if not any("pattern" in rule or "format" in rule for rule in rules):
        return False
    return (strings.constants is not None) + sum(map(len, rules)) > 1


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
