"""The formats in which model families write tool calls."""

from __future__ import annotations

import re
from collections.abc import Generator

from .machine import MAX_KEY, CallMachine, Reading, Step

_NAME = re.compile(r"[A-Za-z0-9_-]*")


class HermesCalls(CallMachine):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen 2.5, Qwen 3."""

    MARKERS = ("<tool_call>",)

    def _calls(self) -> Reading:
        yield from self._blanks()
        if (yield from self._call_object()) is None:
            return False
        self._hold()
        yield from self._blanks()
        if (yield from self._literal("</tool_call>")):
            self._held = None
        else:
            self._go_back()
        return True


class Llama3Calls(CallMachine):
    """{"name": ..., "parameters": {...}} as the whole answer or after <|python_tag|>: Llama 3.1 to 3.3.

    Several calls are separated by semicolons or line breaks.
    """

    MARKERS = ("<|python_tag|>",)

    def _opening(self) -> Step:
        self._hold()
        yield from self._blanks()
        if (yield from self._next()) != "{" or not (yield from self._calls()):
            self._go_back()

    def _calls(self) -> Reading:
        yield from self._blanks()
        if (is_whole := (yield from self._call_object())) is None:
            return False
        while is_whole:
            self._hold()
            yield from self._blanks()
            yield from self._literal(";")
            yield from self._blanks()
            is_whole = yield from self._call_object()
            if is_whole is None:
                self._go_back()
        return True


class MistralCalls(CallMachine):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name[ARGS]{...}: Mistral."""

    MARKERS = ("[TOOL_CALLS]",)

    def _calls(self) -> Reading:
        yield from self._blanks()
        if (yield from self._next()) == "[":
            return (yield from self._call_list())
        name = yield from self._word(_NAME)
        if name not in self._names:
            return False
        if (yield from self._literal("[CALL_ID]")):
            yield from self._word(_NAME)
        has_separator = yield from self._literal("[ARGS]")
        yield from self._blanks()
        if (yield from self._next()) == "{":
            self._begin_call(name)
            yield from self._stream_arguments()
            return True
        if not has_separator or (self._at < len(self._text) and not (yield from self._at_marker())):
            return False
        self._begin_call(name)
        self._emit_whole_arguments("{}")
        return True

    def _word(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Read the characters that a pattern allows, as many as a tool's name may have."""
        word = ""
        while True:
            found = pattern.match(self._text, self._at)
            assert found is not None
            word = word + found[0]
            self._at = found.end()
            if self._at < len(self._text) or self._ended or len(word) > MAX_KEY:
                return word
            yield

    def _at_marker(self) -> Reading:
        """Return whether another call begins here, without reading its marker."""
        at_marker = yield from self._literal("[TOOL_CALLS]")
        self._at -= len("[TOOL_CALLS]") * at_marker
        return at_marker


class JsonCalls(CallMachine):
    """[{"name": ..., "arguments": {...}}, ...] as the whole answer: for models without a format of their own.

    Only a grammar makes a model write it.
    """

    def _opening(self) -> Step:
        self._hold()
        yield from self._blanks()
        if not (yield from self._call_list()):
            self._go_back()

    def _calls(self) -> Reading:
        raise AssertionError("there is no marker")
