"""Which request is preempted, by swap or recompute, and which blocks steps in flight defer; by hand."""

from __future__ import annotations

import pytest

from paged.requests.request import RequestStatus
from paged.scheduler.policies import Priority
from tests.support.scheduler_cases import (
    added,
    computed,
    finish,
    hash_token,
    names,
    new_request,
    new_scheduler,
    run_step,
    run_until,
    scheduled,
    updated,
)


def test_highest_rank_is_preempted_first_and_admitted_again_before_later_requests():
    scheduler = new_scheduler(num_blocks=6)
    a, b, c, d = added(scheduler, *(new_request(name, 15, 16) for name in "abcd"))
    assert run_step(scheduler) == {"a": 15, "b": 15, "c": 15}
    assert run_step(scheduler) == {"a": 1, "b": 1, "c": 1}
    # All three need a third block and none is free: c has the highest rank and gives back two.
    assert run_step(scheduler) == {"a": 1, "b": 1}
    assert names(scheduler.waiting()) == ["c", "d"]
    assert (c.num_computed_tokens, c.num_output_tokens, c.status) == (0, 2, RequestStatus.WAITING)
    assert [r.metrics.num_preemptions for r in (a, b, c, d)] == [0, 0, 1, 0]
    assert (scheduler.counters.num_recomputed, scheduler.counters.num_swapped) == (1, 0)
    finish(scheduler)
    assert [r.output_token_ids for r in (a, b, c, d)] == [
        [hash_token(name, i) for i in range(15, 31)] for name in "abcd"
    ]


def test_after_max_preemptions_a_request_runs_once_all_its_blocks_are_reserved():
    scheduler = new_scheduler(num_blocks=4, max_preemptions=1)
    a, b = added(scheduler, new_request("a", 15, 18), new_request("b", 15, 18))  # four blocks each in the end
    run_until(scheduler, lambda: b.metrics.num_preemptions)
    assert b.protected
    c, d = added(scheduler, new_request("c", 1, 1), new_request("d", 15, 18))
    assert names(scheduler.waiting()) == ["b", "c", "d"]
    run_until(scheduler, lambda: b.status is RequestStatus.RUNNING)
    assert a.status is RequestStatus.FINISHED  # not before: there would be no room for all of it
    run_until(scheduler, lambda: b.status is RequestStatus.FINISHED)
    assert b.metrics.num_preemptions == 1
    assert c.num_output_tokens == d.num_output_tokens == 0
    finish(scheduler)


def test_reserved_blocks_are_not_taken_by_growing_requests():
    scheduler = new_scheduler(num_blocks=6, max_preemptions=1)
    _, b = added(scheduler, new_request("a", 15, 18), new_request("b", 15, 26))  # four and five blocks
    run_until(scheduler, lambda: b.metrics.num_preemptions)
    run_until(scheduler, lambda: b.status is RequestStatus.RUNNING)
    assert b.blocks.num_blocks == 4
    # One is reserved for b, one is left for c, which waits for its second until b is done.
    (c,) = added(scheduler, new_request("c", 7, 20))
    run_until(scheduler, lambda: b.status is RequestStatus.FINISHED)
    assert (c.num_computed_tokens, c.metrics.num_preemptions, b.metrics.num_preemptions) == (8, 0, 1)
    finish(scheduler)
    assert c.finish_reason == "length"


@pytest.mark.parametrize(
    ("num_host_blocks", "pays", "swapped"),
    [
        (8, lambda n: n == 16, True),
        (8, lambda _: False, False),
        (1, lambda _: True, False),
        (8, None, False),
    ],
    ids=["pays", "does-not-pay", "host-is-full", "never"],
)
def test_a_preempted_request_is_swapped_or_recomputed(num_host_blocks, pays, swapped):
    scheduler = new_scheduler(num_blocks=6, num_host_blocks=num_host_blocks, swap_pays=pays)
    requests = added(scheduler, *(new_request(name, 15, 16) for name in "abc"))
    c = requests[2]
    run_step(scheduler)
    run_step(scheduler)
    blocks = list(c.blocks.tables[0])
    schedule = scheduled(scheduler)
    assert [block for block, _ in schedule.swap_out] == (blocks if swapped else [])
    assert c.num_computed_tokens == (16 if swapped else 0)
    assert scheduler.counters.num_swapped == swapped
    assert scheduler.counters.num_recomputed == 1 - swapped
    updated(scheduler, schedule)
    swapped_in = schedule.swap_in
    while not swapped_in and c.status is not RequestStatus.FINISHED:
        schedule = scheduled(scheduler)
        swapped_in = schedule.swap_in
        updated(scheduler, schedule)
    assert len(swapped_in) == 2 * swapped
    finish(scheduler)
    assert c.output_token_ids == [hash_token("c", i) for i in range(15, 31)]


def test_lower_priority_number_goes_first_and_preempts_higher_ones():
    scheduler = new_scheduler(num_blocks=4, policy=Priority())
    added(scheduler, new_request("low", 14, 10, priority=5), new_request("lowest", 14, 10, priority=6))
    assert run_step(scheduler) == {"low": 14, "lowest": 14}
    added(scheduler, new_request("same", 15, 2, priority=6))
    assert run_step(scheduler) == {"low": 1, "lowest": 1}
    added(scheduler, new_request("high", 15, 2, priority=-1))
    assert names(scheduler.waiting()) == ["high", "same"]
    assert run_step(scheduler) == {"low": 1, "high": 15}
    assert names(scheduler.waiting()) == ["lowest", "same"]


def test_priority_takes_seats_of_higher_numbers_only():
    scheduler = new_scheduler(max_num_seqs=2, policy=Priority())
    added(scheduler, new_request("one", 4, 9, priority=1), new_request("two", 4, 9, priority=2))
    run_step(scheduler)
    added(scheduler, new_request("as one", 4, 3, priority=2), new_request("zero", 4, 3, priority=0))
    assert run_step(scheduler) == {"one": 1, "zero": 4}
    assert names(scheduler.waiting()) == ["two", "as one"]


@pytest.mark.parametrize(
    ("options", "prompt_len"),
    [
        ({"long_prefill_token_threshold": 64}, 455),
        ({"long_prefill_token_threshold": 64, "num_blocks": 122}, 448),
        ({"budget": 65}, 300),
        ({"long_prefill_token_threshold": 64, "max_num_partial_prefills": 1}, 300),
    ],
    ids=[
        "blocks are promised to a prompt",
        "and one for its first token",
        "a prompt takes all tokens",
        "one prompt at a time",
    ],
)
def test_no_request_is_preempted_for_a_priority_that_cannot_run_yet(options, prompt_len):
    scheduler = new_scheduler(**{"num_blocks": 120, "budget": 256, "policy": Priority(), **options})
    low, high = new_request("low", 470, 30, priority=5), new_request("high", prompt_len, 2, priority=0)
    added(scheduler, low)
    run_until(scheduler, lambda: low.num_output_tokens)
    added(scheduler, high)
    run_step(scheduler)
    added(scheduler, new_request("middle", 515, 2, priority=1))
    steps = run_until(scheduler, lambda: low.metrics.num_preemptions)
    assert ["middle" in step for step in steps] == [False] * (len(steps) - 1) + [True]
    assert len(steps) >= 4  # while the prompt of `high` is computed


def test_priority_preempts_nothing_for_blocks_that_a_cached_prefix_saves():
    scheduler = new_scheduler(num_blocks=11, budget=128, policy=Priority())
    added(scheduler, new_request("same", 33, 4, priority=0), new_request("low", 33, 9, priority=5))
    run_step(scheduler)
    added(scheduler, new_request("same", 33, 4, priority=1))
    schedule = scheduled(scheduler)
    assert names(schedule.requests) == ["same", "low", "same"]
    updated(scheduler, schedule)
    finish(scheduler)


def test_priority_that_fits_only_alone_preempts_all_others():
    scheduler = new_scheduler(num_blocks=10, watermark=0.1, policy=Priority())
    added(scheduler, *(new_request(name, 9, 9, priority=5) for name in "ab"))
    run_step(scheduler)
    added(scheduler, new_request("all", 72, 9, priority=1))
    assert run_step(scheduler) == {"all": 64}
    finish(scheduler)


def test_shared_blocks_make_room_once():
    scheduler = new_scheduler(num_blocks=10, policy=Priority())
    # The two hold seven blocks, of which they share five. With the free one that is not enough for nine.
    added(scheduler, *(new_request("same", 44, 3, priority=2) for _ in range(2)))
    added(scheduler, new_request("first", 15, 9, priority=0))
    run_step(scheduler)
    added(scheduler, new_request("high", 64, 2, priority=1))
    for _ in range(2):
        assert run_step(scheduler) == {"same": 1, "first": 1}
    finish(scheduler)


def test_blocks_that_a_priority_begins_with_make_no_room_for_it():
    scheduler = new_scheduler(num_blocks=10, policy=Priority())
    low, _ = added(scheduler, new_request("low", 33, 4, priority=2), new_request("first", 9, 8, priority=0))
    run_step(scheduler)
    # It needs nine blocks. Three are free, and it begins with four of low's five: they make no room.
    alike = new_request("high", 64, 2, priority=1)
    alike.token_ids[:32] = low.inputs.prompt_token_ids[:32]
    added(scheduler, alike)
    assert run_step(scheduler) == {"low": 1, "first": 1}
    finish(scheduler)


# Steps in flight


def test_overlapping_steps_leave_out_what_is_in_flight():
    scheduler = new_scheduler()
    a, b = added(scheduler, new_request("a", 4, 3), new_request("b", 4, 2))
    scheduler.max_num_batched_tokens = 4
    first = scheduled(scheduler)
    second = scheduled(scheduler)
    assert (computed(first), computed(second)) == ({"a": 4}, {"b": 4})
    assert scheduled(scheduler).is_empty
    assert updated(scheduler, first) == [a]
    third = scheduled(scheduler)
    assert computed(third) == {"a": 1}
    assert updated(scheduler, second) == [b]
    updated(scheduler, third)
    finish(scheduler)


def test_freed_blocks_are_not_used_before_the_steps_that_read_them_end():
    scheduler = new_scheduler(num_blocks=2)
    a, b = added(scheduler, new_request("a", 9, 3), new_request("b", 9, 3))
    schedule = scheduled(scheduler)
    assert computed(schedule) == {"a": 9}
    scheduler.abort(a)
    assert scheduled(scheduler).is_empty
    assert updated(scheduler, schedule) == []
    assert a.num_output_tokens == 0
    assert run_step(scheduler) == {"b": 9}
    finish(scheduler)
    assert b.finish_reason == "length"


def test_no_more_is_preempted_where_deferred_blocks_make_room_for_a_priority():
    scheduler, steps = new_scheduler(num_blocks=8, policy=Priority()), []
    for name in "abc":
        added(scheduler, new_request(name, 9, 9, priority=5))
        steps.append(scheduled(scheduler))
    updated(scheduler, steps[0])
    (high,) = added(scheduler, new_request("high", 17, 2, priority=0))
    assert (scheduled(scheduler).num_preempted, scheduler.block_manager.pool.num_deferred) == (1, 2)
    updated(scheduler, steps[1])
    schedule = scheduled(scheduler)
    assert (computed(schedule), names(scheduler.waiting())) == ({"b": 1}, ["high", "a"])
    updated(scheduler, steps[2])
    updated(scheduler, schedule)
    assert run_step(scheduler) == {"b": 1, "c": 1, "high": 17}
    assert high.metrics.num_preemptions == 0
    finish(scheduler)


def test_head_that_lacked_blocks_is_tried_again_when_there_are_more():
    scheduler = new_scheduler(num_blocks=5)
    added(scheduler, new_request("a", 15, 2), new_request("b", 15, 10), new_request("c", 15, 2))
    assert run_step(scheduler) == {"a": 15, "b": 15}
    assert run_step(scheduler) == {"a": 1, "b": 1}
    assert run_step(scheduler) == {"b": 1, "c": 15}  # b takes one of the three free blocks
    finish(scheduler)
