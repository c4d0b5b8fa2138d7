"""Schedule: what one step does; StepOutput: what it gave; SchedulerCounters: what all of them did."""

from __future__ import annotations

from dataclasses import dataclass, field

from .block_manager import Copy
from .request import Request, TokenLogprobs


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

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.requests or self.swap_out)


@dataclass(slots=True)
class StepOutput:
    """What one step gave, by the rows of schedule.sampled_requests.

    tokens: None where the model's logits were not finite, or something else went wrong.
    logprobs: of those who asked.
    errors: what went wrong else.
    """

    tokens: list[int | None] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)

    def book_logprobs(self, schedule: Schedule) -> None:
        """Hand them to their requests."""
        for row, logprobs in self.logprobs.items():
            schedule.sampled_requests[row].take_logprobs(logprobs)


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
