"""Responses of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...chat.answer_reader import AnswerReader
from ...chat.parts import ChatOutput, Part, ReasoningDelta, delta_of
from ...requests.request import CompletionOutput, RequestOutput
from .chunks import Chunks, Form, Head
from .places import chat_places
from .usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm(Form):
    """What the response to a chat contains.

    role: the role of the answer.
    prompt_text: whether the response includes the rendered conversation.
    new_reader: makes an `AnswerReader` for an answer; None if answers are plain content.
    include_reasoning: whether the response includes reasoning.
    count_tokens: returns the number of tokens in a text.
    """

    role: str = "assistant"
    prompt_text: bool = False
    new_reader: Callable[[], AnswerReader] | None = None
    include_reasoning: bool = True
    count_tokens: Callable[[str], int] = len

    def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Return the response's fields about the prompt."""
        text = {"prompt_text": output.prompt} if self.prompt_text else {}
        return (
            Form.prompt_fields(self, output) | text
        )  # a class with slots that dataclass made has no super()

    def shown(self, parts: Iterable[Part]) -> list[Part]:
        """Return the parts of an answer that the response includes."""
        if self.include_reasoning:
            return [*parts]
        return [part for part in parts if not isinstance(part, ReasoningDelta)]

    def logprobs_of(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """Return the log-probabilities of an output or a delta; None unless they were requested."""
        if completion.logprobs is None:
            return None
        return chat_places(completion.logprobs, self.num_top, self.decoding, as_ids=self.as_ids)


def chat_body(outputs: Sequence[RequestOutput], head: Head, form: ChatForm) -> dict[str, Any]:
    """Return a chat.completion."""
    (output,) = outputs
    choices = []
    usage = Usage(tells_cached=form.cached_tokens)
    usage.add(0, output)
    for completion in output.outputs:
        message, reason = _message(completion, form, usage)
        choice = {
            "index": completion.index,
            "message": message,
            "logprobs": form.logprobs_of(completion),
            "finish_reason": reason,
            "stop_reason": completion.stop_reason,
        }
        if form.token_ids:
            choice["token_ids"] = [*completion.token_ids]
        choices.append(choice)
    body = {**head.as_json(), "choices": choices, "usage": usage.as_json(form.count_tokens)}
    return body | form.prompt_fields(output)


def _message(completion: CompletionOutput, form: ChatForm, usage: Usage) -> tuple[dict[str, Any], str | None]:
    """Return the message of an answer, and its finish_reason."""
    if form.new_reader is None:
        return {"role": form.role, "content": completion.text}, completion.finish_reason
    reader = form.new_reader()
    parts = reader.read(completion)
    usage.add_parts(completion.index, parts)
    message = ChatOutput.of(form.shown(parts)).message() | {"role": form.role}
    return message, _reason(completion, reader)


def _reason(completion: CompletionOutput, reader: AnswerReader) -> str | None:
    """Return the finish_reason: an answer that stops after whole calls asks for their results."""
    is_call = completion.finish_reason == "stop" and reader.has_whole_calls
    return "tool_calls" if is_call else completion.finish_reason


class ChatChunks(Chunks):
    """The chunks of a streamed chat.completion."""

    form: ChatForm

    def __init__(self, head: Head, form: ChatForm) -> None:
        super().__init__(head, form, Usage(tells_cached=form.cached_tokens))
        self._is_begun = False
        self._readers: dict[int, AnswerReader] = {}

    def opening(self) -> list[dict[str, Any]]:
        """Return the first chunk of each choice, with its role."""
        delta = {"role": self.form.role, "content": ""}
        return [self.chunk(self._choice(i, delta)) for i in range(self.form.n)]

    def before(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:  # noqa: ARG002
        """Return the chunks about the prompt, which precede the chunks of the answers."""
        if self._is_begun:
            return []
        self._is_begun = True
        fields = self.form.prompt_fields(output)
        return [self.chunk(self._choice(0, {}), **fields)] if fields else []

    def chunks_of(self, choice: int, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Return the chunks of a delta; an empty list while its text is held back."""
        form = self.form
        deltas, reason = self._parsed(choice, completion)
        logprobs = form.logprobs_of(completion) if completion.token_ids else None
        if not deltas:
            if not (reason is not None or logprobs or form.token_ids):
                return []
            deltas = [{}]
        *early, last = deltas
        chunks = [self.chunk(self._choice(choice, delta)) for delta in early]
        made = self._choice(choice, last, logprobs, reason, completion.stop_reason)
        if form.token_ids:
            made["token_ids"] = [*completion.token_ids]
        return [*chunks, self.chunk(made)]

    def _parsed(self, choice: int, completion: CompletionOutput) -> tuple[list[dict[str, Any]], str | None]:
        """Return the deltas of a text, and the finish_reason if it is the last."""
        form = self.form
        reason = completion.finish_reason
        if form.new_reader is None:
            return [{"content": completion.text}] if completion.text else [], reason
        reader = self._readers.get(choice)
        if reader is None:
            reader = self._readers[choice] = form.new_reader()
        parts = reader.read(completion)
        self.usage.add_parts(choice, parts)
        return [delta_of(part) for part in form.shown(parts)], _reason(completion, reader)

    def finish(self) -> list[dict[str, Any]]:
        """Return the last chunks, which follow the last output."""
        if not self.form.include_usage:
            return []
        return [self.usage_chunk(self.form.count_tokens)]

    @staticmethod
    def _choice(
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        return choice
