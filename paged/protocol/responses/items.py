"""Items of a response's input as the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...base.errors import RequestError
from ...base.validation import shown
from ..fields.images import image_part, refuse_images

Message = dict[str, Any]
Item = Mapping[str, Any]


def messages_of(items: str | Sequence[Item], earlier: Sequence[Message] = ()) -> list[Message]:
    """Convert items to messages, and append them to the messages of an earlier response.

    items: a text, or the parsed items of the input.

    Raises RequestError for items in an impossible order.
    """
    given = [{"type": "message", "role": "user", "content": items}] if isinstance(items, str) else items
    turns = _Turns(earlier)
    for i, item in enumerate(given):
        turns.add(f"input[{i}]", item)
    return turns.messages


def turn_of(output: Iterable[Item]) -> list[Message]:
    """Convert a response's own output to messages."""
    turns = _Turns(())
    for item in output:
        turns.add("output", item)
    return turns.messages


class _Turns:
    """Messages as items make them: an assistant's reasoning, text and calls become one message."""

    def __init__(self, earlier: Sequence[Message]) -> None:
        self.messages = [*earlier]
        self._calls = {call["id"] for message in earlier for call in message.get("tool_calls", ())}
        self._answered = {message["tool_call_id"] for message in earlier if message["role"] == "tool"}
        self._open: Message | None = None  # the assistant's message that the next item may belong to

    def add(self, name: str, item: Item) -> None:
        """Add an item. name: its path in the body."""
        match item["type"]:
            case "function_call":
                self._add_call(name, item)
            case "function_call_output":
                self._add_output(name, item)
            case "reasoning":
                self._add_reasoning(item)
            case _:
                self._add_message(name, item)

    def _add_message(self, name: str, item: Item) -> None:
        if item["role"] != "user":
            refuse_images(f"{name}.content", item["role"], item["content"], "input_image")
        if item["role"] == "assistant":
            message = self._assistant()
            message["content"] = (message.get("content") or "") + _text(item["content"])
            return
        content = item["content"]
        if not isinstance(content, str):
            content = _chat_parts(f"{name}.content", content)
        self._append({"role": item["role"], "content": content})

    def _add_call(self, name: str, item: Item) -> None:
        call_id = item["call_id"]
        if call_id in self._calls:
            raise RequestError(
                f"{name}.call_id {shown(call_id)} is that of an earlier call, too", param=f"{name}.call_id"
            )
        self._calls.add(call_id)
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def _add_output(self, name: str, item: Item) -> None:
        call_id = item["call_id"]
        if call_id not in self._calls or call_id in self._answered:
            what = "has an output already" if call_id in self._answered else "is no function_call before it"
            raise RequestError(f"{name}.call_id {shown(call_id)} {what}", param=f"{name}.call_id")
        self._answered.add(call_id)
        self._append({"role": "tool", "tool_call_id": call_id, "content": _output(name, item["output"])})

    def _add_reasoning(self, item: Item) -> None:
        text = "".join(part["text"] for part in item.get("content") or item.get("summary") or ())
        if not text:
            return
        if self._open is not None and ("content" in self._open or "tool_calls" in self._open):
            self._open = None  # reasoning begins a message
        message = self._assistant()
        message["reasoning"] = message["reasoning_content"] = message.get("reasoning", "") + text

    def _assistant(self) -> Message:
        """Return the assistant's message to add to."""
        if self._open is None:
            message: Message = {"role": "assistant"}
            self._append(message)
            self._open = message
        return self._open

    def _append(self, message: Message) -> None:
        self.messages.append(message)
        self._open = None


def _output(name: str, output: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a call's output as text, or as parts if it has images."""
    has_images = not isinstance(output, str) and any(part["type"] == "input_image" for part in output)
    return _chat_parts(f"{name}.output", output) if has_images else _text(output)


def _chat_parts(name: str, parts: Iterable[Any]) -> list[dict[str, Any]]:
    return [_chat_part(f"{name}[{i}]", part) for i, part in enumerate(parts)]


def _chat_part(name: str, part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part in the form of parts of a chat's messages."""
    if part["type"] == "input_image":
        return image_part(name, part["image_url"], part.get("detail"), field="image_url")
    return {"type": "text", "text": _part_text(part)}


def _part_text(part: Mapping[str, Any]) -> str:
    return str(part["refusal"] if part["type"] == "refusal" else part["text"])


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(map(_part_text, content))


def num_system(messages: Sequence[Message]) -> int:
    """Return the number of system messages at the beginning of a conversation."""
    num = 0
    while num < len(messages) and messages[num]["role"] in ("system", "developer"):
        num += 1
    return num


def with_instructions(messages: Sequence[Message], instructions: str | None) -> list[Message]:
    """Return the messages with the instructions as the first message.

    The instructions are merged with system messages at the beginning, since many templates accept only one.
    """
    num = num_system(messages)
    if num + (instructions is not None) < 2:
        first = [] if instructions is None else [{"role": "system", "content": instructions}]
        return [*first, *messages]
    texts = [] if instructions is None else [instructions]
    for message in messages[:num]:
        content = message["content"]
        texts.append(content if isinstance(content, str) else "".join(part["text"] for part in content))
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[num:]]
