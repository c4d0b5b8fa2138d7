"""ConversationCall: a body with a conversation, whose answer may hold reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...chat.answer_reader import AnswerReader, TokenText
from ...chat.plan import ToolPlan
from ...options.sampling_params import StructuredOutputsParams
from ...requests.request import Prompt
from ..answers.chats import ChatForm
from ..limits import Limits
from .call import AnswerCall
from .conversation import Conversation

if TYPE_CHECKING:
    from ...engine.model_text import ModelText


def converse(values: Mapping[str, Any], limits: Limits) -> tuple[Conversation, ToolPlan]:
    """Return the conversation of a body, and the plan for its tools.

    values: the parsed fields of a chat body.

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
    """A body with a conversation. Its answer may contain reasoning and tool calls."""

    DEFAULT_MAX_TOKENS = None  # up to the end of the context
    conversation: Conversation

    def converse(self, values: Mapping[str, Any]) -> None:
        """Set the conversation from parsed fields of a chat body. Raises RequestError naming the field."""
        with self.NAMES.in_errors():
            self.conversation, self._plan = converse(values, self.limits)
        if self._plan.tools and "structured_outputs" not in self.sampling:
            self.constraint_field = "tools"
        self._prompt: str | None = None
        self._end_ids: set[int] = set()  # tokens of the format that end an answer besides EOS tokens
        self._constraint: StructuredOutputsParams | None = None  # the plan's, if it is not the body's own

    def prompts(self, text: ModelText) -> Sequence[Prompt]:
        """Return the rendered conversation."""
        with self.naming_field(self.PROMPT_FIELD):
            prompt = self.conversation.prompt(text)
        self._prompt = prompt["prompt"]
        tokenizer = text.tokenizer
        if self._plan.parses and tokenizer is not None:
            known = tokenizer.special_ids
            ends = {known[end] for end in self._plan.format.entry.ends if end in known}
            self._end_ids = ends - text.eos_token_ids
        self.decode_with(tokenizer, keeps_special_tokens=self._keeps_special_tokens)
        return [prompt]

    @property
    def _keeps_special_tokens(self) -> bool:
        """Whether the parser reads special tokens."""
        return self._plan.parses and not self._plan.skip_special_tokens

    def given_params(self) -> dict[str, Any]:
        """Return the arguments of SamplingParams that the body sets. Call `prompts` first."""
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
        if self._keeps_special_tokens:
            given |= {"skip_special_tokens": False, "spaces_between_special_tokens": False}
        if self._end_ids and not given.get("ignore_eos", False):
            given["stop_token_ids"] = [*given.get("stop_token_ids", ()), *sorted(self._end_ids)]
        return {**given, "structured_outputs": constraint}

    def field_of_constraint(self, part: str | None) -> str:
        """Return the field of the body that set a part of the engine's structured_outputs."""
        if self._constraint is None:
            return super().field_of_constraint(part)
        return self.constraint_field

    @property
    def may_call_tools(self) -> bool:
        """Whether the answer may contain tool calls."""
        return bool(self._plan.tools)

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens in a part of the answer. Call `prompts` first."""
        tokenizer = self.form_fields["decoding"].tokenizer
        return 0 if tokenizer is None else len(tokenizer.encode(text, add_special_tokens=False))

    def new_form(self, **more: Any) -> ChatForm:
        """Return a description of what the response contains."""
        return ChatForm(
            **self.form_fields,
            num_top=self.sampling.get("logprobs", 0),
            role=self.conversation.answer_role,
            new_reader=self._new_reader if self._plan.parses else None,
            count_tokens=self.count_tokens,
            **more,
        )

    def _new_reader(self) -> AnswerReader:
        assert self._prompt is not None, "prompts() was not called"
        parser = self._plan.new_parser(self._prompt)
        tokenizer = self.form_fields["decoding"].tokenizer
        if tokenizer is None or not self._keeps_special_tokens:
            return AnswerReader(parser)
        is_skipping = self.values.get("skip_special_tokens", True)
        return AnswerReader(parser, TokenText(tokenizer, self._plan.markers, is_skipping=is_skipping))
