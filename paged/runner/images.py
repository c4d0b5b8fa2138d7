"""What the images of a step give its tokens: embeddings, and for each token what it sees and rotates by."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..device.transfers import Sent, Upload
from ..images.processing import patches_of
from ..model.batch import Batch
from ..model.towers.patches import Grid
from ..model.towers.vit import TowerRun, Vit
from ..requests.request import PromptImage
from ..scheduler.towers import TowerSteps, TowerWork
from .image_rows import ImageRows
from .plan import ComputedPart

MOST_PATCHES = 8192  # at once, but for an image that has more


class _Step(NamedTuple):
    """What is sent for the images of a step.

    rows: where their embeddings go; None in a part of a model that gets none.
    """

    images: Sequence[ImageRows]
    rows: Sent | None  # i64, among the step's tokens
    last_keys: Sent | None  # i32, of all of them
    grid_positions: Sent | None  # i64[3, num_tokens]


class ImagePlaces:
    """What tokens see and rotate by in steps with images, in a part of a model whose embeddings are made
    elsewhere.
    """

    def work(self, steps: TowerSteps) -> None:
        """Do nothing: another part has the tower."""

    def rehearse(self) -> None:
        """Do nothing: another part has the tower."""

    def put(self, plan: ComputedPart, upload: Upload) -> _Step:
        """Add what a step with images needs to the upload. Pixels are sent separately."""
        keys = None if plan.last_keys is None else upload.put(plan.last_keys, torch.int32)
        grid = None
        if plan.grid_positions is not None:
            grid = upload.put(np.array(plan.grid_positions, np.int64).reshape(3, -1), torch.int64)
        return _Step(plan.images, None, keys, grid)

    def add_to(self, batch: Batch, step: _Step) -> None:
        """Add what was put into an upload to the batch of the step, once the upload is sent."""
        if step.grid_positions is not None:
            batch.grid_positions = step.grid_positions.tensor
        if step.last_keys is not None:
            batch.queries.last_keys = step.last_keys.tensor


def new_images(tower: Vit | None, device: torch.device, dtype: torch.dtype, most_bytes: int) -> ImagePlaces:
    """Return what takes images for a part of a model, with its tower or without one; see `Images`."""
    return ImagePlaces() if tower is None else Images(tower, device, dtype, most_bytes)


class Images(ImagePlaces):
    """Computes the embeddings of images, and caches the most recently used ones by the sha256 of the image.

    Embeddings that requests wait for are held in any case: the scheduler says when they are released.

    most_bytes: the size of the cache.
    """

    def __init__(self, tower: Vit, device: torch.device, dtype: torch.dtype, most_bytes: int) -> None:
        self._tower = tower
        self._device = device
        self._dtype = dtype
        self._most_bytes = most_bytes
        self._kept = OrderedDict[bytes, Tensor]()  # the one used last at the end
        self._num_bytes = 0
        self._held = dict[bytes, Tensor]()  # as long as requests wait for them
        self._runs = dict[bytes, TowerRun]()  # of images that are through some of the layers
        self.num_computed = 0  # images that the tower has seen
        self.num_parts = 0  # steps that took an image through some of the layers

    def work(self, steps: TowerSteps) -> None:
        """Take images through some layers, or through all at once. Hold the embeddings that this makes."""
        for sha256, is_needed in steps.moves:
            if is_needed:
                self._hold(sha256)
            else:
                self._release(sha256)
        whole = list[PromptImage]()
        for work in steps.work:
            image = work.image
            if image.sha256 in self._held or self._hold(image.sha256):
                continue
            if work.is_last and not work.first_layer:
                whole.append(image)
            else:
                self._work_on(work)
        if whole:
            self._held |= self._computed(whole)

    def _hold(self, sha256: bytes) -> bool:
        """Hold embeddings that are kept; return whether they are."""
        kept = self._kept.pop(sha256, None)
        if kept is not None:
            self._num_bytes -= kept.nbytes
            self._held[sha256] = kept
        return kept is not None

    def _release(self, sha256: bytes) -> None:
        """Keep embeddings that are held, and give up an image that is through some layers alone."""
        self._runs.pop(sha256, None)
        held = self._held.pop(sha256, None)
        if held is not None:
            self._keep(sha256, held)

    def _work_on(self, work: TowerWork) -> None:
        """Take one image through some layers. What an earlier step has not done is done before."""
        image = work.image
        run = self._runs.pop(image.sha256, None)  # lost if a layer raises, as the residual may be written
        if run is None or run.num_layers != work.first_layer:
            run = self._tower.begin(*self._patches([image]))
            self._tower.advance(run, work.first_layer)
        self._tower.advance(run, work.num_layers)
        self.num_parts += 1
        if not work.is_last:
            self._runs[image.sha256] = run
            return
        self._held[image.sha256] = self._tower.finish(run)
        self.num_computed += 1

    def put(self, plan: ComputedPart, upload: Upload) -> _Step:
        """Add what a step with images needs to the upload. Pixels are sent separately."""
        rows = [row for each in plan.images for row in each.rows]
        return super().put(plan, upload)._replace(rows=upload.put(rows, torch.int64))

    def add_to(self, batch: Batch, step: _Step) -> None:
        """Add embeddings, too, to the batch of a step whose upload was sent."""
        super().add_to(batch, step)
        if not step.images or step.rows is None:
            return
        embeddings = self._embeddings([each.image for each in step.images])
        parts = [
            embeddings[each.image.sha256][each.first : each.first + len(each.rows)] for each in step.images
        ]
        made, *features = torch.cat(parts).chunk(1 + self._tower.vision.num_features, dim=1)
        batch.given = step.rows.tensor, made
        batch.features = tuple(features)

    def _embeddings(self, images: Sequence[PromptImage]) -> dict[bytes, Tensor]:
        """Return the embeddings of images by their sha256. What is not kept is computed."""
        by_sha = {image.sha256: image for image in images}
        found = {sha256: self._held[sha256] for sha256 in by_sha if sha256 in self._held}
        for sha256 in by_sha:
            if sha256 not in found and sha256 in self._kept:
                found[sha256] = self._kept[sha256]
                self._kept.move_to_end(sha256)
        missing = [image for sha256, image in by_sha.items() if sha256 not in found]
        if missing:
            computed = self._computed(missing)
            for sha256, own in computed.items():
                self._keep(sha256, own)
            found |= computed
        return found

    def rehearse(self) -> None:
        """Run the tower on the largest number of patches, with a full cache, to measure memory on a GPU."""
        kept = torch.empty(self._most_bytes, dtype=torch.uint8, device=self._device)
        side = self._tower.spec.grid or math.isqrt(MOST_PATCHES)
        grid = Grid(side - side % self._tower.side, side - side % self._tower.side)
        grids = [grid] * max(1, MOST_PATCHES // grid.num_patches)
        shape = len(grids) * grid.num_patches, self._tower.spec.patch_numbers
        self._tower(torch.zeros(shape, dtype=self._dtype, device=self._device), grids)
        del kept

    def _computed(self, images: Sequence[PromptImage]) -> dict[bytes, Tensor]:
        """Compute the embeddings of images. Large ones are computed one by one."""
        found = dict[bytes, Tensor]()
        some = list[PromptImage]()
        num_patches = 0
        for image in images:
            own = image.height * image.width // self._tower.spec.patch_size**2
            if some and num_patches + own > MOST_PATCHES:
                found |= self._computed_at_once(some)
                some = []
                num_patches = 0
            some.append(image)
            num_patches += own
        return found | self._computed_at_once(some)

    def _computed_at_once(self, images: Sequence[PromptImage]) -> dict[bytes, Tensor]:
        square = self._tower.vision.square
        counts = [image.height // square * (image.width // square) for image in images]
        made = self._tower(*self._patches(images))
        self.num_computed += len(images)
        parts = torch.split(made, counts)
        return {image.sha256: own.clone() for image, own in zip(images, parts, strict=True)}

    def _patches(self, images: Sequence[PromptImage]) -> tuple[Tensor, list[Grid]]:
        """Return the patches of images on the device, and the images' sizes in patches."""
        size = self._tower.spec.patch_size
        vision = self._tower.vision
        patches = [
            torch.from_numpy(patches_of(vision, image.height, image.width, image.pixels, image.values))
            for image in images
        ]
        grids = [Grid(image.height // size, image.width // size) for image in images]
        return torch.cat(patches).to(self._dtype).to(self._device), grids

    def _keep(self, sha256: bytes, embeddings: Tensor) -> None:
        """Keep embeddings, and give up those that were not used for the longest time."""
        assert sha256 not in self._kept, "embeddings that are kept are not computed again"
        self._num_bytes += embeddings.nbytes
        self._kept[sha256] = embeddings
        while self._num_bytes > self._most_bytes:
            _, gone = self._kept.popitem(last=False)
            self._num_bytes -= gone.nbytes
