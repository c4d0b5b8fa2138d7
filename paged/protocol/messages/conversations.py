"""Bodies of Anthropic's Messages in the form of a chat's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...base.errors import RequestError
from ...base.validation import shown
from ..calls.call import OwnNames
from ..fields.builtin_tools import functions_of
from ..fields.images import image_part
from ..limits import Limits
from .fields import BILLING_HEADER

Message = dict[str, Any]
Block = Mapping[str, Any]
NamedBlock = tuple[str, Block]  # with its path in the body
# What these bodies name otherwise than a chat does.
MESSAGES_NAMES = OwnNames(
    (r"\bresponse_format\.json_schema\.schema\b", "output_config.format.schema"),
    (r"\bresponse_format\b", "output_config.format"),
    (r"\btools\[(\d+)\]\.function\.parameters\b", r"tools[\1].input_schema"),
    (r"\btools\[(\d+)\]\.function\.", r"tools[\1]."),
    (r"\btool_choice\.function\.name\b", "tool_choice.name"),
    (r"\btool_choice 'required'", "tool_choice 'any'"),
    (r"'required', a named tool", "'any', a named tool"),
    (r"\btool_choice 'function'", "tool_choice 'tool'"),
    (r"^stop\b", "stop_sequences"),
    (r"^continue_final_message\b", "an assistant's message at the end"),
    (r"^user$", "metadata.user_id"),
)
_MODES = {"auto": "auto", "any": "required", "none": "none"}


def chat_of(values: Mapping[str, Any], limits: Limits) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of an equivalent chat body, and the names of the tools that are left out.

    values: the parsed fields of a body of Anthropic's API.

    Raises RequestError naming the field.
    """
    system, left_out = _system(values.get("system"))
    chat: dict[str, Any] = {**_output(values), **_template(values)}
    chat["messages"] = [*system, *_messages(values["messages"])]
    if "tools" in values:
        tools, builtin = functions_of(values["tools"], "custom", ignores_builtin=limits.ignore_builtin_tools)
        left_out += builtin
        chat["tools"] = [_tool(tool) for tool in tools]
    choice = values.get("tool_choice")
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = _MODES.get(choice["type"], named)
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
    if values["messages"][-1]["role"] == "assistant":
        _check_continued(values["messages"])
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat, left_out


def _check_continued(given: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError unless the last message, an assistant's, ends with text to continue."""
    content = given[-1]["content"]
    if isinstance(content, str) or not content or content[-1]["type"] == "text":
        return
    kind = content[-1]["type"]
    where = f"messages[{len(given) - 1}].content[{len(content) - 1}]"
    why = "has no tool_result after it" if kind == "tool_use" else "has no text after it to continue"
    raise RequestError(f"{where} is a {kind} block at the end, which {why}", param=where)


def _output(values: Mapping[str, Any]) -> dict[str, Any]:
    config = values.get("output_config", {})
    fields = {"reasoning_effort": config["effort"]} if "effort" in config else {}
    if "format" in config:
        schema = {"schema": config["format"]["schema"]}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def _template(values: Mapping[str, Any]) -> dict[str, Any]:
    thinking = values.get("thinking")
    # Templates know either name.
    names = () if thinking is None else ("enable_thinking", "thinking")
    asked = dict.fromkeys(names, thinking is not None and thinking["type"] != "disabled")
    return {"chat_template_kwargs": {**asked, **values.get("chat_template_kwargs", {})}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _system(given: str | Sequence[Block] | None) -> tuple[list[Message], list[str]]:
    """Return the system message, if there is one, and the names of the blocks that are left out."""
    if given is None or isinstance(given, str):
        return [] if given is None else [{"role": "system", "content": given}], []
    kept = [block for block in given if not block["text"].startswith(BILLING_HEADER)]
    left_out = [f"system[{i}]" for i, block in enumerate(given) if block not in kept]
    return [{"role": "system", "content": _joined(kept)}], left_out


def _messages(given: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages of a chat. Raises RequestError for a result without its call."""
    messages: list[Message] = []
    open_calls: set[str] = set()
    # Consecutive messages of one role are one turn, as many templates require.
    for role, turn in itertools.groupby(enumerate(given), lambda each: each[1]["role"]):
        blocks = [block for i, message in turn for block in _named_blocks(i, message["content"])]
        if role == "assistant":
            messages.append(_assistant(blocks))
            open_calls = {call["id"] for call in messages[-1].get("tool_calls", ())}
        elif role == "user":
            messages += _user(blocks, open_calls)
        else:
            messages.append({"role": "system", "content": _joined([block for _, block in blocks])})
    return messages


def _named_blocks(index: int, content: str | Sequence[Block]) -> Iterator[NamedBlock]:
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    yield from ((f"messages[{index}].content[{i}]", block) for i, block in enumerate(content))


def _user(blocks: Sequence[NamedBlock], open_calls: set[str]) -> Iterator[Message]:
    """Yield the results of the calls before, and what the user says.

    open_calls: the ids of calls without a result; ids that get a result here are removed.
    """
    parts: list[Block] = []
    for name, block in blocks:
        if block["type"] == "text":
            parts.append({"type": "text", "text": block["text"]})
            continue
        if block["type"] == "image":
            parts.append(_image(name, block["source"]))
            continue
        call_id = block["tool_use_id"]
        if call_id not in open_calls:
            where = f"{name}.tool_use_id"
            raise RequestError(
                f"{where} {shown(call_id)} is no tool_use of the assistant's message before it that has no "
                "result",
                param=where,
            )
        open_calls.remove(call_id)
        yield {"role": "tool", "tool_call_id": call_id, "content": _result(name, block.get("content", ""))}
    if parts or not blocks:
        is_one_text = len(parts) == 1 and parts[0]["type"] == "text"
        yield {"role": "user", "content": parts[0]["text"] if is_one_text else parts}


def _result(name: str, content: str | Sequence[Block]) -> str | list[Block]:
    """Return a tool's result as text, or as parts if it has images."""
    if isinstance(content, str) or all(block["type"] != "image" for block in content):
        return _joined(content)
    return [
        _image(f"{name}.content[{i}]", block["source"])
        if block["type"] == "image"
        else {"type": "text", "text": _text_of(block)}
        for i, block in enumerate(content)
    ]


def _image(name: str, source: Block) -> Block:
    """Return the part of a chat's message for the source of an image block."""
    if source["type"] == "url":
        return image_part(name, source["url"], field="source.url")
    url = f"data:{source['media_type']};base64,{source['data']}"
    return image_part(name, url, field="source.data")


def _assistant(blocks: Sequence[NamedBlock]) -> Message:
    """Return the message of the blocks. Raises RequestError for two calls with an id."""
    message: Message = {"role": "assistant"}
    texts: list[str] = []  # joined at once: there may be many
    thoughts: list[str] = []
    call_ids = set[str]()
    for name, block in blocks:
        match block["type"]:
            case "text":
                texts.append(block["text"])
            case "thinking":
                thoughts.append(block["thinking"])
            case "tool_use":
                if block["id"] in call_ids:
                    where = f"{name}.id"
                    raise RequestError(
                        f"{where} {shown(block['id'])} is that of an earlier tool_use", param=where
                    )
                call_ids.add(block["id"])
                arguments = json.dumps(block["input"], ensure_ascii=False)
                function = {"name": block["name"], "arguments": arguments}
                call = {"id": block["id"], "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
    if texts:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning"] = message["reasoning_content"] = "".join(thoughts)
    return message if len(message) > 1 else {**message, "content": ""}


def _joined(content: str | Sequence[Block]) -> str:
    return content if isinstance(content, str) else "\n\n".join(map(_text_of, content))


def _text_of(block: Block) -> str:
    if block["type"] == "tool_reference":
        return f"Found the tool {block['tool_name']}."
    return str(block["text"])
