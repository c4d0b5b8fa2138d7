"""Answers in Ollama's form: lines of JSON, or one object, with times in nanoseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, ClassVar

from ...chat.parts import ContentDelta, Part, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from ...requests.request import CompletionOutput, RequestMetrics, RequestOutput
from ..answers.chats import ChatForm
from ..answers.chunks import Head
from ..answers.typed_events import TypedEvents
from ..messages.events import whole_members

_NS = 10**9


def moment(seconds: float | None = None) -> str:
    """Return a moment as Ollama writes it, by default now. seconds: since 1970."""
    when = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return when.isoformat(timespec="microseconds").replace("+00:00", "Z")


def done_without_text(model: str, reason: str, *, is_chat: bool) -> dict[str, Any]:
    """Return the answer to a body without a prompt, which loads or unloads the model."""
    empty: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return {"model": model, "created_at": moment(), **empty, "done": True, "done_reason": reason}


class Durations:
    """The times of an answer.

    began: when its body was parsed, by time.monotonic. load_s: for which it has waited for its model.
    """

    def __init__(self, began: float, load_s: float) -> None:
        self._began = began
        self._load_s = load_s

    def as_json(self, times: RequestMetrics | None) -> dict[str, int]:
        """Return the durations in nanoseconds, as far as they are known."""
        found = {"total": time.monotonic() - self._began + self._load_s, "load": self._load_s}
        if times is not None and times.first_token_time is not None:
            found["prompt_eval"] = times.first_token_time - (times.first_scheduled_time or times.arrival_time)
            if times.finished_time is not None:
                found["eval"] = times.finished_time - times.first_token_time
        return {f"{name}_duration": max(0, int(seconds * _NS)) for name, seconds in found.items()}


class OllamaLines(TypedEvents):
    """The lines of a streamed answer of Ollama's, which also build the whole answer.

    is_chat: whether a line has a message, not a response.
    """

    NAMES_EVENTS: ClassVar[bool] = False
    IS_LINES: ClassVar[bool] = True

    def __init__(
        self,
        head: Head,
        form: ChatForm,
        count_tokens: Callable[[str], int],
        durations: Durations,
        *,
        is_chat: bool,
    ) -> None:
        super().__init__(head, form, count_tokens)
        self._durations = durations
        self._is_chat = is_chat
        self._times: RequestMetrics | None = None
        self._calls: list[tuple[str, str, list[str]]] = []  # that are not sent yet
        self._whole: dict[str, Any] = {"content": "", "thinking": "", "tool_calls": []}
        self._logprobs: list[dict[str, Any]] = []

    def opening(self) -> list[dict[str, Any]]:
        """Return nothing: the first line has text."""
        return []

    def before(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:  # noqa: ARG002
        """Note the times of an output."""
        self._times = output.metrics or self._times
        return []

    def chunks_of(self, choice: int, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Return the lines of a delta, the last of them with the log-probabilities of its tokens."""
        lines = super().chunks_of(choice, completion)
        places = self.form.logprobs_of(completion) if completion.token_ids else None
        if places is not None:
            self._logprobs += places["content"]
            if not lines:
                lines = [self._line(content="")]
            lines[-1]["logprobs"] = places["content"]
        return lines

    def take(self, part: Part) -> list[dict[str, Any]]:
        """Return the lines of a part. A call is sent once it is whole."""
        match part:
            case ContentDelta(text):
                self._whole["content"] += text
                return [*self._sent_calls(), self._line(content=text)]
            case ReasoningDelta(text):
                self._whole["thinking"] += text
                return [*self._sent_calls(), self._line(content="", thinking=text)]
            case ToolCallStart(_, call_id, name):
                sent = self._sent_calls()
                self._calls.append((call_id, name, []))
                return sent
            case ToolArgumentsDelta(_, text):
                self._calls[-1][2].append(text)
                return []

    def finish(self) -> list[dict[str, Any]]:
        """Return the last lines, the last of them with counts and times."""
        return [*self._sent_calls(), {**self._line(content=""), **self._ending()}]

    def error(self, status: int, body: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Return the line that ends the stream with an error."""
        return ollama_error(body)

    def whole(self) -> dict[str, Any]:
        """Return the whole answer, after `finish`."""
        whole = {name: value for name, value in self._whole.items() if value or name == "content"}
        logprobs = {"logprobs": self._logprobs} if self._logprobs else {}
        return {**self._line(**whole), **logprobs, **self._ending()}

    def _sent_calls(self) -> list[dict[str, Any]]:
        """Return a line for each complete call."""
        calls = [
            {"id": call_id, "function": {"name": name, "arguments": whole_members("".join(texts))}}
            for call_id, name, texts in self._calls
        ]
        self._calls = []
        self._whole["tool_calls"] += calls
        return [self._line(content="", tool_calls=[call]) for call in calls]

    def _line(self, *, content: str, **more: Any) -> dict[str, Any]:
        head = {"model": self.head.model, "created_at": moment()}
        if self._is_chat:
            return {**head, "message": {"role": "assistant", "content": content, **more}, "done": False}
        return {**head, "response": content, **more, "done": False}

    def _ending(self) -> dict[str, Any]:
        assert self.completion is not None, "the answer has not ended"
        return {
            "done": True,
            "done_reason": "length" if self.completion.finish_reason == "length" else "stop",
            **self._durations.as_json(self._times),
            "prompt_eval_count": self.usage.num_prompt,
            "eval_count": self.usage.num_new,
        }


def ollama_error(body: dict[str, Any]) -> dict[str, Any]:
    """Return an error in Ollama's form. body: the same error in OpenAI's form."""
    error = body["error"]
    message = error["message"]
    param = error["param"]
    return {"error": message if param is None or param in message else f"{param}: {message}"}
