"""HarmonyParser: the messages of one answer of gpt-oss, each with a channel."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator

from .machine import CallMachine, Step
from .parts import ReasoningDelta

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
TOKENS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
ROLE = f"{START}assistant"
BETWEEN_TEXTS = "\n\n"  # two messages that are both content, or both reasoning
MAX_HEADER = 512  # characters; a longer one is content
_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"(?<!\w)to=([^\s<]+)")
_FUNCTIONS = "functions."
_TO = " to="  # a recipient, which may come before the channel


class HarmonyParser(CallMachine):
    """Finds reasoning (channel analysis), calls (recipient functions.NAME) and content (all else).

    A message to any other recipient becomes content, header included, so that nothing is lost. A header that
    the end of the answer cuts off is dropped.

    prompt: the prompt; the answer may begin in it.
    is_split: whether reasoning is separated; else it becomes content.
    keeps_header: whether a header that is cut off becomes content instead, as in an answer that must be a
        call.
    """

    def __init__(
        self,
        names: Collection[str],
        new_id: Callable[[], str],
        prompt: str = "",
        *,
        is_split: bool = True,
        keeps_header: bool = False,
    ) -> None:
        self._is_split = is_split
        self._keeps_header = keeps_header
        self._has_content = self._has_reasoning = False
        self._blanks_of_reasoning = ""
        super().__init__(names, new_id)
        _, role, begun = prompt.rpartition(ROLE)
        if role and begun:
            self.feed(begun)

    def _run(self) -> Step:
        while (yield from self.next_character()):
            yield from self.literal(ROLE)
            if (yield from self.literal(START)):  # of another role, which is none of ours
                self.emit_content(START)
            self.hold()
            header = yield from self._header()
            if header is None and self.held is None:
                return  # the answer was cut
            if header is None:
                self.go_back()
                yield from self._text(is_reasoning=False)
            else:
                yield from self._message(header)
        self.end_content()

    def _header(self) -> Generator[None, None, str | None]:
        """Read a header up to its end, which is read too. Return it; None if there is none.

        A header that was cut is read, and no text is held back any more.
        """
        begin = ""
        for text in (CHANNEL, MESSAGE, _TO):
            if not begin and (yield from self.literal(text)):
                begin = text
        if begin == MESSAGE:
            return ""
        if not begin:
            if self.text[self.at :] and any(map(self.is_cut_in, (CHANNEL, MESSAGE))):
                self._cut_header()
            return None
        marks = (MESSAGE, START, *ENDS)
        while True:
            found = [(at, mark) for mark in marks if (at := self.text.find(mark, self.at)) >= 0]
            end, mark = min(found, default=(len(self.text), ""))
            header = begin + self.text[self.at : end]
            if mark or self.ended or len(header) > MAX_HEADER:
                break
            yield
        if mark == MESSAGE and len(header) <= MAX_HEADER:
            self.at = end + len(mark)
            return header
        if not mark and len(header) <= MAX_HEADER and (begin == CHANNEL or _FUNCTIONS in header):
            self._cut_header()
        return None

    def _cut_header(self) -> None:
        """Drop the rest of the text, or leave it to be content."""
        if self._keeps_header:
            return
        self.at = len(self.text)
        self.held = None

    def _message(self, header: str) -> Step:
        """Read the message behind a header."""
        channel = _CHANNEL.search(header)
        recipient = _RECIPIENT.search(header)
        name = "" if recipient is None else recipient[1].removeprefix(_FUNCTIONS)
        if recipient is None:
            self.held = None
            yield from self._text(is_reasoning=channel is not None and channel[1] == "analysis")
        elif not recipient[1].startswith(_FUNCTIONS) or name not in self.names:
            self.go_back()
            yield from self._text(is_reasoning=False)
        else:
            yield from self._call(name)

    def _call(self, name: str) -> Step:
        """Read the arguments of a call, or content if they are none."""
        yield from self.blanks()
        character = yield from self.next_character()
        if character == "{":
            self.begin_call(name)
            yield from self.stream_arguments()
        elif not character:
            self.begin_call(name)  # cut before its arguments
        else:
            for end in ENDS:
                if (yield from self.literal(end)):
                    self.begin_call(name)
                    self.emit_rest("{}")
                    return
            self.go_back()
        yield from self._text(is_reasoning=False)

    def _text(self, *, is_reasoning: bool) -> Step:
        """Read the text of a message and its end."""
        is_reasoning = is_reasoning and self._is_split
        if is_reasoning and self._has_reasoning:
            self._blanks_of_reasoning = BETWEEN_TEXTS
        elif not is_reasoning and self._has_content:
            self.emit_content(BETWEEN_TEXTS)
        emit = self._emit_reasoning if is_reasoning else self._emit_text
        marker = yield from self.read_to([START, *ENDS], emit)
        if marker != START:
            self.at += len(marker)
        self._blanks_of_reasoning = ""

    def _emit_text(self, text: str) -> None:
        self._has_content = self._has_content or bool(text)
        self.emit_content(text)

    def _emit_reasoning(self, text: str) -> None:
        """Emit reasoning without the blanks around it."""
        text = self._blanks_of_reasoning + (text if self._has_reasoning else text.lstrip())
        settled = text.rstrip()
        self._blanks_of_reasoning = text[len(settled) :]
        if settled:
            self._has_reasoning = True
            self.parts.append(ReasoningDelta(settled))
