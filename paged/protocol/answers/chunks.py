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
    """What a response contains besides the text.

    n: number of choices of each prompt.
    num_prompts: number of prompts.
    decoding: converts tokens to text.
    num_top: how many of the most likely tokens a chat lists at each position.
    as_ids: whether log-probabilities name tokens by their ids.
    token_ids: whether to return the token ids of prompts and outputs.
    include_usage: whether a stream ends with the counts of tokens.
    continuous_usage: whether each chunk contains the counts so far.
    cached_tokens: whether to report how many prompt tokens were in the prefix cache.
    prompt_logprobs: whether to return the log-probabilities of prompts, in a separate field.
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
        """Return the response's fields about a prompt."""
        fields: dict[str, Any] = {}
        if self.prompt_logprobs and output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_places(output.prompt_logprobs)
        if self.token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        return fields


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that all chunks of a response share.

    created: seconds since 1970.
    """

    id: str
    object: str
    created: int
    model: str

    def as_json(self) -> dict[str, Any]:
        """Return the fields as they appear in a body."""
        return {"id": self.id, "object": self.object, "created": self.created, "model": self.model}


class Chunks(ABC):
    """Makes the chunks of one streamed response from outputs with deltas.

    Send the chunks of `start` before the first output, of `add` for each output, and of `finish`
    after the last. If an output failed (`failure_of`), do not add it: send its error as the last event.

    NAMES_EVENTS: whether each event has the name of its type. The last event then says that the answer has
    ended.
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
        """Return the chunks that precede the first output, which must be passed to `add` next."""
        self.usage.add_prompt(index, output)
        return self.opening()

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks that precede all outputs."""
        return []

    def add(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the chunks for an output of the prompt number `index`."""
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

    @property
    def has_ended(self) -> bool:
        """Whether the answer ends here, although the engine would go on."""
        return False

    def finish(self) -> list[dict[str, Any]]:
        """Return the last chunks, which follow the last output."""
        if not self.form.include_usage:
            return []
        return [self.usage_chunk()]

    def usage_chunk(self, count_tokens: Callable[[str], int] | None = None) -> dict[str, Any]:
        """Return the chunk with the counts of tokens.

        count_tokens: passed to `Usage.as_json`.
        """
        return {**self._head, "choices": [], "usage": self.usage.as_json(count_tokens)}

    def error(self, status: int, body: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Return the event that ends the stream with an error.

        body: the body that this error would have as a response of its own.
        """
        return body

    def before(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:  # noqa: ARG002
        """Return the chunks about the prompt number `index`, which precede the chunks of its choices."""
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
