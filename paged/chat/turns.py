"""Conversations in the form that a chat template demands."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

Message = Mapping[str, Any]
_MERGED = ("user", "assistant")
_REASONING = ("reasoning", "reasoning_content", "thinking")


def has_repeated_roles(messages: Sequence[Any]) -> bool:
    """Return whether two adjacent messages are both the user's or both the assistant's."""
    return any(_is_same_turn(one, other) for one, other in pairwise(messages))


def merged(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation in which adjacent messages of the user, or of the assistant, are merged."""
    turns = list[Message]()
    for message in messages:
        if turns and _is_same_turn(turns[-1], message):
            turns[-1] = _joined(turns[-1], message)
        else:
            turns.append(message)
    return turns


def _is_same_turn(one: Any, other: Any) -> bool:
    if not (isinstance(one, Mapping) and isinstance(other, Mapping)):
        return False
    return one.get("role") == other.get("role") and one.get("role") in _MERGED


def _joined(one: Message, other: Message) -> Message:
    calls = [*(one.get("tool_calls") or ()), *(other.get("tool_calls") or ())]
    joined = {**one, **other, "content": _contents(one.get("content"), other.get("content"))}
    for key in _REASONING:
        if texts := [text for text in (one.get(key), other.get(key)) if text]:
            joined[key] = "\n\n".join(texts)
    return {**joined, "tool_calls": calls} if calls else joined


def _contents(one: Any, other: Any) -> Any:
    if not one or not other:
        return one or other
    if isinstance(one, str) and isinstance(other, str):
        return f"{one}\n\n{other}"
    parts = ([{"type": "text", "text": each}] if isinstance(each, str) else [*each] for each in (one, other))
    return [part for each in parts for part in each]


def with_short_ids(messages: Sequence[Message], length: int) -> list[Message]:
    """Return a conversation in which all call ids have this length, as some templates demand.

    An id of another length is replaced by a hash of it.
    """

    def short(given: Any) -> str:
        text = str(given)
        is_short = len(text) == length and text.isalnum() and text.isascii()
        return text if is_short else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:length]

    shown = list[Message]()
    for message in messages:
        calls = message.get("tool_calls")
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": short(message["tool_call_id"])}
        if isinstance(calls, Sequence) and all(isinstance(call, Mapping) for call in calls):
            message = {**message, "tool_calls": [{**call, "id": short(call.get("id"))} for call in calls]}
        shown.append(message)
    return shown


def with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation for Harmony's templates. They show only one call per message.

    A message with several calls becomes several messages of one call, each followed by its result. A preamble
    and the reasoning before a call are joined, since the templates accept only one text.
    """
    found = list[Message]()
    waiting = list[Message]()  # calls of the last message whose results come next
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, Mapping) else None
        if isinstance(message, Mapping) and message.get("role") == "tool" and waiting:
            found += _next_call(waiting, message)
            continue
        found += waiting
        waiting = []
        if not isinstance(calls, Sequence) or not calls:
            found.append(message)
            continue
        first = _in_one_text({**message, "tool_calls": [calls[0]]})
        waiting = [first, *({"role": message["role"], "tool_calls": [call]} for call in calls[1:])]
    return [*found, *waiting]


def _next_call(waiting: list[Message], result: Message) -> list[Message]:
    """Take the call that a result answers. Return it and the result."""
    ids = [message["tool_calls"][0].get("id") for message in waiting]
    answered = result.get("tool_call_id")
    at = ids.index(answered) if answered in ids else 0
    call = waiting.pop(at)
    if at and len(ids) > 1:  # the reasoning comes before all calls
        call, waiting[0] = _moved(waiting[0], call)
    return [call, result]


def _moved(first: Message, call: Message) -> tuple[Message, Message]:
    """Move what precedes the calls from the first one to another."""
    more = {key: value for key, value in first.items() if key not in ("role", "tool_calls")}
    return {**call, **more}, {"role": first["role"], "tool_calls": first["tool_calls"]}


def _in_one_text(message: Message) -> Message:
    content = message.get("content")
    reasoning = next((message[key] for key in _REASONING if message.get(key)), None)
    if not isinstance(content, str) or not content or not isinstance(reasoning, str):
        return message
    kept = {key: value for key, value in message.items() if key not in ("content", *_REASONING)}
    return {**kept, "thinking": f"{reasoning}\n\n{content}"}
