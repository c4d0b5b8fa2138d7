"""ForcedCalls: the calls of an answer which a grammar makes calls and nothing else, also when it is cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from .parts import ContentDelta, OutputParser, Part, ToolArgumentsDelta, ToolCallStart

_NAME_GOES_ON = re.compile(r"[A-Za-z0-9_-]{2}")


class ForcedCalls:
    """Finds the calls of an answer that has nothing but calls.

    max_tokens or a stop string may cut it anywhere. Text outside of arguments is then the beginning or the
    end of a call: it is no content, and begins a call without arguments where it tells which one.

    calls: the parser of the calls.
    opening: the text before the first call.
    begins: the text of a call up to its arguments, by the name of its tool.
    name_at: where the name is in each of these.
    new_id: makes the id of a call.
    """

    def __init__(
        self,
        calls: OutputParser,
        opening: str,
        begins: Mapping[str, str],
        name_at: int,
        new_id: Callable[[], str],
    ) -> None:
        self._calls = calls
        self._opening = opening
        self._begins = begins
        self._name_at = name_at
        self._new_id = new_id
        self._num_calls = 0
        self._rest = ""  # text after the last call that is in no call
        self._is_begun = self._is_cut = False

    @property
    def has_whole_calls(self) -> bool:
        """Whether there is a call, and the arguments of all calls are whole."""
        return self._calls.has_whole_calls and not self._is_cut

    def feed(self, text: str) -> list[Part]:
        """Take more text. Return the parts that are certain."""
        self._is_begun = self._is_begun or bool(text)
        return self._without_rest(self._calls.feed(text))

    def finish(self) -> list[Part]:
        """End the text. Return the remaining parts."""
        parts = self._without_rest(self._calls.finish())
        if any(isinstance(part, ToolCallStart) for part in parts):
            # The parser took the end of the text for a call without arguments.
            self._is_cut = True
            return [part for part in parts if not isinstance(part, ToolArgumentsDelta)]
        name = self._cut_name()
        if name is not None:
            self._is_cut = True
            parts.append(ToolCallStart(self._num_calls, self._new_id(), name))
        return parts

    def _without_rest(self, parts: list[Part]) -> list[Part]:
        """Keep text outside of calls, unless arguments have stopped being JSON: then it is content."""
        kept = list[Part]()
        for part in parts:
            if isinstance(part, ToolCallStart):
                self._num_calls += 1
                self._rest = ""
            if isinstance(part, ContentDelta) and (not self._num_calls or self._calls.has_whole_calls):
                self._rest += part.text
            else:
                kept.append(part)
        return kept

    def _cut_name(self) -> str | None:
        """Return the tool whose call the rest begins; None if it begins none, or does not tell which."""
        names = [*self._begins]
        length = 0
        opening = "" if self._num_calls else self._opening
        for start in range(len(self._rest)):
            text = self._rest[start:]
            found = self._begun_by(text, opening) or self._begun_by(text, "")
            if found:
                names = found
                length = len(text)
                break
        if len(names) != 1 or not self._is_begun:
            return None
        # A first call must come. The rest of a later one may be the end of the call before it.
        return names[0] if not self._num_calls or length >= max(self._name_at, 1) else None

    def _begun_by(self, text: str, opening: str) -> list[str]:
        """Return the tools whose call a text begins, or goes on with after its name."""
        begins = {name: opening + begin for name, begin in self._begins.items()}
        return [
            name
            for name, begin in begins.items()
            if begin.startswith(text)
            or (text.startswith(begin) and not _NAME_GOES_ON.match(text, len(begin) - 1))
        ]
