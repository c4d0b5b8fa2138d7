"""TypedEvents: the events of an answer whose parts are items or blocks, each event with a type."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from ...chat.answer_reader import AnswerReader
from ...chat.parts import ContentDelta, Part
from ...requests.request import CompletionOutput, RequestOutput
from .chats import ChatForm
from .chunks import Chunks, Head
from .usage import Usage


class TypedEvents(Chunks):
    """Makes the events of a streamed answer to a conversation, and from them the whole answer.

    completion: the last output, with its finish_reason; None until it arrives.
    count_tokens: returns the number of tokens in a text.
    """

    NAMES_EVENTS: ClassVar[bool] = True
    form: ChatForm

    def __init__(self, head: Head, form: ChatForm, count_tokens: Callable[[str], int]) -> None:
        super().__init__(head, form, Usage(tells_cached=form.cached_tokens))
        self.head = head
        self.completion: CompletionOutput | None = None
        self.count_tokens = count_tokens
        self._reader: AnswerReader | None = None

    def chunks_of(self, choice: int, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Return the events of a delta."""
        if completion.finish_reason is not None:
            self.completion = completion
        if self.form.new_reader is None:
            return self.take(ContentDelta(completion.text)) if completion.text else []
        if self._reader is None:
            self._reader = self.form.new_reader()
        parts = self._reader.read(completion)
        self.usage.add_parts(choice, parts)
        return [event for part in self.form.shown(parts) for event in self.take(part)]

    @property
    def has_whole_calls(self) -> bool:
        """Whether the answer has a call, and the arguments of all its calls are complete."""
        return self._reader is not None and self._reader.has_whole_calls

    @abstractmethod
    def take(self, part: Part) -> list[dict[str, Any]]:
        """Return the events for a part of the answer."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the whole answer. Call this after `finish`."""

    def whole_of(self, output: RequestOutput) -> dict[str, Any]:
        """Return the whole answer for one finished output."""
        self.start(0, output)
        self.add(0, output)
        self.finish()
        return self.whole()
