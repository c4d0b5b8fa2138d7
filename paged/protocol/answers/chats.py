"""Responses of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...requests.request import CompletionOutput, RequestOutput
from .chunks import Chunks, Form, Head
from .places import chat_places, prompt_places
from .usage import Usage, usage_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm(Form):
    """The form of a chat.

    role: of the answer.
    prompt_logprobs: whether the log-probabilities of the prompt are returned.
    prompt_text: whether the rendered conversation is returned.
    """

    role: str = "assistant"
    prompt_logprobs: bool = False
    prompt_text: bool = False

    def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Return the fields of a body about the prompt."""
        fields: dict[str, Any] = {}
        if self.prompt_logprobs and output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_places(output.prompt_logprobs)
        if self.token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        if self.prompt_text:
            fields["prompt_text"] = output.prompt
        return fields

    def logprobs_of(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """Return the log-probabilities of an output or a delta; None unless requested."""
        if completion.logprobs is None:
            return None
        return chat_places(completion.logprobs, self.num_top, as_ids=self.as_ids)


def chat_body(outputs: Sequence[RequestOutput], head: Head, form: ChatForm) -> dict[str, Any]:
    """Return a chat.completion."""
    (output,) = outputs
    choices = []
    for completion in output.outputs:
        choice = {
            "index": completion.index,
            "message": {"role": form.role, "content": completion.text},
            "logprobs": form.logprobs_of(completion),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if form.token_ids:
            choice["token_ids"] = [*completion.token_ids]
        choices.append(choice)
    body = {**head.as_json(), "choices": choices, "usage": usage_of(outputs)}
    return body | form.prompt_fields(output)


class ChatChunks(Chunks):
    """The chunks of a streamed chat.completion."""

    form: ChatForm

    def __init__(self, head: Head, form: ChatForm) -> None:
        super().__init__(head, form, Usage())
        self._is_begun = False

    def start(self) -> list[dict[str, Any]]:
        """Return the role of each choice."""
        delta = {"role": self.form.role, "content": ""}
        return [self.chunk(self._choice(i, delta)) for i in range(self.form.n)]

    def before(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:  # noqa: ARG002
        """Return what belongs to the prompt."""
        if self._is_begun:
            return []
        self._is_begun = True
        fields = self.form.prompt_fields(output)
        return [self.chunk(self._choice(0, {}), **fields)] if fields else []

    def chunks_of(self, choice: int, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Return the chunk of a delta, or none while its text is held back."""
        form, reason, text = self.form, completion.finish_reason, completion.text
        logprobs = form.logprobs_of(completion) if completion.token_ids else None
        if not (text or reason is not None or logprobs or form.token_ids):
            return []
        delta = {"content": text} if text else {}
        made = self._choice(choice, delta, logprobs, reason, completion.stop_reason)
        if form.token_ids:
            made["token_ids"] = [*completion.token_ids]
        return [self.chunk(made)]

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
