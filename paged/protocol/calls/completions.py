"""CompletionCall: a body of /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...base.errors import RequestError
from ...base.fields import Field, FieldTable, refused
from ...base.kinds import Boolean, Integer
from ...requests.request import Prompt, RequestOutput
from ..answers.chunks import Head
from ..answers.completions import CompletionChunks, CompletionForm, Echo, completion_body
from ..fields.common import ADD_SPECIAL_TOKENS, ANSWER_FIELDS, BASE_FIELDS, PROMPTS
from ..fields.sampling import SAMPLING_FIELDS, check_most_logprobs, sampling_field
from ..limits import Limits
from .call import AnswerCall, listed_prompts, prompt_of

if TYPE_CHECKING:
    from ...engine.model_text import ModelText

COMPLETION_TABLE = FieldTable(
    "/v1/completions",
    [
        Field("prompt", PROMPTS, "the text to complete, its token ids, or a list of either", required=True),
        *BASE_FIELDS,
        *(field for field in SAMPLING_FIELDS if field.name != "max_tokens"),
        Field("max_tokens", Integer(0), "most tokens to generate, by default 16; 0 needs echo"),
        sampling_field(
            "logprobs",
            "report the log-probability of every token and of this many most likely ones at its position; "
            "with echo also of the prompt's tokens",
        ),
        Field("echo", Boolean(), "repeat the prompt before its completion"),
        ADD_SPECIAL_TOKENS,
        sampling_field("detokenize"),
        *ANSWER_FIELDS,
        *refused("suffix", "models that fill in the middle take a prompt with their own special tokens", ""),
        *refused("prompt_embeds", "a prompt is text or token ids"),
        *refused("messages", "a conversation belongs to /v1/chat/completions"),
    ],
)


class CompletionCall(AnswerCall):
    """A body of /v1/completions."""

    table = COMPLETION_TABLE
    DEFAULT_MAX_TOKENS = 16

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        values = self.values
        sampling = self.sampling
        self.listed = listed_prompts(values["prompt"])
        self.check_choices(len(self.listed))
        self._echo: Echo | None = None
        self._echoes: bool = values.get("echo", False)
        check_most_logprobs("logprobs", values.get("logprobs"), limits.max_logprobs)
        if self._echoes and "logprobs" in values:
            # A body may ask for more candidates of the prompt, which are then in both places.
            asked = values["logprobs"], values.get("prompt_logprobs", 0)
            sampling["prompt_logprobs"] = -1 if -1 in asked else max(asked)
        self._echo_only = values.get("max_tokens") == 0
        if self._echo_only:
            if not self._echoes:
                raise RequestError(
                    "max_tokens 0 generates nothing; with echo: true it returns the prompt",
                    param="max_tokens",
                )
            sampling["max_tokens"] = 1  # the engine computes the prompt for a token, which is left out

    def prompts(self, text: ModelText) -> Sequence[Prompt]:
        """Return the prompts of the body."""
        if self._echoes:
            if text.tokenizer is None:
                raise RequestError(
                    "echo needs the tokenizer, which skip_tokenizer_init=True left out", param="echo"
                )
            self._echo = Echo(tokenizer=text.tokenizer, only=self._echo_only)
        if "logprobs" in self.values and self.values.get("detokenize", True):
            self.decode_with(text.tokenizer)
        return [prompt_of(prompt, self.values) for prompt in self.listed]

    def body(
        self, outputs: Sequence[RequestOutput], identity: str, created: int, model: str
    ) -> dict[str, Any]:
        """Return a text_completion."""
        return completion_body(outputs, self._head(identity, created, model), self._form)

    def chunks(self, identity: str, created: int, model: str) -> CompletionChunks:
        """Return the maker of chunks for a streamed text_completion."""
        return CompletionChunks(self._head(identity, created, model), self._form)

    @staticmethod
    def _head(identity: str, created: int, model: str) -> Head:
        return Head(f"cmpl-{identity}", "text_completion", created, model)

    @property
    def _form(self) -> CompletionForm:
        assert self._echo is not None or not self._echoes, "prompts() was not called"
        return CompletionForm(
            **self.form_fields,
            num_prompts=len(self.listed),
            echo=self._echo,
            logprobs="logprobs" in self.values,
        )
