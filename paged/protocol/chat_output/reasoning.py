"""ReasoningMachine: separates reasoning in <think> tags from the answer."""

from __future__ import annotations

from .machine import Step, TextMachine
from .parts import ContentDelta, OutputParser, Part, ReasoningDelta

THINK = "<think>"
END_THINK = "</think>"


class ReasoningMachine(TextMachine):
    """Finds reasoning at the beginning of a text; the rest goes through the parser of the answer.

    Blanks around the tags are neither reasoning nor answer.

    is_inside: whether the text begins inside of the reasoning, as after a prompt that ends in <think>.
    answer: the parser of the rest; None if all of it is content.
    """

    def __init__(self, answer: OutputParser | None, *, is_inside: bool) -> None:
        self._answer = answer
        self._is_inside = is_inside
        self._pending_blanks = ""
        super().__init__()

    @property
    def has_whole_calls(self) -> bool:
        """Whether there is a call, and the arguments of all calls are whole."""
        return self._answer is not None and self._answer.has_whole_calls

    def finish(self) -> list[Part]:
        """End the text. Return the remaining parts."""
        return super().finish() + ([] if self._answer is None else self._answer.finish())

    def _run(self) -> Step:
        self._hold()
        yield from self._blanks()
        if (yield from self._literal(THINK)) or self._is_inside:
            self._held = None
            yield from self._blanks()
            yield from self._reasoning()
            yield from self._blanks()
        else:
            self._go_back()
        while True:
            self._emit_answer(self._text[self._at :])
            self._at = len(self._text)
            if self._ended:
                return
            yield

    def _reasoning(self) -> Step:
        """Read reasoning and its end tag."""
        yield from self._read_to([END_THINK], self._emit_reasoning)
        self._at += len(END_THINK) if self._at < len(self._text) else 0

    def _emit_reasoning(self, text: str) -> None:
        """Emit reasoning. Blanks at the end wait for what follows."""
        text = self._pending_blanks + text
        settled = text.rstrip()
        self._pending_blanks = text[len(settled) :]
        if settled:
            self._parts.append(ReasoningDelta(settled))

    def _emit_answer(self, text: str) -> None:
        if self._answer is not None:
            self._parts += self._answer.feed(text)
        elif text:
            self._parts.append(ContentDelta(text))


def ends_in_reasoning(prompt: str, *, continues_answer: bool = False) -> bool:
    """Return whether an answer to this prompt begins inside of reasoning, because the prompt has begun it.

    continues_answer: whether the prompt ends with the beginning of an answer, which may hold reasoning.
    """
    if continues_answer:
        return prompt.rfind(THINK) > prompt.rfind(END_THINK)
    return prompt.rstrip().endswith(THINK)
