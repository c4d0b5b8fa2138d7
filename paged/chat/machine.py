"""TextMachine and CallMachine: coroutines that read text as it arrives.

A machine is a generator that yields where it needs more text. Text that may still become a call is held; if
it becomes none, it is returned as content, from which the search goes on. Arguments are passed on as soon as
they are sure to be JSON: they cannot be called back, so a call whose arguments stop being JSON keeps what was
passed on, and the text from the wrong character on is content.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from typing import Any

from .json_scanner import STRING_MARKS, JsonScanner
from .parts import ContentDelta, Part, ToolArgumentsDelta, ToolCallStart

BLANKS = " \t\n\r"  # those of JSON, which a grammar can name
MAX_KEY = 256  # characters of a key or a tool's name as JSON; text with a longer one is no call
_BLANKS = re.compile(r"([ \t\n\r]+)")
Step = Generator[None, None, None]  # a coroutine without a result
Reading = Generator[None, None, bool]  # a coroutine that returns whether it found what it looked for


class TextMachine(ABC):
    """A coroutine that reads text as it arrives: `text[at:]` has arrived and is not read yet.

    Text from `held` on stays in `text`, so that reading can return to it. A yield may shift positions in
    `text`, and only `held` is adjusted.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.held: int | None = None
        self.parts = list[Part]()
        self._running = self._run()
        # What markers begin with while nothing else is looked for, and where other text then goes.
        self._firsts: frozenset[str] | None = None
        self._emit: Callable[[str], None] = lambda _: None
        self.is_cut = False  # whether the text has ended where more was looked for

    def feed(self, text: str) -> list[Part]:
        """Take more text. Return the parts of the answer that are complete."""
        is_plain = self._firsts is not None and self.at == len(self.text) and self.held is None
        if is_plain and self._firsts is not None and self._firsts.isdisjoint(text):
            self._emit(text)
            return self._taken()
        keep = self.at if self.held is None else self.held
        self.text = self.text[keep:] + text
        self.at = self.at - keep
        self.held = None if self.held is None else 0
        return self._resume()

    def finish(self) -> list[Part]:
        """End the text. Return the remaining parts."""
        self.ended = True
        return self._resume()

    def _resume(self) -> list[Part]:
        with suppress(StopIteration):
            next(self._running)
        return self._taken()

    def _taken(self) -> list[Part]:
        parts = self.parts
        self.parts = []
        return parts

    @abstractmethod
    def _run(self) -> Step:
        """Read all of the text."""

    def hold(self) -> None:
        """Keep the text from here on, so that `go_back` can return to this place."""
        self.held = self.at

    def go_back(self) -> None:
        """Return to where `hold` was called."""
        assert self.held is not None
        self.at = self.held
        self.held = None

    def next_character(self) -> Generator[None, None, str]:
        """Return the next character without consuming it; "" at the end of the text."""
        while self.at == len(self.text) and not self.ended:
            yield
        self.is_cut = self.is_cut or self.at == len(self.text)
        return self.text[self.at : self.at + 1]

    def blanks(self) -> Step:
        """Read blanks."""
        while (character := (yield from self.next_character())) and character in BLANKS:
            self.at += 1

    def literal(self, wanted: str) -> Reading:
        """Consume a literal if the text continues with it. Return whether it did."""
        while not self.text.startswith(wanted, self.at):
            arrived = self.text[self.at : self.at + len(wanted)]
            if self.ended or not wanted.startswith(arrived):
                self.is_cut = self.is_cut or wanted.startswith(arrived)
                return False
            yield
        self.at += len(wanted)
        return True

    def is_cut_in(self, wanted: str) -> bool:
        """Return whether the text ended within this literal, or right before it."""
        return self.ended and wanted.startswith(self.text[self.at :])

    def closing(self, text: str) -> Reading:
        """Read a closing text as `words` does. If the answer is cut off inside it, read what has arrived."""
        if (yield from self.words(text)):
            return True
        if any(self.is_cut_in(piece) for piece in text.split()):
            self.at = len(self.text)
            return True
        return False

    def words(self, text: str) -> Reading:
        """Read a text; a blank in it matches any number of blanks. Return whether it was there."""
        for piece in _BLANKS.split(text):
            if not piece or piece[0] in BLANKS:
                yield from self.blanks() if piece else ()
            elif not (yield from self.literal(piece)):
                return False
        return True

    def word(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Read the characters that match a pattern, at most as many as a tool's name may have."""
        word = ""
        while True:
            found = pattern.match(self.text, self.at)
            assert found is not None, "the pattern may match nothing"
            word += found[0]
            self.at = found.end()
            if self.at < len(self.text) or self.ended or len(word) > MAX_KEY:
                self.is_cut = self.is_cut or self.at == len(self.text)
                return word
            yield

    def read_to(self, markers: Sequence[str], emit: Callable[[str], None]) -> Generator[None, None, str]:
        """Emit text up to the first marker, and stop there. Return the marker; "" at the end of the text."""
        while True:
            found = [(at, marker) for marker in markers if (at := self.text.find(marker, self.at)) >= 0]
            end, marker = min(found, default=(len(self.text) - self._num_begun(markers), ""))
            emit(self.text[self.at : end])
            self.at = end
            if marker or self.ended:
                self.is_cut = self.is_cut or not marker
                return marker
            self._firsts = frozenset(text[0] for text in markers)
            self._emit = emit
            yield
            self._firsts = None

    def _num_begun(self, markers: Sequence[str]) -> int:
        """Return how many of the last characters may be the beginning of a marker."""
        if self.ended:
            return 0
        most = min(len(self.text) - self.at, max(map(len, markers), default=1) - 1)
        ends = (self.text[len(self.text) - num :] for num in range(most, 0, -1))
        return next((len(end) for end in ends if any(marker.startswith(end) for marker in markers)), 0)


class CallMachine(TextMachine):
    """Finds calls in text. Text outside calls is content. Blanks between content and calls are dropped.

    names: the names of the tools. A call of any other tool is content.
    new_id: makes the id of a call.
    """

    def __init__(self, names: Collection[str], new_id: Callable[[], str]) -> None:
        self.names = frozenset(names)
        self._new_id = new_id
        self._num_calls = self._num_whole = 0
        self._is_after_call = False
        self._pending_blanks = ""  # content if more content follows
        super().__init__()

    @property
    def has_whole_calls(self) -> bool:
        """Whether the answer has a call, and the arguments of all its calls are complete."""
        return 0 < self._num_calls == self._num_whole

    def emit_content(self, text: str) -> None:
        """Emit content. Hold back blanks at its end until more follows; drop blanks after a call."""
        text = self._pending_blanks + text
        if self._is_after_call:
            text = text.lstrip()
        settled = text.rstrip()
        self._pending_blanks = text[len(settled) :]
        if settled:
            self._is_after_call = False
            self.parts.append(ContentDelta(settled))

    def end_content(self) -> None:
        """Emit the blanks at the end of an answer without calls."""
        if not self._num_calls and self._pending_blanks:
            self.parts.append(ContentDelta(self._pending_blanks))

    def begin_call(self, name: str) -> None:
        """Begin a call. `go_back` is no longer possible."""
        self._pending_blanks = ""
        self._is_after_call = True
        self.held = None
        self.parts.append(ToolCallStart(self._num_calls, self._new_id(), name))
        self._num_calls += 1

    def emit_arguments(self, text: str) -> None:
        """Emit a further piece of the call's arguments."""
        if not text:
            return
        if self.parts and isinstance(last := self.parts[-1], ToolArgumentsDelta):
            self.parts[-1] = ToolArgumentsDelta(last.index, last.text + text)
        else:
            self.parts.append(ToolArgumentsDelta(self._num_calls - 1, text))

    def emit_rest(self, text: str) -> None:
        """Emit the last piece of the call's arguments, which completes the call."""
        self.emit_arguments(text)
        self._num_whole += 1

    def stream_arguments(self) -> Reading:
        """Read a JSON object and pass each character on at once. Return whether the object is complete."""
        scanner = JsonScanner()
        while not (scanner.done or scanner.failed):
            end = scanner.scan(self.text, self.at)
            self.emit_arguments(self.text[self.at : end])
            self.at = end
            if not (scanner.done or scanner.failed):
                if self.ended:
                    return False
                if scanner.is_in_string:
                    self._firsts = STRING_MARKS
                    self._emit = self.emit_arguments
                yield
                self._firsts = None
        self._num_whole += scanner.done
        return scanner.done

    def value(self, most: int | None = None) -> Generator[None, None, str]:
        """Read a JSON value of at most `most` characters (None: any length).

        Return its text; "" if there is no value, or if it is longer.
        """
        scanner = JsonScanner()
        pieces = list[str]()
        length = 0
        while True:
            end = scanner.scan(self.text, self.at)
            pieces.append(self.text[self.at : end])
            length += end - self.at
            self.at = end
            if self.ended:
                scanner.finish()
            if scanner.failed or (most is not None and length > most):
                return ""
            if scanner.done:
                return "".join(pieces)
            yield

    def string(self) -> Generator[None, None, str]:
        """Read a JSON string. Return its value; "" if there is no string."""
        if (yield from self.next_character()) != '"':
            return ""
        text = yield from self.value(MAX_KEY)
        return json.loads(text) if text else ""

    def call_object(self) -> Generator[None, None, bool | None]:
        """Read {"name": ..., "arguments": {...}} with its members in any order, perhaps with "id" and "type".

        "parameters" is a synonym of "arguments". Return None if the text is not a call, False if a call has
        begun but is malformed, True if the call is complete.
        """
        name = ""
        arguments = ""
        has_begun = False
        separator = "{"
        while (yield from self.literal(separator)):
            yield from self.blanks()
            if separator == "{" and (yield from self.literal("}")):
                return None  # it has no name
            key = yield from self.string()
            yield from self.blanks()
            if not (yield from self.literal(":")):
                break
            yield from self.blanks()
            if key == "name" and not name:
                name = yield from self.string()
                if name not in self.names:
                    break
            elif key in ("arguments", "parameters") and not arguments:
                if name and (yield from self.next_character()) == "{":
                    self.begin_call(name)
                    has_begun = True
                    arguments = "{"
                    if not (yield from self.stream_arguments()):
                        return False
                    self.hold()  # what follows the arguments is content if it is wrong
                elif not (arguments := _object_text((yield from self.value()))):
                    break
            elif key not in ("id", "type") or not (yield from self.value()):
                break
            yield from self.blanks()
            if (yield from self.literal("}")):
                if not name:
                    return None
                if not has_begun:
                    self.begin_call(name)
                    self.emit_rest(arguments or "{}")
                self.held = None
                return True
            separator = ","
        if not has_begun:
            return None
        self.go_back()
        return False


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
