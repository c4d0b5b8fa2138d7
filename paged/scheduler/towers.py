"""TowerQueue: how far the images of prompts are through the vision tower, which works a few layers a step."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..requests.request import PromptImage, Request

if TYPE_CHECKING:
    from ..architectures.config import ModelConfig


class TowerWork(NamedTuple):
    """The layers of the tower that a step takes an image through.

    is_last: whether the step also makes the image's embeddings.
    """

    image: PromptImage
    first_layer: int
    num_layers: int
    is_last: bool


class TowerSteps(NamedTuple):
    """What the tower does in a step.

    moves: the images, by sha256, whose kept embeddings requests wait for (True), or for whose embeddings no
        request waits any more (False), in the order in which this came about.
    """

    moves: list[tuple[bytes, bool]]
    work: list[TowerWork]


class TowerCosts(NamedTuple):
    """What the tower costs, in tokens of the text model.

    linear: the cost of one layer for a patch. attention: the cost of one layer for a pair of patches.
    """

    num_layers: int
    patch_size: int
    square: int
    linear: float
    attention: float
    embedding_bytes: int

    def of_layer(self, image: PromptImage) -> float:
        """Return the cost of one layer for an image."""
        num_patches = image.height * image.width // self.patch_size**2
        return num_patches * (self.linear + num_patches * self.attention)

    def num_bytes(self, image: PromptImage) -> int:
        """Return the size of an image's embeddings."""
        return image.height // self.square * (image.width // self.square) * self.embedding_bytes


def costs_of(model: ModelConfig, element_bytes: int) -> TowerCosts:
    """Return what the tower of a model costs, by the multiplications of both."""
    vision = model.vision
    assert vision is not None, "a model without a tower has no costs of one"
    tower = vision.tower
    token = model.num_active_layer_params
    layers = max(1, tower.num_layers)
    return TowerCosts(
        num_layers=tower.num_layers,
        patch_size=tower.patch_size,
        square=vision.square,
        linear=tower.num_layer_params / layers / token,
        attention=2 * tower.num_heads * tower.head_dim / token if tower.num_layers else 0.0,
        embedding_bytes=model.hidden_size * (1 + vision.num_features) * element_bytes,
    )


@dataclass(slots=True)
class _Progress:
    """How many layers an image is through, and whether its embeddings, of so many bytes, are made."""

    num_bytes: int
    num_layers: int = 0
    is_done: bool = False


class TowerQueue:
    """The images that requests wait for, and those whose embeddings are kept.

    A request computes no token of an image before a step has made the image's embeddings, unless its prompt
    ends with an image of one token: this token is a decode, and the runner computes its image. What a step
    spends on the tower, it has less of for prompts, so that decodes beside it wait for no whole image. A step
    takes an image through at least one layer.

    The runner keeps embeddings under the same rule as this class. Where both differ, the runner computes an
    image again, in the step that needs it.

    most_bytes: of the embeddings that are kept although no request waits for them.
    """

    def __init__(self, costs: TowerCosts, most_bytes: int) -> None:
        self.costs = costs
        self._most_bytes = most_bytes
        self._active = dict[bytes, _Progress]()
        self._kept = OrderedDict[bytes, int]()  # the bytes of each, the one released last at the end
        self._num_bytes = 0
        self._moves = list[tuple[bytes, bool]]()
        self._work = list[TowerWork]()
        self.num_tokens = 0.0  # that the next step's work costs

    def begin_step(self, requests: Iterable[Request]) -> None:
        """Begin to choose the work of a step. requests: those whose images are needed further on."""
        self._work = []
        self.num_tokens = 0.0
        if not self._active:
            return
        needed = {
            image.sha256
            for request in requests
            for image in request.inputs.images
            if image.end > request.num_computed_tokens
        }
        for sha256 in [each for each in self._active if each not in needed]:
            self._release(sha256)

    def take(self, *, is_alone: bool) -> TowerSteps | None:
        """Return the work of the step that was chosen; None if there is none.

        is_alone: whether the step does nothing else. Then it is not run for moves alone.
        """
        if not self._work and (is_alone or not self._moves):
            return None
        steps = TowerSteps(self._moves, self._work)
        self._work = []
        self._moves = []
        return steps

    def forget(self) -> None:
        """Forget all progress, after a failed step."""
        self._work = []
        for sha256 in [*self._active]:
            self._release(sha256)

    def most_new(self, request: Request, start: int, num_new: int, budget: int) -> int:
        """Return how many of the next num_new tokens a request may compute from `start` on.

        Work on the first images that are not ready is put into the step, as far as the budget goes beside the
        tokens in front of them.
        """
        spent: float | None = self.num_tokens
        reserved = 0  # tokens in front of the first image that is worked on
        for image in request.inputs.images:
            if image.end <= start:
                continue
            if image.start >= start + num_new:
                break
            before = max(0, image.start - start)
            is_ready = self._is_ready(image, budget - before - self.num_tokens)
            if spent is not None and self.num_tokens > spent:
                reserved = before
                spent = None
            if not is_ready:
                num_new = before
                break
        return min(num_new, max(reserved, self.beside(budget)))

    def beside(self, budget: int) -> int:
        """Return how many tokens a step has left besides its work on images."""
        return max(0, budget - math.ceil(self.num_tokens)) if self.num_tokens else budget

    def _is_ready(self, image: PromptImage, budget: float) -> bool:
        """Work on an image, and return whether its embeddings are there for this step."""
        sha256 = image.sha256
        progress = self._active.get(sha256)
        if progress is None:
            num_bytes = self.costs.num_bytes(image)
            progress = self._active[sha256] = _Progress(num_bytes, is_done=sha256 in self._kept)
            if progress.is_done:
                self._num_bytes -= self._kept.pop(sha256)
                self._moves.append((sha256, True))
        if progress.is_done or budget <= 0:
            return progress.is_done
        cost = self.costs.of_layer(image)
        num_left = self.costs.num_layers - progress.num_layers
        num_layers = min(num_left, int(budget / cost) if cost else num_left)
        if not num_layers and num_left and self.num_tokens:
            return False
        num_layers = min(num_left, max(1, num_layers))
        progress.is_done = num_layers == num_left
        self._work.append(TowerWork(image, progress.num_layers, num_layers, progress.is_done))
        progress.num_layers += num_layers
        self.num_tokens += num_layers * cost
        return progress.is_done

    def _release(self, sha256: bytes) -> None:
        """Keep embeddings that no request waits for, and give up those that were released first."""
        progress = self._active.pop(sha256)
        self._moves.append((sha256, False))
        if progress.is_done:
            self._kept[sha256] = progress.num_bytes
            self._num_bytes += progress.num_bytes
        while self._num_bytes > self._most_bytes:
            self._num_bytes -= self._kept.popitem(last=False)[1]

    def check(self) -> None:
        """Check the sums and the limits."""
        assert self._num_bytes == sum(self._kept.values()) <= self._most_bytes
        assert not self._active.keys() & self._kept.keys()
        assert all(each.num_layers <= self.costs.num_layers for each in self._active.values())
