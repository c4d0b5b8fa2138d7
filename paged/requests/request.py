"""Request: one sample of a prompt on its way through the engine; RequestOutput: its result for the user.

Before them, prompts as users write them, and the seeds of requests that have none of their own.
"""

from __future__ import annotations

import enum
import hashlib
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NotRequired, Protocol, Self, TypedDict

from ..blocks.sequence import SequenceBlocks
from ..options.sampling_params import RequestOutputKind, SamplingParams
from .token_rules import TokenRules

if TYPE_CHECKING:
    from ..blocks.content_chain import Content
    from ..options.lora_request import LoRARequest
    from .prompt_report import PromptReport, TokenLogprobs
    from .stop_strings import StopStrings


class TextPrompt(TypedDict):
    """A prompt as text.

    multi_modal_data: {"image": ...}, an image or a list of them: a path, the bytes of a file, or an image of
        Pillow or numpy.
    multi_modal_uuids, mm_processor_kwargs: names of the images, and how they are processed.
    cache_salt: only prompts with the same salt share cached blocks.
    add_special_tokens: False if the text contains its special tokens, as the text of a chat template does.
    """

    prompt: str
    cache_salt: NotRequired[str]
    add_special_tokens: NotRequired[bool]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt, resized.

    start, end: the range of the prompt's tokens that stand for the image, including tokens between its rows.
    sha256: a hash of the pixels and of everything that determines the image's embeddings.
    height, width: the size in pixels.
    pixels: uint8[height, width, 3], row by row.
    values: what numbers of pixels become; b"": what the engine's processing says. See `images.processing`.
    """

    start: int
    end: int
    sha256: bytes
    height: int
    width: int
    pixels: bytes
    values: bytes = b""

    @property
    def content(self) -> Content:
        """Its place in the prompt and its content, for the prefix cache."""
        from ..blocks.content_chain import Content

        return Content(self.start, self.end, self.sha256)


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | Mapping[str, Any]


def derived_seed(engine_seed: int, request_id: str) -> int:
    """Return the 64-bit seed of a request, derived from the engine's seed and the request's id."""
    return _digest(f"{engine_seed}/{request_id}")


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of a sample. The first sample has the request's seed and equals the output of n=1."""
    return _digest(f"{seed}#{index}") if index else seed


def _digest(text: str) -> int:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little")


FinishReason = Literal["stop", "length", "abort", "error"]
# Why a request failed: its own parameters, the model or the engine, its timeout_s, or that it was aborted.
ErrorKind = Literal["request", "engine", "timeout", "abort"]
NO_SEAT = -1
# Why a request is held; one may be for both reasons.
SLOW_READER = 1
NO_MASK = 2
NO_ADAPTER = 4
LONG = b" long"  # ends the namespace of what longrope rotates by its long factors
TIMEOUT_MESSAGE = "timeout_s has passed"  # the stop_reason of a request whose deadline has passed


class Grammar(Protocol):
    """The state of a grammar after an output, which must belong to its language; see `structured_outputs`."""

    def copy(self) -> Self:
        """Return an independent copy."""

    def follow(self, request: Request) -> bool:
        """Advance to the end of the request's output. Return whether the grammar allows this output."""

    def possible(self, stop_ids: frozenset[int]) -> frozenset[int]:
        """Return the tokens that may come next.

        stop_ids: the tokens that end an output.
        """

    def is_complete(self, request: Request) -> bool:
        """Return whether the output is complete and nothing can follow it."""

    def num_allowed(self, request: Request, tokens: Sequence[int]) -> int:
        """Return how many of these guesses the grammar allows next; 0 if checking would take too long."""

    def forced(self, request: Request) -> list[int]:
        """Return the next tokens that the grammar forces; none if finding them would take too long."""


class RequestStatus(enum.Enum):
    """The state of a request. A preempted request is WAITING again."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True)
class RequestMetrics:
    """A request's times, in seconds of the scheduler's clock, and its counts of preemptions and drafts.

    The clock is `time.perf_counter` of the engine's process, or virtual in a simulation.

    first_scheduled_time: when the request first left the queue.
    num_drafts: how many drafts steps have verified. A verified draft gives 1 + num_accepted_tokens /
        num_drafts tokens on average.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def start_beside(self, other: RequestMetrics) -> None:
        """Record that a fork is scheduled at its arrival, because it starts with the blocks of its parent."""
        self.first_scheduled_time = max(self.arrival_time, other.first_scheduled_time or self.arrival_time)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInputs:
    """The user's prompt and parameters, and values derived from them. Immutable, and shared by the n samples.

    max_total_tokens: maximum number of tokens of prompt and output together.
    stop_ids: token ids that end the output: EOS (unless ignored) and stop_token_ids.
    rules: bad_words and dry_sequence_breakers as token ids.
    stops: the automaton of the stop strings.
    num_unstopped_tokens: number of output tokens whose text is not searched for stop strings: a fork with
        other stop strings has them from its parent.
    num_given_tokens: number of output tokens that another engine generated. Deltas leave them out.
    given_logprob: the sum of the log-probabilities of the tokens that another engine generated.
    is_resumed: whether another engine had accepted the request before.
    generates: False if the request only reports on its prompt; its output then stays empty.
    namespace: what the KV depends on besides the tokens, such as the cache salt.
    adapter: the number of its LoRA adapter; 0: none. lora_request: the adapter as the user gave it.
    long_from: the number of tokens at which longrope changes the KV of all tokens and the request is
        recomputed; None if that never happens.
    part_of: the call that this request belongs to, such as an HTTP request with many prompts; "" if the
        request is a call by itself. The requests of a call are queued one at a time.
    deadline: the time of the request's timeout, on the scheduler's clock.
    images: the images of the prompt, in order.
    uncut: ranges [first, end) of prompt tokens that attend to each other. A step computes all of a range,
        except tokens in cached blocks.
    """

    request_id: str = ""
    prompt: str | None = None
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_total_tokens: int
    stop_ids: frozenset[int] = frozenset()
    rules: TokenRules = field(default_factory=TokenRules)
    stops: StopStrings | None = None
    num_unstopped_tokens: int = 0
    num_given_tokens: int = 0
    given_logprob: float = 0.0
    is_resumed: bool = False
    generates: bool = True
    priority: float = 0.0
    tenant: str = ""
    part_of: str = ""
    namespace: bytes = b""
    adapter: int = 0
    lora_request: LoRARequest | None = None
    long_from: int | None = None
    deadline: float = math.inf
    images: tuple[PromptImage, ...] = ()
    uncut: tuple[tuple[int, int], ...] = ()
    wants_logprobs: bool = field(init=False)  # of the output

    @property
    def contents(self) -> Sequence[Content]:
        """What the placeholders among the prompt's tokens stand for."""
        return [image.content for image in self.images] if self.images else ()

    def __post_init__(self) -> None:
        params = self.params
        wants_logprobs = params.logprobs is not None or params.best_of is not None
        object.__setattr__(self, "wants_logprobs", wants_logprobs)


@dataclass(slots=True, eq=False)
class SamplingState:
    """The sampler's record of one request.

    logprobs: the log-probabilities of the output tokens, if they are reported.
    parameters: the request's row of `sampling.parameters`, once the row is written.
    """

    seed: int = 0
    parameters: bytes = b""
    grammar: Grammar | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """One sample of a prompt: its tokens and its scheduling state.

    `num_tokens` counts the tokens of prompt and output; `num_computed_tokens` counts the tokens whose KV is
    in the cache. Steps raise `num_computed_tokens` up to `num_tokens`.

    Other parts of the engine store their state in `inputs`, `sampling`, `report`, `blocks` and `metrics`.

    index: the number of this sample among the n samples of the prompt.
    siblings: the other samples, until the prompt is computed.
    on_token_from: the number of tokens from which on `on_token` must be called for each new token. At fewer
        tokens, only a stop token can end the request.
    num_cached_tokens: how many prompt tokens the prefix cache held when the request first ran.
    ready: whether the next step may include the request. It must be running. If a step in flight computes it,
        that step must end with one of its pending tokens.
    num_pending: how many tokens the steps in flight will give it, if steps begin before the last tokens are
        known; see `StepsAhead`.
    ahead_until: the number of known and pending tokens from which on its next step waits for all results; 0
        if its steps always wait.
    seat: the request's place in the tensors that the device holds about running requests; NO_SEAT while it
        does not run.
    adapter_slot: the slot of its adapter on the device while it runs; -1: none.
    arrival: the request's number in the order of arrival.
    rank: the request's place in the order of running requests; the highest rank is preempted first.
    protected: whether the request has reached max_preemptions and is no longer preempted.
    held: the reasons why the request computes nothing until it is released; see `Scheduler.hold`.
    is_beam: whether `Scheduler.replace_last_token` may replace its newest token.
    """

    inputs: RequestInputs
    # Copied from the inputs, since they are read in every step. All n samples share the user's request_id.
    request_id: str = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    generates: bool = field(init=False)
    index: int = 0
    siblings: Sequence[Request] = ()
    token_ids: list[int] = field(init=False)  # prompt, then output
    num_prompt_tokens: int = field(init=False)
    on_token_from: int = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    status: RequestStatus = RequestStatus.WAITING
    ready: bool = False
    num_pending: int = 0
    ahead_until: int = 0
    seat: int = NO_SEAT
    adapter_slot: int = -1
    arrival: int = -1
    rank: tuple[float, int] = (0.0, -1)
    protected: bool = False
    held: int = 0
    is_beam: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error_kind: ErrorKind | None = None
    sampling: SamplingState = field(default_factory=SamplingState)
    report: PromptReport | None = None
    blocks: SequenceBlocks = field(default_factory=lambda: SequenceBlocks(0, None))
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.perf_counter()))

    def __post_init__(self) -> None:
        inputs = self.inputs
        self.request_id = inputs.request_id
        self.stop_ids = inputs.stop_ids
        self.generates = inputs.generates
        self.token_ids = list(inputs.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.on_token_from = self.num_prompt_tokens + 1

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_settled(self) -> bool:
        """Whether the request is running and no step in flight computes it, so that it may be preempted."""
        return self.ready and not self.num_pending

    @property
    def namespace(self) -> bytes:
        """What the KV depends on besides the tokens. It changes when the output reaches `long_from`."""
        inputs = self.inputs
        if inputs.long_from is None or not self.num_prompt_tokens < inputs.long_from <= len(self.token_ids):
            return inputs.namespace
        return inputs.namespace + LONG

    @property
    def has_just_grown_long(self) -> bool:
        """Whether the newest token brings the request to long_from, so that all its KV must be recomputed."""
        return len(self.token_ids) == self.inputs.long_from and self.finish_reason is None

    @property
    def first_needed(self) -> int:
        """The first token to compute even if cached: the last, or an earlier one whose row is reported."""
        last = len(self.token_ids) - 1
        report = self.report
        return last if report is None or report.is_complete else min(report.next_row, last)

    @property
    def ran_before(self) -> bool:
        """Whether the request has ever been admitted, even if it waits again."""
        return self.num_cached_tokens is not None

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def add_logprobs(self, *logprobs: TokenLogprobs) -> None:
        """Add the log-probabilities of the next tokens, replacing entries that a failed step left."""
        del self.sampling.logprobs[self.num_output_tokens :]
        self.sampling.logprobs += logprobs

    def on_token(self, token_id: int, now: float) -> None:
        """Record a new token: note the time of the first one, and finish the request if token_id ends it."""
        inputs = self.inputs
        params = self.inputs.params
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
        self.on_token_from = inputs.max_total_tokens
        if inputs.long_from is not None and self.num_tokens < inputs.long_from:
            self.on_token_from = min(self.on_token_from, inputs.long_from)
        if token_id in self.stop_ids and self.num_output_tokens > params.min_tokens:
            # As in vLLM, stop_reason is None for EOS.
            self.finish("stop", now, token_id if token_id in params.stop_token_ids else None)
        elif len(self.token_ids) >= inputs.max_total_tokens:
            self.finish("stop" if self.is_complete else "length", now)

    @property
    def is_complete(self) -> bool:
        """Return whether the output ends now: its grammar is complete, and no stop token can mark the end."""
        grammar = None if self.stop_ids else self.sampling.grammar
        if grammar is None or self.num_output_tokens < self.inputs.params.min_tokens:
            return False
        return grammar.is_complete(self)

    @property
    def ended_by_token(self) -> bool:
        """Whether the last token ended the output and is not part of the output's text."""
        return self.finish_reason == "stop" and self.token_ids[-1] in self.stop_ids

    def finish(
        self,
        reason: FinishReason,
        now: float,
        stop_reason: int | str | None = None,
        error_kind: ErrorKind | None = None,
    ) -> None:
        """Mark the request as finished; the scheduler frees its blocks.

        error_kind: given if the reason is "error" or "abort".
        """
        self.status = RequestStatus.FINISHED
        self.ready = False
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.error_kind = error_kind
        self.metrics.finished_time = now


class Outbox:
    """A queue of outputs that the caller has not taken yet."""

    def __init__(self) -> None:
        self._outputs: deque[RequestOutput] = deque()

    def __len__(self) -> int:
        return len(self._outputs)

    def wants(self, kind: RequestOutputKind) -> bool:
        """Return whether an output of an unfinished request with this output_kind is wanted now."""
        return kind is not RequestOutputKind.FINAL_ONLY

    def put(self, output: RequestOutput) -> None:
        """Add the newest output."""
        self._outputs.append(output)

    def put_prompt(self, places: Sequence[dict[int, Logprob] | None]) -> bool:  # noqa: ARG002
        """Take the next log-probabilities of the prompt.

        Return False if the outbox instead wants all of them in every output.
        """
        return False

    def take(self) -> list[RequestOutput]:
        """Remove and return all outputs."""
        taken = [*self._outputs]
        self._outputs.clear()
        return taken


@dataclass(slots=True, eq=False)
class RequestGroup:
    """The n samples of a prompt. The user sees them as one request."""

    request_id: str
    samples: list[Request]
    outbox: Outbox = field(default_factory=Outbox)

    @property
    def output_kind(self) -> RequestOutputKind:
        """What each output holds while the request is unfinished."""
        return self.samples[0].inputs.params.output_kind

    @property
    def finished(self) -> bool:
        """Whether all samples are finished."""
        for sample in self.samples:  # noqa: SIM110 - for every output: all() is slower
            if sample.finish_reason is None:
                return False
        return True


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token, computed from the logits before any sampling parameter changes them.

    rank: the token's rank in the vocabulary, 1 for the most likely token.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)  # not frozen: one is made for every output, and that takes longer
class CompletionOutput:
    """One sample's output so far; with output_kind DELTA, only what is new since the last RequestOutput.

    text: the text that can no longer change. Incomplete characters and text that may begin a stop string are
        held back.
    token_ids: all output tokens, including tokens whose text is held back or cut at a stop string. A list
        once finished; before, a sequence that compares equal to a list.
    logprobs: for each position, the log-probabilities of the token there and of the most likely tokens; None
        unless requested.
    cumulative_logprob: the sum over the tokens; None unless logprobs or best_of is given.
    finish_reason: None until finished, then "stop" (EOS, stop string or stop token), "length" (max_tokens or
        the end of the context), "abort" or "error".
    stop_reason: the stop string or stop token id that ended the output, None for EOS; the message of an
        "error", or of an "abort" by timeout_s.
    error_kind: why the reason is "error" or "abort": the request itself is wrong ("request"), the model or
        the engine failed ("engine"), timeout_s has passed ("timeout"), or the request was aborted ("abort").
    message: with `LLM.chat`, the answer as a message of the conversation, with content, reasoning and
        tool_calls; None otherwise.
    """

    lora_request: ClassVar[None] = None  # of vLLM's outputs; that of the request has the adapter
    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    error_kind: ErrorKind | None = None
    message: dict[str, Any] | None = None

    def finished(self) -> bool:
        """Whether the sample has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request as the user sees it, finished or not.

    num_cached_tokens: number of prompt tokens found in the prefix cache; None before the request first ran.
    metrics: the metrics of the first sample.
    prompt_logprobs: for each position of the prompt, the log-probabilities of the token there and of the most
        likely tokens; the first entry is None. None unless requested, and until all are known.
    """

    # Of vLLM's outputs, where they are None for a decoder.
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None
    metrics: RequestMetrics
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    lora_request: LoRARequest | None = None
