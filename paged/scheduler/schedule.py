"""Schedule: what one step does; StepOutput: what it gave; SchedulerCounters: what all of them did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..blocks.manager import Copy
from ..requests.request import PromptReport, Request, TokenLogprobs


class AskedRows(NamedTuple):
    """The rows [start, end) of a request, of those that a step computes, which its report wants.

    offset: the first of them among the new tokens of the step.
    """

    request: Request
    report: PromptReport
    start: int
    end: int
    offset: int


NOT_FINITE = "the model's logits are not finite"


@dataclass(slots=True)
class Schedule:
    """What one step does: copy blocks, then compute num_new_tokens[i] of requests[i].

    Copies go in this order: out to host memory, in from there, then from block to block. Each list may be
    done at once: no block is read and written within one.
    """

    requests: list[Request] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    # Who gets a token, and from the last row of which of `requests`: one's own, or that of the request which
    # computed the prompt for all n samples.
    sampled_requests: list[Request] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    swap_out: list[Copy] = field(default_factory=list)  # block to host block
    swap_in: list[Copy] = field(default_factory=list)  # host block to block
    copies: list[Copy] = field(default_factory=list)
    num_tokens: int = 0
    num_decode_tokens: int = 0
    num_preempted: int = 0
    grown: list[int] = field(default_factory=list)  # of the decodes: whose block tables have changed

    @property
    def is_decode(self) -> bool:
        """Whether every request computes one token, gets one, and got one before."""
        return self.num_decode_tokens == len(self.requests) == len(self.sampled)

    def asked_rows(self) -> list[AskedRows]:
        """What the reports of its requests want of it. Those who decode have theirs."""
        asked, offset = [], self.num_decode_tokens
        for i in range(self.num_decode_tokens, len(self.requests)):
            request, num_new = self.requests[i], self.num_new_tokens[i]
            first, report = request.num_computed_tokens, request.report
            if report is not None and not report.is_complete:
                start, end = report.next_row, min(report.end, first + num_new)
                assert start >= first, "the prefix cache has skipped a row that is asked for"
                if start < end:
                    asked.append(AskedRows(request, report, start, end, offset + start - first))
            offset += num_new
        return asked

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.requests or self.swap_out)


@dataclass(slots=True)
class StepOutput:
    """What one step gave, by the rows of schedule.sampled_requests.

    tokens: None where there is none: see errors.
    logprobs: of those who asked.
    errors: why a row has no token, which ends its request.
    reports: of `Schedule.asked_rows`, the log-probabilities of each row, or the sum of the hidden states.
    """

    tokens: list[int | None] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    reports: list[tuple[AskedRows, list[TokenLogprobs] | Any]] = field(default_factory=list)

    def book_reports(self) -> None:
        """Hand them over."""
        for asked, rows in self.reports:
            if asked.report.num_top is None:
                asked.report.take_hidden(asked.end, rows)
            else:
                asked.report.take_logprobs(asked.end, rows)

    def book_logprobs(self, schedule: Schedule) -> None:
        """Hand them to their requests, which get their tokens after them."""
        for row, logprobs in self.logprobs.items():
            schedule.sampled_requests[row].add_logprobs(logprobs)


@dataclass(slots=True)
class SchedulerCounters:
    """What happened so far."""

    num_steps: int = 0
    step_prefill_tokens: int = 0  # of the last step
    step_decode_tokens: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_queried_tokens: int = 0  # of prompts looked up in the prefix cache
    num_recomputed: int = 0  # preemptions by recompute
    num_swapped: int = 0  # preemptions by swap
    num_finished: int = 0  # requests that ended by themselves, or by an error

    def count(self, schedule: Schedule) -> None:
        """One more step."""
        self.num_steps += 1
        self.step_decode_tokens = schedule.num_decode_tokens
        self.step_prefill_tokens = schedule.num_tokens - schedule.num_decode_tokens
        self.num_decode_tokens += self.step_decode_tokens
        self.num_prefill_tokens += self.step_prefill_tokens
