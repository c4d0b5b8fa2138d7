"""TemplateMachine: parts of an answer as the checkpoint's own response_template describes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from .parts import ContentDelta, Part, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from .response_template import ResponseTemplate
from .tools import Tool


class TemplateMachine:
    """Turns the events of transformers into parts.

    Content and reasoning arrive piece by piece, a call when it is complete, as the template may rewrite it. A
    call that is not as the template says, or of another tool, is content without its first tag.
    """

    def __init__(
        self, template: ResponseTemplate, prompt: str, tools: Sequence[Tool], new_id: Callable[[], str]
    ) -> None:
        self._template = template
        self._new_id = new_id
        self._names = frozenset(tool.name for tool in tools)
        functions = ({"name": tool.name, "parameters": tool.parameters} for tool in tools)
        self._tools = [{"type": "function", "function": function} for function in functions]
        self._parser = template.new_parser(prompt, self._tools)
        self._raw: list[str] | None = None  # the text of the call that is open
        # of the region that is open
        self._is_blank = True
        self._pending_blanks = ""
        self._parts = list[Part]()
        self._num_calls = 0

    @property
    def has_whole_calls(self) -> bool:
        """Whether there is a call. One that was cut is content."""
        return self._num_calls > 0

    def feed(self, text: str) -> list[Part]:
        """Take more text. Return the parts that are certain."""
        for character in text:  # one at a time, so that an error costs no events before it
            self._take(character, partial(self._parser.feed, character))
        return self._taken()

    def finish(self) -> list[Part]:
        """End the text. Return the remaining parts."""
        self._take("", lambda: self._parser.finalize()[1])
        return self._taken()

    def _taken(self) -> list[Part]:
        parts = self._parts
        self._parts = []
        return parts

    def _take(self, character: str, step: Callable[[], list[dict[str, Any]]]) -> None:
        if self._raw is not None:
            self._raw.append(character)
        try:
            events = step()
        except Exception:  # of any kind, as the checkpoint says what to do with the text
            self._return_call([character] if self._raw is None else self._raw)
            self._parser = self._template.new_parser("", self._tools)
            return
        is_opened = False
        for event in events:
            field = event["field"]
            is_call = event["field"] == "tool_calls"
            match event["type"]:
                case "region_open":
                    self._is_blank = True
                    self._pending_blanks = ""
                    self._raw, is_opened = ([], True) if is_call else (None, False)
                case "region_chunk" if not is_call:
                    self._text(field, event["text"])
                case "region_chunk" if is_opened and self._raw is not None:
                    self._raw.append(event["text"])
                case "region_close" if is_call:
                    self._close_call(event["value"])

    def _text(self, field: str, text: str) -> None:
        """Take text of a region. Blanks at its beginning and its end are dropped."""
        text = self._pending_blanks + (text.lstrip() if self._is_blank else text)
        settled = text.rstrip()
        self._pending_blanks = text[len(settled) :]
        if settled:
            self._is_blank = False
            self._parts.append(ContentDelta(settled) if field == "content" else ReasoningDelta(settled))

    def _close_call(self, value: Any) -> None:
        calls = [_call(call) for call in (value if isinstance(value, list) else [value])]
        if not all(call is not None and call[0] in self._names for call in calls):
            self._return_call(self._raw or [])
            return
        for name, arguments in filter(None, calls):
            self._parts.append(ToolCallStart(self._num_calls, self._new_id(), name))
            self._parts.append(ToolArgumentsDelta(self._num_calls, arguments))
            self._num_calls += 1
        self._raw = None

    def _return_call(self, raw: Sequence[str]) -> None:
        """Return the text of what is no call as content."""
        self._raw = None
        if text := "".join(raw):
            self._parts.append(ContentDelta(text))


def _call(value: Any) -> tuple[str, str] | None:
    """Return the name and the arguments of a call that transformers has read; None if it is wrong."""
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    try:
        given = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
        text = json.dumps(given, ensure_ascii=False, allow_nan=False)
        text.encode()  # may have lone surrogates
    except (TypeError, ValueError, RecursionError):
        return None
    return (name, text) if isinstance(name, str) and isinstance(given, Mapping) else None
