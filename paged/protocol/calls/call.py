"""Call: a request body, validated as far as possible without a model."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

from ...base.errors import PagedError, RequestError
from ...base.fields import FieldTable
from ...options.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from ...requests.request import Prompt, RequestOutput
from ..answers.chunks import Chunks
from ..answers.places import Decoding
from ..fields.sampling import SAMPLING_KINDS, check_most_logprobs, constraint_of, field_of_part
from ..limits import MAX_CHOICES, MAX_PARAMETER_SIZE, Limits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...engine.model_text import ModelText
    from ...options.lora_request import LoRARequest
    from ...text.tokenizer import Tokenizer
    from .conversation import Conversation

# What the engine calls some fields of bodies; None for that of the prompts.
_ENGINE_FIELDS = {"prompt": None, "prompt_token_ids": None, "tenant": "user"}
# What it calls the constraint, at the beginning of messages.
_CONSTRAINT = re.compile(r"^structured_outputs( (json|json_object|structural_tag)\b)?")


class OwnNames:
    """The field names that one kind of body uses instead of the common names.

    The names are pairs of a pattern and its replacement.
    """

    def __init__(self, *names: tuple[str, str]) -> None:
        self._names = [(re.compile(pattern), name) for pattern, name in names]

    def of(self, text: str) -> str:
        """Replace the common names in a path or a message by the body's own names."""
        for pattern, name in self._names:
            text = pattern.sub(name, text)
        return text

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Translate the field names in errors raised inside this context to the body's own names."""
        try:
            yield
        except PagedError as error:
            if error.param is not None:
                error.param = self.of(error.param)
            error.args = (self.of(str(error)),)
            raise


class Call(ABC):
    """The body of an HTTP request, validated as far as possible without a model.

    table: the fields of the body.
    PROMPT_FIELD: the field that holds the prompts.
    NAMES: the fields for which this body has its own names.
    is_queued: whether the call is sent to an engine.
    values: the parsed fields of the body.
    ignored: the names of given fields that have no effect here.
    limits: what the operator of the server allows.
    model: the name of the model; None accepts any model.
    tenant: `user`, unless `give_to` sets another tenant.
    user: the field user of the body.
    stream: whether to answer by server-sent events.
    request_id: the id that the client chose.
    priority, timeout_s: see SamplingParams.
    conversation: the messages of the body; None if it has none.
    adapter: the LoRA adapter that `model` names, which the server sets; None for the model itself.
    load_s: seconds for which the request has waited until its model was loaded.
    keep_alive: seconds for which the model stays loaded after the request; None as the server says.
    """

    table: ClassVar[FieldTable]
    PROMPT_FIELD: ClassVar[str] = "prompt"
    NAMES: ClassVar[OwnNames] = OwnNames()
    is_queued: ClassVar[bool] = True
    conversation: Conversation | None = None

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        self.values, without_effect = self.read(body)
        self.ignored = tuple(without_effect)
        self.limits = limits
        values = self.values
        self.model: str | None = values.get("model")
        self.user: str = values.get("user", "")
        self.tenant = self.user
        self.stream = bool(values.get("stream", False))
        self.request_id: str | None = values.get("request_id")
        self.priority: float | None = values.get("priority")
        self.timeout_s: float | None = values.get("timeout_s")
        self.keep_alive: float | None = values.get("keep_alive")
        self.adapter: LoRARequest | None = None
        self.load_s = 0.0

    def read(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return the fields of the body under their common names, and the names of fields without effect."""
        return self.table.parse(body)

    def give_to(self, tenant: str, salt: str) -> None:
        """Set the tenant, and replace the prefix cache's salt given in the body."""
        self.tenant = tenant
        self.values["cache_salt"] = salt

    def param_of(self, error: PagedError) -> str | None:
        """Return the field of the body that caused an error; None if no field did."""
        if error.param is None:
            return None
        name = re.split(r"[.\[]", error.param, maxsplit=1)[0]
        if name in _ENGINE_FIELDS:
            return self.PROMPT_FIELD if _ENGINE_FIELDS[name] is None else _ENGINE_FIELDS[name]
        return self.NAMES.of(error.param)

    def name_field(self, error: PagedError, default: str | None = None) -> None:
        """Name the field of the body that caused an error, in the error's `param` and in its message."""
        error.param = self.param_of(error) or default
        error.args = (self.NAMES.of(str(error)),)

    @contextmanager
    def naming_field(self, default: str | None = None) -> Iterator[None]:
        """Apply `name_field` to errors raised inside this context."""
        try:
            yield
        except PagedError as error:
            self.name_field(error, default)
            raise


def listed_prompts(value: str | list[Any]) -> list[Any]:
    """Return the list of prompts in a value: a text, a list of token ids, or a list of such prompts."""
    return [value] if isinstance(value, str) or (value and isinstance(value[0], int)) else value


def prompt_of(prompt: str | list[int], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prompt with the options that the body gives for prompts."""
    salt = {"cache_salt": values["cache_salt"]} if "cache_salt" in values else {}
    if isinstance(prompt, str):
        return {"prompt": prompt, "add_special_tokens": values.get("add_special_tokens", True), **salt}
    return {"prompt_token_ids": prompt, **salt}


class GenerationCall(Call):
    """A request body that asks for generated tokens.

    DEFAULT_MAX_TOKENS: the value of max_tokens if neither the body nor generation_config.json sets it.
    n: number of choices of each prompt.
    """

    DEFAULT_MAX_TOKENS: ClassVar[int | None]

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        values = self.values
        self.n: int = values.get("n", 1)
        self.sampling = {name: values[name] for name in values.keys() & SAMPLING_KINDS.keys()}
        check_most_logprobs("prompt_logprobs", values.get("prompt_logprobs"), limits.max_logprobs)
        # The field that the engine's structured_outputs come from, for errors.
        self.constraint_field = "response_format" if "response_format" in values else "structured_outputs"
        self._has_structures = "structures" in values.get("response_format", {})  # which become a format
        with self.NAMES.in_errors():
            constraint = constraint_of(values)
        if constraint is not None:
            self.sampling["structured_outputs"] = constraint

    def give_to(self, tenant: str, salt: str) -> None:
        """Set the tenant, and replace the prefix cache's salt given in the body."""
        super().give_to(tenant, salt)
        self.sampling["cache_salt"] = salt

    def param_of(self, error: PagedError) -> str | None:
        """Return the field of the body that caused an error; None if no field did."""
        param = super().param_of(error)
        name, _, part = (param or "").partition(".")
        return (
            self.NAMES.of(self.field_of_constraint(part or None)) if name == "structured_outputs" else param
        )

    def name_field(self, error: PagedError, default: str | None = None) -> None:
        """Name the field of the body that caused an error, in the error's `param` and in its message."""
        field = self.field_of_constraint(None)
        if field != "structured_outputs":
            error.args = (_CONSTRAINT.sub(field, str(error)),)
        super().name_field(error, default)

    def field_of_constraint(self, part: str | None) -> str:
        """Return the field of the body that set a part of the engine's structured_outputs.

        part: the path of the part, such as structural_tag.format.elements[1]; None stands for the whole.
        """
        return field_of_part(self.constraint_field, None if self._has_structures else part)

    @abstractmethod
    def prompts(self, text: ModelText) -> Sequence[Prompt]:
        """Return the prompts to complete. Raises RequestError.

        Rendering a chat template may take milliseconds.
        """

    def params(self, text: ModelText, *, stream: bool | None = None) -> SamplingParams:
        """Return the sampling parameters with the model's defaults. Call `prompts` first. Raises
        RequestError.

        stream: True for outputs with deltas, False for one output at the end; None takes the body's choice.
        """
        is_delta = self.stream if stream is None else stream
        kind = RequestOutputKind.DELTA if is_delta else RequestOutputKind.FINAL_ONLY
        with self.naming_field():
            return text.params_of({**self.given_params(), "output_kind": kind}, self.DEFAULT_MAX_TOKENS)

    def given_params(self) -> dict[str, Any]:
        """Return the arguments of SamplingParams that the body sets."""
        return {**self.sampling}

    def check_choices(self, num_prompts: int) -> None:
        """Raise RequestError if the call would generate too many samples."""
        name, num_samples = max(("n", self.n), ("best_of", self.values.get("best_of", 0)), key=itemgetter(1))
        if num_prompts * num_samples > MAX_CHOICES:
            raise RequestError(
                f"{name} {num_samples} for {num_prompts:,} prompts makes {num_prompts * num_samples:,} "
                f"choices; {MAX_CHOICES:,} is the most",
                param=name,
            )
        sizes = {name: _size(value) for name, value in self.sampling.items()}
        if num_prompts > 1 and num_prompts * sum(sizes.values()) > MAX_PARAMETER_SIZE:
            largest = max(sizes, key=sizes.__getitem__)
            name = self.constraint_field if largest == "structured_outputs" else largest
            raise RequestError(
                f"{name} is too large for {num_prompts:,} prompts, each of which has all parameters: "
                f"{num_prompts * sum(sizes.values()):,} characters, an entry of a list counted as four; "
                f"{MAX_PARAMETER_SIZE:,} is the most. Send fewer prompts in one body",
                param=name,
            )


def _size(value: Any) -> int:
    """Return about how many characters a parameter has, an entry of a list counting as four."""
    if isinstance(value, StructuredOutputsParams):
        return _size(getattr(value, value.kind))
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Sequence | Mapping):
        return 4 * len(value) + sum(len(part) for part in value if isinstance(part, str))
    return 4


class AnswerCall(GenerationCall):
    """A request body of OpenAI's API whose response has choices."""

    def __init__(self, body: Mapping[str, Any], limits: Limits) -> None:
        super().__init__(body, limits)
        options = self.values.get("stream_options")
        if options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        options = options or {}
        self.form_fields: dict[str, Any] = {
            "n": self.n,
            "as_ids": self.values.get("return_tokens_as_token_ids", False),
            "token_ids": self.values.get("return_token_ids", False),
            "include_usage": options.get("include_usage", False),
            "continuous_usage": options.get("continuous_usage_stats", False),
            "cached_tokens": limits.cached_tokens,
            "prompt_logprobs": "prompt_logprobs" in self.values,
        }

    def decode_with(self, tokenizer: Tokenizer | None, *, keeps_special_tokens: bool = False) -> None:
        """Set the tokenizer that makes the text of the answer.

        keeps_special_tokens: whether the text must keep special tokens, regardless of the body.
        """
        values = self.values
        self.form_fields["decoding"] = Decoding(
            tokenizer,
            not keeps_special_tokens and values.get("skip_special_tokens", True),
            not keeps_special_tokens and values.get("spaces_between_special_tokens", True),
        )

    @abstractmethod
    def body(
        self, outputs: Sequence[RequestOutput], identity: str, created: int, model: str
    ) -> dict[str, Any]:
        """Return the whole response body. Call `prompts` first.

        outputs: the finished output of each prompt.
        identity: an id that is unique among responses.
        created: seconds since 1970.
        """

    def immediate(self, model: str) -> dict[str, Any] | None:  # noqa: ARG002
        """Return the whole response body if no engine is needed for it, else None."""
        return None

    @abstractmethod
    def chunks(self, identity: str, created: int, model: str) -> Chunks:
        """Return the maker of chunks for a streamed response. Call `prompts` first."""
