"""Answers of llama.cpp's /completion and /infill: events, or one object."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ...requests.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from ..answers.chunks import Chunks, Form, Head
from ..answers.usage import Usage
from ..jobs import finite


class Indented:
    """A text that ends before a line that is indented by fewer than `least` spaces and tabs.

    The first line, which goes on with the prompt's, may have any. An empty line has none.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._indent: int | None = None  # of the line, as far as it is known; None behind its beginning
        self.has_ended = False

    def take(self, text: str) -> str:
        """Return the part of the next piece of text that belongs to it."""
        if self.has_ended or not self._least:
            return "" if self.has_ended else text
        for i, char in enumerate(text):
            if self._indent is not None and char in " \t":
                self._indent += 1
                continue
            if self._indent is not None and self._indent < self._least:
                self.has_ended = True
                return text[:i]
            self._indent = 0 if char == "\n" else None
        return text


class NativeChunks(Chunks):
    """The events of a streamed completion of llama.cpp's, which also build the whole answer.

    index: the number of its prompt.
    num_probs: how many of the most likely tokens are listed at each position; None without any.
    is_empty: whether the answer has no token, as the request has only computed its prompt.
    least_indent: see `Indented`.
    most_ms: the text ends with the first line end that comes so long after the first token.
    """

    def __init__(
        self,
        head: Head,
        form: Form,
        *,
        index: int,
        num_probs: int | None,
        is_empty: bool = False,
        least_indent: int = 0,
        most_ms: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(head, form, Usage(tells_cached=True))
        self._index = index
        self._is_empty = is_empty
        self._indented = Indented(least_indent)
        self._most_ms = most_ms
        self._clock = clock
        self._begun: float | None = None  # when the first token came
        self._elapsed = 0.0  # seconds until the last one
        self._is_late = False
        self._model = head.model
        self._num_probs = num_probs
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._probabilities: list[dict[str, Any]] = []
        self._last: CompletionOutput | None = None
        self._times: RequestMetrics | None = None
        self._prompt = ""

    def before(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:  # noqa: ARG002
        """Note the times and the prompt of an output."""
        self._times = output.metrics or self._times
        self._prompt = output.prompt or ""
        return []

    def chunks_of(self, choice: int, completion: CompletionOutput) -> list[dict[str, Any]]:  # noqa: ARG002
        """Return the event of a delta."""
        if completion.finish_reason is not None:
            self._last = completion
        if self._is_empty or self.has_ended:
            return []
        tokens = [*completion.token_ids]
        if tokens:
            now = self._clock()
            self._begun = now if self._begun is None else self._begun
            self._elapsed = now - self._begun
        text = self._indented.take(completion.text)
        if "\n" in text and self._elapsed * 1e3 > self._most_ms:
            self._is_late = True
            text = text[: text.index("\n") + 1]
        self._texts.append(text)
        self._tokens += tokens
        probabilities = [self._place(place) for place in completion.logprobs or ()]
        self._probabilities += probabilities
        if not (text or tokens):
            return []
        made = {
            "index": self._index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": 0,
            "tokens_predicted": self._num_new,
            "tokens_evaluated": self.usage.num_prompt,
        }
        return [{**made, "completion_probabilities": probabilities} if probabilities else made]

    @property
    def _num_new(self) -> int:
        return 0 if self._is_empty else self.usage.num_new

    def finish(self) -> list[dict[str, Any]]:
        """Return the last event, without text."""
        return [self._ending("", [])]

    @property
    def has_ended(self) -> bool:
        """Whether the text is over, by its indent or its time."""
        return self._indented.has_ended or self._is_late

    def whole(self) -> dict[str, Any]:
        """Return the whole answer after its last output."""
        return self._ending("".join(self._texts), self._probabilities)

    def _place(self, place: Mapping[int, Logprob]) -> dict[str, Any]:
        chosen, *_ = candidates = [*place.items()]
        top = sorted(candidates, key=lambda item: item[1].rank)[: self._num_probs or 0]
        return {**_shown(*chosen), "top_logprobs": [_shown(*item) for item in top]}

    def _ending(self, content: str, probabilities: Sequence[dict[str, Any]]) -> dict[str, Any]:
        last = self._last
        assert last is not None or self.has_ended, "the answer has not ended"
        reason = None if last is None else last.stop_reason
        word = reason if isinstance(reason, str) else ""
        is_cut = self._is_empty or self.has_ended or (last is not None and last.finish_reason == "length")
        stop_type = "limit" if is_cut else ("word" if word else "eos")
        made: dict[str, Any] = {
            "index": self._index,
            "content": content,
            "tokens": self._tokens if content else [],
            "id_slot": 0,
            "stop": True,
            "model": self._model,
            "tokens_predicted": self._num_new,
            "tokens_evaluated": self.usage.num_prompt,
            "tokens_cached": self.usage.num_cached or 0,
            "prompt": self._prompt,
            "has_new_line": "\n" in "".join(self._texts),
            "truncated": False,
            "stop_type": stop_type,
            "stopping_word": "" if is_cut else word,
            "timings": self._timings(),
        }
        return {**made, "completion_probabilities": [*probabilities]} if probabilities else made

    def _timings(self) -> dict[str, Any]:
        """Return the counts and times in milliseconds, as far as they are known."""
        times = self._times
        if times is None or times.first_token_time is None:
            return {}
        until = times.finished_time
        predicted = self._elapsed if until is None else until - times.first_token_time
        begun = times.first_scheduled_time or times.arrival_time
        num_cached = self.usage.num_cached or 0
        parts = {
            "prompt": (self.usage.num_prompt - num_cached, times.first_token_time - begun),
            "predicted": (self._num_new, predicted),
        }
        found: dict[str, Any] = {"cache_n": num_cached}
        for name, (count, seconds) in parts.items():
            found[f"{name}_n"] = count
            found[f"{name}_ms"] = seconds * 1e3
            if count and seconds > 0:
                found[f"{name}_per_token_ms"] = seconds * 1e3 / count
                found[f"{name}_per_second"] = count / seconds
        return found


class ManyNativeChunks(Chunks):
    """The events of the completions of one prompt or several. The last event of each has "stop": true."""

    ENDS_WITH_DONE: ClassVar[bool] = False

    def __init__(self, head: Head, parts: Sequence[NativeChunks]) -> None:
        super().__init__(head, Form(num_prompts=len(parts)), Usage(tells_cached=True))
        self._parts = parts

    def add(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Return the events for an output of the prompt number `index`."""
        if index in self._ended:
            return []
        self.usage.add(index, output)
        part = self._parts[index]
        events = part.add(0, output)
        if output.finished or part.has_ended:
            self._ended.add(index)
            events += part.finish()
        return events

    @property
    def has_ended(self) -> bool:
        """Whether the last event of each prompt was made."""
        return len(self._ended) == len(self._parts)

    def whole(self) -> Any:
        """Return the whole answer after the last output: of several prompts a list, as llama.cpp does."""
        answers = [part.whole() for part in self._parts]
        return answers if len(answers) > 1 else answers[0]

    def chunks_of(self, choice: int, completion: CompletionOutput) -> list[dict[str, Any]]:
        """Return the events of a delta."""
        return self._parts[choice].chunks_of(0, completion)


def _shown(token_id: int, candidate: Logprob) -> dict[str, Any]:
    text = candidate.decoded_token or ""
    return {
        "id": token_id,
        "token": text,
        "bytes": [*text.encode("utf-8", "surrogatepass")],
        "logprob": finite(candidate.logprob),
    }
