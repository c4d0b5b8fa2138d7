"""A scheduler on a made-up model, whose tokens are a fixed function of the request and the position."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paged.blocks.manager import BlockManager
from paged.drafting.drafter import Draft
from paged.requests.request import Request, RequestInputs
from paged.scheduler.drafts import verified
from paged.scheduler.schedule import Schedule, StepOutput
from paged.scheduler.scheduler import Scheduler

BLOCK_SIZE = 8
STOP = 999


def new_request(name: str, prompt_len: int, max_tokens: int, **inputs: Any) -> Request:
    inputs = RequestInputs(
        request_id=name,
        prompt_token_ids=[hash_token(name, i) for i in range(prompt_len)],
        max_total_tokens=prompt_len + max_tokens,
        stop_ids=frozenset([STOP]),
        **inputs,
    )
    return Request(inputs)


def hash_token(name: str, position: int) -> int:
    """Return the made-up model's token at a position: a fixed function, so recomputing changes nothing."""
    return random.Random(f"{name}/{position}").randrange(100)


def new_scheduler(
    num_blocks: int = 16,
    max_num_seqs: int = 8,
    budget: int = 64,
    num_host_blocks: int = 0,
    num_in_flight: int = 1,
    **options: Any,
) -> Scheduler:
    manager = BlockManager(num_blocks, BLOCK_SIZE, num_host_blocks=num_host_blocks)
    scheduler = Scheduler(manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **options)
    scheduler.num_in_flight = num_in_flight
    return scheduler


def added(scheduler: Scheduler, *requests: Request) -> list[Request]:
    for request in requests:
        scheduler.add(request)
    return list(requests)


def scheduled(scheduler: Scheduler) -> Schedule:
    schedule = scheduler.schedule()
    scheduler.check()
    return schedule


def computed(schedule: Schedule) -> dict[str, int]:
    """How many tokens each request computes, in the order of the step."""
    ids = [request.request_id for request in schedule.requests]
    return dict(zip(ids, schedule.num_new_tokens, strict=True))


def updated(scheduler: Scheduler, schedule: Schedule) -> list[Request]:
    """Give a step the tokens of the made-up model, one for each row that it samples."""
    tokens: list[int | None] = []
    for row, request in enumerate(schedule.sampled_requests, -schedule.num_decode_tokens):
        drafts = schedule.drafts[row] if 0 <= row < len(schedule.drafts) else []
        tokens += [hash_token(request.request_id, request.num_tokens + i) for i in range(1 + len(drafts))]
    output = verified(schedule, StepOutput(tokens))
    advanced = scheduler.update(schedule, output.tokens, output.errors, output.runs)
    scheduler.check()
    return advanced


class Guesses:
    """A drafter of as many tokens as it may guess, of which the first num_right are the made-up model's."""

    def __init__(self, num_right: int = 99) -> None:
        self.num_right = num_right

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft]:
        """Guess. Of one request it is sure."""
        return [
            Draft([self._token(request, i) for i in range(limit)], float(request.request_id == "sure"))
            for request, limit in zip(requests, limits, strict=True)
        ]

    def _token(self, request: Request, i: int) -> int:
        right = hash_token(request.request_id, request.num_tokens + i)
        return right if i < self.num_right else (right + 1) % 100


def run_step(scheduler: Scheduler) -> dict[str, int]:
    schedule = scheduled(scheduler)
    updated(scheduler, schedule)
    return computed(schedule)


def run_until(scheduler: Scheduler, reached: Callable[[], object]) -> list[dict[str, int]]:
    """Run steps until a condition holds. Return what each step computed."""
    steps = []
    while not reached():
        steps.append(run_step(scheduler))
        assert len(steps) < 5000, "it never came to that"
    return steps


def finish(scheduler: Scheduler) -> list[dict[str, int]]:
    """Run steps until all requests are finished, and assert that no block is held."""
    steps = run_until(scheduler, lambda: not scheduler.has_unfinished())
    assert scheduler.block_manager.pool.num_used == 0
    assert scheduler.block_manager.host_pool.num_used == 0
    return steps


def names(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]
