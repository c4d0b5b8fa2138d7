"""Held requests: they compute nothing, give way to others, and go on with the same tokens; by hand."""

from __future__ import annotations

import pytest

from paged.requests.request import NO_MASK, SLOW_READER, RequestStatus
from paged.scheduler.policies import POLICIES, new_policy
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


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_held_request_keeps_its_blocks_and_goes_on_where_it_was():
    scheduler = new_scheduler()
    a, _ = added(scheduler, new_request("a", 15, 8), new_request("b", 15, 8))
    run_step(scheduler)
    scheduler.hold(a)
    scheduler.hold(a)
    blocks = list(a.blocks.tables[0])
    assert run_step(scheduler) == run_step(scheduler) == {"b": 1}
    assert (a.status, a.blocks.tables[0].tolist(), a.num_output_tokens) == (RequestStatus.RUNNING, blocks, 1)
    scheduler.release(a)
    scheduler.release(a)
    assert run_step(scheduler) == {"a": 1, "b": 1}
    finish(scheduler)
    assert a.output_token_ids == [hash_token("a", i) for i in range(15, 23)]
    assert a.metrics.num_preemptions == 0


def test_a_request_held_in_flight_gets_the_token_of_its_step():
    scheduler = new_scheduler()
    (a,) = added(scheduler, new_request("a", 15, 8))
    schedule = scheduled(scheduler)
    scheduler.hold(a)
    updated(scheduler, schedule)
    assert a.num_output_tokens == 1
    assert scheduled(scheduler).is_empty
    assert scheduler.has_unfinished()
    assert not scheduler.has_runnable()
    scheduler.abort(a)
    scheduler.check()


@pytest.mark.parametrize("name", POLICIES)
def test_a_held_request_that_waits_is_passed_over_until_it_is_released(name):
    scheduler = new_scheduler(max_num_seqs=1, policy=new_policy(name, lambda _: 0))
    first, a, b, c = added(scheduler, *(new_request(name, 4, 2) for name in ("first", "a", "b", "c")))
    run_step(scheduler)
    scheduler.hold(a)
    scheduler.hold(c)
    scheduler.check()
    run_until(scheduler, lambda: b.status is RequestStatus.FINISHED)
    assert (first.num_output_tokens, a.num_output_tokens, scheduler.num_waiting) == (2, 0, 2)
    assert scheduled(scheduler).is_empty
    scheduler.abort(c)
    scheduler.release(a)
    assert names(scheduler.waiting()) == ["a"]
    assert finish(scheduler) == [{"a": 4}, {"a": 1}]


def test_a_released_request_has_its_place_in_the_queue_again():
    scheduler = new_scheduler(max_num_seqs=1)
    _, a, _ = added(scheduler, *(new_request(name, 4, 1) for name in "0ab"))
    scheduler.hold(a)
    scheduler.release(a)
    assert names(scheduler.waiting()) == ["0", "a", "b"]
    assert finish(scheduler) == [{"0": 4}, {"a": 4}, {"b": 4}]


@pytest.mark.parametrize("protected", [False, True], ids=["", "protected"])
def test_where_blocks_are_short_a_held_request_is_preempted_first_and_that_does_not_count(protected):
    scheduler = new_scheduler(num_blocks=6)
    a, b, c = added(scheduler, *(new_request(name, 15, 16) for name in "abc"))
    run_step(scheduler)
    scheduler.hold(a)
    if protected:
        a.protected = True
        scheduler._running._num_protected += 1
    run_step(scheduler)
    # b and c need a third block each and none is free: a gives back two, though its rank is the lowest.
    assert run_step(scheduler) == {"b": 1, "c": 1}
    assert (a.status, a.num_computed_tokens, a.protected) == (RequestStatus.WAITING, 0, protected)
    assert [r.metrics.num_preemptions for r in (a, b, c)] == [0, 0, 0]
    run_until(scheduler, lambda: b.finish_reason and c.finish_reason)
    assert a.num_output_tokens == 1
    scheduler.release(a)
    finish(scheduler)
    assert a.output_token_ids == [hash_token("a", i) for i in range(15, 31)]


def test_a_held_request_keeps_its_seat_from_those_that_wait_for_a_while():
    clock = Clock()
    scheduler = new_scheduler(max_num_seqs=2, held_for_s=5.0, clock=clock)
    a, b, c = added(scheduler, *(new_request(name, 4, 3) for name in "abc"))
    run_step(scheduler)
    scheduler.hold(a)
    scheduler.hold(b)
    clock.now = 4.9
    assert scheduled(scheduler).is_empty
    assert scheduler.has_runnable()  # c, as soon as the time is over
    clock.now = 5.0
    scheduler.hold(a)  # it is held already: its time does not start again
    assert run_step(scheduler) == {"c": 4}
    assert (a.metrics.num_preemptions, a.status, b.status) == (
        0,
        RequestStatus.WAITING,
        RequestStatus.WAITING,
    )
    scheduler.release(b)
    finish_c = run_until(scheduler, lambda: c.finish_reason)
    assert finish_c[0] == {"c": 1, "b": 5}
    scheduler.release(a)
    finish(scheduler)


def test_without_a_request_that_waits_a_held_one_keeps_its_blocks_for_ever():
    clock = Clock()
    scheduler = new_scheduler(held_for_s=5.0, clock=clock)
    a, b = added(scheduler, new_request("a", 4, 3), new_request("b", 4, 9))
    run_step(scheduler)
    scheduler.hold(a)
    clock.now = 99.0
    assert run_step(scheduler) == {"b": 1}
    scheduler.hold(b)
    assert scheduled(scheduler).is_empty
    assert a.status is b.status is RequestStatus.RUNNING


def test_samples_wait_with_the_held_one_that_computes_their_prompt():
    scheduler = new_scheduler(max_num_seqs=3)
    leader, one, two = samples = [new_request("a", 15, 3) for _ in range(3)]
    leader.siblings = [one, two]
    scheduler.add(leader)
    for sample in samples:
        scheduler.hold(sample)
    assert scheduled(scheduler).is_empty
    scheduler.release(leader)
    schedule = scheduled(scheduler)
    assert computed(schedule) == {"a": 15}
    assert schedule.sampled_requests == samples  # the first token of all comes from the same row
    updated(scheduler, schedule)
    assert scheduled(scheduler).requests == [leader]
    scheduler.check()


def test_a_held_request_in_flight_keeps_its_blocks():
    scheduler = new_scheduler(num_blocks=4)
    a, b = added(scheduler, new_request("a", 15, 8), new_request("b", 15, 8))
    run_step(scheduler)
    scheduler.hold(a)
    run_step(scheduler)  # b needs a third block next, and none is free
    scheduler.release(a)
    scheduler.hold(b)
    in_flight = scheduled(scheduler)
    assert in_flight.requests == [a]
    scheduler.release(b)
    scheduler.hold(a)
    assert scheduled(scheduler).is_empty
    assert a.status is RequestStatus.RUNNING
    updated(scheduler, in_flight)
    assert run_step(scheduler) == {"b": 1}
    assert a.status is RequestStatus.WAITING


def test_a_request_is_held_until_it_is_released_for_each_reason():
    scheduler = new_scheduler()
    (a,) = added(scheduler, new_request("a", 15, 2))
    scheduler.hold(a, SLOW_READER)
    scheduler.hold(a, NO_MASK)
    scheduler.release(a, SLOW_READER)
    assert scheduled(scheduler).is_empty
    scheduler.hold(a, NO_MASK)
    scheduler.release(a, NO_MASK)
    assert finish(scheduler) == [{"a": 15}, {"a": 1}]


def test_a_failed_step_leaves_held_requests_held():
    scheduler = new_scheduler()
    a, b = added(scheduler, new_request("a", 15, 3), new_request("b", 15, 3))
    run_step(scheduler)
    scheduler.hold(a)
    scheduled(scheduler)
    scheduler.cancel()
    scheduler.check()
    assert (bool(a.held), a.status, b.status) == (True, RequestStatus.WAITING, RequestStatus.WAITING)
    run_until(scheduler, lambda: b.finish_reason)
    assert a.num_output_tokens == 1
    scheduler.release(a)
    finish(scheduler)
