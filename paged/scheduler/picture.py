"""EnginePicture: what a step computes and whose the blocks are, to be looked at. It holds no text."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..requests.request import Request
from .schedule import Schedule
from .scheduler import Scheduler

MOST_REQUESTS = 512  # of those that run, and as many of those that wait
MOST_BLOCKS = 4096  # of all requests together: what makes, sends and draws a picture is bounded
LEAST_BLOCKS = 8  # of each request

RequestState = Literal["running", "held", "waiting"]


class PicturedRequest(NamedTuple):
    """A sample at the beginning of a step.

    sample: the sample's number among the samples of its prompt.
    num_new_tokens: how many of its tokens the step computes.
    num_blocks: how many blocks the sample has in the layer group with the most tokens in the cache.
    blocks: the ids of these blocks as int32, in order. If the picture has too many blocks, only the first of
        them.
    """

    request_id: str
    sample: int
    tenant: str
    state: RequestState
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_new_tokens: int
    num_blocks: int
    blocks: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePicture:
    """What a step computes, and which request holds which blocks.

    time: when the picture was made, in seconds of a clock with an arbitrary zero.
    seconds: how long making the picture took.
    num_steps and the fields after it: totals so far.
    """

    time: float
    seconds: float
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_pinned_blocks: int
    num_running: int
    num_waiting: int
    num_queued_tokens: int
    step_tokens: int
    requests: list[PicturedRequest]
    num_steps: int
    num_prefill_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_cached_tokens: int
    num_prompt_tokens: int

    @classmethod
    def of(cls, scheduler: Scheduler, schedule: Schedule) -> EnginePicture:
        """Return the picture of a step that is about to be computed."""
        started = time.monotonic()
        counters = scheduler.counters
        pool = scheduler.block_manager.pool
        requests = [*_pictured(scheduler, schedule)]
        ended = time.monotonic()
        return cls(
            time=ended,
            seconds=ended - started,
            block_size=scheduler.block_manager.block_size,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_used_blocks=pool.num_used + pool.num_deferred,
            num_cached_blocks=pool.num_cached,
            num_pinned_blocks=scheduler.block_manager.num_pinned,
            num_running=len(scheduler.running),
            num_waiting=scheduler.num_waiting,
            num_queued_tokens=scheduler.num_queued_tokens,
            step_tokens=schedule.num_tokens,
            requests=requests,
            num_steps=counters.num_steps,
            num_prefill_tokens=counters.num_prefill_tokens,
            num_generated_tokens=counters.num_generated_tokens,
            num_preemptions=counters.num_recomputed + counters.num_swapped,
            num_cached_tokens=counters.num_cached_tokens,
            num_prompt_tokens=counters.num_prompt_tokens,
        )


def _pictured(scheduler: Scheduler, schedule: Schedule) -> Iterator[PicturedRequest]:
    """Yield the running requests by rank, then those that wait, roughly in order."""
    num_new = dict(zip(map(id, schedule.requests), schedule.num_new_tokens, strict=True))
    running = scheduler.running[:MOST_REQUESTS]
    most = max(LEAST_BLOCKS, MOST_BLOCKS // max(1, len(running)))
    group = scheduler.block_manager.widest
    for request in running:
        table = request.blocks.tables[group]
        dropped = request.blocks.num_dropped[group]
        blocks = table[dropped : dropped + most].tobytes()
        state: RequestState = "held" if request.held else "running"
        yield _pictured_as(request, state, num_new.get(id(request), 0), len(table) - dropped, blocks)
    for request in itertools.islice(scheduler.waiting(), MOST_REQUESTS):
        yield _pictured_as(request, "waiting", 0, 0, b"")


def _pictured_as(
    request: Request, state: RequestState, num_new: int, num_blocks: int, blocks: bytes
) -> PicturedRequest:
    return PicturedRequest(
        request.request_id,
        request.index,
        request.inputs.tenant,
        state,
        request.num_prompt_tokens,
        request.num_tokens,
        request.num_computed_tokens,
        request.num_cached_tokens or 0,
        num_new,
        num_blocks,
        blocks,
    )
