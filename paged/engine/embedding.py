"""Embeddings: the pooled final hidden states of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..base.validation import check_bool
from ..errors import RequestError
from ..requests.prompt_report import PromptReport
from ..requests.request import ErrorKind, Request, RequestMetrics
from ..text.prompt_parser import ParsedPrompt

Pooling = Literal["last", "mean"]
POOLINGS = ("last", "mean")


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a prompt, hidden_size floats; None where `error` gives the reason."""

    embedding: list[float] | None
    error: str | None = None
    error_kind: ErrorKind | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding, `outputs.embedding`. The other fields are those of RequestOutput."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool
    num_cached_tokens: int | None
    metrics: RequestMetrics


def check_pooling(pooling: object, normalize: object) -> None:
    """Raise RequestError unless both arguments are valid."""
    if pooling not in POOLINGS:
        raise RequestError(
            f"pooling must be one of {', '.join(map(repr, POOLINGS))}, got {pooling!r}", param="pooling"
        )
    check_bool(RequestError, "normalize", normalize)


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """A request for the embedding of a prompt. A `ReportSpec`."""

    prompt: ParsedPrompt
    pooling: Pooling
    normalize: bool

    def report(self) -> PromptReport:
        """Return a new report, on the positions whose hidden states are averaged."""
        end = len(self.prompt.token_ids)
        return PromptReport(end - 1 if self.pooling == "last" else 0, end)

    def output(self, request: Request) -> EmbeddingRequestOutput:
        """Return the output of the finished request."""
        if request.finish_reason == "length":
            assert request.report is not None
            output = EmbeddingOutput(_embedding(request.report, normalize=self.normalize))
        else:
            why = str(request.stop_reason or request.finish_reason)
            output = EmbeddingOutput(None, why, request.error_kind)
        return EmbeddingRequestOutput(
            request_id=request.request_id,
            prompt=request.inputs.prompt,
            prompt_token_ids=request.inputs.prompt_token_ids,
            outputs=output,
            finished=True,
            num_cached_tokens=request.num_cached_tokens,
            metrics=request.metrics,
        )


def _embedding(report: PromptReport, *, normalize: bool) -> list[float]:
    _, total = report.progress  # f64[hidden_size]
    vector: Any = total / (report.end - report.start)
    if normalize:
        vector = vector / vector.norm().clamp(min=1e-12)
    numbers: list[float] = vector.tolist()
    return numbers
