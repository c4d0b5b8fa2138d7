"""Snapshots: which states are kept behind which blocks, and what is replaced first."""

import random

import pytest

from paged.blocks.manager import BlockManager
from paged.blocks.snapshots import NEVER, Snapshots
from paged.requests.request import Request, RequestInputs
from paged.scheduler.schedule import Schedule
from paged.scheduler.scheduler import Scheduler

SIZE = 4


def new_scheduler(num_kept=8, num_seats=4, interval=25, num_blocks=64, budget=32, **options):
    """Return a scheduler whose requests have states, and its snapshots."""
    snapshots = Snapshots(num_kept, num_seats, SIZE, interval * SIZE)
    manager = BlockManager(num_blocks, SIZE, num_host_states=0, snapshots=snapshots)
    options = {"max_num_seqs": num_seats, "max_num_batched_tokens": budget, "watermark": 0.0, **options}
    return Scheduler(manager, **options), snapshots


def new_request(prompt, num_outputs=1, **inputs):
    inputs |= {"prompt_token_ids": prompt, "max_total_tokens": len(prompt) + num_outputs}
    return Request(RequestInputs(**inputs))


def steps(scheduler, *requests, most=1000):
    """Run requests. Return for each step the tokens that each of them computes, and the moves of states."""
    for request in requests:
        scheduler.add(request)
    found = []
    while scheduler.has_unfinished() and len(found) < most:
        schedule = scheduler.schedule()
        computed = dict(zip(map(requests.index, schedule.requests), schedule.num_new_tokens, strict=True))
        found.append((computed, schedule.state_moves))
        scheduler.update(schedule, [7] * len(schedule.sampled_requests))
        scheduler.check()
    return found


def chunks(found):
    return [computed for computed, _ in found]


def tokens(n, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(100) for _ in range(n)]


def test_prompts_leave_snapshots_and_begin_with_them():
    """At the last end of a block before the last token; where prompts part; from then on others hit these."""
    scheduler, snapshots = new_scheduler()
    shared = tokens(18)
    assert chunks(steps(scheduler, new_request(shared + tokens(4, 1)))) == [{0: 20}, {0: 2}]
    again = new_request(shared + tokens(4, 1))
    ((computed, moves),) = steps(scheduler, again)
    assert (computed, again.num_cached_tokens, len(moves)) == ({0: 2}, 20, 1)
    second = new_request(shared + tokens(7, 2))
    assert chunks(steps(scheduler, second)) == [{0: 16}, {0: 8}, {0: 1}]
    assert second.num_cached_tokens == 0
    assert scheduler.counters.num_cut_tokens == 16
    third = new_request(shared + tokens(5, 3))
    assert chunks(steps(scheduler, third)) == [{0: 4}, {0: 3}]
    assert third.num_cached_tokens == 16
    assert scheduler.counters.num_cut_tokens == 16
    assert len(snapshots) == snapshots.num_made == 4


def test_long_prompts_leave_a_snapshot_at_each_interval():
    scheduler, snapshots = new_scheduler(interval=3)
    first = new_request(tokens(50))
    assert chunks(steps(scheduler, first)) == [{0: 12}] * 4 + [{0: 2}]
    assert len(snapshots) == 4
    other = new_request(tokens(50)[:30] + tokens(10, 1))
    found = steps(scheduler, other)
    assert other.num_cached_tokens == 24
    assert chunks(found) == [{0: 4}, {0: 8}, {0: 4}]  # up to where they part, to the interval, to the end


@pytest.mark.parametrize("num_outputs", [6, 8, 9, 10], ids=str)
def test_what_ends_leaves_its_state(num_outputs):
    """The next turn begins behind the last full block of the answer, also where a request was preempted."""
    scheduler, _ = new_scheduler()
    prompt = tokens(10)
    first = new_request(prompt, num_outputs)
    steps(scheduler, first)
    num_computed = 10 + num_outputs - 1
    turn = new_request(first.token_ids + tokens(3, 1))
    steps(scheduler, turn)
    assert turn.num_cached_tokens == num_computed // SIZE * SIZE
    scheduler, _ = new_scheduler()
    request = new_request(prompt, 20, stop_ids=frozenset([101]))  # which may end it at any token
    steps(scheduler, request, most=num_outputs)
    assert request.num_computed_tokens == 10 + num_outputs - 2
    scheduler.preemption.preempt(request, Schedule())
    assert request.num_computed_tokens == 0
    (start,) = scheduler.schedule().num_computed_tokens
    assert start == (10 + num_outputs - 2) // SIZE * SIZE


def test_a_prompt_waits_for_a_snapshot_that_is_due():
    """Of prompts that come together, the second leaves a snapshot where they part, and the others hit it."""
    scheduler, _ = new_scheduler(budget=200, num_blocks=200)
    requests = [new_request(tokens(42) + tokens(5, 1 + i)) for i in range(4)]
    found = steps(scheduler, *requests)
    assert chunks(found)[0] == {0: 44, 1: 40}
    assert [r.num_cached_tokens for r in requests] == [0, 0, 40, 40]


def test_the_least_recently_used_is_replaced_first():
    scheduler, snapshots = new_scheduler(num_kept=2)
    prompts = [tokens(6, seed) for seed in range(3)]
    for prompt in (prompts[0], prompts[1], prompts[0], prompts[2]):
        steps(scheduler, new_request(prompt))
    manager = scheduler.block_manager
    assert [len(manager.find(prompt)[0]) for prompt in prompts] == [1, 0, 1]
    assert scheduler.pin("first", prompts[0], b"")
    for seed in range(3, 7):
        steps(scheduler, new_request(tokens(6, seed)))
    assert [len(manager.find(prompt)[0]) for prompt in prompts] == [1, 0, 0]
    manager.unpin("first")
    for seed in range(7, 9):
        steps(scheduler, new_request(tokens(6, seed)))
    assert not manager.find(prompts[0])[0]
    manager.reset_prefix_cache()
    assert not len(snapshots)
    scheduler.check()


def test_a_snapshot_goes_with_its_block():
    """The blocks of an unused prefix are needed by another request: its snapshot is free again."""
    scheduler, snapshots = new_scheduler(num_blocks=6)
    steps(scheduler, new_request(tokens(10)))
    assert len(snapshots) == 1
    steps(scheduler, new_request(tokens(22, 1)))
    assert len(snapshots) == 1
    assert not scheduler.block_manager.find(tokens(10))[0]


def test_a_slot_is_not_reused_before_the_step_that_fills_it():
    """A snapshot whose block is gone in the step that leaves it behind keeps its slot until the next one."""
    snapshots = Snapshots(1, 1, SIZE, SIZE)
    slot = snapshots.new(5, after_step=True)
    assert snapshots.longest([5]) == (0, 1)
    assert snapshots.new(6) is None  # it may not be replaced yet
    snapshots.drop(5)
    assert snapshots.take() != slot
    assert snapshots.take() is None
    snapshots.launch()
    assert snapshots.take() == slot
    assert snapshots.place_after(BlockManager(1, SIZE).open([1]), 0) == NEVER
