"""Schedules computed by hand: budget, order, admission, sharing, and how requests end."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from paged.base.errors import QueueFullError, UsageError
from paged.requests.request import Request, RequestMetrics, RequestStatus
from paged.scheduler.policies import POLICIES, Fair, LongestPrefixMatch, new_policy
from paged.scheduler.schedule import SECONDS_OF_STEP
from paged.scheduler.stats import EngineStats
from tests.support.scheduler_cases import (
    STOP,
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

# Tokens


def test_one_rule_computes_chunks_of_prompts_and_then_single_tokens():
    scheduler = new_scheduler(budget=10)
    a, b = added(scheduler, new_request("a", 4, 3), new_request("b", 17, 2))
    steps = finish(scheduler)
    # a's first step gives its first token; b takes what the budget leaves, and samples once it is complete.
    assert steps == [{"a": 4, "b": 6}, {"a": 1, "b": 9}, {"a": 1, "b": 2}, {"b": 1}]
    assert a.output_token_ids == [hash_token("a", i) for i in (4, 5, 6)]
    assert b.output_token_ids == [hash_token("b", i) for i in (17, 18)]
    assert (a.finish_reason, b.finish_reason) == ("length", "length")
    counters = scheduler.counters
    assert (counters.num_steps, counters.num_prefill_tokens, counters.num_decode_tokens) == (4, 21, 3)
    assert scheduler.block_manager.pool.num_used == 0


def test_decodes_go_first_and_a_long_prompt_is_chunked():
    scheduler = new_scheduler(budget=7, long_prefill_token_threshold=4)
    added(scheduler, new_request("long", 20, 2), new_request("b", 2, 5), new_request("c", 9, 2))
    steps = [scheduled(scheduler)]
    assert list(computed(steps[0]).items()) == [("long", 4), ("b", 2), ("c", 1)]
    updated(scheduler, steps[0])
    schedule = scheduled(scheduler)
    assert list(computed(schedule).items()) == [("b", 1), ("long", 4), ("c", 2)]
    assert (schedule.num_tokens, schedule.num_decode_tokens) == (7, 1)
    assert names(schedule.sampled_requests) == ["b"]


def test_budget_of_decodes():
    scheduler = new_scheduler(budget=2)
    added(scheduler, *(new_request(name, 1, 4) for name in "abc"))
    assert [run_step(scheduler) for _ in range(3)] == [{"a": 1, "b": 1}] * 3
    assert run_step(scheduler) == {"a": 1, "b": 1}
    assert run_step(scheduler) == {"c": 1}


@pytest.mark.parametrize(
    ("num_in_flight", "shares"), [(1, [16] * 4), (2, [8] * 6), (3, [6, 5, 5] * 3), (5, [4, 3, 3, 3, 3] * 2)]
)
def test_steps_in_flight_share_the_decodes(num_in_flight, shares):
    """Of 16 decodes each step has its share: first of all of them, then of those whose step has ended."""
    scheduler = new_scheduler(num_blocks=99, max_num_seqs=16, num_in_flight=num_in_flight)
    added(scheduler, *(new_request(str(i), 1, 99) for i in range(16)))
    updated(scheduler, scheduled(scheduler))
    in_flight, found = [], []
    for _ in shares:
        in_flight.append(scheduled(scheduler))
        found.append(in_flight[-1].num_decode_tokens)
        if len(in_flight) == num_in_flight:
            updated(scheduler, in_flight.pop(0))
    assert found == shares


def test_decodes_that_come_later_are_shared_too():
    """One decodes alone, and then there are 16: they do not stay in one step."""
    scheduler = new_scheduler(num_blocks=99, max_num_seqs=16, num_in_flight=2)
    added(scheduler, new_request("first", 1, 99))
    updated(scheduler, scheduled(scheduler))
    alone = scheduled(scheduler)
    added(scheduler, *(new_request(str(i), 1, 99) for i in range(15)))
    in_flight = [alone, scheduled(scheduler)]
    found = []
    for _ in range(6):
        updated(scheduler, in_flight.pop(0))
        in_flight.append(scheduled(scheduler))
        found.append(in_flight[-1].num_decode_tokens)
    assert found[-4:] == [8, 8, 8, 8]


def test_max_num_partial_prefills_bounds_unfinished_prompts():
    scheduler = new_scheduler(budget=16, long_prefill_token_threshold=4, max_num_partial_prefills=1)
    added(scheduler, new_request("a", 9, 2), new_request("b", 3, 2), new_request("c", 9, 2))
    assert run_step(scheduler) == {"a": 4, "b": 3}
    assert run_step(scheduler) == {"b": 1, "a": 4}
    assert run_step(scheduler) == {"a": 1, "c": 4}  # a's last chunk makes room for c's first


def test_of_a_cached_prompt_only_the_last_block_is_computed():
    scheduler = new_scheduler()
    added(scheduler, new_request("a", 24, 1))
    assert run_step(scheduler) == {"a": 24}
    (again,) = added(scheduler, new_request("a", 24, 1))
    assert run_step(scheduler) == {"a": 8}
    assert again.num_cached_tokens == 16
    assert (scheduler.counters.num_cached_tokens, scheduler.counters.num_prompt_tokens) == (16, 48)


def test_requests_of_one_step_share_their_prompt():
    scheduler = new_scheduler()
    added(scheduler, *(new_request("same", 20, 2) for _ in range(3)))
    schedule = scheduled(scheduler)
    assert schedule.num_new_tokens == [20, 4, 4]
    assert scheduler.block_manager.pool.num_used == 2 + 3


# Admission


def test_requests_are_admitted_in_order_even_if_a_later_one_would_fit():
    scheduler = new_scheduler(num_blocks=4)
    added(scheduler, new_request("a", 16, 8), new_request("long", 24, 8), new_request("short", 1, 1))
    assert run_step(scheduler) == {"a": 16}
    assert names(scheduler.waiting()) == ["long", "short"]
    assert scheduler.num_waiting == 2


def test_max_num_seqs_run_at_once():
    scheduler = new_scheduler(max_num_seqs=2)
    added(scheduler, *(new_request(name, 2, 2) for name in "abc"))
    assert run_step(scheduler) == {"a": 2, "b": 2}
    assert run_step(scheduler) == {"a": 1, "b": 1}
    assert run_step(scheduler) == {"c": 2}


@pytest.mark.parametrize(("watermark", "num_running"), [(0.0, 5), (0.2, 4), (0.3, 3)])
def test_watermark_stays_free_on_admission(watermark, num_running):
    scheduler = new_scheduler(num_blocks=10, budget=100, watermark=watermark)
    added(scheduler, *(new_request(name, 15, 17) for name in "abcde"))  # two blocks each
    run_step(scheduler)
    assert len(scheduler.running) == num_running


def test_request_that_can_never_fit_is_refused():
    scheduler = new_scheduler(num_blocks=2)
    # The last token is only sampled: 17 tokens take 16 slots.
    scheduler.add(new_request("fits", 16, 1))
    with pytest.raises(AssertionError, match="never fit"):
        scheduler.add(new_request("too long", 17, 1))


def test_max_queued_tokens_bounds_the_queue_unless_a_request_waits_alone():
    scheduler = new_scheduler(max_num_seqs=1)
    scheduler.max_queued_tokens = 20
    added(scheduler, new_request("a", 30, 4))
    with pytest.raises(QueueFullError, match="30 tokens wait already, this one has 1 and max_queued_tokens"):
        scheduler.add(new_request("b", 1, 4))
    run_step(scheduler)
    added(scheduler, *(new_request(name, 10, 4) for name in "cd"))
    assert scheduler.num_queued_tokens == 20
    with pytest.raises(QueueFullError):
        scheduler.add(new_request("e", 1, 4))
    finish(scheduler)
    assert scheduler.num_queued_tokens == 0


def test_max_waiting_bounds_the_queue():
    scheduler = new_scheduler(max_num_seqs=1, max_waiting=2)
    added(scheduler, new_request("a", 4, 4))
    run_step(scheduler)
    added(scheduler, new_request("b", 4, 4), new_request("c", 4, 4))
    with pytest.raises(QueueFullError, match="2 requests wait already and max_waiting is 2"):
        scheduler.add(new_request("d", 4, 4))
    scheduler.add(new_request("e", 4, 4, is_resumed=True))  # another engine had accepted it
    finish(scheduler)


def test_a_prompt_is_admitted_only_if_running_requests_leave_blocks_for_all_of_it():
    # The pool holds 3 of 16 long prompts: without looking ahead each would be computed many times.
    scheduler = new_scheduler(num_blocks=200, max_num_seqs=16, budget=256)
    requests = added(scheduler, *(new_request(str(i), 400, 100) for i in range(16)))
    num_computed = sum(sum(step.values()) for step in finish(scheduler))
    needed = sum(request.num_tokens - 1 for request in requests)
    assert num_computed < 1.5 * needed


def test_prefix_that_becomes_cached_lets_a_request_run_that_waits_for_blocks():
    scheduler = new_scheduler(num_blocks=16, long_prefill_token_threshold=16)
    a, b = added(scheduler, new_request("same", 96, 32), new_request("same", 96, 2))
    run_until(scheduler, lambda: b.status is not RequestStatus.WAITING)
    # Both need 13 blocks in the end. Once they share ten of 16, there is room for the others.
    assert (a.num_computed_tokens, b.num_cached_tokens) == (80, 80)
    finish(scheduler)


def test_pinned_prefix_counts_for_a_waiting_request():
    scheduler = new_scheduler(num_blocks=8)
    (prefix,) = added(scheduler, new_request("prefix", 17, 1))
    run_step(scheduler)
    _, b = added(scheduler, new_request("a", 9, 7), new_request("b", 2, 6))
    run_step(scheduler)
    longer = prefix.inputs.prompt_token_ids[:16] + [1] * 25
    waits = new_request("waits", 41, 2)
    waits.token_ids = longer.copy()
    added(scheduler, waits)
    assert run_step(scheduler) == {"a": 1, "b": 1}  # it needs six blocks and five are left
    assert scheduler.pin("prefix", longer[:16], b"") == 16
    assert run_step(scheduler) == {"a": 1, "b": 1}  # it needs four and three are left
    scheduler.abort(b)
    assert run_step(scheduler) == {"a": 1, "waits": 25}


@pytest.mark.parametrize("short_of", ["seats", "seats for samples", "blocks"])
def test_queue_is_searched_again_only_when_something_changes_for_its_head(short_of):
    searched = []
    policy = LongestPrefixMatch(lambda request: searched.append(request) or 0)
    num_blocks = 4 if short_of == "blocks" else 32
    scheduler = new_scheduler(num_blocks, max_num_seqs=1 if short_of == "seats" else 2, policy=policy)
    added(scheduler, new_request("a", 9, 16))
    run_step(scheduler)
    searched.clear()
    added(scheduler, *(new_samples(name, 17, 2, 1 + (short_of == "seats for samples"))[0] for name in "bcd"))
    for _ in range(6):
        assert run_step(scheduler) == {"a": 1}
    assert len(searched) == (0 if short_of == "seats" else 3)
    added(scheduler, new_request("e", 17, 2))
    run_step(scheduler)
    assert len(searched) == (0 if short_of == "seats" else 7)
    finish(scheduler)


def test_pin_is_refused_if_a_live_request_would_not_fit_beside_it():
    scheduler = new_scheduler(num_blocks=4)
    (first,) = added(scheduler, new_request("prefix", 17, 1))
    run_step(scheduler)
    (second,) = added(scheduler, new_request("long", 16, 9))  # three blocks
    prompt = first.inputs.prompt_token_ids
    assert scheduler.pin("both", prompt[:16], b"") == 0
    assert scheduler.pin("salted", prompt[:8], b"salt") == 0
    assert scheduler.pin("one", prompt[:8], b"") == 8
    assert scheduler.block_manager.num_pinned == 1
    run_until(scheduler, lambda: second.status is RequestStatus.FINISHED)
    assert second.finish_reason == "length"


def test_cost_of_a_pin_does_not_depend_on_the_number_of_live_requests():
    scheduler, asked = new_scheduler(num_blocks=400, max_num_seqs=200), []
    added(scheduler, *(new_request(str(i), 9, 1 + i) for i in range(100)))
    run_step(scheduler)
    fits = scheduler.block_manager.fits
    scheduler.block_manager.fits = lambda num_tokens: asked.append(num_tokens) or fits(num_tokens)
    prompt = scheduler.running[0].inputs.prompt_token_ids
    assert scheduler.pin("one", prompt, b"") == 8
    assert asked == [9 + 100 - 1]  # the longest


# Samples and forks


def new_samples(name: str, prompt_len: int, max_tokens: int, n: int) -> list[Request]:
    inputs = new_request(name, prompt_len, max_tokens).inputs
    requests = [Request(replace(inputs, request_id=f"{name}{i}"), index=i) for i in range(n)]
    requests[0].siblings = requests[1:]
    return requests


def test_samples_share_the_prompt_and_all_but_one_copy_its_last_block():
    scheduler = new_scheduler(budget=10, max_num_seqs=3)
    samples = new_samples("s", 14, 3, 3)
    added(scheduler, samples[0], new_request("next", 2, 2))
    first = scheduled(scheduler)
    assert (computed(first), first.sampled_requests) == ({"s0": 10}, [])
    updated(scheduler, first)
    schedule = scheduled(scheduler)
    assert computed(schedule) == {"s0": 4}  # and no other: two seats are promised
    assert (schedule.sampled_requests, schedule.sampled) == (samples, [0, 0, 0])
    assert scheduler.running == samples
    assert scheduler.block_manager.pool.num_used == 2
    assert updated(scheduler, schedule) == samples
    schedule = scheduled(scheduler)
    assert computed(schedule) == {"s0": 1, "s1": 1, "s2": 1}
    partial = samples[2].blocks.tables[0][1]  # the last to write need not copy it
    assert [source for source, _ in schedule.copies] == [partial, partial]
    assert scheduler.block_manager.pool.num_used == 4
    updated(scheduler, schedule)
    finish(scheduler)
    assert [s.finish_reason for s in samples] == ["length"] * 3


@pytest.mark.parametrize("run", [[], [1], [1, 2, 3], [1, STOP, 2]], ids=str)
def test_a_row_may_get_no_token_or_several(run):
    scheduler = new_scheduler()
    (request,) = added(scheduler, new_request("a", 5, 9))
    schedule = scheduled(scheduler)
    got = scheduler.update(schedule, [None], runs={0: run})
    scheduler.check()
    taken = run[: run.index(STOP) + 1] if STOP in run else run
    assert got == [request][: len(run)]
    assert request.output_token_ids == taken
    assert scheduler.counters.num_generated_tokens == len(taken)
    if STOP in run:
        assert request.finish_reason == "stop"
        return
    schedule = scheduled(scheduler)
    # After none the last token of the prompt again; of several all that follow the prompt.
    assert computed(schedule) == {"a": max(1, len(run))}
    assert schedule.newcomers == [request], "the seat knows another last token"
    updated(scheduler, schedule)
    finish(scheduler)
    assert request.num_output_tokens == 9


def test_samples_run_when_there_are_seats_for_all():
    scheduler = new_scheduler(max_num_seqs=3)
    added(scheduler, new_request("a", 2, 2), new_samples("s", 4, 2, 3)[0], new_request("b", 2, 2))
    assert run_step(scheduler) == {"a": 2}
    assert run_step(scheduler) == {"a": 1}
    assert run_step(scheduler) == {"s0": 4}
    with pytest.raises(AssertionError, match="more samples than can run at once"):
        scheduler.add(new_samples("t", 4, 2, 4)[0])


def test_samples_are_aborted_with_the_one_that_computes_their_prompt():
    scheduler = new_scheduler(budget=10, max_num_seqs=3)
    samples = new_samples("s", 14, 3, 3)
    added(scheduler, samples[0])
    run_step(scheduler)
    scheduler.abort(samples[0])
    scheduler.check()
    assert [s.finish_reason for s in samples] == ["abort"] * 3
    finish(scheduler)


def forked(parent: Request, name: str) -> Request:
    child = Request(replace(parent.inputs, request_id=name))
    child.token_ids = parent.token_ids.copy()
    return child


def test_fork_goes_on_with_the_same_blocks():
    scheduler = new_scheduler()
    (parent,) = added(scheduler, new_request("p", 10, 9))
    run_step(scheduler)
    child = forked(parent, "child")
    scheduler.fork(parent, child)
    scheduler.check()
    assert child.status is RequestStatus.RUNNING
    assert child.blocks.tables == parent.blocks.tables
    schedule = scheduled(scheduler)
    assert computed(schedule) == {"p": 1, "child": 1}
    assert len(schedule.copies) == 1
    updated(scheduler, schedule)
    finish(scheduler)
    assert child.output_token_ids[0] == parent.output_token_ids[0]
    with pytest.raises(UsageError, match="'p' is finished and cannot be forked"):
        scheduler.fork(parent, forked(parent, "late"))


@pytest.mark.parametrize("reason", ["no seat", "in flight", "no block"])
def test_fork_waits_if_it_cannot_run(reason):
    scheduler = new_scheduler(
        num_blocks=2 if reason == "no block" else 16, max_num_seqs=1 if reason == "no seat" else 8
    )
    (parent,) = added(scheduler, new_request("p", 10, 3))
    run_step(scheduler)
    schedule = scheduled(scheduler) if reason == "in flight" else None
    child = forked(parent, "child")
    scheduler.fork(parent, child)
    assert child.status is RequestStatus.WAITING
    if schedule:
        updated(scheduler, schedule)
    finish(scheduler)
    assert child.finish_reason == "length"


# Ends


def test_stop_token_ends_a_request_and_frees_its_blocks():
    scheduler = new_scheduler()
    a, b = added(scheduler, new_request("a", 4, 9), new_request("b", 4, 9))
    assert scheduler.update(scheduler.schedule(), [STOP, 5]) == [a, b]
    assert (a.finish_reason, b.finish_reason) == ("stop", None)
    assert scheduler.running == [b]
    assert scheduler.block_manager.pool.num_used == 1
    scheduler.check()


def test_logits_that_are_not_finite_end_only_their_request():
    scheduler = new_scheduler()
    a, b = added(scheduler, new_request("a", 4, 9), new_request("b", 4, 9))
    scheduler.update(scheduler.schedule(), [None, 5])
    assert (a.finish_reason, a.output_token_ids) == ("error", [])
    assert "not finite" in a.stop_reason
    assert scheduler.running == [b]
    scheduler.check()


STAGES = ["waiting", "in-prompt", "decoding", "in-flight", "preempted", "swapped", "protected"]


@pytest.mark.parametrize("stage", STAGES)
def test_abort_at_any_stage_frees_blocks(stage):
    scheduler = new_scheduler(
        num_blocks=6,
        budget=20,
        num_host_blocks=8,
        max_preemptions=1 if stage == "protected" else 8,
        swap_pays=lambda _: stage == "swapped",
    )
    requests = added(scheduler, new_request("a", 15, 30), new_request("b", 15, 16), new_request("c", 2, 9))
    _, b, c = requests
    victim = c if stage == "waiting" else b
    if stage in ("preempted", "swapped", "protected"):
        run_until(scheduler, lambda: b.metrics.num_preemptions)
        assert (b.protected, b.blocks.host is not None) == (stage == "protected", stage == "swapped")
    for _ in range({"in-prompt": 1, "decoding": 4, "in-flight": 3}.get(stage, 0)):
        run_step(scheduler)
    if stage == "in-prompt":
        assert 0 < b.num_computed_tokens < 15
    schedule = scheduled(scheduler) if stage == "in-flight" else None
    scheduler.abort(victim)
    scheduler.check()
    assert victim.finish_reason == "abort"
    assert victim not in [*scheduler.running, *scheduler.waiting()]
    if schedule:
        assert b in schedule.requests
        assert b not in updated(scheduler, schedule)
    finish(scheduler)
    assert all(r.finish_reason == "length" for r in requests if r is not victim)


@pytest.mark.parametrize("name", POLICIES)
def test_requests_of_a_failed_step_keep_their_place_and_are_charged_once(name):
    policy = new_policy(name, lambda _: 0)
    scheduler = new_scheduler(max_num_seqs=2, policy=policy)
    requests = added(scheduler, *(new_request(n, 4, 3, tenant="t") for n in "abcd"))
    run_step(scheduler)
    scheduled(scheduler)
    scheduler.cancel()
    scheduler.check()
    assert names(scheduler.waiting()) == ["a", "b", "c", "d"]
    assert computed(scheduled(scheduler)) == {"a": 5, "b": 5}
    scheduler.cancel()
    finish(scheduler)
    assert [r.output_token_ids for r in requests] == [[hash_token(n, i) for i in (4, 5, 6)] for n in "abcd"]
    if isinstance(policy, Fair):
        assert policy.service["t"] == 4 * (4 * policy.INPUT_COST + 3 * policy.OUTPUT_COST)


def test_deadline_ends_running_and_waiting_requests():
    now = 0.0
    scheduler = new_scheduler(max_num_seqs=2, clock=lambda: now)
    a, b, c, d = added(
        scheduler,
        *(
            new_request(name, 4, 9, deadline=at)
            for name, at in zip("abcd", (5.0, 99.0, 3.0, 4.0), strict=True)
        ),
    )
    run_step(scheduler)
    now = 2.9
    assert scheduler.expire() == []
    now = 3.0
    assert scheduler.expire() == [c]
    now = 6.0
    assert scheduler.expire() == [d, a]
    scheduler.check()
    assert (a.finish_reason, a.stop_reason) == ("abort", "timeout_s has passed")
    assert scheduler.running == [b]
    assert scheduler.num_waiting == 0
    finish(scheduler)


def test_finished_requests_are_not_kept_until_their_deadline():
    scheduler = new_scheduler(clock=lambda: 0.0)
    added(scheduler, *(new_request("early", 1, 1, deadline=1.0) for _ in range(2)))
    for _ in range(100):
        added(scheduler, *(new_request("a", 1, 1, deadline=9.0) for _ in range(8)))
        run_until(scheduler, lambda: scheduler.num_waiting == 0)
        assert len(scheduler._deadlines) < 100
    (last,) = added(scheduler, new_request("last", 1, 9, deadline=0.0))
    assert scheduler.expire() == [last]


def test_scheduling_needs_no_torch():
    absent = dict.fromkeys(("torch", "numpy", "triton", "transformers"))
    code = f"import sys; sys.modules |= {absent!r}; import paged.scheduler.scheduler"
    subprocess.run([sys.executable, "-c", code], check=True)


# Times and totals


def test_steps_and_first_runs_are_timed_by_the_clock():
    now = 0.0
    scheduler = new_scheduler(num_blocks=8, max_num_seqs=1, clock=lambda: now)
    first = Request(new_request("first", 12, 2).inputs, metrics=RequestMetrics(0.0))
    second = Request(new_request("second", 4, 1).inputs, metrics=RequestMetrics(0.5))
    added(scheduler, first, second)
    for seconds in (0.25, 0.5, 4.0):
        schedule, now = scheduled(scheduler), now + seconds
        updated(scheduler, schedule)
        now += 10.0  # between steps
    assert (first.metrics.first_scheduled_time, second.metrics.first_scheduled_time) == (0.0, 20.75)
    assert second.metrics.finished_time == 24.75
    stats = EngineStats.of(scheduler)
    held = dict(zip(SECONDS_OF_STEP, stats.step_seconds.counts, strict=False))
    assert ({bound: count for bound, count in held.items() if count}, stats.step_seconds.total) == (
        {0.25: 1, 0.5: 1, 5.0: 1},
        4.75,
    )
    assert (sum(stats.step_tokens.counts), stats.step_tokens.total) == (3, 12 + 1 + 4)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (16, 3)


def test_a_preempted_request_keeps_its_first_time_and_a_fork_starts_on_arrival():
    now = 0.0
    scheduler = new_scheduler(num_blocks=4, clock=lambda: now)
    old, young = added(scheduler, new_request("old", 8, 20), new_request("young", 8, 12))
    run_until(scheduler, lambda: young.metrics.num_preemptions > 0)
    now = 5.0
    finish(scheduler)
    assert (old.metrics.first_scheduled_time, young.metrics.first_scheduled_time) == (0.0, 0.0)
    assert scheduler.counters.num_prompt_tokens == 16
    parent = added(scheduler, new_request("parent", 9, 4))[0]
    run_step(scheduler)
    child = forked(parent, "child")
    child.metrics = RequestMetrics(7.0)
    scheduler.fork(parent, child)
    assert (parent.metrics.first_scheduled_time, child.metrics.first_scheduled_time) == (5.0, 7.0)
