"""ChatTemplates: render conversations to the prompt text that a model was trained on.

The text equals that of transformers' `apply_chat_template`. It is rendered in a process of its own, whose
memory and CPU time are limited: see `worker`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..base.errors import RequestError
from ..base.validation import check_bool, shown
from .message_forms import RefusedError, write_shown
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

# What tells whether a template shows tools.
PROBE_CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "a system message that is looked for"},
    {"role": "user", "content": "a question"},
]
PROBE_TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "g", "parameters": {"type": "object", "properties": {}}},
}
MAX_PROBED = 64  # templates of which it is remembered
NO_TOOLS_SHOWN = (
    "the chat template does not show them to the model, which would not know of them. Give a template that "
    "does as chat_template (--chat-template), or describe them in a message"
)

Message = Mapping[str, Any]  # {"role": ..., "content": ...} and other keys that the template knows


# The arguments of `ChatTemplates.render`, besides the conversation.
TEMPLATE_OPTIONS = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)


class Abilities(NamedTuple):
    """The parts of a conversation that a template shows to the model.

    tools: whether the template's output differs with and without a tool. A template that refuses every trial
        conversation counts as showing tools, since it may expect another kind of conversation.
    system: whether the template shows system messages.
    """

    tools: bool
    system: bool


class ChatTemplates:
    """A checkpoint's chat templates by name; a single template is called "default".

    special_tokens: the variables of templates such as bos_token and eos_token.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        limits: WorkerLimits | None = None,
    ) -> None:
        self.templates = templates
        self.special_tokens = special_tokens
        self._abilities: dict[str, Abilities] = {}  # by the source of a template
        self._refuses_repeated: dict[str, bool] = {}  # as well
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

        If the template refuses system messages or leaves one out, their texts are joined to one system
        message at the beginning, or put at the beginning of the first user message. If the template does not
        accept objects as arguments of calls, it gets them as text.

        Raises RequestError if an argument is wrong, or if the template refuses the messages, fails or exceeds
        a limit.
        """
        check_bool(RequestError, "add_generation_prompt", add_generation_prompt)
        check_bool(RequestError, "continue_final_message", continue_final_message)
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message continues the last message, add_generation_prompt begins another; "
                "give add_generation_prompt=False with continue_final_message=True",
                param="continue_final_message",
            )
        conversation = [_check_message(i, message) for i, message in enumerate(_message_list(messages))]
        variables = {
            "documents": None,
            **self.special_tokens,
            **_extra_variables(chat_template_kwargs),
            "tools": None if tools is None else _check_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        source = self.source(chat_template, has_tools=tools is not None)
        if tools and not self.abilities(chat_template).tools:
            raise RequestError(f"tools are refused: {NO_TOOLS_SHOWN}", param="tools")
        write = partial(self._write, source, variables, continues=continue_final_message)
        try:
            return write_shown(
                conversation,
                write,
                knows_developer=names_role(source, "developer"),
                keeps_last=continue_final_message,
            )
        except RefusedError as refusal:
            raise RequestError(str(refusal)) from refusal

    def _write(
        self, source: str, variables: Mapping[str, Any], messages: list[dict[str, Any]], *, continues: bool
    ) -> str:
        """Render messages. Raises RefusedError if the template does not take them, else RequestError."""
        given, last = _marked_end(messages) if continues else (messages, None)
        name = "the conversation (messages, tools and chat_template_kwargs)"
        answer = self._workers.ask({"source": source, "variables": {**variables, "messages": given}}, name)
        for reason in ("refused", "failed"):
            if reason in answer:
                raise RefusedError(answer[reason], is_own=reason == "refused")
        return str(answer["text"]) if last is None else _cut_at_mark(answer["text"], last)

    def abilities(self, chat_template: str | None = None) -> Abilities:
        """Return what a template shows to the model. Raises RequestError if there is no template."""
        source = self.source(chat_template, has_tools=True)
        if source not in self._abilities:
            if len(self._abilities) == MAX_PROBED:  # requests may bring templates
                self._abilities.clear()
            self._abilities[source] = self._probe(source)
        return self._abilities[source]

    def _probe(self, source: str) -> Abilities:
        """Render conversations with and without a tool, and with and without a system message."""
        shows_tools = False
        is_rendered = False
        shows_system = False
        for conversation in (PROBE_CONVERSATION[1:], PROBE_CONVERSATION):
            given = {**self.special_tokens, "documents": None}
            try:
                without, with_tool = (
                    self._write(source, given | {"tools": tools}, conversation, continues=False)
                    for tools in (None, [PROBE_TOOL])
                )
            except RequestError:
                continue
            is_rendered = True
            shows_tools = shows_tools or without != with_tool
            shows_system = PROBE_CONVERSATION[0]["content"] in without
        return Abilities(shows_tools or not is_rendered, shows_system)

    def refuses_repeated_roles(self, chat_template: str | None = None) -> bool:
        """Return whether a template accepts one message of the user, but refuses two in a row."""
        source = self.source(chat_template)
        if source not in self._refuses_repeated:
            if len(self._refuses_repeated) == MAX_PROBED:
                self._refuses_repeated.clear()
            self._refuses_repeated[source] = self._takes(source, 1) and not self._takes(source, 2)
        return self._refuses_repeated[source]

    def _takes(self, source: str, num_messages: int) -> bool:
        given = {**self.special_tokens, "documents": None, "tools": None}
        try:
            self._write(source, given, PROBE_CONVERSATION[1:] * num_messages, continues=False)
        except RequestError:
            return False
        return True

    def source(self, chat_template: str | None = None, *, has_tools: bool = False) -> str:
        """Return the source of a template.

        chat_template: a name, a Jinja template, or None for the checkpoint's default.

        Raises RequestError if there is no template.
        """
        known = ", ".join(repr(name) for name in sorted({*self.templates, PLAIN}))
        if not isinstance(chat_template, str | None):
            raise RequestError(
                f"chat_template must be a Jinja template or a name, got {shown(chat_template)}",
                param="chat_template",
            )
        if chat_template is None:
            for name in ("tool_use", "default") if has_tools else ("default",):
                if name in self.templates:
                    return self.templates[name]
            if self.templates:
                raise RequestError(
                    f"this checkpoint has several chat templates; name one with chat_template=: {known}",
                    param="chat_template",
                )
            raise RequestError(
                "this checkpoint has no chat template: give a Jinja template as chat_template "
                f"(--chat-template), or {PLAIN!r}, which writes roles as words",
                param="chat_template",
            )
        if chat_template in self.templates:
            return self.templates[chat_template]
        if chat_template == PLAIN:
            return PLAIN_TEMPLATE
        if "{" not in chat_template:
            raise RequestError(
                f"chat_template {shown(chat_template)} is neither a Jinja template nor the name of one; "
                f"there is {known}",
                param="chat_template",
            )
        return chat_template


def names_role(source: str, role: str) -> bool:
    """Return whether a template's source contains this role as a quoted string, as in a comparison."""
    return f"'{role}'" in source or f'"{role}"' in source


def conversations_of(messages: Any) -> list[Any]:
    """Return one conversation or a list of them as a list of conversations."""
    listed = _message_list(messages)
    return [listed] if not listed or isinstance(listed[0], Mapping) else listed


def _message_list(messages: Any) -> list[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise RequestError(f"messages must be a list of messages, got {shown(messages)}", param="messages")
    if not messages:
        raise RequestError("messages must have at least one message, got []", param="messages")
    return list(messages)


def _check_message(index: int, message: Any) -> dict[str, Any]:
    """Return a copy of the message as templates expect it, without keys that are None."""
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RequestError(
            f'{name} must be a dict such as {{"role": ..., "content": ...}}, got {shown(message)}', param=name
        )
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise RequestError(f'{name} must have a "role" such as "user", got {shown(message)}', param=name)
    result = {key: value for key, value in message.items() if value is not None}
    content = result.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str | bytes):
        result["content"] = [_check_part(f"{name}.content[{i}]", part) for i, part in enumerate(content)]
    elif not isinstance(content, str) and (content is not None or result.keys().isdisjoint(NO_CONTENT)):
        raise RequestError(
            f'{name}["content"] must be text or a list of text parts, got {shown(content)}', param=name
        )
    if "tool_calls" in result:
        result["tool_calls"] = _check_calls(f"{name}.tool_calls", result["tool_calls"])
    for key in REASONING:
        if key in result:
            return {"thinking": result[key], **result, "reasoning_content": result[key]}
    return result


def _check_part(name: str, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind is None:
        raise RequestError(
            f'{name} must be a dict such as {{"type": "text", "text": ...}}, got {shown(part)}', param=name
        )
    if kind == "image" and len(part) == 1:  # taken out of the conversation: see `chat_images`
        return dict(part)
    if kind != "text":
        raise RequestError(
            f"{name} is of type {shown(kind)}; 'text', and 'image_url' of an image, are supported", param=name
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f'{name}["text"] must be a string, got {shown(part.get("text"))}', param=name)
    return dict(part)


def _check_calls(name: str, calls: Any) -> list[Any]:
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{name} must be a list of dicts, got {shown(calls)}", param=name)
    return [*calls]


def _check_tools(tools: Any) -> list[Any]:
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise RequestError(f"tools must be a list of JSON schemas, got {shown(tools)}", param="tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(
                f"tools[{i}] must be a dict with the JSON schema of a function, got {shown(tool)}",
                param=f"tools[{i}]",
            )
    return list(tools)


def _extra_variables(given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise RequestError(
            f"chat_template_kwargs must be a dict of names and values, got {shown(given)}",
            param="chat_template_kwargs",
        )
    for name in OWN_VARIABLES:
        if name in given:
            raise RequestError(
                f"chat_template_kwargs must not have {name!r}, which is an argument itself",
                param="chat_template_kwargs",
            )
    return given


def _marked_end(conversation: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the conversation with the mark after the last message's text, and that text."""
    *before, last = conversation
    content = last.get("content")
    if isinstance(content, list) and content and "text" in content[-1]:
        part = content[-1]
        marked = [*content[:-1], {**part, "text": part["text"] + MARK}]
        return [*before, {**last, "content": marked}], str(part["text"])
    if not isinstance(content, str):
        raise RequestError(
            "continue_final_message needs a last message that ends with text to continue",
            param="continue_final_message",
        )
    return [*before, {**last, "content": content + MARK}], content


def _cut_at_mark(text: str, last: str) -> str:
    at = text.rfind(MARK.rstrip())
    if at < 0 or last.strip() not in text[:at]:
        raise RequestError(
            "continue_final_message is not possible: "
            "the chat template changes the last message, or leaves it out",
            param="continue_final_message",
        )
    # Without the mark's final space, the template strips messages: the continued one must be stripped too.
    return text[:at] if text.startswith(MARK, at) else text[:at].rstrip()
