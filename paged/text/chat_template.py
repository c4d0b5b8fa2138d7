"""ChatTemplates: conversations to the text that a model was trained to go on from.

The text is what transformers' `apply_chat_template` makes of them. It is rendered in a process of its own,
whose memory and CPU time are limited: see template_worker.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..validation import check_bool

WORKER = Path(__file__).with_name("template_worker.py")
# For models that have no template of their own; only who names it gets it.
PLAIN = "plain"
PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{{ message['role'] | capitalize }}: {{ message['content'] }}
{%- if not loop.last %}{{ '\\n' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '\\nAssistant:' }}{% endif -%}
"""
# Stands where a message is to be continued. The space at its end shows whether the template strips messages.
MARK = "\ue000the answer goes on here\ue000 "
REASONING = ("reasoning_content", "thinking", "reasoning")  # names that a message's reasoning has gone by
NO_CONTENT = ("tool_calls", *REASONING)  # a message with one of these needs no content
OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")

Message = Mapping[str, Any]  # {"role": ..., "content": ...} and what else the template knows


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may take.

    time_s: CPU time.
    memory: bytes of address space, interpreter included.
    characters: of the messages as JSON, and of the text made of them.
    """

    time_s: float = 5.0
    memory: int = 512 * 2**20
    characters: int = 64 * 2**20


class ChatTemplates:
    """A checkpoint's chat templates by name; the one of a single template is "default".

    special_tokens: what templates know as bos_token, eos_token and so on.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        limits: TemplateLimits | None = None,
    ) -> None:
        self.templates, self.special_tokens = templates, special_tokens
        self._worker = _Worker(limits or TemplateLimits())

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of one conversation, special tokens included.

        See `LLMEngine.chat` for the arguments.

        Raises RequestError if one of them is wrong, or the template refuses them, fails or takes too much.
        """
        check_bool(RequestError, "add_generation_prompt", add_generation_prompt)
        check_bool(RequestError, "continue_final_message", continue_final_message)
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message goes on with the last message, add_generation_prompt begins another; "
                "give add_generation_prompt=False with continue_final_message=True"
            )
        conversation = [_checked(i, message) for i, message in enumerate(_listed(messages))]
        last = _mark_end(conversation) if continue_final_message else None
        variables = {
            "documents": None,
            **self.special_tokens,
            **_extra_variables(chat_template_kwargs),
            "messages": conversation,
            "tools": None if tools is None else _checked_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._worker.render(self.source(chat_template, has_tools=tools is not None), variables)
        return text if last is None else _cut_at_mark(text, last)

    def source(self, chat_template: str | None = None, *, has_tools: bool = False) -> str:
        """The template that is meant: a name's, `chat_template` itself, or the checkpoint's own.

        Raises RequestError if there is none.
        """
        known = ", ".join(repr(name) for name in sorted({*self.templates, PLAIN}))
        if not isinstance(chat_template, str | None):
            raise RequestError(f"chat_template must be a Jinja template or a name, got {chat_template!r}")
        if chat_template is None:
            for name in ("tool_use", "default") if has_tools else ("default",):
                if name in self.templates:
                    return self.templates[name]
            if self.templates:
                raise RequestError(
                    f"this checkpoint has several chat templates; name one with chat_template=: {known}"
                )
            raise RequestError(
                "this checkpoint has no chat template: give a Jinja template as chat_template "
                f"(--chat-template), or {PLAIN!r}, which writes roles as words"
            )
        if chat_template in self.templates:
            return self.templates[chat_template]
        if chat_template == PLAIN:
            return PLAIN_TEMPLATE
        if "{" not in chat_template:
            raise RequestError(
                f"chat_template {chat_template!r} is neither a Jinja template nor the name of one; "
                f"there is {known}"
            )
        return chat_template


def conversations_of(messages: Any) -> list[Any]:
    """One conversation, or a list of them, as a list of them."""
    listed = _listed(messages)
    return [listed] if not listed or isinstance(listed[0], Mapping) else listed


def _listed(messages: Any) -> list[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"messages must be a list of messages, got {messages!r}")
    if not messages:
        raise RequestError("messages must have at least one message, got []")
    return list(messages)


def _checked(index: int, message: Any) -> dict[str, Any]:
    """A copy of the message as templates expect it, without what is None."""
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f'{name} must be a dict such as {{"role": ..., "content": ...}}, got {message!r}')
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(f'{name} must have a "role" such as "user", got {message!r}')
    result = {key: value for key, value in message.items() if value is not None}
    content = result.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        result["content"] = [_checked_part(f"{name}.content[{i}]", part) for i, part in enumerate(content)]
    elif not isinstance(content, str) and (content is not None or result.keys().isdisjoint(NO_CONTENT)):
        raise RequestError(f'{name}["content"] must be text or a list of text parts, got {content!r}')
    if "tool_calls" in result:
        result["tool_calls"] = _checked_calls(f"{name}.tool_calls", result["tool_calls"])
    for key in REASONING:
        if key in result:
            return {"thinking": result[key], **result, "reasoning_content": result[key]}
    return result


def _checked_part(name: str, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is None:
        raise RequestError(f'{name} must be a dict such as {{"type": "text", "text": ...}}, got {part!r}')
    if kind != "text":
        raise RequestError(f"{name} is of type {kind!r}; only parts of type 'text' are supported")
    if not isinstance(part.get("text"), str):
        raise RequestError(f'{name}["text"] must be a string, got {part.get("text")!r}')
    return dict(part)


def _checked_calls(name: str, calls: Any) -> list[Any]:
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{name} must be a list of dicts, got {calls!r}")
    return [_with_parsed_arguments(call) for call in calls]


def _with_parsed_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """OpenAI has a call's arguments as text, templates want what it says."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise RequestError(
            f"the arguments of a tool call must be JSON: {error}; got {function['arguments']!r}"
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _checked_tools(tools: Any) -> list[Any]:
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise RequestError(f"tools must be a list of JSON schemas, got {tools!r}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{i}] must be a dict with the JSON schema of a function, got {tool!r}")
    return list(tools)


def _extra_variables(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError(f"chat_template_kwargs must be a dict of names and values, got {given!r}")
    for name in OWN_VARIABLES:
        if name in given:
            raise RequestError(f"chat_template_kwargs must not have {name!r}, which is an argument itself")
    return given


def _mark_end(conversation: list[dict[str, Any]]) -> str:
    """Put the mark behind the last message's text, which is returned."""
    content = conversation[-1].get("content")
    if isinstance(content, list) and content:
        part = content[-1]
        conversation[-1]["content"] = [*content[:-1], {**part, "text": part["text"] + MARK}]
        return str(part["text"])
    if not isinstance(content, str):
        raise RequestError("continue_final_message needs a last message that has text to continue")
    conversation[-1]["content"] = content + MARK
    return content


def _cut_at_mark(text: str, last: str) -> str:
    at = text.rfind(MARK.rstrip())
    if at < 0 or last.strip() not in text[:at]:
        raise RequestError(
            "continue_final_message cannot be done: "
            "the chat template changes the last message, or leaves it out"
        )
    # A template that strips messages would have stripped this one before anything could follow it.
    return text[:at] if text.startswith(MARK, at) else text[:at].rstrip()


class _Worker:
    """Asks the process that renders; starts it when it is first needed, and after it was ended."""

    def __init__(self, limits: TemplateLimits) -> None:
        self.limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._lock = threading.Lock()  # one question at a time

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """The text. Raises RequestError if there is none."""
        try:
            line = json.dumps({"source": source, "variables": variables}).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"messages, tools and chat_template_kwargs must be JSON: {error}") from error
        if len(line) > self.limits.characters:
            raise RequestError(
                f"the messages have {len(line)} characters as JSON, more than {self.limits.characters}"
            )
        with self._lock:
            reply = self._ask(line)
        if "error" in reply:
            raise RequestError(reply["error"])
        if "text" not in reply:
            raise RequestError(
                f"the chat template takes more than {self.limits.memory // 2**20} MiB of memory"
            )
        return reply["text"]

    def _ask(self, line: bytes) -> dict[str, str]:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            reply = process.stdout.readline()
        except BrokenPipeError:
            reply = b""
        except BaseException:  # an interrupt: the answer that comes would be taken for the next one's
            self.close()
            raise
        if reply.endswith(b"\n"):
            return dict(json.loads(reply))
        self.close()
        if process.returncode == -signal.SIGPROF:
            return {"error": f"the chat template takes more than {self.limits.time_s:g} s"}
        return {
            "error": f"the chat template ended the process that renders it (exit code {process.returncode})"
        }

    def _start(self) -> subprocess.Popen[bytes]:
        limits = self.limits
        numbers = (limits.time_s, limits.memory, limits.characters)
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER), *map(str, numbers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # It finds jinja2 where this process does.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            process_group=0,  # the terminal's Ctrl-C is not for it
        )
        self._end = weakref.finalize(self, _end, self._process)
        return self._process

    def close(self) -> None:
        """End the process; the next question starts another."""
        if self._end is not None:
            self._end()
        self._process = None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):  # what was not written yet goes with it
                pipe.close()
