"""Tagged arguments: one element for each parameter, whose text becomes JSON by the schema of the tool."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any

from .formats import CallSyntax
from .json_scanner import is_json
from .literals import PYTHON, json_of
from .machine import BLANKS, MAX_KEY, CallMachine, Reading
from .values import NULLABLE_TEXT, TEXT, Types, is_whole, number_of, property_of, quoted, types_of

_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_NULLS = ("null", "none")
_NUMBERS = frozenset(["number", "integer"])
_ANY = frozenset(["null", "number", "boolean", "object", "array"])


class TaggedArguments:
    """Reads the elements of one call, up to the text that ends it.

    A parameter of type string is the text between its tags, without the line breaks next to the tags, and is
    passed on as it arrives. Other parameters are passed on when they are complete.

    schema: the schema of the arguments.
    """

    def __init__(self, machine: CallMachine, syntax: CallSyntax, schema: Any) -> None:
        before, between, after = syntax.parameter_texts
        self._machine = machine
        self._schema = schema
        self._opener = before.strip()
        self._between = between.rstrip("\n").replace("><", "> <")  # which may have blanks between them
        self._end = after.strip()
        # The line break before the end belongs to the format.
        has_breaks = between.endswith("\n") and after.startswith("\n")
        self._ends = [f"\n{self._end}", self._end] if has_breaks else [self._end]
        self._closer = syntax.after_arguments.split()[0]

    def read(self, begin: Callable[[], None]) -> Generator[None, None, bool | None]:
        """Read the elements and the first word after them.

        begin: called once the text is certain to be arguments.

        Return None if the text is not arguments, False if the arguments are malformed, True if they are
        complete.
        """
        machine = self._machine
        yield from machine.blanks()
        if not (yield from machine.literal(self._opener)):
            if not (yield from machine.literal(self._closer)):
                return None
            begin()
            machine.emit_rest("{}")
            return True
        key = yield from self._key()
        if key is None:
            return None
        begin()
        separator = "{"
        while True:
            machine.emit_arguments(f'{separator}"{quoted(key)}": ')
            if not (yield from self._value(property_of(self._schema, key, self._schema))):
                return False
            yield from machine.blanks()
            separator = ", "
            if (yield from machine.literal(self._opener)):
                key = yield from self._key()
                if key is None:
                    return False
            else:
                if not (yield from machine.literal(self._closer)):
                    return False
                machine.emit_rest("}")
                return True

    def _key(self) -> Generator[None, None, str | None]:
        """Read a key and what follows it; None if there is none."""
        machine = self._machine
        name = list[str]()
        stop = self._between[0]
        if not (yield from machine.read_to([stop, "\n"], name.append)):
            return None
        key = "".join(name).strip()
        is_key = 0 < len(key) <= MAX_KEY and (yield from machine.words(self._between))
        return key if is_key else None

    def _value(self, schema: Any) -> Reading:
        """Read a value and emit it. Return whether it has an end."""
        machine = self._machine
        types = types_of(schema, self._schema)
        if len(self._ends) > 1 and types is not None and "string" in types:
            yield from machine.literal("\n")
        if types == TEXT or (types == NULLABLE_TEXT and not (yield from self._may_be_null())):
            machine.emit_arguments('"')
            if not (yield from self._to_end(lambda text: machine.emit_arguments(quoted(text)))):
                return False
            machine.emit_arguments('"')
            return True
        if types is None or "string" not in types:
            found = yield from self._json(types)
            if found:
                machine.emit_arguments(found)
                return True
            if len(self._ends) > 1:
                yield from machine.literal("\n")
        pieces = list[str]()
        if not (yield from self._to_end(pieces.append)):
            return False
        machine.emit_arguments(value_of("".join(pieces), types))
        return True

    def _may_be_null(self) -> Reading:
        """Return whether the value may be null, without reading it."""
        machine = self._machine
        machine.hold()
        yield from machine.blanks()
        word = ""
        while len(word) < len(_NULLS[0]) and (character := (yield from machine.next_character())):
            word += character.lower()
            machine.at += 1
            if not any(null.startswith(word) for null in _NULLS):
                break
        machine.go_back()
        return word in _NULLS

    def _json(self, types: Types) -> Generator[None, None, str]:
        """Read JSON in braces, brackets or quotes, which may have an end inside; "" if there is none."""
        machine = self._machine
        machine.hold()
        yield from machine.blanks()
        begins = {"{": "object", "[": "array", '"': "string"}
        kind = begins.get((yield from machine.next_character()))
        if kind is not None and (types is None or kind in types):
            text = yield from machine.value()
            if text:
                yield from machine.blanks()
                if (yield from self._at_end(self._end)):
                    machine.held = None
                    return text
        machine.go_back()
        return ""

    def _to_end(self, emit: Callable[[str], None]) -> Reading:
        """Emit a text up to its end, which is read. Return whether there is one."""
        machine = self._machine
        while marker := (yield from machine.read_to(self._ends, emit)):
            machine.hold()
            if (yield from self._at_end(marker)):
                machine.held = None
                return True
            machine.go_back()
            emit(marker)
            machine.at += len(marker)
        return False

    def _at_end(self, marker: str) -> Reading:
        """Read the end of an element if one follows that is one: another element or the call's end is next.

        Elsewhere it belongs to the value.
        """
        machine = self._machine
        if not (yield from machine.literal(marker)):
            return False
        assert machine.held is not None, "the caller can go back"
        length = machine.at - machine.held
        yield from machine.blanks()
        is_end = False
        for text in (self._opener, self._closer):
            is_end = is_end or (yield from machine.literal(text))
        is_end = is_end or machine.is_cut_in(self._opener) or machine.is_cut_in(self._closer)
        if is_end:
            machine.at = machine.held + length
        return is_end


def value_of(text: str, types: Types) -> str:
    """Return the JSON of a value that is written as plain text.

    The text is tried as null, number, boolean, object and array, the allowed types first. If none fits, it is
    a string.
    """
    bare = text.strip(BLANKS)
    found = _literal(bare, _ANY if types is None else types)
    if not found and types is not None and "string" not in types:
        found = _literal(bare, _ANY)
    if not found and types is None and bare[:1] == '"' and is_json(bare):
        found = bare
    return found or f'"{quoted(text)}"'


def _literal(text: str, types: frozenset[str]) -> str:
    """Return a literal of one of the types as JSON; "" if the text is none."""
    word = _WORDS.get(text.lower(), "")
    if word == "null" and "null" in types:
        return word
    number = number_of(text) if types & _NUMBERS else ""
    if number and ("number" in types or is_whole(number)):
        return number
    if word in ("true", "false") and "boolean" in types:
        return word
    return _container(text, types) if types & {"object", "array"} else ""


def _container(text: str, types: frozenset[str]) -> str:
    """Return an object or array, written in JSON, in Python or as a JSON string of either; "" for none."""
    wanted = {"object": "{", "array": "[("}
    if any(text[:1] and text[0] in begins for name, begins in wanted.items() if name in types):
        return text if is_json(text) else json_of(text, PYTHON)
    if text[:1] == '"' and is_json(text):
        inner = json.loads(text).strip(BLANKS)
        return _container(inner, types) if inner[:1] != '"' else ""
    return ""
