"""What a caller asks of an engine for one prompt, as given. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from ..base.errors import RequestError, UsageError
from ..base.validation import shown
from ..options.sampling_params import SamplingParams
from ..requests.request import Grammar, Prompt, Request
from ..requests.token_rules import TokenRules
from ..text.prompt_parser import ParsedPrompt

if TYPE_CHECKING:
    from ..options.lora_request import LoRARequest
    from ..requests.prompt_report import PromptReport
    from ..requests.stop_strings import StopStrings
    from .model_text import ModelText

Found = TypeVar("Found", covariant=True)


class Prepared(NamedTuple):
    """The parts of a request that may take long to make: the tokenized prompt and the compiled parameters."""

    prompt: ParsedPrompt
    rules: TokenRules = TokenRules()
    stops: StopStrings | None = None
    grammar: Grammar | None = None


class SampleSoFar(NamedTuple):
    """An unfinished sample, as far as another engine has computed it.

    sample: its number among the samples of its request.
    cumulative_logprob: the sum of the log-probabilities of the tokens; None unless log-probabilities are
        reported.
    """

    sample: int
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request to generate tokens. `RequestFactory.new_group` validates it.

    prompt: as given, or already prepared.
    sampling_params: None takes the engine's defaults.
    priority, timeout_s: replace those of sampling_params where not None.
    generated_token_ids: the output so far, which another engine made.
    resumed: the samples to continue after another engine has ended. The request was accepted there: a full
        queue does not refuse it, and its tenant was charged for the prompt.
    part_of: see `RequestInputs`.
    lora_request: the LoRA adapter; None: the model alone.
    """

    prompt: Prompt | ParsedPrompt | Prepared
    sampling_params: SamplingParams | None
    priority: float | None = None
    tenant: str = ""
    timeout_s: float | None = None
    generated_token_ids: Sequence[int] = ()
    resumed: Sequence[SampleSoFar] | None = None
    part_of: str = ""
    lora_request: LoRARequest | None = None

    def __post_init__(self) -> None:
        if isinstance(self.sampling_params, SamplingParams):  # which the caller may assign to later
            object.__setattr__(self, "sampling_params", self.sampling_params.clone())

    def params(self, default: SamplingParams) -> SamplingParams:
        """Return the sampling parameters, with the request's own priority and timeout_s.

        Raises RequestError if they are none.
        """
        params = check_is_params(default if self.sampling_params is None else self.sampling_params)
        options: dict[str, Any] = {"priority": self.priority, "timeout_s": self.timeout_s}
        given = {name: value for name, value in options.items() if value is not None}
        return replace(params, **given) if given else params


class ReportSpec(Protocol[Found]):
    """A request for a report on a prompt, which generates nothing."""

    @property
    def prompt(self) -> ParsedPrompt:
        """The prompt to compute."""

    def report(self, text: ModelText) -> PromptReport:
        """Return a new report for the request to fill.

        text: the engine's tokenizer and templates.
        """

    def output(self, request: Request) -> Found:
        """Return the output made from the report of the finished request."""


class ReportTerms(NamedTuple):
    """How a request for a report is scheduled. part_of: see `RequestInputs`; lora_request: `RequestSpec`."""

    priority: float = 0.0
    tenant: str = ""
    timeout_s: float | None = None
    part_of: str = ""
    lora_request: Any = None

    def params(self) -> SamplingParams:
        """Return sampling parameters with these terms, which generate nothing. Raises RequestError."""
        check_tenant(self.tenant)
        # Room for one token, which is never computed.
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            priority=self.priority,
            timeout_s=self.timeout_s,
        )


def check_tenant(tenant: object) -> None:
    """Raise RequestError for a tenant that is not a string."""
    if not isinstance(tenant, str):
        raise RequestError(f"tenant must be a string, got {shown(tenant)}", param="tenant")


def ids_of(request_ids: str | Iterable[str]) -> list[str]:
    """Return one id or several as a list. Raises RequestError for anything else."""
    if isinstance(request_ids, str):
        return [request_ids]
    listed = [*request_ids] if isinstance(request_ids, Iterable) else [request_ids]
    for request_id in listed:
        if not isinstance(request_id, str):
            raise RequestError(f"request_id must be a string, or several, got {shown(request_ids)}")
    return listed


def closed_error(request_id: str) -> UsageError:
    """Return the error of a reader whose stream is closed while it waits for an output."""
    return UsageError(f"the stream of request {request_id!r} was closed while its output was awaited")


def check_is_params(params: Any) -> SamplingParams:
    """Return the sampling parameters. Raises RequestError if the argument is something else."""
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"sampling_params must be SamplingParams, got {shown(params)}", param="sampling_params"
        )
    return params
