"""Images in the scheduler: a tower works on them beside decodes, before their tokens are computed."""

from __future__ import annotations

import random
from collections import OrderedDict, deque

import pytest

from paged.requests.request import PromptImage
from paged.scheduler.schedule import Schedule
from paged.scheduler.towers import TowerCosts, TowerQueue
from tests.support.scheduler_cases import added, new_request, new_scheduler, run_step, scheduled, updated

COSTS = TowerCosts(num_layers=3, patch_size=1, square=1, linear=0.5, attention=0.02, embedding_bytes=1)


def image(start: int, length: int, name: object, height: int = 4) -> PromptImage:
    return PromptImage(start, start + length, str(name).encode(), height, length, b"")


class Tower:
    """What a runner has of images: those on their way, those held, and those kept besides."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.layers: dict[bytes, int] = {}
        self.held: dict[bytes, int] = {}
        self.kept = OrderedDict[bytes, int]()
        self.num_parts = 0

    def run(self, schedule: Schedule, budget: int) -> None:
        """Do what a step says, which must go on where the last one ended, and not beyond the budget."""
        if schedule.towers is None:
            return
        for sha256, is_needed in schedule.towers.moves:
            if is_needed:
                self.held[sha256] = self.kept.pop(sha256)
                continue
            self.layers.pop(sha256, None)
            if (num_bytes := self.held.pop(sha256, None)) is not None:
                self.kept[sha256] = num_bytes
            while sum(self.kept.values()) > self.most_bytes:
                self.kept.popitem(last=False)
        cost = sum(each.num_layers * COSTS.of_layer(each.image) for each in schedule.towers.work)
        is_least = sum(each.num_layers for each in schedule.towers.work) == 1
        assert is_least or schedule.num_tokens + cost <= budget + 1
        for image, first_layer, num_layers, is_last in schedule.towers.work:
            assert self.layers.get(image.sha256, 0) == first_layer
            self.layers[image.sha256] = first_layer + num_layers
            assert is_last is (self.layers[image.sha256] == COSTS.num_layers)
            self.num_parts += not is_last
            if is_last:
                del self.layers[image.sha256]
                self.held[image.sha256] = COSTS.num_bytes(image)

    def check(self, schedule: Schedule) -> int:
        """Check that the images of a step's tokens have been seen. Return how many tokens are theirs."""
        num_tokens = 0
        rows = zip(schedule.requests, schedule.num_computed_tokens, schedule.num_new_tokens, strict=True)
        for request, start, count in rows:
            for each in request.inputs.images:
                if (both := min(each.end, start + count) - max(each.start, start)) > 0:
                    assert each.sha256 in self.held, "an image is not seen yet"
                    num_tokens += both
        return num_tokens


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_images_are_seen_before_their_tokens(num_in_flight):
    """With prompts that share images and prefixes, preempted, and of any embeddings that are kept."""
    num_parts = num_tokens = num_preempted = 0
    for seed in range(60):
        rng = random.Random(seed)
        budget = rng.choice((8, 16, 64))
        tower = Tower(most_bytes=rng.choice((0, 30, 1000)))
        num_blocks = rng.choice((8, 12, 30))
        scheduler = new_scheduler(num_blocks, budget=budget, num_in_flight=num_in_flight)
        scheduler.towers = TowerQueue(COSTS, tower.most_bytes)
        requests = []
        for i in range(rng.randint(1, 6)):
            places = [(at, rng.randint(1, 6)) for at in (0, 9, 20) if rng.random() < 0.6]
            images = tuple(image(at, length, (rng.randrange(4), length)) for at, length in places)
            name = rng.choice(("same", str(i)))
            requests += [new_request(name, 30, rng.randint(1, 30), images=images)]
        steps = deque[Schedule]()
        for _ in range(3000):
            if requests and rng.random() < 0.4:
                added(scheduler, requests.pop())
            while len(steps) < num_in_flight and not (schedule := scheduled(scheduler)).is_empty:
                tower.run(schedule, budget)
                num_tokens += tower.check(schedule)
                num_preempted += schedule.num_preempted
                steps.append(schedule)
            if steps:
                updated(scheduler, steps.popleft())
            if not requests and not steps and not scheduler.has_unfinished():
                break
        else:
            raise AssertionError("it never ended")
        num_parts += tower.num_parts
    assert num_parts > 50
    assert num_tokens > 500
    assert num_preempted > 10


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
