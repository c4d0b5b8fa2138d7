"""ConversationCall: a body with a conversation, whose answer may hold reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...requests.prompts import Prompt
from ...sampling_params import StructuredOutputsParams
from ..answers.chats import ChatForm
from ..chat_output.parts import OutputParser
from ..chat_output.plan import ToolPlan
from ..limits import Limits
from .call import AnswerCall
from .conversation import Conversation

if TYPE_CHECKING:
    from ...engine.model_text import ModelText


def converse(values: Mapping[str, Any], limits: Limits) -> tuple[Conversation, ToolPlan]:
    """Return the conversation of a body and what its tools make of it.

    values: fields of a chat's form.

    Raises RequestError naming the field.
    """
    conversation = Conversation(values, limits)
    plan = ToolPlan.of(
        limits.chat_format,
        tools=values.get("tools"),
        tool_choice=values.get("tool_choice"),
        parallel_tool_calls=values.get("parallel_tool_calls", True),
        continues_answer=values.get("continue_final_message", False),
    )
    conversation.tools = plan.template_tools
    conversation.tool_format = plan.format
    return conversation, plan


class ConversationCall(AnswerCall):
    """A body with a conversation, whose answer may hold reasoning and tool calls."""

    DEFAULT_MAX_TOKENS = None  # up to the end of the context

    def converse(self, values: Mapping[str, Any]) -> None:
        """Set the conversation, from fields of a chat's form. Raises RequestError naming the field."""
        with self.NAMES.in_errors():
            self.conversation, self._plan = converse(values, self.limits)
        if self._plan.tools and "structured_outputs" not in self.sampling:
            self.constraint_field = "tools"
        self._prompt: str | None = None
        self._constraint: StructuredOutputsParams | None = None  # the plan's, if it is not the body's own

    def prompts(self, text: ModelText) -> Sequence[Prompt]:
        """Return the rendered conversation."""
        with self.naming_field(self.PROMPT_FIELD):
            prompt = self.conversation.prompt(text)
        self._prompt = prompt["prompt"]
        skips = not self._plan.parses or self._plan.skip_special_tokens
        self.decode_with(text.tokenizer, skip_special_tokens=skips)
        return [prompt]

    def given_params(self) -> dict[str, Any]:
        """Return the arguments of SamplingParams that the body gives, after `prompts`."""
        plan = self._plan
        given = super().given_params()
        if not plan.parses:
            return given
        assert self._prompt is not None, "prompts() was not called"
        if given.get("stop"):
            given["no_stop_within"] = plan.reasoning_tags(self._prompt)  # they end the answer alone
        wanted = given.get("structured_outputs")
        constraint = plan.structured_outputs(self._prompt, wanted)
        self._constraint = None if constraint is wanted else constraint
        if not plan.skip_special_tokens:  # the parser reads them
            given["skip_special_tokens"] = False
        return {**given, "structured_outputs": constraint}

    def field_of_constraint(self, part: str | None) -> str:
        """Return the field of the body from which a part of the engine's structured_outputs comes."""
        if self._constraint is None:
            return super().field_of_constraint(part)
        return self.constraint_field

    @property
    def may_call_tools(self) -> bool:
        """Whether the answer may hold tool calls."""
        return bool(self._plan.tools)

    def count_tokens(self, text: str) -> int:
        """Return how many tokens a part of the answer has, after `prompts`."""
        tokenizer = self.form_fields["decoding"].tokenizer
        return 0 if tokenizer is None else len(tokenizer.encode(text, add_special_tokens=False))

    def new_form(self, **more: Any) -> ChatForm:
        """Return the form of the answer."""
        return ChatForm(
            **self.form_fields,
            num_top=self.sampling.get("logprobs", 0),
            role=self.conversation.answer_role,
            new_parser=self._new_parser if self._plan.parses else None,
            **more,
        )

    def _new_parser(self) -> OutputParser:
        assert self._prompt is not None, "prompts() was not called"
        return self._plan.new_parser(self._prompt)
