"""A made-up vision tower, for the simulation: an embedding is a hash of its image and its number."""

from __future__ import annotations

import hashlib
import random
import zlib
from array import array
from collections import OrderedDict
from types import SimpleNamespace
from typing import cast

from paged.architectures.towers import VisionSpec
from paged.requests.request import PromptImage, Request
from paged.runner.plan import ComputedPart
from paged.scheduler.towers import TowerCosts, TowerQueue, TowerSteps

MARKER = 9  # the token in place of each embedding
BETWEEN = 8  # the token behind each row of embeddings but the last, as in Pixtral's images
MOST_LENGTH = 9


def vision_of(*, sees_itself: bool) -> VisionSpec:
    """Return what a planner has to know of a model that sees images."""
    return cast(
        VisionSpec, SimpleNamespace(token_id=MARKER, sections=None, square=1, sees_itself=sees_itself)
    )


def tokens_of(length: int) -> list[int]:
    """Return the tokens of an image."""
    return [BETWEEN if i % 4 == 3 and i < length - 1 else MARKER for i in range(length)]


def new_image(rng: random.Random, start: int, length: int) -> PromptImage:
    """Return one of a few images of this length."""
    height = rng.choice((1, 1, 4))
    sha256 = hashlib.sha256(repr((rng.randrange(3), height, length)).encode()).digest()
    return PromptImage(start, start + length, sha256, height, length, b"")


def with_images(rng: random.Random, prompt: list[int], longest: int) -> tuple[list[int], list[PromptImage]]:
    """Put images into a prompt in place of tokens of text. longest: the most tokens of an image."""
    images = list[PromptImage]()
    prompt = prompt.copy()
    at = rng.randint(0, 4)
    while (most := min(longest, MOST_LENGTH, len(prompt) - at)) > 0 and len(images) < 3:
        image = new_image(rng, at, rng.randint(1, most))
        if image.start + 1 == image.end == len(prompt):  # a decode, for which `TowerQueue` does nothing
            break
        prompt[at : image.end] = tokens_of(image.end - at)
        images.append(image)
        at = image.end + rng.choice((0, 1, 5))
    return prompt, images


def embedding(sha256: bytes, number: int) -> int:
    """Return one of an image's embeddings."""
    return zlib.crc32(number.to_bytes(2, "little"), zlib.crc32(sha256))


def seen_tokens(request: Request) -> list[int]:
    """Return a request's tokens, with embeddings in place of their markers."""
    if not request.inputs.images:
        return request.token_ids
    tokens = request.token_ids.copy()
    for image in request.inputs.images:
        places = [at for at in range(image.start, image.end) if tokens[at] == MARKER]
        for number, at in enumerate(places):
            tokens[at] = embedding(image.sha256, number)
    return tokens


def last_keys_of(request: Request, start: int, count: int) -> array[int]:
    """Return the last position that each of a request's tokens sees, where images see themselves."""
    ends = [(image.start, image.end) for image in request.inputs.images]
    return array(
        "i", [next((e - 1 for s, e in ends if s <= at < e), at) for at in range(start, start + count)]
    )


class SimulatedTower:
    """What a runner has of images: those on their way, those held, and those that are kept besides.

    has_lost: whether a failed step has lost some, which are computed again by the step that needs them.
    """

    def __init__(self, costs: TowerCosts, most_bytes: int) -> None:
        self.costs = costs
        self.most_bytes = most_bytes
        self.layers = dict[bytes, int]()
        self.held = dict[bytes, int]()  # bytes
        self.kept = OrderedDict[bytes, int]()
        self.has_lost = False

    def lose(self) -> None:
        """Lose everything."""
        for each in (self.layers, self.held, self.kept):
            each.clear()
        self.has_lost = True

    def work(self, steps: TowerSteps | None) -> float:
        """Do what a step says, which must go on where the last one ended. Return what it costs in tokens."""
        if steps is None:
            return 0.0
        self.move(steps.moves)
        for image, first_layer, num_layers, is_last in steps.work:
            if image.sha256 in self.held or image.sha256 in self.kept:
                assert self.has_lost, "a tower computes what is kept"
                if image.sha256 in self.kept:
                    self.move([(image.sha256, True)])
                continue
            assert self.layers.pop(image.sha256, 0) == first_layer, "a tower goes on elsewhere"
            assert is_last is (first_layer + num_layers == self.costs.num_layers)
            if is_last:
                self.held[image.sha256] = self.costs.num_bytes(image)
            else:
                self.layers[image.sha256] = first_layer + num_layers
        return sum(each.num_layers * self.costs.of_layer(each.image) for each in steps.work)

    def move(self, moves: list[tuple[bytes, bool]]) -> None:
        """Hold embeddings that are kept, or keep those that are held, and give up the oldest of these."""
        for sha256, is_needed in moves:
            source, target = (self.kept, self.held) if is_needed else (self.held, self.kept)
            if not is_needed:
                self.layers.pop(sha256, None)
            assert not is_needed or sha256 in source or self.has_lost, "what was given up is to be held"
            if sha256 in source:
                target[sha256] = source.pop(sha256)
            while sum(self.kept.values()) > self.most_bytes:
                self.kept.popitem(last=False)

    def see(self, plan: ComputedPart) -> dict[int, int]:
        """Return the embeddings of a step by the number of their token."""
        found = dict[int, int]()
        for image, rows, first in plan.images:
            assert image.sha256 in self.held or self.has_lost, "an image is not seen yet"
            found.update((row, embedding(image.sha256, first + i)) for i, row in enumerate(rows))
        return found

    def check(self, queue: TowerQueue) -> None:
        """Assert that the scheduler knows what is here, once its moves are done."""
        if self.has_lost:
            return
        ready = {sha256 for sha256, each in queue._active.items() if each.is_done}
        assert {*self.held} == ready, "other images are held than requests wait for"
        on_way = {sha256: each.num_layers for sha256, each in queue._active.items() if each.num_layers}
        assert self.layers == {sha256: num for sha256, num in on_way.items() if sha256 not in ready}
        assert [*self.kept] == [*queue._kept], "other images are kept than the scheduler knows of"


def random_tower(rng: random.Random) -> tuple[SimulatedTower, TowerQueue]:
    """Return a tower, and what a scheduler knows of it."""
    costs = TowerCosts(
        num_layers=rng.choice((0, 1, 3, 8)),
        patch_size=1,
        square=1,
        linear=rng.choice((0.1, 0.5)),
        attention=0.02,
        embedding_bytes=1,
    )
    most_bytes = rng.choice((0, 30, 1000))
    return SimulatedTower(costs, most_bytes), TowerQueue(costs, most_bytes)
