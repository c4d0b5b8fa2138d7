"""Schedule: what one step does. StepOutput: its results. SchedulerCounters: totals of all steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..blocks.manager import Copy
from ..requests.request import ErrorKind, Request

if TYPE_CHECKING:
    from ..requests.prompt_report import TokenLogprobs
    from .towers import TowerSteps


class AskedRows(NamedTuple):
    """The prompt positions [start, end) of requests[row] that this step computes for the request's report.

    offset: the index of the first position among the step's new tokens.
    is_scored: whether the report needs the logits of the positions; otherwise it needs the sum of their
        hidden states.
    """

    row: int
    start: int
    end: int
    offset: int
    is_scored: bool = True


class RowError(NamedTuple):
    """Why a row has no token: a message and the kind of error."""

    message: str
    kind: ErrorKind


class ReportParams(NamedTuple):
    """What to report on the positions of one `AskedRows`.

    num_top: see `PromptReport`.
    next_tokens: the prompt's token after each position; empty if hidden states are summed.
    """

    num_top: int | None
    next_tokens: list[int]


class ReportedRows(NamedTuple):
    """A step's results for the report of requests[row], up to position `end`.

    found: the log-probabilities of each position, or a tensor: the sum of the positions' hidden states.
    """

    row: int
    end: int
    found: list[TokenLogprobs] | Any


NOT_FINITE = RowError("the model's logits are not finite", "engine")


@dataclass(slots=True)
class Schedule:
    """What one step does: copy blocks, then compute num_new_tokens[i] of requests[i].

    Copies are made in this order: out to host memory, in from host memory, then from block to block. The
    copies of one list may be made in parallel: none reads a block that another writes.

    The first num_decode_tokens requests compute their last token and sample the next token. The next
    len(drafts) requests also compute their `drafts`, which are guesses of their next tokens, and sample after
    each token.

    num_computed_tokens, seats: each request's number of computed tokens when the step begins, and its seat.
    scheduled_time: when the step was scheduled, on the scheduler's clock.
    newcomers: the requests that took their seats or changed since the last step. Some may not be in this
        step.
    corrected: the requests whose last token differs from the last token that the device has in their seats,
        because the last step sampled drafts.
    vacated: the seats that requests left since the last step. Newcomers may have taken them.
    """

    requests: list[Request] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    seats: list[int] = field(default_factory=list)
    newcomers: list[Request] = field(default_factory=list)
    corrected: list[Request] = field(default_factory=list)
    vacated: list[int] = field(default_factory=list)
    # The requests that get a token, and the index in `requests` of the one whose last row it is drawn from:
    # their own, or the request which computed the prompt for all n samples.
    sampled_requests: list[Request] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    sampled_seats: list[int] = field(default_factory=list)
    swap_out: list[Copy] = field(default_factory=list)  # block to host block
    swap_in: list[Copy] = field(default_factory=list)  # host block to block
    copies: list[Copy] = field(default_factory=list)
    # From a slot of states to another, one after another and before the step computes anything: seats, and
    # behind them slots of host memory.
    state_moves: list[Copy] = field(default_factory=list)
    settled: list[tuple[int, int, int]] = field(default_factory=list)  # `state_moves.SettledSeat`
    # How many tokens of each request's last run of drafts its state has not seen; empty if all have seen all.
    unapplied: list[int] = field(default_factory=list)
    # The slot of each request's adapter, or none if no request has one; then adapters and the slots that they
    # are copied into before the step. None: the engine has no slots.
    adapters: tuple[Sequence[int], list[tuple[int, int]]] | None = None
    # What the vision tower does in this step; None: nothing.
    towers: TowerSteps | None = None
    num_tokens: int = 0
    num_decode_tokens: int = 0
    drafts: list[list[int]] = field(default_factory=list)
    num_preempted: int = 0
    scheduled_time: float = 0.0
    grown: list[int] = field(default_factory=list)  # rows of decodes whose block tables have changed

    @property
    def is_decode(self) -> bool:
        """Whether every request computes one token and samples the next token."""
        return self.num_decode_tokens == len(self.requests) == len(self.sampled)

    @property
    def moves_blocks(self) -> bool:
        """Whether blocks are copied or swapped."""
        return bool(self.copies or self.swap_in or self.swap_out)

    @property
    def has_prompts(self) -> bool:
        """Whether any request computes tokens of its prompt, or recomputes tokens."""
        return self.num_decode_tokens + len(self.drafts) < len(self.requests)

    def sample_decodes(self, starts: list[int]) -> None:
        """Compute one token of each request added so far, at position starts[i], and sample the next one."""
        requests = self.requests
        num = self.num_tokens = self.num_decode_tokens = len(requests)
        self.num_new_tokens = [1] * num
        self.sampled = list(range(num))
        self.num_computed_tokens = starts
        self.sampled_requests = requests.copy()
        self.seats = [request.seat for request in requests]
        self.sampled_seats = self.seats.copy()

    def add(self, request: Request, num_new: int) -> None:
        """Add a request that computes its next num_new tokens."""
        self.requests.append(request)
        self.num_new_tokens.append(num_new)
        self.num_computed_tokens.append(request.num_computed_tokens)
        self.seats.append(request.seat)
        self.num_tokens += num_new

    def sample(self, request: Request, row: int) -> None:
        """Draw a token for a request from the last row of requests[row]."""
        self.sampled_requests.append(request)
        self.sampled.append(row)
        self.sampled_seats.append(request.seat)

    def add_drafts(self, drafts: Mapping[int, list[int]]) -> None:
        """Add drafts to the decodes in these rows, and move these decodes after the other decodes."""
        num = self.num_decode_tokens
        plain = [row for row in range(num) if row not in drafts]
        order = [*plain, *drafts]
        columns: list[list[Any]] = [self.requests, self.num_new_tokens, self.num_computed_tokens, self.seats]
        for column in columns:
            column[:num] = [column[row] for row in order]
        self.sampled_requests[:num] = self.requests[:num]
        self.sampled_seats[:num] = self.seats[:num]
        self.drafts = [*drafts.values()]
        self.num_decode_tokens = len(plain)
        self.num_new_tokens[len(plain) : num] = [1 + len(run) for run in self.drafts]
        self.num_tokens += sum(map(len, self.drafts))
        place = dict(zip(plain, range(len(plain)), strict=True))
        self.grown = [place[row] for row in self.grown if row in place]

    def asked_rows(self) -> list[AskedRows]:
        """Return the prompt positions in this step on which requests want reports. Decodes have none."""
        asked = []
        offset = self.num_decode_tokens
        for i in range(self.num_decode_tokens, len(self.requests)):
            num_new = self.num_new_tokens[i]
            first = self.num_computed_tokens[i]
            report = self.requests[i].report
            if report is not None and not report.is_complete:
                start = report.next_row
                end = min(report.end, first + num_new)
                assert start >= first, "the prefix cache has skipped a row that is asked for"
                if start < end:
                    is_scored = report.num_top is not None
                    asked.append(AskedRows(i, start, end, offset + start - first, is_scored))
            offset += num_new
        return asked

    def end_reported(self, row: int, now: float) -> bool:
        """Finish the request of a row if its report has failed, or is complete and no token is wanted."""
        request = self.requests[row]
        if request.finish_reason is not None:  # aborted in flight
            return False
        if request.report is not None and request.report.failed:
            # In the step with the prompt's last token the siblings have rows of their own.
            beside = [q for at, q in zip(self.sampled, self.sampled_requests, strict=True) if at == row]
            for ended in (request, *request.siblings, *beside):
                ended.finish("error", now, *NOT_FINITE)
        elif not request.generates and request.num_computed_tokens == request.num_tokens:
            request.finish("length", now)
        return request.finish_reason is not None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.requests or self.swap_out or (self.towers and self.towers.work))


@dataclass(slots=True)
class StepOutput:
    """The results of a step, indexed by rows of schedule.sampled_requests.

    tokens: the token of each row that got exactly one; None for rows in `runs` or `errors`.
    runs: the tokens of rows that got none or several. A row without a token is sampled again.
    logprobs: the log-probabilities of the rows that asked for them.
    run_logprobs: the log-probabilities of each token of a run.
    errors: why a row has no token. The row's request ends.
    reports: the results for each entry of `Schedule.asked_rows`.
    """

    tokens: list[int | None] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, RowError] = field(default_factory=dict)
    runs: dict[int, list[int]] = field(default_factory=dict)
    run_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    reports: list[ReportedRows] = field(default_factory=list)

    def record_reports(self, schedule: Schedule) -> None:
        """Append the results of this step to the reports of its requests."""
        for row, end, found in self.reports:
            report = schedule.requests[row].report
            assert report is not None, "no report has asked for the row"
            if report.num_top is None:
                report.take_hidden(end, found)
            else:
                report.take_logprobs(end, found)

    def record_logprobs(self, schedule: Schedule) -> int:
        """Append log-probabilities to their requests, before tokens are appended. Return how many.

        If a request ended while the step was in flight, its log-probabilities are dropped together with its
        token.
        """
        num_candidates = 0
        for row, logprobs in ({row: [one] for row, one in self.logprobs.items()} | self.run_logprobs).items():
            request = schedule.sampled_requests[row]
            if request.finish_reason is None:
                request.add_logprobs(*logprobs)
                num_candidates += sum(len(each.token_ids) for each in logprobs)
        return num_candidates


# The bounds of a step's seconds, and of its tokens (those of vLLM's iteration_tokens_total).
SECONDS_OF_STEP = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
TOKENS_OF_STEP = (1.0, *(float(1 << power) for power in range(3, 15)))


@dataclass(frozen=True, slots=True)
class HistogramCounts:
    """A snapshot of a histogram.

    counts: how many values are in each bucket. A bucket ends at its bound, which belongs to it; the last
        bucket has no bound.
    total: the sum of the values.
    """

    counts: tuple[int, ...]
    total: float

    @classmethod
    def total_of(cls, several: Sequence[HistogramCounts]) -> HistogramCounts:
        """Add up histograms with the same bounds."""
        counts = zip(*(each.counts for each in several), strict=True)
        return cls(tuple(map(sum, counts)), sum(each.total for each in several))


class Histogram:
    """Counts values by fixed bounds. A call of `add` takes less than a microsecond."""

    __slots__ = ("_counts", "_total", "bounds")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(set(bounds)), "the bounds of a histogram increase"
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, once or several times."""
        self._counts[bisect_left(self.bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> HistogramCounts:
        """Return the counts so far."""
        return HistogramCounts(tuple(self._counts), self._total)


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the engine started."""

    num_steps: int = 0
    step_prefill_tokens: int = 0  # of the last step
    step_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0  # of the requests that ran, the cached among them
    num_cached_tokens: int = 0
    num_cut_tokens: int = 0  # prompt tokens whose blocks were cached, without a snapshot behind them
    num_recomputed: int = 0  # preemptions by recompute
    num_swapped: int = 0  # preemptions by swap
    num_finished: int = 0  # requests, the aborted not among them
    num_drafts: int = 0  # runs of draft tokens
    num_draft_tokens: int = 0
    num_accepted_at: list[int] = field(default_factory=list)  # drafts, by their place in the run
    step_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS_OF_STEP))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS_OF_STEP))

    def count(self, schedule: Schedule, now: float) -> None:
        """Count the tokens and the duration of a step that ends now."""
        self.num_steps += 1
        self.step_seconds.add(now - schedule.scheduled_time)
        self.step_tokens.add(schedule.num_tokens)
        self.num_generated_tokens += len(schedule.sampled_requests)
        self.step_decode_tokens = schedule.num_decode_tokens + sum(1 + len(run) for run in schedule.drafts)
        self.step_prefill_tokens = schedule.num_tokens - schedule.num_decode_tokens
        self.num_decode_tokens += self.step_decode_tokens
        self.num_prefill_tokens += self.step_prefill_tokens

    def count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Count num_drafted drafts of a request, of which num_accepted were accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        accepted_at = self.num_accepted_at
        accepted_at += [0] * (num_drafted - len(accepted_at))
        for place in range(num_accepted):
            accepted_at[place] += 1

    def count_first_run(self, request: Request) -> None:
        """Count a request that leaves the queue for the first time.

        Tokens that another engine or the parent of a fork generated do not count.
        """
        num_prompt_tokens = request.num_prompt_tokens
        num_cached = min(request.num_cached_tokens or 0, num_prompt_tokens)
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += num_cached
        self.num_cut_tokens += max(0, min(request.blocks.num_matched, num_prompt_tokens) - num_cached)
