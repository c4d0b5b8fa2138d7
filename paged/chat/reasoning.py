"""ReasoningMachine: separates reasoning from the answer behind it."""

from __future__ import annotations

from collections.abc import Generator

from .formats import ReasoningSyntax
from .machine import Step, TextMachine
from .parts import ContentDelta, OutputParser, Part, ReasoningDelta


class ReasoningMachine(TextMachine):
    """Finds reasoning at the beginning of a text; the rest goes through the parser of the answer.

    Blanks around the marks are neither reasoning nor answer.

    is_inside: whether the text begins inside reasoning, as after a prompt that ends in <think>.
    answer: the parser of the rest; None if the rest is all content.
    """

    def __init__(self, syntax: ReasoningSyntax, answer: OutputParser | None, *, is_inside: bool) -> None:
        self._syntax = syntax
        self._answer = answer
        self._is_inside = is_inside
        self._pending_blanks = ""
        self._is_over = False  # whether all that follows is the answer's
        super().__init__()

    @property
    def has_whole_calls(self) -> bool:
        """Whether the answer has a call, and the arguments of all its calls are complete."""
        return self._answer is not None and self._answer.has_whole_calls

    def feed(self, text: str) -> list[Part]:
        """Take more text. Return the parts of the answer that are certain."""
        if self._is_over and self._answer is not None:
            return self._answer.feed(text)
        return super().feed(text)

    def finish(self) -> list[Part]:
        """End the text. Return the remaining parts."""
        return super().finish() + ([] if self._answer is None else self._answer.finish())

    def _run(self) -> Step:
        self.hold()
        yield from self.blanks()
        is_begun = False
        for begin in self._syntax.begins:
            is_begun = is_begun or (yield from self.literal(begin))
        ends = list[str]()
        if is_begun or self._is_inside:
            self.held = None
            yield from self.blanks()
            yield from self._reasoning()
            yield from self.blanks()
            ends = yield from self._answer_tag()
        else:
            self.go_back()
        self._is_over = not ends
        while marker := (yield from self.read_to(ends, self._emit_answer)):
            self.at += len(marker)
            ends = []
            yield from self.blanks()

    def _reasoning(self) -> Step:
        """Read reasoning and its end."""
        marker = yield from self.read_to(self._syntax.ends, self._emit_reasoning)
        self.at += len(marker)

    def _answer_tag(self) -> Generator[None, None, list[str]]:
        """Read the text before the answer. Return the texts that end it."""
        begin, end = self._syntax.answer
        if not begin or not (yield from self.literal(begin)):
            return []
        yield from self.blanks()
        return [end]

    def _emit_reasoning(self, text: str) -> None:
        """Emit reasoning. Blanks at the end wait for what follows."""
        text = self._pending_blanks + text
        settled = text.rstrip()
        self._pending_blanks = text[len(settled) :]
        if settled:
            self.parts.append(ReasoningDelta(settled))

    def _emit_answer(self, text: str) -> None:
        if self._answer is not None:
            self.parts += self._answer.feed(text)
        elif text:
            self.parts.append(ContentDelta(text))


def ends_in_reasoning(syntax: ReasoningSyntax, prompt: str, *, continues_answer: bool = False) -> bool:
    """Return whether the prompt opens reasoning that the answer continues.

    continues_answer: whether the prompt ends with the beginning of an answer. That beginning may contain
        reasoning.
    """
    begins = [text.strip() for text in syntax.begins]
    if continues_answer:
        return max(map(prompt.rfind, begins)) > max(map(prompt.rfind, syntax.ends))
    return prompt.rstrip().endswith(tuple(begins))
