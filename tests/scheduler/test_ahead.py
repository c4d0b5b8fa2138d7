"""Steps in flight of the same requests: what begins before which token is known, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from paged.options.sampling_params import SamplingParams
from paged.requests.prompt_report import TokenLogprobs
from paged.requests.request import RequestStatus
from paged.requests.token_rules import TokenRules
from paged.scheduler.policies import Fair, Priority
from paged.scheduler.schedule import Schedule, StepOutput
from paged.scheduler.scheduler import Scheduler
from tests.support.scheduler_cases import (
    STOP,
    added,
    computed,
    hash_token,
    names,
    new_request,
    new_scheduler,
    scheduled,
    updated,
)

DRY = SamplingParams(dry_multiplier=1.0)


def new_ahead(**options: Any) -> Scheduler:
    scheduler = new_scheduler(**options)
    scheduler.run_ahead()
    return scheduler


def ended(scheduler: Scheduler, in_flight: list[Schedule]) -> dict[str, int]:
    """Begin a step, and end the oldest of two or more in flight. Return what the new one computes."""
    schedule = scheduled(scheduler)
    if not schedule.is_empty:
        in_flight.append(schedule)
    if in_flight and (schedule.is_empty or len(in_flight) > 1):
        updated(scheduler, in_flight.pop(0))
    return computed(schedule)


def test_a_decode_goes_on_before_its_last_token_is_known_as_far_as_its_end_is():
    scheduler = new_ahead()
    (a,) = added(scheduler, new_request("a", 4, 3))
    steps = [scheduled(scheduler) for _ in range(3)]
    assert [step.num_computed_tokens for step in steps] == [[0], [4], [5]]
    assert (a.num_pending, a.num_tokens, scheduled(scheduler).is_empty) == (3, 4, True)
    for num_pending, step in zip((2, 1, 0), steps, strict=True):
        assert updated(scheduler, step) == [a]
        assert a.num_pending == num_pending
    assert (a.finish_reason, a.output_token_ids) == ("length", [hash_token("a", i) for i in (4, 5, 6)])
    assert scheduler.counters.num_generated_tokens == 3


def test_a_request_that_grows_long_waits_there():
    scheduler = new_ahead()
    (a,) = added(scheduler, new_request("a", 4, 9, long_from=6))
    steps = [scheduled(scheduler) for _ in range(2)]
    assert scheduled(scheduler).is_empty
    for step in steps:
        updated(scheduler, step)
    assert (computed(scheduled(scheduler)), a.num_pending) == ({"a": 6}, 1)


@pytest.mark.parametrize("end", ["stop", "abort"])
def test_the_row_of_a_request_that_ended_in_flight_is_dropped_with_its_logprobs(end):
    scheduler = new_ahead(num_blocks=2)
    (a,) = added(scheduler, new_request("a", 8, 8, params=SamplingParams(logprobs=0)))
    first, second = scheduled(scheduler), scheduled(scheduler)
    seat = a.seat
    if end == "stop":
        assert scheduler.update(first, [STOP]) == [a]
    else:
        scheduler.abort(a)
        assert updated(scheduler, first) == []
    tokens = a.output_token_ids
    assert (a.finish_reason, tokens) == (end, [STOP] if end == "stop" else [])
    # The step that is left may write into its block and its seat.
    (b,) = added(scheduler, new_request("b", 9, 2))
    assert (scheduled(scheduler).is_empty, scheduler.block_manager.pool.num_deferred) == (True, 2)
    assert seat not in scheduler._running.seats._free
    output = StepOutput([7], {0: TokenLogprobs([7], [-1.0], 1)})
    assert output.record_logprobs(second) == 0
    assert scheduler.update(second, output.tokens) == []
    assert (a.output_token_ids, a.sampling.logprobs) == (tokens, [])
    assert scheduler.counters.num_generated_tokens == len(tokens)
    assert (computed(scheduled(scheduler)), b.seat) == ({"b": 9}, seat)


@pytest.mark.parametrize(
    "inputs",
    [
        {"params": DRY},
        {"params": SamplingParams(logits_processors=[lambda _, logits: logits])},
        {"rules": TokenRules(bad_words=((3, 4),))},
    ],
    ids=["DRY", "logits_processors", "a bad word of two tokens"],
)
def test_a_request_that_follows_its_text_waits_for_each_token(inputs):
    scheduler = new_ahead()
    added(scheduler, new_request("waits", 4, 9, **inputs), new_request("goes on", 4, 9))
    in_flight: list[Schedule] = []
    assert [ended(scheduler, in_flight) for _ in range(4)] == [
        {"waits": 4, "goes on": 4},
        {"goes on": 1},
        {"waits": 1, "goes on": 1},
        {"goes on": 1},
    ]


def test_requests_that_wait_for_their_tokens_come_together():
    scheduler, in_flight, found = new_ahead(), [], []
    added(scheduler, new_request("a", 4, 20, params=DRY), new_request("plain", 4, 20))
    for step in range(8):
        if step in (1, 2):
            added(scheduler, new_request(f"b{step}", 4, 20, params=DRY))
        found.append([name for name, num in ended(scheduler, in_flight).items() if name != "plain"])
    assert found == [["a"], ["b1"], ["a", "b2"], [], ["a", "b1", "b2"], [], ["a", "b1", "b2"], []]


def test_a_beam_waits_for_the_token_that_is_chosen():
    scheduler = new_ahead()
    (a,) = added(scheduler, new_request("a", 4, 9))
    a.is_beam = True
    step = scheduled(scheduler)
    assert scheduled(scheduler).is_empty
    updated(scheduler, step)
    scheduler.replace_last_token(a, 7)
    assert scheduled(scheduler).newcomers == [a]


def test_a_request_that_missed_a_step_waits_for_those_in_flight():
    """The sampler has forgotten what it counted of the request's tokens, and would miss the pending one."""
    scheduler = new_ahead()
    a, _ = added(scheduler, new_request("a", 4, 9), new_request("b", 4, 9))
    first = scheduled(scheduler)
    scheduler.hold(a)
    assert computed(scheduled(scheduler)) == {"b": 1}
    scheduler.release(a)
    assert computed(scheduled(scheduler)) == {"b": 1}
    updated(scheduler, first)
    assert computed(scheduled(scheduler)) == {"a": 1, "b": 1}


@pytest.mark.parametrize(("num_ended", "shares"), [(0, False), (1, True)])
def test_a_fork_shares_blocks_whose_newest_token_alone_is_in_flight(num_ended, shares):
    scheduler = new_ahead()
    (a,) = added(scheduler, new_request("a", 12, 9))
    steps = [scheduled(scheduler) for _ in range(2 * num_ended or 1)]
    for step in steps[:num_ended]:
        updated(scheduler, step)
    child = new_request("child", 12, 9)
    child.token_ids = a.token_ids.copy()
    scheduler.fork(a, child)
    assert (child.status is RequestStatus.RUNNING) is shares
    scheduler.check()
    third = scheduled(scheduler)
    # With two pending tokens, blocks may have left the parent's window that the child needs.
    assert a.num_pending == 2
    late = new_request("late", 12, 9)
    late.token_ids = a.token_ids.copy()
    scheduler.fork(a, late)
    assert late.status is RequestStatus.WAITING
    for step in (*steps[num_ended:], third):
        updated(scheduler, step)


def test_where_blocks_are_short_none_is_scheduled_ahead_and_then_the_youngest_is_preempted():
    scheduler, in_flight = new_ahead(num_blocks=4), []
    a, b = added(scheduler, new_request("a", 14, 12), new_request("b", 14, 12))
    assert ended(scheduler, in_flight) == {"a": 14, "b": 14}
    assert ended(scheduler, in_flight) == ended(scheduler, in_flight) == {"a": 1, "b": 1}
    # The next tokens need a third block each, of which there is none.
    assert (ended(scheduler, in_flight), [r.num_pending for r in (a, b)]) == ({}, [0, 0])
    assert (ended(scheduler, in_flight), a.num_pending) == ({"a": 1}, 1)
    assert (names(scheduler.waiting()), b.metrics.num_preemptions) == (["b"], 1)


def test_a_higher_priority_waits_for_the_steps_in_flight_of_the_request_it_preempts():
    scheduler, in_flight = new_ahead(max_num_seqs=1, policy=Priority()), []
    (low,) = added(scheduler, new_request("low", 4, 9, priority=2))
    assert (ended(scheduler, in_flight), ended(scheduler, in_flight)) == ({"low": 4}, {"low": 1})
    added(scheduler, new_request("high", 4, 2, priority=1))
    assert (ended(scheduler, in_flight), low.num_pending) == ({}, 0)
    assert ended(scheduler, in_flight) == {"high": 4}
    assert low.status is RequestStatus.WAITING


def test_a_decode_that_the_step_has_already_is_not_preempted_for_another_one_of_it():
    scheduler, in_flight = new_ahead(num_blocks=8, policy=Fair(), watermark=0.0), []
    _, above = added(scheduler, *(new_request(f"a{i}", n, 9, tenant="a") for i, n in enumerate((26, 10))))
    ended(scheduler, in_flight)
    (below,) = added(scheduler, new_request("b", 14, 9, tenant="b"))
    for _ in range(2):
        ended(scheduler, in_flight)
    while in_flight:
        updated(scheduler, in_flight.pop(0))
    while below.num_tokens < 17:
        updated(scheduler, scheduled(scheduler))
    step = scheduled(scheduler)  # "b" lacks a block, and of blocks "a" is above its share
    assert (computed(step), above.status) == ({"a0": 1, "a1": 1}, RequestStatus.RUNNING)
    updated(scheduler, step)


def test_a_failed_step_leaves_no_token_pending():
    scheduler = new_ahead()
    (a,) = added(scheduler, new_request("a", 4, 9))
    for _ in range(3):
        scheduled(scheduler)
    scheduler.cancel()
    scheduler.check()
    assert (a.num_pending, a.num_computed_tokens, a.status) == (0, 0, RequestStatus.WAITING)
    assert computed(scheduled(scheduler)) == {"a": 4}
