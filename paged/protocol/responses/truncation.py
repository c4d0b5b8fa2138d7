"""Conversations without their oldest messages, so that the rest fits the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from .items import Message, num_system


def fitting(messages: Sequence[Message], fits: Callable[[Sequence[Message]], bool]) -> Sequence[Message]:
    """Return the messages without as few of the oldest as makes the rest fit.

    The system messages at the beginning and the last message stay, and no result stays without its call.

    fits: returns whether messages fit; fewer of them fit if more do.
    """
    if fits(messages):
        return messages
    num_kept = num_system(messages)
    kept = messages[:num_kept]
    cuts = [cut for cut in _cuts(messages) if cut > num_kept]
    if not cuts:
        return messages
    at = bisect_left(cuts, True, key=lambda cut: fits([*kept, *messages[cut:]]))
    return [*kept, *messages[cuts[min(at, len(cuts) - 1)] :]]  # the engine says by how much it is too long


def _cuts(messages: Sequence[Message]) -> list[int]:
    """Return where a conversation can begin: no call before has its result after."""
    results = {message["tool_call_id"] for message in messages if message["role"] == "tool"}
    waiting = set[str]()
    cuts = []
    for i, message in enumerate(messages):
        if not waiting:
            cuts.append(i)
        if message["role"] == "tool":
            waiting.discard(message["tool_call_id"])
        waiting |= results & {call["id"] for call in message.get("tool_calls", ())}
    return cuts
