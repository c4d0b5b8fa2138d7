"""Images in the scheduler: a tower works on them beside decodes. `tests.simulation` has many more cases."""

from __future__ import annotations

from paged.requests.request import PromptImage
from paged.scheduler.towers import TowerCosts, TowerQueue
from tests.support.scheduler_cases import added, new_request, new_scheduler, run_step, scheduled, updated

COSTS = TowerCosts(num_layers=3, patch_size=1, square=1, linear=0.5, attention=0.02, embedding_bytes=1)


def image(start: int, length: int, name: object, height: int = 4) -> PromptImage:
    return PromptImage(start, start + length, str(name).encode(), height, length, b"")


def test_decodes_wait_for_no_whole_image():
    scheduler = new_scheduler(budget=16)
    scheduler.towers = TowerQueue(COSTS, 0)
    decoding, seeing, reading = (
        new_request("decoding", 2, 40),
        new_request("seeing", 12, 5, images=(image(4, 6, "x", height=40),)),
        new_request("reading", 20, 1),
    )
    added(scheduler, decoding)
    run_step(scheduler)
    added(scheduler, seeing, reading)
    # Text in front of the image, and a layer of it, which costs more than a step.
    assert run_step(scheduler) == {"decoding": 1, "seeing": 4}
    steps = [scheduled(scheduler)]
    updated(scheduler, steps[0])
    assert [each.num_layers for each in steps[0].towers.work] == [1]
    assert [request.request_id for request in steps[0].requests] == ["decoding"]
    assert run_step(scheduler) == {"decoding": 1}
    assert run_step(scheduler)["seeing"] == 8


def test_progress_is_forgotten_with_a_failed_step():
    scheduler = new_scheduler(budget=16)
    scheduler.towers = TowerQueue(COSTS, 0)
    added(scheduler, new_request("seeing", 12, 5, images=(image(0, 6, "x", height=40),)))
    assert scheduled(scheduler).towers.work[0].first_layer == 0
    scheduler.cancel()
    assert scheduled(scheduler).towers.work[0].first_layer == 0
