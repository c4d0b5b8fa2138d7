"""CallParser: finds tool calls in text, as the description of a format says."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Sequence

from .formats import CallSyntax
from .literals import PYTHON, Notation, read_keywords, read_members, read_value
from .machine import CallMachine, Reading, Step
from .tagged import TaggedArguments
from .tools import Tool

_NAME = re.compile(r"[A-Za-z0-9_-]*")
_OBJECT_END = re.compile(r"[}\]\s]*")


class CallParser(CallMachine):
    """Finds calls in the format of a `CallSyntax`. Text outside of calls is content.

    Where calls begin, every format also accepts a JSON object with name and arguments, or a list of such
    objects.

    tools: the tools that may be called.
    left_out: beginnings of calls that are not recognised here, such as special tokens that the tokenizer
        lacks.
    """

    def __init__(
        self,
        syntax: CallSyntax,
        tools: Sequence[Tool],
        new_id: Callable[[], str],
        left_out: Collection[str] = (),
    ) -> None:
        self._syntax = syntax
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._markers = [text for text in (syntax.begin, *syntax.also) if text and text not in left_out]
        # The text after a list or an object of a call.
        end = syntax.after_arguments + syntax.section[1]
        self._object_end = (
            _OBJECT_END.sub("", end, count=1) if syntax.is_object else "".join(end.split()[-1:])
        )
        super().__init__(list(self._schemas), new_id)

    def _run(self) -> Step:
        if not self._syntax.begin:
            self.hold()
            yield from self.blanks()
            if not (yield from self._calls("")):
                self.go_back()
        while marker := (yield from self.read_to(self._markers, self.emit_content)):
            self.hold()
            self.at += len(marker)
            if not (yield from self._calls(marker)):
                self.go_back()
                self.at += len(marker)
                self.emit_content(marker)
        self.end_content()

    def _calls(self, marker: str) -> Reading:
        """Read calls behind a marker, which is held. Return whether there is one."""
        syntax = self._syntax
        if syntax.is_object or marker:
            yield from self.blanks()
            is_list = syntax.section[0].endswith("[") and not syntax.is_object
            if (yield from self.next_character()) in ("{", "" if is_list else "["):
                return (yield from self._objects())
        return not syntax.is_object and (yield from self._written(marker))

    def _objects(self) -> Reading:
        """Read {"name": ...} or [{"name": ...}, ...]. Return whether there is a call."""
        is_list = yield from self.literal("[")
        yield from self.blanks()
        is_whole = yield from self.call_object()
        if is_whole is None:
            return False
        while is_whole:
            self.hold()
            yield from self.blanks()
            if is_list and (yield from self.literal("]")):
                self.hold()
                yield from self.blanks()
                if not (self._object_end and (yield from self.closing(self._object_end))):
                    self.go_back()
                self.held = None
                break
            if not is_list and self._object_end and (yield from self.closing(self._object_end)):
                self.held = None
                break
            _ = (yield from self.literal(",")) or (yield from self.literal(";"))
            yield from self.blanks()
            is_whole = yield from self.call_object()
            if is_whole is None:
                self.go_back()
        return True

    def _written(self, marker: str) -> Reading:
        """Read calls that the format writes out. Return whether there is one."""
        syntax = self._syntax
        opening = syntax.section[0] + syntax.before_name
        if marker in opening:
            opening = opening[opening.index(marker) + len(marker) :]
        if not (yield from self.words(opening)):
            return False
        is_whole = yield from self._call()
        if is_whole is None:
            return False
        while is_whole:
            self.hold()
            yield from self.blanks()
            if not (yield from self.closing(self._rest_of_call)):
                break
            self.hold()
            yield from self.blanks()
            if syntax.section[1] and (yield from self.closing(syntax.section[1])):
                self.held = None
                return True
            if not syntax.section[1] and syntax.before_name:
                break  # the next call has a marker of its own
            yield from self.words(syntax.separator.strip())
            yield from self.blanks()
            if not (yield from self.words(syntax.before_name)):
                break
            is_whole = yield from self._call()
            if is_whole is None:
                break
        if self.held is not None:
            self.go_back()
        elif self.is_cut:
            self.at = len(self.text)  # the rest is a part of the call, not content
        return True

    @property
    def _rest_of_call(self) -> str:
        """What follows the arguments of a call, without the word that reading them includes."""
        syntax = self._syntax
        text = syntax.after_arguments
        if syntax.arguments in ("json", "gemma"):
            return text.lstrip()
        return text[1:] if syntax.arguments == "python" else " ".join(text.split()[1:])

    def _call(self) -> Generator[None, None, bool | None]:
        """Read a call from its name on. Returns None if it is none, False if it is cut or wrong."""
        syntax = self._syntax
        name = yield from self.word(_NAME)
        if name not in self.names:
            return None
        if syntax.identity and (yield from self.literal(syntax.identity)):
            yield from self.word(_NAME)
        if syntax.arguments == "json":
            return (yield from self._json_call(name))
        if not (yield from self.words(syntax.after_name)):
            return None
        match syntax.arguments:
            case "tagged":
                reader = TaggedArguments(self, syntax, self._schemas[name])
                return (yield from reader.read(lambda: self.begin_call(name)))
            case "python":
                return (yield from self._keywords(name))
        return (yield from self._braces(name))

    def _json_call(self, name: str) -> Generator[None, None, bool | None]:
        after_name = self._syntax.after_name
        is_line = not after_name.strip() and "\n" in after_name
        is_named = yield from self._line_end() if is_line else self.words(after_name)
        yield from self.blanks()
        if (yield from self.next_character()) == "{" and (is_named or not is_line):
            self.begin_call(name)
            return (yield from self.stream_arguments())
        if is_line or not is_named:
            return None
        if (yield from self._at_end_of_call()):
            self.begin_call(name)
            self.emit_rest("{}")
            return True
        if self.ended and self.at == len(self.text):
            self.begin_call(name)
            return False
        return None

    def _line_end(self) -> Reading:
        has_break = False
        while (character := (yield from self.next_character())) and character in " \t\r\n":
            has_break = has_break or character == "\n"
            self.at += 1
        return has_break

    def _at_end_of_call(self) -> Reading:
        """Return whether the call ends here or another one begins, without reading that."""
        for text in (self._syntax.begin, *self._syntax.after_arguments.split()[:1]):
            if (yield from self.literal(text)):
                self.at -= len(text)
                return True
        return False

    def _keywords(self, name: str) -> Generator[None, None, bool | None]:
        """Read keyword arguments with Python's literals, and the parenthesis after them."""
        yield from self.blanks()
        if (yield from self.literal(")")):
            self.begin_call(name)
            self.emit_rest("{}")
            return True
        separator = "{"
        while True:
            key = yield from read_keywords(self)
            if key is None or not (yield from self.next_character()):
                return None if separator == "{" else False
            if separator == "{":
                self.begin_call(name)
            self.emit_arguments(f'{separator}"{key}": ')
            separator = ", "
            if not (yield from read_value(self, PYTHON)):
                return False
            yield from self.blanks()
            has_comma = yield from self.literal(",")
            yield from self.blanks()
            if (yield from self.literal(")")):
                self.emit_rest("}")
                return True
            if not has_comma:
                return False

    def _braces(self, name: str) -> Generator[None, None, bool | None]:
        """Read Gemma's braces."""
        if not (yield from self.literal("{")):
            return None
        self.begin_call(name)
        is_whole = yield from read_members(self, Notation(self._syntax.quote), 1)
        self._num_whole += is_whole
        return is_whole
