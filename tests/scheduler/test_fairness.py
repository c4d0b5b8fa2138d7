"""Seats and blocks under "fair": the first worlds of `python -m tests.fairness`, and the attacks by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from paged.requests.request import RequestStatus
from paged.scheduler.policies import Fair
from paged.scheduler.policy import Holdings
from tests.fairness import run_world, steps_alone
from tests.support.scheduler_cases import added, finish, new_request, new_scheduler, run_step


def test_shares_hold_for_2_to_500_tenants():
    worlds = [run_world(seed, num_steps=15) for seed in (2, 12, 20)]
    assert max(world.longest_wait for world in worlds) > 0
    assert sum(world.num_preempted for world in worlds) > 20


def test_a_tenant_alone_loses_nothing():
    for seed in range(2):
        assert steps_alone("fair", seed) == steps_alone("fcfs", seed)


@pytest.mark.parametrize("num_blocks", [2000, 300], ids=["for want of seats", "for want of blocks"])
def test_a_short_request_does_not_wait_for_the_long_ones_of_another_tenant(num_blocks):
    scheduler = new_scheduler(num_blocks, max_num_seqs=64, budget=256, policy=Fair(), watermark=0.0)
    long = added(scheduler, *(new_request(f"a{i}", 16, 100, tenant="a") for i in range(100)))
    while scheduler._running.num_seats and scheduler.block_manager.pool.num_available > 4:
        run_step(scheduler)
    num_before = len(scheduler.running)
    (short,) = added(scheduler, new_request("b", 16, 4, tenant="b"))
    for _ in range(4):
        run_step(scheduler)
    assert short.status is RequestStatus.FINISHED
    assert len(scheduler.running) >= num_before - 2, "more were preempted than the short one took"
    assert not any(request.protected for request in long)
    many = added(scheduler, *(new_request(f"b{i}", 16, 60, tenant="b") for i in range(70)))
    for _ in range(40):
        run_step(scheduler)
    seats = Counter(request.inputs.tenant for request in scheduler.running)
    if num_blocks == 2000:
        assert seats == {"a": 32, "b": 32}
    else:
        held = scheduler._running.holdings().blocks
        assert all(abs(held[tenant] - 150) <= 2 * 15 for tenant in "ab"), held
    finish(scheduler)
    assert all(request.finish_reason == "length" for request in (*long, *many))


def test_more_samples_than_a_share_run_one_by_one_while_others_wait():
    scheduler = new_scheduler(2000, max_num_seqs=8, budget=256, policy=Fair())
    added(scheduler, *(new_request(f"a{i}", 4, 50, tenant="a") for i in range(9)))
    run_step(scheduler)
    samples = [new_request("b", 4, 9, tenant="b") for _ in range(8)]
    samples[0].siblings = samples[1:]
    scheduler.add(samples[0])
    for _ in range(5):
        run_step(scheduler)
    assert Counter(request.inputs.tenant for request in scheduler.running) == {"a": 4, "b": 4}
    finish(scheduler)
    assert {request.finish_reason for request in samples} == {"length"}


def test_a_tenant_with_a_protected_request_alone_has_a_share():
    """Such a request waits beside the policy's queues, which may be empty."""
    policy = Fair({"b": 2.5})
    policy.divide(lambda: Holdings([]), lambda _: 1, num_seats=8, num_blocks=99, lead=0.0)
    request = new_request("b", 4, 9, tenant="b")
    request.siblings = [new_request("b", 4, 9, tenant="b") for _ in range(8)]
    assert policy.exceeds_share(request, Holdings([]))
    request.siblings = request.siblings[1:]
    assert not policy.exceeds_share(request, Holdings([]))


def test_a_request_that_gives_way_to_others_again_and_again_is_not_protected():
    scheduler = new_scheduler(99, max_num_seqs=2, budget=256, policy=Fair(), max_preemptions=2)
    _, young = added(scheduler, *(new_request(f"a{i}", 4, 90, tenant="a") for i in range(2)))
    for i in range(4):
        while young.status is not RequestStatus.RUNNING:
            run_step(scheduler)
        added(scheduler, new_request(f"b{i}", 4, 2, tenant="b"))
        assert f"b{i}" in run_step(scheduler)
    assert not young.protected
    finish(scheduler)


def test_a_tenant_above_its_share_of_blocks_gives_them_to_one_that_grows():
    scheduler = new_scheduler(12, budget=256, policy=Fair(), watermark=0.0)
    many = added(scheduler, *(new_request(f"a{i}", 8, 40, tenant="a") for i in range(3)))
    run_step(scheduler)
    (youngest,) = added(scheduler, new_request("b", 8, 40, tenant="b"))
    while youngest.status is not RequestStatus.FINISHED:
        run_step(scheduler)
    assert youngest.metrics.num_preemptions == 0
    assert many[-1].metrics.num_preemptions > 0
    finish(scheduler)
