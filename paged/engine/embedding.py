"""Embeddings: the pooled final hidden states of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..base.errors import RequestError
from ..base.validation import check_bool, check_int, shown
from ..checkpoints.embedding_files import POOLINGS, EmbeddingSettings, Pooling
from ..options.other_calls import PoolingParams
from ..requests.prompt_report import PromptReport
from ..requests.request import ErrorKind, Prompt, Request, RequestMetrics
from ..text.prompt_parser import ParsedPrompt, PromptParser

if TYPE_CHECKING:
    from .model_text import ModelText


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of a prompt, or the reason why it could not be computed.

    embedding: None if the computation failed; `error` then says why.
    """

    embedding: list[float] | None
    error: str | None = None
    error_kind: ErrorKind | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding, `outputs.embedding`. The other fields are as in RequestOutput."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool
    num_cached_tokens: int | None
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class EmbeddingOptions:
    """The options of a call for embeddings; see `LLMEngine.embed`. Options that are None come from the
    checkpoint.
    """

    pooling: Pooling | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None

    def each(self, params: Any, count: int) -> list[EmbeddingOptions]:
        """Return the options of each of `count` prompts.

        params: `PoolingParams`, one for all prompts or one for each.

        Raises RequestError if params are something else, or contradict the options.
        """
        if params is None:
            return [self] * count
        listed = [params] * count if isinstance(params, PoolingParams) else params
        if not isinstance(listed, Sequence) or not all(isinstance(each, PoolingParams) for each in listed):
            raise RequestError(
                f"pooling_params must be PoolingParams, or a list of them, got {shown(params)}",
                param="pooling_params",
            )
        if len(listed) != count:
            raise RequestError(
                f"pooling_params has {len(listed)} entries for {count} prompts", param="pooling_params"
            )
        return [self._with(each) for each in listed]

    def _with(self, params: PoolingParams) -> EmbeddingOptions:
        own = self
        for name, theirs in (("dimensions", "dimensions"), ("normalize", "use_activation")):
            value = getattr(params, theirs)
            if value is None:
                continue
            if getattr(self, name) is not None:
                raise RequestError(f"give either {name} or {theirs} of pooling_params", param=name)
            own = replace(own, **{name: value})
        return own

    def check(self, settings: EmbeddingSettings) -> None:
        """Raise RequestError unless the checkpoint can make such embeddings."""
        if settings.refusal is not None:
            raise RequestError(f"embeddings are refused: {settings.refusal}")
        if self.pooling is not None and self.pooling not in POOLINGS:
            names = ", ".join(map(repr, POOLINGS))
            raise RequestError(f"pooling must be one of {names}, got {self.pooling!r}", param="pooling")
        if self.pooling is None and settings.pooling is None:
            names = " or ".join(map(repr, POOLINGS))
            raise RequestError(
                f"embeddings are refused: {settings.unsupported_pooling}; pooling={names} makes other ones",
                param="pooling",
            )
        if self.normalize is not None:
            check_bool(RequestError, "normalize", self.normalize)
        if self.dimensions is not None:
            self._check_dimensions(settings)
        if self.prompt_name not in (None, "") and self.prompt_name not in [*settings.prompts]:
            known = ", ".join(map(shown, settings.prompts)) or "none"
            raise RequestError(
                f"prompt_name must be one of the checkpoint's prompts ({known}), got "
                f"{shown(self.prompt_name)}",
                param="prompt_name",
            )

    def _check_dimensions(self, settings: EmbeddingSettings) -> None:
        given = check_int(RequestError, "dimensions", self.dimensions, 1)
        if given > settings.size:
            raise RequestError(
                f"dimensions must be at most {settings.size}, the size of this model's vectors, got {given}",
                param="dimensions",
            )
        if settings.dimensions is not None and given not in settings.dimensions:
            listed = " or ".join(map(str, settings.dimensions))
            raise RequestError(
                f"dimensions must be {listed}, as config.json says of this model's vectors, got {given}",
                param="dimensions",
            )


class Embedder:
    """Makes the requests of one call for embeddings. Raises RequestError if an option is wrong."""

    def __init__(self, text: ModelText, parser: PromptParser, options: EmbeddingOptions) -> None:
        self._settings = settings = text.embedding
        options.check(settings)
        self._text = text
        self.renders = settings.as_message  # a template, which may take long
        self._parser = parser
        self._options = options
        name = settings.default_prompt_name if options.prompt_name is None else options.prompt_name
        self._before = settings.prompts.get(name, "") if name is not None else ""

    def spec(self, prompt: Prompt) -> EmbeddingSpec:
        """Return the request for the embedding of a prompt. Raises RequestError."""
        options = self._options
        settings = self._settings
        parsed = self._parser.parse(self._with_prompt(prompt))
        num_tokens = len(parsed.token_ids)
        if settings.max_tokens is not None and num_tokens > settings.max_tokens:
            raise RequestError(
                f"the text has {num_tokens} tokens; {settings.max_tokens_key} allows {settings.max_tokens} "
                "for an embedding",
                param="prompt",
            )
        pooling = options.pooling or settings.pooling
        assert pooling is not None, "the options were not checked"
        normalize = settings.normalize if options.normalize is None else options.normalize
        return EmbeddingSpec(parsed, pooling, normalize, options.dimensions, self._first(parsed))

    def _with_prompt(self, prompt: Prompt) -> Prompt:
        """Return a prompt with the checkpoint's before it, in lower case where the checkpoint asks for it."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if not isinstance(text, str):
            if self._options.prompt_name:
                raise RequestError(
                    "prompt_name goes with text alone, as token ids are embedded as they are",
                    param="prompt_name",
                )
            return prompt
        made: dict[str, Any]
        if self._settings.as_message:
            system = [{"role": "system", "content": self._before}] if self._before else []
            messages = [*system, {"role": "user", "content": text}]
            made = self._text.render_chat(messages, add_generation_prompt=False)
        else:
            made = {"prompt": self._in_case(self._before + text)}
        return {**prompt, **made} if isinstance(prompt, Mapping) else made

    def _in_case(self, text: str) -> str:
        return text.lower() if self._settings.lower_case else text

    def _first(self, parsed: ParsedPrompt) -> int:
        """Return the first token that is read: that behind the checkpoint's prompt where it is left out."""
        settings = self._settings
        if settings.include_prompt or settings.as_message or not self._before or parsed.text is None:
            return 0
        before = self._parser.parse(self._in_case(self._before)).token_ids
        special = self._parser.tokenizer.special_token_ids if self._parser.tokenizer is not None else ()
        num_before = len(before) - (before[-1] in special)
        if num_before >= len(parsed.token_ids):
            raise RequestError("the text has no token behind the checkpoint's prompt", param="prompt")
        return num_before


class EmbeddingReport(PromptReport):
    """A report that turns the hidden states of a prompt into a vector.

    head: maps the mean of the hidden states to the vector; None returns the mean.
    """

    __slots__ = ("head",)
    head: Callable[[Any], Any] | None


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """The `ReportSpec` for the embedding of a prompt.

    dimensions: the size that the vector is cut to; None keeps its size.
    first: the first token that pooling "mean" and "cls" reads.
    """

    prompt: ParsedPrompt
    pooling: Pooling
    normalize: bool
    dimensions: int | None = None
    first: int = 0

    def report(self, text: ModelText) -> PromptReport:
        """Return a new report on the positions whose hidden states are averaged."""
        end = len(self.prompt.token_ids)
        start = end - 1 if self.pooling == "last" else self.first
        report = EmbeddingReport(start, start + 1 if self.pooling == "cls" else end)
        report.head = text.embedding_head
        return report

    def output(self, request: Request) -> EmbeddingRequestOutput:
        """Return the output of the finished request."""
        if request.finish_reason == "length":
            assert isinstance(request.report, EmbeddingReport)
            output = EmbeddingOutput(self._vector(request.report))
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

    def _vector(self, report: EmbeddingReport) -> list[float]:
        _, sums = report.progress  # f64[2, hidden_size]
        vector: Any = sums.sum(0) / (report.end - report.start)
        if report.head is not None:
            vector = report.head(vector)
        vector = vector[: self.dimensions]
        if self.normalize:
            vector = vector / vector.norm().clamp(min=1e-12)
        numbers: list[float] = vector.tolist()
        return numbers


def without_text(spec: EmbeddingSpec) -> EmbeddingSpec:
    """Return a copy of the spec without its text, which another process does not need."""
    return replace(spec, prompt=replace(spec.prompt, text=None))
