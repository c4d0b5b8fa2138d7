"""ChatTemplates: render conversations to the prompt text that a model was trained on.

The text equals that of transformers' `apply_chat_template`. It is rendered in a process of its own, whose
memory and CPU time are limited: see `worker`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import RequestError
from ..strict_json import parse_json
from ..validation import check_bool, shown
from .worker import Worker, WorkerLimits, Workers

# For models without a template; used only when named.
PLAIN = "plain"
PLAIN_TEMPLATE = """\
{%- for message in messages -%}
{{ message['role'] | capitalize }}: {{ message['content'] }}
{%- if not loop.last %}{{ '\\n' }}{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '\\nAssistant:' }}{% endif -%}
"""
# Marks where a message is to be continued. Its final space shows whether the template strips messages.
MARK = "\ue000the answer goes on here\ue000 "
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message's reasoning
NO_CONTENT = ("tool_calls", *REASONING)  # a message with one of these needs no content
MOST_RENDERED = 4  # conversations at once, each by a process
OWN_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message")

Message = Mapping[str, Any]  # {"role": ..., "content": ...} and other keys that the template knows


# The arguments of `ChatTemplates.render`, besides the conversation.
TEMPLATE_OPTIONS = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)


class ChatTemplates:
    """A checkpoint's chat templates by name; a single template is called "default".

    special_tokens: the variables bos_token, eos_token and so on of templates.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        limits: WorkerLimits | None = None,
    ) -> None:
        self.templates, self.special_tokens = templates, special_tokens
        limits = limits or WorkerLimits()
        self._workers = Workers(
            MOST_RENDERED, lambda: Worker("paged.text.template_worker", "the chat template", limits)
        )

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
        """Return the text of one conversation with its special tokens; see `LLMEngine.chat`.

        Raises RequestError if an argument is wrong, or the template refuses it, fails or exceeds a limit.
        """
        check_bool(RequestError, "add_generation_prompt", add_generation_prompt)
        check_bool(RequestError, "continue_final_message", continue_final_message)
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message continues the last message, add_generation_prompt begins another; "
                "give add_generation_prompt=False with continue_final_message=True"
            )
        conversation = [_check_message(i, message) for i, message in enumerate(_message_list(messages))]
        last = _mark_end(conversation) if continue_final_message else None
        variables = {
            "documents": None,
            **self.special_tokens,
            **_extra_variables(chat_template_kwargs),
            "messages": conversation,
            "tools": None if tools is None else _check_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        source = self.source(chat_template, has_tools=tools is not None)
        name = "the conversation (messages, tools and chat_template_kwargs)"
        text = self._workers.ask({"source": source, "variables": variables}, name)["text"]
        return text if last is None else _cut_at_mark(text, last)

    def source(self, chat_template: str | None = None, *, has_tools: bool = False) -> str:
        """Return the source of a template.

        chat_template: a name, a Jinja template, or None for the checkpoint's default.

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
    """Return one conversation or a list of them as a list of conversations."""
    listed = _message_list(messages)
    return [listed] if not listed or isinstance(listed[0], Mapping) else listed


def _message_list(messages: Any) -> list[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"messages must be a list of messages, got {messages!r}")
    if not messages:
        raise RequestError("messages must have at least one message, got []")
    return list(messages)


def _check_message(index: int, message: Any) -> dict[str, Any]:
    """Return a copy of the message as templates expect it, without keys that are None."""
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(f'{name} must be a dict such as {{"role": ..., "content": ...}}, got {message!r}')
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(f'{name} must have a "role" such as "user", got {message!r}')
    result = {key: value for key, value in message.items() if value is not None}
    content = result.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        result["content"] = [_check_part(f"{name}.content[{i}]", part) for i, part in enumerate(content)]
    elif not isinstance(content, str) and (content is not None or result.keys().isdisjoint(NO_CONTENT)):
        raise RequestError(f'{name}["content"] must be text or a list of text parts, got {content!r}')
    if "tool_calls" in result:
        result["tool_calls"] = _check_calls(f"{name}.tool_calls", result["tool_calls"])
    for key in REASONING:
        if key in result:
            return {"thinking": result[key], **result, "reasoning_content": result[key]}
    return result


def _check_part(name: str, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is None:
        raise RequestError(f'{name} must be a dict such as {{"type": "text", "text": ...}}, got {part!r}')
    if kind != "text":
        raise RequestError(f"{name} is of type {kind!r}; only parts of type 'text' are supported")
    if not isinstance(part.get("text"), str):
        raise RequestError(f'{name}["text"] must be a string, got {part.get("text")!r}')
    return dict(part)


def _check_calls(name: str, calls: Any) -> list[Any]:
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{name} must be a list of dicts, got {calls!r}")
    return [_with_parsed_arguments(f"{name}[{i}]", call) for i, call in enumerate(calls)]


def _with_parsed_arguments(name: str, call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the call with its arguments parsed from JSON: OpenAI sends text, templates expect a dict."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = parse_json(function["arguments"] or "{}")
    except RequestError as error:
        raise RequestError(
            f"{name}.function.arguments must be JSON: {error}; got {shown(function['arguments'])}"
        ) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _check_tools(tools: Any) -> list[Any]:
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
    """Append the mark to the last message's text. Return the text."""
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
            "continue_final_message is not possible: "
            "the chat template changes the last message, or leaves it out"
        )
    # Without the mark's final space, the template strips messages: the continued one must be stripped too.
    return text[:at] if text.startswith(MARK, at) else text[:at].rstrip()
