"""Request: one prompt on its way through the engine; RequestOutput: what its owner sees of it."""

from __future__ import annotations

import enum
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, Self

from ..blocks.sequence import SequenceBlocks
from ..sampling_params import RequestOutputKind, SamplingParams
from .stop_strings import StopStrings
from .token_rules import TokenRules

FinishReason = Literal["stop", "length", "abort", "error"]
# Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}, with "cache_salt" where one is wanted,
# and "add_special_tokens": False for text that has its own, as a chat template's
Prompt = str | Sequence[int] | Mapping[str, Any]


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one place of a sequence: of the token there, then of the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the token there among all, from 1


class Grammar(Protocol):
    """Where an output is in the language that it must belong to; see `structured_outputs`."""

    def copy(self) -> Self:
        """One of its own at the same place."""

    def follow(self, request: Request) -> bool:
        """Take all of the output. Returns whether the language has it."""

    def possible(self, stop_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that may come next, where these are what ends an output."""

    def is_complete(self, request: Request) -> bool:
        """Whether the output is, and nothing can follow it."""


class RequestStatus(enum.Enum):
    """Where a request is. A preempted request is WAITING again."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of the scheduler's clock, and how often.

    The clock is `time.perf_counter`, in a simulation a virtual one.
    """

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True, eq=False)
class PromptReport:
    """What is wanted of rows of a prompt: row i is what the model makes of the tokens up to the i-th.

    The rows [start, end) must be computed, even where the prefix cache has their tokens. Each is taken once,
    in order, whatever was computed again.

    num_top: tell the log-probability of the token behind each row, and those of so many most likely ones, -1
        of the whole vocabulary. None: add up the final hidden states.
    failed: whether a row was not finite.
    """

    start: int
    end: int
    num_top: int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    failed: bool = False
    # The first row that was not taken yet, and the sum of those before, f64[hidden_size]; one value, so that
    # an interrupt cannot part them.
    progress: tuple[int, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.progress = (self.start, None)

    @property
    def next_row(self) -> int:
        """The first row that was not taken yet."""
        return self.progress[0]

    @property
    def is_complete(self) -> bool:
        """Whether all rows were taken."""
        return self.next_row >= self.end

    def take_logprobs(self, end: int, logprobs: list[TokenLogprobs]) -> None:
        """The rows up to `end`."""
        self.logprobs[self.next_row - self.start :] = logprobs
        self.failed = self.failed or not all(math.isfinite(row.logprobs[0]) for row in logprobs)
        self.progress = (end, None)

    def take_hidden(self, end: int, total: Any) -> None:
        """The sum of the rows up to `end`, a tensor."""
        before = self.progress[1]
        self.failed = self.failed or not total.isfinite().all()
        self.progress = (end, total if before is None else before + total)

    def fork(self) -> PromptReport:
        """One that goes on by itself from here."""
        copy = PromptReport(self.start, self.end, self.num_top, self.logprobs.copy(), self.failed)
        copy.progress = self.progress
        return copy


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInputs:
    """What was asked for, which never changes: the user's prompt and parameters, and what follows from them.

    The n samples of a prompt share one.

    max_total_tokens: the limit of prompt and output together.
    stop_ids: token ids that end the output: EOS (unless ignored) and stop_token_ids.
    rules: bad_words and dry_sequence_breakers as token ids.
    stops: the automaton of the stop strings.
    generates: False if only a report on the prompt is wanted: the output is then empty.
    namespace: everything but the tokens that the KV depends on.
    deadline: on the scheduler's clock.
    """

    request_id: str = ""
    prompt: str | None = None
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    max_total_tokens: int
    stop_ids: frozenset[int] = frozenset()
    rules: TokenRules = field(default_factory=TokenRules)
    stops: StopStrings | None = None
    generates: bool = True
    priority: float = 0.0
    tenant: str = ""
    namespace: bytes = b""
    deadline: float = math.inf
    is_greedy: bool = field(init=False)  # the output is the most likely tokens, with nothing else to report
    wants_logprobs: bool = field(init=False)  # of the output

    def __post_init__(self) -> None:
        params = self.params
        wants_logprobs = params.logprobs is not None or params.best_of is not None
        plain = not (params.edits_logits or wants_logprobs)
        object.__setattr__(self, "wants_logprobs", wants_logprobs)
        object.__setattr__(self, "is_greedy", params.temperature == 0.0 and plain)


@dataclass(slots=True, eq=False)
class SamplingState:
    """What the sampler keeps of one request.

    logprobs: of the output's tokens, where they are wanted.
    """

    seed: int = 0
    grammar: Grammar | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """One sample of a prompt: its tokens, and how far the scheduler has brought it.

    Two counts carry the scheduling: `num_tokens` is how many tokens there are (prompt and output),
    `num_computed_tokens` for how many of them the KV is in the cache. The others are yet to be computed.

    The other parts of the engine keep their state in records of their own: `inputs`, `sampling`, `report`,
    `blocks` and `metrics`.

    index: which of the n samples of the prompt it is.
    siblings: the other samples, until the prompt is computed.
    alert_at: the number of tokens from which on `on_token` must see each new one.
    num_cached_tokens: how many prompt tokens the prefix cache held when the request first ran.
    ready: whether the next step may include it: it runs, and no step in flight computes it.
    arrival: its number in the order of arrival.
    rank: its place among the running requests.
    protected: whether it was preempted so often that it will not be again.
    report: what is reported on the prompt.
    """

    inputs: RequestInputs
    index: int = 0
    siblings: Sequence[Request] = ()
    token_ids: list[int] = field(init=False)  # prompt, then output
    num_prompt_tokens: int = field(init=False)
    alert_at: int = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    status: RequestStatus = RequestStatus.WAITING
    ready: bool = False
    arrival: int = -1
    rank: tuple[float, int] = (0.0, -1)
    protected: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    sampling: SamplingState = field(default_factory=SamplingState)
    report: PromptReport | None = None
    blocks: SequenceBlocks = field(default_factory=lambda: SequenceBlocks(0, None))
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(time.perf_counter()))

    def __post_init__(self) -> None:
        self.token_ids = list(self.inputs.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.alert_at = self.num_prompt_tokens + 1

    @property
    def request_id(self) -> str:
        """The id by which its user knows it; that of all n samples."""
        return self.inputs.request_id

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def first_needed(self) -> int:
        """The first token that must be computed though it is cached: at least the last, for the next one."""
        last = len(self.token_ids) - 1
        report = self.report
        return last if report is None or report.is_complete else min(report.next_row, last)

    @property
    def ran_before(self) -> bool:
        """Whether it ran at any time, though it may wait again."""
        return self.num_cached_tokens is not None

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Add those of the next token. If the step then fails, the same place is filled once more."""
        del self.sampling.logprobs[self.num_output_tokens :]
        self.sampling.logprobs.append(logprobs)

    def on_token(self, token_id: int, now: float) -> None:
        """Note when the first token came, and finish the request if the newest one, token_id, ends it."""
        inputs = self.inputs
        if self.metrics.first_token_time is None:
            self.metrics.first_token_time = now
            self.alert_at = self.num_tokens + 1 if self._ends_by_grammar else inputs.max_total_tokens
        if token_id in inputs.stop_ids and self.num_output_tokens > inputs.params.min_tokens:
            # EOS is the model's own end, for which vLLM's habit is a stop_reason of None.
            self.finish("stop", now, token_id if token_id in inputs.params.stop_token_ids else None)
        elif self._ends_by_grammar and self._is_complete():
            self.finish("stop", now)
        elif len(self.token_ids) >= inputs.max_total_tokens:
            self.finish("length", now)

    @property
    def _ends_by_grammar(self) -> bool:
        """Whether the grammar alone says that the output is complete, as no token ends it."""
        return self.sampling.grammar is not None and not self.inputs.stop_ids

    def _is_complete(self) -> bool:
        grammar = self.sampling.grammar
        assert grammar is not None
        return self.num_output_tokens >= self.inputs.params.min_tokens and grammar.is_complete(self)

    @property
    def ended_by_token(self) -> bool:
        """Whether the last token is one that ended the output, and so no part of the text."""
        return self.finish_reason == "stop" and self.token_ids[-1] in self.inputs.stop_ids

    def finish(self, reason: FinishReason, now: float, stop_reason: int | str | None = None) -> None:
        """Mark as done; the scheduler takes its blocks back."""
        self.status = RequestStatus.FINISHED
        self.ready = False
        self.finish_reason, self.stop_reason = reason, stop_reason
        self.metrics.finished_time = now


class Outbox:
    """Where the outputs of somebody's requests go until they are taken."""

    def __init__(self) -> None:
        self._outputs: deque[RequestOutput] = deque()

    def __len__(self) -> int:
        return len(self._outputs)

    def wants(self, kind: RequestOutputKind) -> bool:
        """Whether an output of a request that is not finished is of use now."""
        return kind is not RequestOutputKind.FINAL_ONLY

    def put(self, output: RequestOutput) -> None:
        """Add the newest output."""
        self._outputs.append(output)

    def take(self) -> list[RequestOutput]:
        """All there are, which are then gone."""
        taken = [*self._outputs]
        self._outputs.clear()
        return taken


@dataclass(slots=True, eq=False)
class RequestGroup:
    """What its owner knows as one request: n samples of a prompt."""

    request_id: str
    samples: list[Request]
    outbox: Outbox = field(default_factory=Outbox)

    @property
    def output_kind(self) -> RequestOutputKind:
        """What outputs of it hold before it is finished."""
        return self.samples[0].inputs.params.output_kind

    @property
    def finished(self) -> bool:
        """Whether all samples are."""
        for sample in self.samples:  # noqa: SIM110 - for every output: all() is slower
            if sample.finish_reason is None:
                return False
        return True


@dataclass(frozen=True, slots=True)
class Logprob:
    """How likely a token was: the model's own log-probability, before any sampling parameter.

    rank: among all tokens, from 1 for the most likely.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(slots=True)  # not frozen: one is made for every output, and that takes longer
class CompletionOutput:
    """What was generated for a prompt; with output_kind DELTA, since the last output.

    text: as far as it will not change. A character of which a part is missing is held back, and so is what
        may become a stop string.
    token_ids: all of them, also those whose text is held back or cut off at a stop string; a list at the end,
        and before it a sequence that equals one.
    logprobs: of each token, those of itself and of the most likely ones in its place; None unless asked for.
    cumulative_logprob: of the tokens, in sum; None unless logprobs or best_of asked for it.

    finish_reason: None while it runs; "stop" (EOS, a stop string or stop token), "length" (max_tokens or
    the end of the context), "abort", or "error".
    stop_reason: the stop string or stop token id that ended it, None for EOS; the message of an "error", and
        of an "abort" for timeout_s.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request as its owner sees it, so far or finished.

    num_cached_tokens: how many prompt tokens were found in the prefix cache; None before it ran.
    metrics: those of the first sample.
    prompt_logprobs: for each token of the prompt its own log-probability and those of the most likely ones in
        its place, None for the first; None unless asked for, and until all of them are known.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
