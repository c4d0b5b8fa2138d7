"""Calls of many parts: one at a time waits in the queue, so that later calls are not behind all of them."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from paged.scheduler.policies import POLICIES, new_policy
from tests.support.scheduler_cases import added, finish, new_request, new_scheduler, run_step


@pytest.mark.parametrize("seed", range(6))
def test_at_most_one_part_that_has_not_begun_is_ahead_of_a_later_call(seed):
    """First come, first served between calls, whose parts begin in order; some are aborted or held."""
    choose = random.Random(seed)
    scheduler = new_scheduler(num_blocks=30, max_num_seqs=3, budget=choose.choice([4, 16]))
    calls, begun_before, firsts = {}, {}, []
    begun = Counter()
    for step in range(120):
        if choose.random() < 0.3:
            name = f"call{len(calls)}"
            num_parts = choose.choice([1, 1, 2, 30])
            call = [
                new_request(f"{name}-{i}", choose.randint(1, 9), 2, part_of=name if num_parts > 1 else "")
                for i in range(num_parts)
            ]
            calls[name] = added(scheduler, *call)
            begun_before[name] = begun.copy()
        if step % 7 == 0 and (waiting := [*scheduler.waiting()]):
            choose.choice([scheduler.abort, scheduler.hold])(choose.choice(waiting))
        schedule = scheduler.schedule()
        for request in schedule.requests:
            name = request.request_id.split("-")[0]
            if request.num_computed_tokens or request.metrics.num_preemptions:
                continue
            if not begun[name] and not any(part.held or part.error_kind for part in calls[name]):
                assert all(begun[other] - num <= 1 for other, num in begun_before[name].items())
                firsts.append(name)
            begun[name] += 1
        if not schedule.is_empty:
            scheduler.update(schedule, [1] * len(schedule.sampled))
        scheduler.check()
    assert firsts == sorted(firsts, key=[*calls].index)
    assert max(begun.values()) > 5
    for call in calls.values():
        for request in call:
            scheduler.release(request)
    finish(scheduler)


@pytest.mark.parametrize("policy", POLICIES)
def test_parts_of_a_call_fill_the_steps_that_are_left_to_it(policy):
    scheduler = new_scheduler(num_blocks=99, max_num_seqs=9, policy=new_policy(policy, lambda _: 0))
    added(scheduler, *(new_request(f"a{i}", 4, 2, part_of="a") for i in range(12)))
    added(scheduler, new_request("b", 4, 2), *(new_request(f"c{i}", 4, 2, part_of="c") for i in range(2)))
    assert [*run_step(scheduler)] == ["a0", "b", "c0", "a1", "c1", "a2", "a3", "a4", "a5"]
