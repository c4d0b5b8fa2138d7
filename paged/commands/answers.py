"""Answers of a conversation in the terminal: from an engine in this process, or from a server."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..base.errors import PagedError
from ..options.sampling_params import MAX_SEED, SamplingParams
from . import common
from .api_client import ApiClient, ApiExchange, part_of, reasoning_of
from .chat_params import ChatParams
from .common import CliError, FailedError

if TYPE_CHECKING:
    from ..engine.engine import LLMEngine
    from ..options.lora_request import LoRARequest
    from ..requests.request import CompletionOutput, Prompt

Messages = Sequence[Mapping[str, Any]]


class ChatAnswer(NamedTuple):
    """The content of an answer so far, and the reasoning before it."""

    content: str = ""
    reasoning: str = ""


class Answers(Protocol):
    """Answers a conversation, one turn at a time.

    params: the sampling parameters of the next answer.
    """

    params: ChatParams

    def stream(self, messages: Messages) -> Generator[ChatAnswer]:
        """Yield the answer so far after each new part. Raises PagedError.

        Closing the iterator aborts the answer.
        """

    def give_up(self) -> None:
        """Make `stream` end soon. May be called by a signal handler."""

    def report_end(self) -> None:
        """Say why the last answer ended, if it was cut off. Raises CliError if it failed."""


class EngineAnswers:
    """Answers of an engine in this process.

    given: the arguments of SamplingParams that the user gave.
    template: the arguments chat_template and chat_template_kwargs of `ChatTemplates.render`.
    """

    def __init__(self, engine: LLMEngine, given: Mapping[str, Any], template: Mapping[str, Any]) -> None:
        from ..chat.local import LocalChat

        self._engine = engine
        self._chat = LocalChat(engine.text, template["chat_template"])
        self.params = ChatParams(given, checkpoint=engine.sampling_defaults, chat=engine.text.chat_defaults)
        self._template = template
        self.lora_request: LoRARequest | None = None
        self._num_requests = 0  # seeds are derived from it, so a retry gets another one
        self._completion: CompletionOutput | None = None

    def stream(self, messages: Messages) -> Generator[ChatAnswer]:
        """Yield the answer so far after each step that adds to it."""
        self._completion = None
        prompt = self._engine.render_chat(messages, **self._template)
        request_id = self._request(prompt)
        parts = self._chat.growing(str(prompt["prompt"]))
        answer = ChatAnswer()
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    self._completion = output.outputs[0]
                    answer = ChatAnswer(*parts.read(self._completion))
                yield answer
        finally:
            self._engine.abort_request(request_id)

    def give_up(self) -> None:
        """Do nothing. The current step must not be interrupted, and it ends soon."""

    def report_end(self) -> None:
        """Raise FailedError if the engine failed. Print a warning if the answer was cut off."""
        completion = self._completion
        if completion is None:
            return
        if completion.finish_reason == "error":
            raise FailedError(str(completion.stop_reason))
        if completion.finish_reason == "abort":
            common.complain(str(completion.stop_reason))
        elif completion.finish_reason == "length" and len(completion.token_ids) != self._sampling.max_tokens:
            common.complain(f"the answer fills the context; {self._way_out()}")

    @property
    def _sampling(self) -> SamplingParams:
        return self._chat.params_of(self._engine.params_of(self.params.values, max_tokens=None))

    def _request(self, prompt: Prompt) -> str:
        """Add the request for the next answer. Return its id."""
        request_id = str(self._num_requests)
        self._num_requests += 1
        try:
            self._engine.add_request(request_id, prompt, self._sampling, lora_request=self.lora_request)
        except PagedError as error:
            # Only these errors go away with a shorter conversation. Those of an image begin with its place.
            if error.param == "prompt" and not str(error).startswith("messages["):
                raise CliError(f"{error}; {self._way_out()}") from error
            raise
        return request_id

    def _way_out(self) -> str:
        return (
            f"the context has {self._engine.max_model_len} tokens: /reset forgets the conversation, "
            "--max-model-len and --num-blocks may make it larger"
        )


class ServerAnswers:
    """Answers of a server with OpenAI's API.

    fields: further fields of every request body, besides messages and sampling parameters.
    params: the sampling parameters.
    seed: the seed of the first answer; each further answer adds 1, so that a retry differs. None lets the
        server choose.
    """

    def __init__(
        self, client: ApiClient, fields: Mapping[str, Any], params: ChatParams, seed: int | None
    ) -> None:
        self._client = client
        self.params = params
        self._fields = fields
        self._seed = seed
        self._num_requests = 0
        self._exchange: ApiExchange | None = None
        self._is_given_up = False
        self._finish_reason: str | None = None

    def stream(self, messages: Messages) -> Generator[ChatAnswer]:
        """Yield the answer so far after each event that adds to it. Raises ApiError."""
        self._is_given_up = False
        self._finish_reason = None
        sampling = body_fields(self.params.values)
        body = {**self._fields, **sampling, "messages": messages, "stream": True}
        if self._seed is not None:
            body["seed"] = (self._seed + self._num_requests) % (MAX_SEED + 1)
        self._num_requests += 1
        self._exchange = self._client.request("POST", "/chat/completions", body)
        text = reasoning = ""
        try:
            with self._exchange as exchange:
                for event in exchange.events():
                    part, finish_reason = part_of(event)
                    text += part
                    reasoning += reasoning_of(event)
                    self._finish_reason = finish_reason or self._finish_reason
                    yield ChatAnswer(text, reasoning)
        except PagedError:
            if not self._is_given_up:
                raise
        finally:
            self._exchange = None

    def give_up(self) -> None:
        """Close the connection, so that `stream` ends and the server aborts the request."""
        self._is_given_up = True
        if self._exchange is not None:
            self._exchange.give_up()

    def report_end(self) -> None:
        """Print a warning if the answer was cut off."""
        if self._finish_reason == "length" and "max_tokens" not in self.params.values:
            common.complain(
                "the answer fills the context, or has as many tokens as the server allows by default: /reset "
                "forgets the conversation, --max-tokens asks for more"
            )
        elif self._finish_reason not in (None, "stop", "length"):
            common.complain(f"the server ended the answer: {self._finish_reason}")


def body_fields(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments of SamplingParams to fields of a request body, as OpenAI and vLLM name them."""
    fields = {name: value for name, value in sampling.items() if name != "structured_outputs"}
    structured = sampling.get("structured_outputs")
    if structured is None:
        return fields
    if structured.json is not None:
        schema = json.loads(structured.json) if isinstance(structured.json, str) else structured.json
        return fields | {
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        }
    names = ("regex", "choice", "grammar")
    given = {name: getattr(structured, name) for name in names if getattr(structured, name) is not None}
    return fields | {"structured_outputs": given}
