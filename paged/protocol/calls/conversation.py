"""Conversation: messages and the options of their template, rendered to a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...base.errors import RequestError
from ...base.validation import shown
from ...chat.tool_format import JSON_FORMAT, ToolFormat
from ...chat.tool_prompts import Message
from ...text.chat_template import names_role
from ..fields.messages import ROLES
from ..limits import Limits

if TYPE_CHECKING:
    from ...engine.model_text import ModelText

# Fields of a body that are variables of the template.
_VARIABLES = ("reasoning_effort", "documents")


class Conversation:
    """The messages of a body, and how to render them.

    fetched: the images at URLs of its messages; None while they are to be fetched.
    tools: the tools that the template shows to the model.
    tool_format: describes the tools in messages if the template cannot show tools.
    """

    def __init__(self, values: Mapping[str, Any], limits: Limits) -> None:
        if "chat_template" in values and not limits.trust_chat_template:
            raise RequestError(
                "chat_template in a body is code, which this server takes only with "
                "--trust-request-chat-template; --chat-template sets one for all requests",
                param="chat_template",
            )
        self.messages: list[dict[str, Any]] = values["messages"]
        if limits.system is not None and self.messages[0]["role"] not in ("system", "developer"):
            self.messages = [{"role": "system", "content": limits.system}, *self.messages]
        self.fetched: Mapping[str, bytes] | None = None
        self.tools: Sequence[Mapping[str, Any]] | None = None
        self.tool_format: ToolFormat = limits.chat_format.tools or JSON_FORMAT
        self._values = values
        self._limits = limits

    @property
    def answer_role(self) -> str:
        """The role of the answer: the last message's role if it is continued."""
        if self._values.get("continue_final_message", False):
            return str(self.messages[-1]["role"])
        return "assistant"

    def prompt(self, text: ModelText) -> dict[str, Any]:
        """Return the prompt. Raises RequestError if the template refuses the conversation."""
        values = self._values
        limits = self._limits
        template = values.get("chat_template", limits.chat_template)
        source = text.chat_templates.source(template, has_tools=self.tools is not None)
        messages: Sequence[Message] = [_message(i, m, source) for i, m in enumerate(self.messages)]
        tools = self.tools
        form = self.tool_format
        if tools:
            shows = text.chat_templates.abilities(template)
            if not shows.tools:
                messages = form.messages_with(messages, tools, shows_system=shows.system)
                tools = None
        variables = {name: values[name] for name in _VARIABLES if name in values}
        prompt = text.render_chat(
            messages,
            fetched=self.fetched,
            mm_processor_kwargs=values.get("mm_processor_kwargs"),
            tools=tools,
            add_generation_prompt=values.get("add_generation_prompt", True),
            continue_final_message=values.get("continue_final_message", False),
            chat_template=template,
            chat_template_kwargs={
                **limits.chat_template_kwargs,
                **variables,
                **values.get("chat_template_kwargs", {}),
            },
        )
        return {**prompt, "add_special_tokens": values.get("add_special_tokens", False)}


def _message(index: int, message: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a message with a role that the template knows."""
    role = message["role"]
    if role == "developer" and not names_role(source, role):
        return {**message, "role": "system"}
    if role not in ROLES and not names_role(source, role):
        name = f"messages[{index}].role"
        known = ", ".join(map(repr, ROLES))
        raise RequestError(
            f"{name} must be one of {known}, or a role that the chat template names; got {shown(role)}",
            param=name,
        )
    return message
