"""EnginePicture: who has which blocks, exactly, and bounded however many there are."""

import random
from array import array
from collections import Counter

from paged.scheduler import picture as pictures
from paged.scheduler.picture import EnginePicture
from tests.support.scheduler_cases import BLOCK_SIZE, added, new_request, new_scheduler, scheduled, updated


def blocks_of(picture: EnginePicture) -> list[list[int]]:
    return [array("i", request.blocks).tolist() for request in picture.requests]


def test_a_picture_has_what_the_step_computes_and_who_has_each_block():
    for seed in range(30):
        rng = random.Random(seed)
        scheduler = new_scheduler(num_blocks=rng.randint(12, 40), num_host_blocks=rng.choice([0, 8]))
        for i in range(rng.randint(1, 12)):
            name = f"{rng.randrange(3)}"  # those of the same name have the same prompt
            request = new_request(name, rng.randint(1, 5 * BLOCK_SIZE), rng.randint(1, 20), tenant=f"t{i}")
            added(scheduler, request)
        for _ in range(40):
            if not scheduler.has_unfinished():
                break
            schedule = scheduled(scheduler)
            picture = EnginePicture.of(scheduler, schedule)
            computed = [
                (r.inputs.tenant, n) for r, n in zip(schedule.requests, schedule.num_new_tokens, strict=True)
            ]
            assert sorted(computed) == sorted(
                (each.tenant, each.num_new_tokens) for each in picture.requests if each.num_new_tokens
            )
            assert picture.step_tokens == schedule.num_tokens
            held = Counter(block for blocks in blocks_of(picture) for block in blocks)
            assert held == Counter(scheduler.block_manager.pool.references())
            states = Counter(each.state for each in picture.requests)
            assert (states["running"], states["waiting"]) == (picture.num_running, picture.num_waiting)
            updated(scheduler, schedule)


def test_a_picture_of_many_requests_is_bounded(monkeypatch):
    monkeypatch.setattr(pictures, "MOST_REQUESTS", 10)
    monkeypatch.setattr(pictures, "MOST_BLOCKS", 30)
    monkeypatch.setattr(pictures, "LEAST_BLOCKS", 2)
    scheduler = new_scheduler(num_blocks=400, max_num_seqs=20, budget=2000)
    added(scheduler, *(new_request(f"r{i}", 5 * BLOCK_SIZE, 4) for i in range(40)))
    picture = EnginePicture.of(scheduler, scheduler.schedule())
    assert (picture.num_running, picture.num_waiting) == (20, 20)
    assert Counter(each.state for each in picture.requests) == {"running": 10, "waiting": 10}
    assert {len(blocks) for blocks in blocks_of(picture)[:10]} == {3}
    assert {each.num_blocks for each in picture.requests[:10]} == {5}
