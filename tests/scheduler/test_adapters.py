"""Slots of adapters: every request ends, none waits for ever, and a step has what its requests need."""

import random

import pytest

from paged.requests.request import NO_MASK, SLOW_READER, RequestStatus
from paged.scheduler.adapters import AdapterSlots
from paged.scheduler.policies import Priority
from tests.support.scheduler_cases import added, hash_token, new_request, new_scheduler, scheduled, updated


def run_world(seed):
    """Run random requests with adapters to their end. Return how many steps had adapters."""
    generator = random.Random(seed)
    num_slots, num_seqs = generator.randint(1, 3), generator.randint(1, 6)
    scheduler = new_scheduler(
        num_blocks=generator.choice([12, 40]),
        max_num_seqs=num_seqs,
        budget=generator.choice([9, 64]),
        num_host_blocks=generator.choice([0, 12]),
        policy=None,
        **({"swap_pays": lambda _: True} if generator.random() < 0.3 else {}),
    )
    scheduler.have_adapters(num_slots)
    contents = {}  # by slot: the adapter that the device has there
    live, ended, num_made, num_steps = [], [], 0, 0
    while live or num_made < 60:
        if num_made < 60 and generator.random() < 0.5:
            adapter = generator.choice([0, *range(1, 7)])
            own = new_request(
                f"r{num_made}",
                generator.randint(1, 20),
                generator.randint(1, 12),
                adapter=adapter,
                namespace=bytes([adapter]),
            )
            live += added(scheduler, own)
            num_made += 1
        chance = generator.random()
        if live and chance < 0.03:
            scheduler.abort(generator.choice(live))
        elif live and chance < 0.05:
            parent = generator.choice(live)
            if parent.status is RequestStatus.RUNNING:
                child = new_request(
                    f"{parent.request_id}",
                    parent.num_prompt_tokens,
                    30,
                    adapter=parent.inputs.adapter,
                    namespace=parent.inputs.namespace,
                )
                child.token_ids = parent.token_ids.copy()
                scheduler.fork(parent, child)
                live.append(child)
        elif chance < 0.07:
            scheduler.cancel()
            contents.clear()  # what a failed step has copied is unknown
        schedule = scheduled(scheduler)
        if schedule.requests:
            assert schedule.adapters is not None
            slots, loads = schedule.adapters
            for adapter, slot in loads:
                contents[slot] = adapter
            needed = [request.inputs.adapter for request in schedule.requests]
            assert [contents[slot] if slot >= 0 else 0 for slot in slots or [-1] * len(needed)] == needed
            assert len({*needed} - {0}) <= num_slots
            num_steps += any(needed)
        if not schedule.is_empty:
            updated(scheduler, schedule)
        ended += [request for request in live if request.status is RequestStatus.FINISHED]
        live = [request for request in live if request.status is not RequestStatus.FINISHED]
    for request in ended:
        if request.finish_reason == "length":
            assert request.token_ids == [hash_token(request.request_id, i) for i in range(request.num_tokens)]
    return num_steps


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_every_request_ends_with_its_adapter(first):
    assert sum(run_world(seed) for seed in range(first, first + 20)) > 500


def test_the_longest_unused_adapter_loses_its_slot():
    scheduler = new_scheduler(num_blocks=64)
    scheduler.have_adapters(2)

    def loads(adapter):
        added(scheduler, new_request(f"{adapter}", 3, 2, adapter=adapter))
        found = []
        while scheduler.has_unfinished():
            schedule = scheduled(scheduler)
            found += schedule.adapters[1]
            updated(scheduler, schedule)
        return found

    assert [loads(adapter) for adapter in (1, 2, 1, 3, 1, 2)] == [
        [(1, 0)],
        [(2, 1)],
        [],
        [(3, 1)],
        [],
        [(2, 1)],
    ]


def test_a_free_slot_is_kept_for_the_first_that_waits():
    slots = AdapterSlots(2, max_passes=4)

    def ranked(adapter, *rank):
        request = new_request(f"{adapter}", 3, 4, adapter=adapter)
        request.rank = rank
        return request

    first = ranked(1, 0, 0)
    slots.join(first)
    slots.join(ranked(2, 0, 1))
    waiting = ranked(3, 1, 2)
    slots.set_aside(waiting)
    assert not slots.admits(waiting)
    slots.leave(first)
    assert [slots.admits(own) for own in (waiting, ranked(4, 1, 3), ranked(5, 0, 4))] == [True, False, True]
    # Of an adapter that has a slot, those of lower priority do not pass.
    assert [slots.admits(ranked(2, priority, 5)) for priority in (0, 1, 2)] == [True, True, False]


def test_others_pass_but_not_for_ever():
    """Users of one adapter come faster than they end; after max_num_seqs admissions the other one's turn has
    come.
    """
    scheduler = new_scheduler(num_blocks=64, max_num_seqs=4)
    scheduler.have_adapters(1)
    added(scheduler, *(new_request(f"a{i}", 3, 6, adapter=1) for i in range(2)))
    updated(scheduler, scheduled(scheduler))
    (other,) = added(scheduler, new_request("b", 3, 6, adapter=2))
    num_begun = 0
    while other.num_cached_tokens is None:
        num_begun += 1
        assert num_begun < 40, "the other adapter never runs"
        added(scheduler, new_request(f"c{num_begun}", 3, 6, adapter=1), new_request(f"p{num_begun}", 3, 2))
        updated(scheduler, scheduled(scheduler))
    assert num_begun > 3, "others did pass"


def test_higher_priority_gets_a_slot_of_lower_ones():
    """Requests of lower priority hold the slots, and more of them come in each step."""
    scheduler = new_scheduler(num_blocks=64, max_num_seqs=4, policy=Priority())
    scheduler.have_adapters(2)
    low = [new_request(f"a{i}", 3, 60, adapter=1 + i % 2, priority=2) for i in range(3)]
    added(scheduler, *low)
    updated(scheduler, scheduled(scheduler))
    (high,) = added(scheduler, new_request("b", 3, 6, adapter=3, priority=1))
    added(scheduler, *(new_request(f"c{i}", 3, 6, adapter=1, priority=2) for i in range(4)))
    updated(scheduler, scheduled(scheduler))
    assert high.status is RequestStatus.RUNNING
    # The adapter of one user, which is the weaker one, gave its slot.
    assert [r.status is RequestStatus.RUNNING for r in low] == [True, False, True]
    # None is preempted for a request of the same priority, and none of lower priority passes it.
    (equal,) = added(scheduler, new_request("d", 3, 6, adapter=4, priority=2))
    (weak,) = added(scheduler, new_request("e", 3, 6, adapter=3, priority=9))
    updated(scheduler, scheduled(scheduler))
    assert [low[0].status, equal.status, weak.status] == [RequestStatus.RUNNING] + [RequestStatus.WAITING] * 2


def test_slow_readers_give_their_slots():
    """A request that is held computes nothing, and does not keep a slot from others for ever."""
    now = [0.0]
    scheduler = new_scheduler(num_blocks=64, held_for_s=5.0, clock=lambda: now[0])
    scheduler.have_adapters(1)
    (slow,) = added(scheduler, new_request("slow", 3, 60, adapter=1))
    updated(scheduler, scheduled(scheduler))
    scheduler.hold(slow, SLOW_READER)
    (other,) = added(scheduler, new_request("other", 3, 6, adapter=2))
    assert not scheduled(scheduler).requests
    now[0] = 6.0
    assert scheduled(scheduler).requests == [other]
    assert slow.status is RequestStatus.WAITING


def with_waiting_parts(num_tokens):
    """Return a scheduler whose one slot is in use for a while, and three parts of a call that wait for it."""
    scheduler = new_scheduler(num_blocks=64)
    scheduler.have_adapters(1)
    added(scheduler, new_request("a", 3, num_tokens, adapter=1))
    updated(scheduler, scheduled(scheduler))
    parts = added(scheduler, *(new_request(f"p{i}", 3, 2, adapter=2, part_of="call") for i in range(3)))
    return scheduler, parts


def begun(scheduler, parts):
    """Run all requests to their end. Return the parts in the order in which they began."""
    found = []
    while scheduler.has_unfinished():
        schedule = scheduled(scheduler)
        scheduler.check()
        found += [r for r in schedule.newcomers if r in parts]
        updated(scheduler, schedule)
    return found


def test_a_request_that_waits_for_a_slot_keeps_its_turn_in_its_call():
    """Parts of a call begin in order, whether or not their adapter has a slot at first."""
    scheduler, parts = with_waiting_parts(num_tokens=4)
    assert begun(scheduler, parts) == parts


def test_a_part_that_is_held_while_it_waits_for_a_slot_gives_its_turn_to_the_next():
    """It waits behind that one when it is released, so that no two parts of a call are in the queue."""
    scheduler, parts = with_waiting_parts(num_tokens=6)
    updated(scheduler, scheduled(scheduler))
    scheduler.hold(parts[0], NO_MASK)
    updated(scheduler, scheduled(scheduler))
    scheduler.release(parts[0], NO_MASK)
    assert begun(scheduler, parts) == [parts[1], parts[2], parts[0]]
