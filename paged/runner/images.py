"""Images: the embeddings of images in a step, computed by the tower or kept from an earlier step."""

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
from ..model.towers.vit import Vit
from ..requests.request import PromptImage
from .image_rows import ImageRows
from .plan import ComputedPart

MOST_PATCHES = 8192  # at once, but for an image that has more
MOST_BYTES_ON_GPU = 256 * 2**20


class _Step(NamedTuple):
    """What is sent for the images of a step."""

    images: Sequence[ImageRows]
    rows: Sent  # i64, among the step's tokens
    last_keys: Sent | None  # i32, of all of them
    grid_positions: Sent | None  # i64[3, num_tokens]


class Images:
    """Computes the embeddings of images, and keeps those used last, by the sha256 of their images.

    most_bytes: of the embeddings that are kept for later steps. A GPU keeps at most MOST_BYTES_ON_GPU.
    """

    def __init__(self, tower: Vit, device: torch.device, dtype: torch.dtype, most_bytes: int) -> None:
        self._tower = tower
        self._device = device
        self._dtype = dtype
        self._most_bytes = min(most_bytes, MOST_BYTES_ON_GPU) if device.type == "cuda" else most_bytes
        self._kept = OrderedDict[bytes, Tensor]()  # the one used last at the end
        self._num_bytes = 0
        self.num_computed = 0  # images that the tower has seen

    def put(self, plan: ComputedPart, upload: Upload) -> _Step:
        """Add what the device needs to the upload, but for pixels."""
        rows = [row for each in plan.images for row in each.rows]
        keys = None if plan.last_keys is None else upload.put(plan.last_keys, torch.int32)
        grid = None
        if plan.grid_positions is not None:
            grid = upload.put(np.array(plan.grid_positions, np.int64).reshape(3, -1), torch.int64)
        return _Step(plan.images, upload.put(rows, torch.int64), keys, grid)

    def add_to(self, batch: Batch, step: _Step) -> None:
        """Give the batch of a step, whose upload is sent, the embeddings of its images."""
        if step.grid_positions is not None:
            batch.grid_positions = step.grid_positions.tensor
        if not step.images:
            return
        embeddings = self._embeddings([each.image for each in step.images])
        parts = [
            embeddings[each.image.sha256][each.first : each.first + len(each.rows)] for each in step.images
        ]
        made, *features = torch.cat(parts).chunk(1 + self._tower.vision.num_features, dim=1)
        batch.given = step.rows.tensor, made
        batch.features = tuple(features)
        if step.last_keys is not None:
            batch.queries.last_keys = step.last_keys.tensor

    def _embeddings(self, images: Sequence[PromptImage]) -> dict[bytes, Tensor]:
        """Return the embeddings of images by their sha256. What is not kept is computed."""
        by_sha = {image.sha256: image for image in images}
        missing = [image for sha256, image in by_sha.items() if sha256 not in self._kept]
        found = {sha256: self._kept[sha256] for sha256 in by_sha if sha256 in self._kept}
        for sha256 in found:
            self._kept.move_to_end(sha256)
        if missing:
            found |= self._computed(missing)
        return found

    def rehearse(self) -> None:
        """Run the tower on as many patches as it gets at once, beside as many bytes as are kept.

        On a GPU, memory for this is measured.
        """
        kept = torch.empty(self._most_bytes, dtype=torch.uint8, device=self._device)
        side = self._tower.spec.grid or math.isqrt(MOST_PATCHES)
        grid = Grid(side - side % self._tower.side, side - side % self._tower.side)
        grids = [grid] * max(1, MOST_PATCHES // grid.num_patches)
        shape = len(grids) * grid.num_patches, self._tower.spec.patch_numbers
        self._tower(torch.zeros(shape, dtype=self._dtype, device=self._device), grids)
        del kept

    def _computed(self, images: Sequence[PromptImage]) -> dict[bytes, Tensor]:
        """Compute the embeddings of images, and keep them. Large ones are computed one by one."""
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
        size = self._tower.spec.patch_size
        square = self._tower.vision.square
        vision = self._tower.vision
        patches = [
            torch.from_numpy(patches_of(vision, image.height, image.width, image.pixels)) for image in images
        ]
        grids = [Grid(image.height // size, image.width // size) for image in images]
        counts = [image.height // square * (image.width // square) for image in images]
        pixels = torch.cat(patches).to(self._dtype).to(self._device)
        made = self._tower(pixels, grids)
        self.num_computed += len(images)
        found = {image.sha256: own for image, own in zip(images, torch.split(made, counts), strict=True)}
        for sha256, own in found.items():
            self._keep(sha256, own)
        return found

    def _keep(self, sha256: bytes, embeddings: Tensor) -> None:
        """Keep embeddings, and give up those that were not used for the longest time."""
        own = embeddings.clone() if embeddings.untyped_storage().nbytes() > embeddings.nbytes else embeddings
        self._kept[sha256] = own
        self._num_bytes += own.nbytes
        while self._num_bytes > self._most_bytes:
            _, gone = self._kept.popitem(last=False)
            self._num_bytes -= gone.nbytes
