"""Requests that generate nothing: their prompts are computed for a report alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from ..base.errors import RequestError
from ..options.sampling_params import SamplingParams
from ..requests.request import Request, RequestGroup, RequestMetrics
from ..text.prompt_parser import ParsedPrompt
from .request_spec import Prepared, check_tenant, deadline_of

if TYPE_CHECKING:
    from ..requests.prompt_report import PromptReport
    from .model_text import ModelText
    from .request_factory import RequestFactory

Found = TypeVar("Found", covariant=True)


class ReportSpec(Protocol[Found]):
    """A request that generates no tokens, but reports on its prompt."""

    @property
    def prompt(self) -> ParsedPrompt:
        """The prompt to compute and report on."""

    def report(self, text: ModelText) -> PromptReport:
        """Return a new report for the request to fill.

        text: the engine's tokenizer and templates.
        """

    def output(self, request: Request) -> Found:
        """Make the output of the finished request from its report."""


class ReportTerms(NamedTuple):
    """The scheduling parameters of a request for a report.

    part_of: see `RequestInputs`.
    lora_request: see `RequestSpec`.
    """

    priority: float = 0.0
    tenant: str = ""
    timeout_s: float | None = None
    part_of: str = ""
    lora_request: Any = None

    def params(self) -> SamplingParams:
        """Return sampling parameters with these terms that generate no tokens. Raises RequestError."""
        check_tenant(self.tenant)
        # Room for one token, which is never computed.
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            priority=self.priority,
            timeout_s=self.timeout_s,
        )


def new_report(
    factory: RequestFactory, request_id: str, spec: ReportSpec[object], terms: ReportTerms, now: float
) -> RequestGroup:
    """Make a request that generates no tokens, but reports on its prompt.

    Raises RequestError, which names what is wrong.
    """
    if spec.prompt.images:
        raise RequestError(
            "multi_modal_data is for prompts that are completed: reports are of text alone",
            param="multi_modal_data",
        )
    report = spec.report(factory.text)
    if report.num_top is not None:
        factory.check_head()
    params = terms.params()
    factory.check_priority(terms.priority)
    deadline = deadline_of(params, now)
    inputs = factory.inputs(
        request_id,
        Prepared(spec.prompt),
        params,
        terms.tenant,
        deadline,
        generates=False,
        part_of=terms.part_of,
    )
    if terms.lora_request is not None:
        inputs = factory.with_adapter(inputs, terms.lora_request)
    request = Request(inputs, report=report, metrics=RequestMetrics(now))
    return RequestGroup(request_id, [request])
