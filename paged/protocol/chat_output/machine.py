"""TextMachine and CallMachine: coroutines that read text as it arrives and find tool calls in it.

A machine is a generator that yields where it needs more text. Text that may still become a call is held; if
it becomes none, it is returned as content, from which the search goes on. Arguments are passed on as soon as
they are sure to be JSON: they cannot be called back, so a call whose arguments stop being JSON keeps what was
passed on, and the text from the wrong character on is content.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from typing import Any

from .json_scanner import JsonScanner
from .parts import ContentDelta, Part, ToolArgumentsDelta, ToolCallStart

BLANKS = " \t\n\r"  # those of JSON, which a grammar can name
MAX_KEY = 256  # characters of a key or a tool's name as JSON; text with a longer one is no call
Step = Generator[None, None, None]  # a coroutine without a result
Reading = Generator[None, None, bool]  # a coroutine that returns whether it found what it looked for


class TextMachine(ABC):
    """A coroutine over text: `_text[_at:]` has arrived and is not read yet.

    Text from `_held` on is kept, so that reading can return there.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._held: int | None = None
        self._parts = list[Part]()
        self._running = self._run()

    def feed(self, text: str) -> list[Part]:
        """Take more text. Return the parts that are certain."""
        keep = self._at if self._held is None else self._held
        self._text = self._text[keep:] + text
        self._at = self._at - keep
        self._held = None if self._held is None else 0
        return self._resume()

    def finish(self) -> list[Part]:
        """End the text. Return the remaining parts."""
        self._ended = True
        return self._resume()

    def _resume(self) -> list[Part]:
        with suppress(StopIteration):
            next(self._running)
        parts = self._parts
        self._parts = []
        return parts

    @abstractmethod
    def _run(self) -> Step:
        """Read all of the text."""

    def _hold(self) -> None:
        self._held = self._at

    def _go_back(self) -> None:
        """Return to where `_hold` was called."""
        assert self._held is not None
        self._at = self._held
        self._held = None

    def _next(self) -> Generator[None, None, str]:
        """Return the next character without reading it; "" at the end of the text."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def _blanks(self) -> Step:
        """Read blanks."""
        while (character := (yield from self._next())) and character in BLANKS:
            self._at += 1

    def _literal(self, wanted: str) -> Reading:
        """Read a literal if the text continues with it."""
        while not self._text.startswith(wanted, self._at):
            arrived = self._text[self._at : self._at + len(wanted)]
            if self._ended or not wanted.startswith(arrived):
                return False
            yield
        self._at += len(wanted)
        return True

    def _read_to(self, markers: Sequence[str], emit: Callable[[str], None]) -> Generator[None, None, str]:
        """Emit text up to the first marker, where it stops. Return the marker; "" at the end of the text."""
        while True:
            found = [(at, marker) for marker in markers if (at := self._text.find(marker, self._at)) >= 0]
            end, marker = min(found, default=(len(self._text) - self._num_begun(markers), ""))
            emit(self._text[self._at : end])
            self._at = end
            if marker or self._ended:
                return marker
            yield

    def _num_begun(self, markers: Sequence[str]) -> int:
        """Return how many of the last characters may be the beginning of a marker."""
        if self._ended:
            return 0
        most = min(len(self._text) - self._at, max(map(len, markers), default=1) - 1)
        ends = (self._text[len(self._text) - num :] for num in range(most, 0, -1))
        return next((len(end) for end in ends if any(marker.startswith(end) for marker in markers)), 0)


class CallMachine(TextMachine):
    """Finds calls in text, in the format of a subclass. Text outside of calls is content.

    Blanks between content and a call, and between calls, are neither.

    MARKERS: texts that may begin a call anywhere.
    markers: those of MARKERS that may occur; None for all.
    names: of the tools. A call of another one is content.
    new_id: makes the id of a call.
    """

    MARKERS: Sequence[str] = ()

    def __init__(
        self, names: Collection[str], new_id: Callable[[], str], markers: Sequence[str] | None = None
    ) -> None:
        self._markers = self.MARKERS if markers is None else markers
        self._names = frozenset(names)
        self._new_id = new_id
        self._num_calls = self._num_whole = 0
        self._pending_blanks = ""  # content if more content follows
        super().__init__()

    @property
    def has_whole_calls(self) -> bool:
        """Whether there is a call, and the arguments of all calls are whole."""
        return 0 < self._num_calls == self._num_whole

    def _run(self) -> Step:
        yield from self._opening()
        while marker := (yield from self._read_to(self._markers, self._emit_content)):
            self._hold()
            self._at += len(marker)
            if not (yield from self._calls()):
                self._go_back()
                self._at += len(marker)
                self._emit_content(marker)
        if not self._num_calls and self._pending_blanks:
            self._parts.append(ContentDelta(self._pending_blanks))

    def _opening(self) -> Step:
        """Read calls that only the beginning of the text may have."""
        yield from ()

    @abstractmethod
    def _calls(self) -> Reading:
        """Read what follows a marker, which is held. Return whether it has a call."""

    def _emit_content(self, text: str) -> None:
        """Emit content. Blanks at the end wait for what follows."""
        text = self._pending_blanks + text
        settled = text.rstrip()
        self._pending_blanks = text[len(settled) :]
        if settled:
            self._parts.append(ContentDelta(settled))

    def _begin_call(self, name: str) -> None:
        """Begin a call. From here on nothing is held."""
        self._pending_blanks = ""
        self._held = None
        self._parts.append(ToolCallStart(self._num_calls, self._new_id(), name))
        self._num_calls += 1

    def _emit_arguments(self, text: str) -> None:
        if text:
            self._parts.append(ToolArgumentsDelta(self._num_calls - 1, text))

    def _emit_whole_arguments(self, text: str) -> None:
        self._emit_arguments(text)
        self._num_whole += 1

    def _stream_arguments(self) -> Reading:
        """Read an object and pass each character on at once. Return whether it is whole."""
        scanner = JsonScanner()
        while not (scanner.done or scanner.failed):
            end = scanner.scan(self._text, self._at)
            self._emit_arguments(self._text[self._at : end])
            self._at = end
            if not (scanner.done or scanner.failed):
                if self._ended:
                    return False
                yield
        self._num_whole += scanner.done
        return scanner.done

    def _value(self, most: int | None = None) -> Generator[None, None, str]:
        """Read a JSON value of `most` characters. Return its text; "" if there is none."""
        scanner = JsonScanner()
        pieces = list[str]()
        length = 0
        while True:
            end = scanner.scan(self._text, self._at)
            pieces.append(self._text[self._at : end])
            length += end - self._at
            self._at = end
            if self._ended:
                scanner.finish()
            if scanner.failed or (most is not None and length > most):
                return ""
            if scanner.done:
                return "".join(pieces)
            yield

    def _string(self) -> Generator[None, None, str]:
        """Read a JSON string. Return its value; "" if there is none."""
        if (yield from self._next()) != '"':
            return ""
        text = yield from self._value(MAX_KEY)
        return json.loads(text) if text else ""

    def _call_object(self) -> Generator[None, None, bool | None]:
        """Read {"name": ..., "arguments": {...}}, in any order, perhaps with "id" and "type".

        "parameters" is the same as "arguments". Returns None if it is no call, False if it has begun but does
        not end as it should, True if it is whole.
        """
        name = ""
        arguments = ""
        has_begun = False
        separator = "{"
        while (yield from self._literal(separator)):
            yield from self._blanks()
            if separator == "{" and (yield from self._literal("}")):
                return None  # it has no name
            key = yield from self._string()
            yield from self._blanks()
            if not (yield from self._literal(":")):
                break
            yield from self._blanks()
            if key == "name" and not name:
                name = yield from self._string()
                if name not in self._names:
                    break
            elif key in ("arguments", "parameters") and not arguments:
                if name and (yield from self._next()) == "{":
                    self._begin_call(name)
                    has_begun = True
                    arguments = "{"
                    if not (yield from self._stream_arguments()):
                        return False
                    self._hold()  # what follows the arguments is content if it is wrong
                elif not (arguments := _object_text((yield from self._value()))):
                    break
            elif key not in ("id", "type") or not (yield from self._value()):
                break
            yield from self._blanks()
            if (yield from self._literal("}")):
                if not name:
                    return None
                if not has_begun:
                    self._begin_call(name)
                    self._emit_whole_arguments(arguments or "{}")
                self._held = None
                return True
            separator = ","
        if not has_begun:
            return None
        self._go_back()
        return False

    def _call_list(self) -> Reading:
        """Read [{"name": ...}, ...], where the text is at the bracket. Return whether it has a call."""
        if not (yield from self._literal("[")):
            return False
        yield from self._blanks()
        if (is_whole := (yield from self._call_object())) is None:
            return False
        while is_whole:
            self._hold()
            yield from self._blanks()
            if (yield from self._literal("]")):
                self._held = None
                break
            yield from self._literal(",")
            yield from self._blanks()
            is_whole = yield from self._call_object()
            if is_whole is None:
                self._go_back()
        return True


def _object_text(value: str) -> str:
    """Return arguments as the text of an object, even if the model wrote null or a string; "" otherwise."""
    if value.startswith("{"):
        return value
    if value in ("null", '""'):
        return "{}"
    decoded: Any = json.loads(value) if value else None
    if not isinstance(decoded, str) or any("\ud800" <= c <= "\udfff" for c in decoded):
        return ""
    scanner = JsonScanner()
    text = decoded.strip()
    is_object = text.startswith("{") and scanner.scan(text) == len(text) and scanner.done
    return text if is_object else ""
