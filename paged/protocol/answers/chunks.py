"""Chunks: the events of a streamed response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...requests.request import CompletionOutput, RequestOutput
from .places import Decoding, prompt_places
from .usage import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a response holds besides the text.

    n: number of choices of each prompt.
    num_prompts: number of prompts.
    decoding: how tokens become text.
    num_top: how many of the most likely tokens a chat lists at each position.
    as_ids: whether log-probabilities name tokens by their ids.
    token_ids: return the ids of the tokens of prompts and outputs.
    include_usage: end a stream with the counts of tokens.
    continuous_usage: put the counts so far into each chunk.
    cached_tokens: say how many tokens of the prompts were in the prefix cache.
    prompt_logprobs: return the log-probabilities of the prompts in a field of their own.
    """

    n: int = 1
    num_prompts: int = 1
    decoding: Decoding = field(default_factory=Decoding)
    num_top: int = 0
    as_ids: bool = False
    token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    cached_tokens: bool = False
    prompt_logprobs: bool = False

    def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Return the fields of a response about a prompt."""
        fields: dict[str, Any] = {}
        if self.prompt_logprobs and output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_places(output.prompt_logprobs)
        if self.token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        return fields


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that all chunks of a response share. `created` is in seconds since 1970."""

    id: str
    object: str
    created: int
    model: str

    def as_json(self) -> dict[str, Any]:
        """Return the fields of a body."""
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}


class Chunks(ABC):
    """The chunks of one streamed response, made from outputs with deltas.

    Send `start` with the first output, `add` of each output, and `finish` after the last. An output that
    failed (`failure_of`) is not added: its error is the last event.

    NAMES_EVENTS: whether each event is named by its type; the last event then says that the answer has ended.
    ENDS_WITH_DONE: whether [DONE] follows plain events.
    IS_LINES: whether the chunks are sent as lines of JSON.
    """

    NAMES_EVENTS: ClassVar[bool] = False
    IS_LINES: ClassVar[bool] = False
    ENDS_WITH_DONE: ClassVar[bool] = True

    def __init__(self, head: Head, form: Form, usage: Usage) -> None:
        self.form = form
        self.usage = usage
        self._head = head.as_json()
        self._ended: set[int] = set()  # choices whose finish_reason was sent

    def start(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the first chunks. They precede those of the first output, which is passed to `add` next."""
        self.usage.add_prompt(index, output)
        return self.opening()

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks that precede all outputs."""
        return []

    def add(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the chunks of an output of the prompt with this index."""
        self.usage.add(index, output)
        chunks = self.before(index, output)
        for completion in output.outputs:
            choice = index * self.form.n + completion.index
            if choice in self._ended:  # its siblings go on
                continue
            if completion.finish_reason is not None:
                self._ended.add(choice)
            chunks += self.chunks_of(choice, completion)
        return chunks

    def finish(self) -> list[dict[str, Any]]:
        """Return the last chunks, after the last output."""
        if not self.form.include_usage:
            return []
        return [self.usage_chunk()]

    def usage_chunk(self, count_tokens: Callable[[str], int] | None = None) -> dict[str, Any]:
        """Return the chunk with the counts of tokens.

        count_tokens: see `Usage.as_json`.
        """
        return {**self._head, "choices": [], "usage": self.usage.as_json(count_tokens)}

    def error(self, status: int, body: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Return the event that ends the stream with an error.

        body: the body of the same error as a response of its own.
        """
        return body

    def before(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:  # noqa: ARG002
        """Return the chunks about the prompt with this index. They precede the chunks of its choices."""
        return []

    @abstractmethod
    def chunks_of(self, choice: int, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Return the chunks of a delta."""

    def chunk(self, choice: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Return a chunk with one choice."""
        chunk = {**self._head, "choices": [choice], **more}
        if self.form.continuous_usage:
            chunk["usage"] = self.usage.as_json()
        elif self.form.include_usage:
            chunk["usage"] = None  # as in OpenAI's API
        return chunk
