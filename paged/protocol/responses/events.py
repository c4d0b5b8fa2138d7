"""ResponseEvents: the events of a response of OpenAI's Responses API, and the response that they build.

SingleTokens: an answer token by token, so that what belongs to a token stays with its text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...chat.json_scanner import is_json
from ...chat.parts import ContentDelta, Part, ReasoningDelta, ToolArgumentsDelta, ToolCallStart
from ...requests.request import CompletionOutput, Logprob
from ..answers.chats import ChatForm
from ..answers.chunks import Head
from ..answers.errors import FAILED, TOO_MANY
from ..answers.places import Decoding
from ..answers.typed_events import TypedEvents


class SingleTokens:
    """Splits deltas or whole outputs with log-probabilities into outputs of one token each."""

    def __init__(self, decoding: Decoding) -> None:
        tokenizer = decoding.tokenizer
        before = [] if tokenizer is None else tokenizer.encode_bare("a")  # the answer follows a prompt
        self._detokenizer = decoding.detokenizer(before)
        self._waiting = deque[tuple[int, dict[int, Logprob], int]]()  # tokens whose text has not arrived
        self._text = ""

    def split(self, completion: CompletionOutput) -> Iterator[tuple[CompletionOutput, int]]:
        """Yield outputs of one token each, with that token's part of the text. The last has the rest."""
        for token_id, place in zip(completion.token_ids, completion.logprobs or (), strict=False):
            piece = "" if self._detokenizer is None else self._detokenizer.append(token_id)
            self._waiting.append((token_id, place, len(piece)))
        self._text += completion.text
        is_last = completion.finish_reason is not None
        found = list[tuple[CompletionOutput, int]]()
        while self._waiting and (is_last or self._waiting[0][2] <= len(self._text)):
            token_id, place, length = self._waiting.popleft()
            text = self._text[:length]
            self._text = self._text[length:]
            one = replace(completion, text=text, token_ids=[token_id], logprobs=[place], finish_reason=None)
            found.append((one, len(text)))
        if is_last:
            rest = replace(completion, text=self._text, token_ids=[], logprobs=[])
            found.append((rest, len(self._text)))
        yield from found


Event = dict[str, Any]
Item = dict[str, Any]
RESPONSE_PREFIX = "resp_"  # of the ids of responses


def response_of_item(item_id: str) -> str:
    """Return the id of the response to which the item with this id belongs."""
    _, _, rest = item_id.partition("_")
    return f"{RESPONSE_PREFIX}{rest.rpartition('_')[0]}"


@dataclass(slots=True)
class _OpenItem:
    """An item whose text grows. fields: the fields that do not change; texts: the text so far."""

    kind: str
    fields: Item
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self, status: str) -> Item:
        """Return the item as it is, or without content if it is only announced."""
        is_begun = status != "in_progress"
        if self.kind == "function_call":
            return {**self.fields, "arguments": "".join(self.texts), "status": status}
        return {**self.fields, "content": [self.part()] if is_begun else [], "status": status}

    def part(self) -> dict[str, Any]:
        """Return the one part of its content."""
        text = "".join(self.texts)
        if self.kind == "reasoning":
            logprobs = {"logprobs": [*self.logprobs]} if self.logprobs else {}
            return {"type": "reasoning_text", "text": text, **logprobs}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*self.logprobs]}


class ResponseEvents(TypedEvents):
    """Makes the events of a streamed response, in OpenAI's order, and from them the whole response.

    terms: fields of the request that the response repeats.
    on_end: called with the whole response.
    is_cancelled: returns whether the client has cancelled the response.
    """

    def __init__(
        self,
        head: Head,
        form: ChatForm,
        count_tokens: Callable[[str], int],
        *,
        terms: Mapping[str, Any],
        on_end: Callable[[dict[str, Any]], None],
        is_cancelled: Callable[[], bool],
    ) -> None:
        super().__init__(head, form, count_tokens)
        self._terms = terms
        self._on_end = on_end
        self._is_cancelled = is_cancelled
        self._num_events = 0
        self._items: list[Item] = []
        self._open: _OpenItem | None = None
        # Of tokens whose text is in no event yet, each with the length of the text.
        self._logprobs: list[tuple[dict[str, Any], int]] = []
        self._tokens: SingleTokens | None = None
        self._whole: dict[str, Any] = {}

    def opening(self) -> list[Event]:
        """Return the events that precede all output."""
        return [
            self._event(f"response.{name}", response=self.response("in_progress"))
            for name in ("created", "in_progress")
        ]

    def chunks_of(self, choice: int, completion: CompletionOutput) -> list[Event]:
        """Return the events of a delta. Log-probabilities go into the items that contain their tokens."""
        if completion.logprobs is None:
            return super().chunks_of(choice, completion)
        if self._tokens is None:
            self._tokens = SingleTokens(self.form.decoding)
        events = list[Event]()
        for one, length in self._tokens.split(completion):
            found = self.form.logprobs_of(one)
            assert found is not None, "a part of an output with log-probabilities has some"
            self._logprobs += ((_with_bytes(place), length) for place in found["content"])
            events += super().chunks_of(choice, one)
        return events

    def take(self, part: Part) -> list[Event]:
        """Return the events for a part of the answer."""
        match part:
            case ContentDelta(text):
                return self._add_text("message", text)
            case ReasoningDelta(text):
                return self._add_text("reasoning", text)
            case ToolCallStart(_, call_id, name):
                return self._begin({"type": "function_call", "id": "fc", "call_id": call_id, "name": name})
            case ToolArgumentsDelta(_, text):
                assert self._open is not None, "arguments follow the beginning of their call"
                self._open.texts.append(text)
                return [self._of_open("response.function_call_arguments.delta", delta=text)]

    def finish(self) -> list[Event]:
        """Return the events that follow all output."""
        assert self.completion is not None, "the answer has not ended"
        is_cut = self.completion.finish_reason == "length"
        events = [] if self._items or self._open is not None else self._begin_text("message")
        if self._logprobs and self._open is not None and self._open.kind != "function_call":
            events += self._add_text(self._open.kind, "")
        events += self._end_open("incomplete" if is_cut else "completed")
        is_cut = is_cut or any(item.get("status") == "incomplete" for item in self._items)
        status = "incomplete" if is_cut else "completed"
        self._whole = self.response(status)
        self._on_end(self._whole)
        return [*events, self._event(f"response.{status}", response=self._whole)]

    def error(self, status: int, body: dict[str, Any]) -> Event:
        """Return the event that says that the response failed or was cancelled."""
        if self._is_cancelled():
            return self._event("response.failed", response=self.response("cancelled"))
        code = "server_error" if status >= FAILED else "invalid_prompt"
        code = "rate_limit_exceeded" if status == TOO_MANY else code
        error = {"code": code, "message": body["error"]["message"]}
        return self._event("response.failed", response={**self.response("failed"), "error": error})

    def whole(self) -> dict[str, Any]:
        """Return the whole response. Call this after `finish`."""
        return self._whole

    def response(self, status: str) -> dict[str, Any]:
        """Return the response with this status and the items that are complete so far."""
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self.head.as_json(),
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": cut,
            "output": [*self._items],
            "usage": self._usage() if status in ("completed", "incomplete") else None,
            **self._terms,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.num_prompt,
            "input_tokens_details": {"cached_tokens": usage.num_cached or 0, "cache_write_tokens": 0},
            "output_tokens": usage.num_new,
            "output_tokens_details": {"reasoning_tokens": usage.num_reasoning(self.count_tokens)},
            "total_tokens": usage.num_prompt + usage.num_new,
        }

    def _add_text(self, kind: str, text: str) -> list[Event]:
        """Return the events of more text of an item of a kind."""
        item = self._open
        events = [] if item is not None and item.kind == kind else self._begin_text(kind)
        item = self._open
        assert item is not None
        item.texts.append(text)
        name = "response.output_text.delta" if kind == "message" else "response.reasoning_text.delta"
        # As `_of_open` and `_event` make it: most events are of this kind.
        delta: Event = {
            "type": name,
            "sequence_number": self._num_events,
            "item_id": item.fields["id"],
            "output_index": len(self._items),
            "content_index": 0,
            "delta": text,
        }
        self._num_events += 1
        logprobs = self._logprobs_of(text)
        if kind == "message" or logprobs:
            item.logprobs += logprobs
            delta["logprobs"] = logprobs
        events.append(delta)
        return events

    def _logprobs_of(self, text: str) -> list[dict[str, Any]]:
        """Return the log-probabilities of the last tokens, as many as have a text; none are waiting then.

        Tokens before them are marks of the format, which are in no item.
        """
        if not self._logprobs:
            return []
        waiting = self._logprobs
        self._logprobs = []
        length = 0
        start = len(waiting)
        while start and (length < len(text) or not text):
            start -= 1
            length += waiting[start][1]
        # Tokens without a text of their own complete a character with the one after them.
        while start and not waiting[start - 1][1]:
            start -= 1
        return [place for place, _ in waiting[start:]]

    def _begin_text(self, kind: str) -> list[Event]:
        fields = {"type": kind, "id": "msg", "role": "assistant"}
        events = self._begin(fields if kind == "message" else {"type": kind, "id": "rs", "summary": []})
        assert self._open is not None
        return [
            *events,
            self._of_open("response.content_part.added", content_index=0, part=self._open.part()),
        ]

    def _begin(self, fields: Item) -> list[Event]:
        """Begin an item, whose id begins with that in the fields. Return the events."""
        events = self._end_open("completed")
        identity = self.head.id.removeprefix(RESPONSE_PREFIX)
        item_id = f"{fields['id']}_{identity}_{len(self._items)}"
        item = self._open = _OpenItem(fields["type"], {**fields, "id": item_id})
        added = {"output_index": len(self._items), "item": item.as_json("in_progress")}
        return [*events, self._event("response.output_item.added", **added)]

    def _end_open(self, status: str) -> list[Event]:
        """End the open item, if there is one. Return the events."""
        item = self._open
        if item is None:
            return []
        text = "".join(item.texts)
        if item.kind == "function_call":
            # A call that was cut is never complete, whatever ended the answer.
            status = "completed" if is_json(text) else "incomplete"
            events = [self._of_open("response.function_call_arguments.done", arguments=text)]
        else:
            is_text = item.kind == "message"
            name = f"response.{'output' if is_text else 'reasoning'}_text.done"
            more = {"logprobs": [*item.logprobs]} if is_text else {}
            events = [
                self._of_open(name, content_index=0, text=text, **more),
                self._of_open("response.content_part.done", content_index=0, part=item.part()),
            ]
        done = item.as_json(status)
        events.append(self._event("response.output_item.done", output_index=len(self._items), item=done))
        self._items.append(done)
        self._open = None
        return events

    def _of_open(self, name: str, **fields: Any) -> Event:
        """Return an event of the open item."""
        assert self._open is not None
        return self._event(name, item_id=self._open.fields["id"], output_index=len(self._items), **fields)

    def _event(self, name: str, **fields: Any) -> Event:
        event = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return event


def _with_bytes(place: dict[str, Any]) -> dict[str, Any]:
    """Return the log-probabilities of a token with the bytes of its text, also where they are not known."""
    top = [_known(each) for each in place["top_logprobs"]]
    return {**_known(place), "top_logprobs": top}


def _known(candidate: dict[str, Any]) -> dict[str, Any]:
    known = candidate["bytes"]
    return candidate if known is not None else {**candidate, "bytes": [*candidate["token"].encode()]}
