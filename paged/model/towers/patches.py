"""Patches of images, and where they lie: what a tower begins with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...architectures.families.vision import VISION
from ...architectures.towers import AxisTable, TowerSpec
from ...checkpoints.stored import StoredRows
from ...kernels.operations import Kernels
from ..layers.norms import LayerNorm
from ..weights.loading import Loadable, Loader
from .linear import NamelessParameter


class Grid(NamedTuple):
    """The size of an image in patches."""

    rows: int
    columns: int

    @property
    def num_patches(self) -> int:
        """The number of patches."""
        return self.rows * self.columns


def squares(grid: Grid, side: int) -> Tensor:
    """Return the row and column of each patch, i64[num_patches, 2], square by square."""
    rows = torch.arange(grid.rows, device="cpu").view(-1, 1, side, 1)
    columns = torch.arange(grid.columns, device="cpu").view(1, -1, 1, side)
    shape = grid.rows // side, grid.columns // side, side, side
    return torch.stack([rows.expand(shape).reshape(-1), columns.expand(shape).reshape(-1)], dim=1)


class PatchProjection(Loadable):
    """A convolution over patches, computed as a product. Its weights are stored as [hidden_size, channels,
    size, size], or as those of a linear layer.
    """

    def __init__(self, spec: TowerSpec, kernels: Kernels) -> None:
        super().__init__(StoredRows({VISION + spec.names.patch: spec.hidden_size}))
        frames = (spec.frames,) if spec.frames > 1 else ()
        shape = spec.num_channels, *frames, spec.patch_size, spec.patch_size
        if spec.is_flat:
            shape = (spec.patch_numbers,)
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.hidden_size, *shape), requires_grad=False)
        bias = nn.Parameter(torch.empty(spec.hidden_size), requires_grad=False)
        self.bias = bias if spec.patch_bias else None
        self.before = self.behind = None
        if spec.names.patch_norms is not None:
            before, behind = (VISION + name for name in spec.names.patch_norms)
            eps = spec.norm.eps
            self.before = LayerNorm(spec.patch_numbers, eps, kernels, before, index=by_channel(spec))
            self.behind = LayerNorm(spec.hidden_size, eps, kernels, behind)

    def load(self, loader: Loader) -> None:
        super().load(loader)
        weight = self.weight.detach().flatten(1)
        if self.spec.is_flat:
            weight = weight[:, by_channel(self.spec).to(weight.device)]
        self.form = loader.in_floats.forms.make(weight.contiguous(), "layer")
        del self.weight
        if self.bias is not None:
            self.form.lay_out(self.bias.detach())

    def forward(
        self, patches: Tensor
    ) -> Tensor:  # [num_patches, patch_numbers] -> [num_patches, hidden_size]
        frames = self.spec.frames
        if frames > 1:  # of a channel after each other
            channels = patches.view(len(patches), self.spec.num_channels, 1, -1)
            patches = channels.expand(-1, -1, frames, -1).flatten(1)
        if self.before is not None and self.behind is not None:
            return self.behind(self.form(self.before(patches), self.bias))  # type: ignore[no-any-return]
        return self.form(patches, self.bias)


def by_channel(spec: TowerSpec) -> Tensor:
    """Return the order of a patch's numbers by channel, i64[patch_numbers], if they are stored by pixel."""
    numbers = torch.arange(spec.patch_numbers, device="cpu")
    return numbers.view(-1, spec.num_channels).t().flatten()


class PositionTable(Loadable):
    """A table with a learned vector for each place of a square grid."""

    def __init__(self, spec: TowerSpec) -> None:
        assert spec.names.positions is not None
        self.side = spec.grid
        self.is_interpolated = spec.is_interpolated
        num_places = spec.grid**2
        super().__init__(StoredRows({VISION + spec.names.positions: num_places}))
        self.weight = nn.Parameter(torch.empty(num_places, spec.hidden_size), requires_grad=False)

    def forward(self, places: Tensor, grids: Sequence[Grid], kernels: Kernels) -> Tensor:
        """Return the vector of each place, i64[num_patches, 2] -> [num_patches, hidden_size]."""
        table = self.weight.detach()
        if not self.is_interpolated:
            return kernels.take_rows(table, places[:, 0] * self.side + places[:, 1])
        counts = torch.tensor([grid.num_patches for grid in grids], device="cpu")
        sizes = torch.tensor(grids, device="cpu").repeat_interleave(counts, dim=0).to(places.device)
        # The corners of an image's grid lie on those of the table.
        at = places * ((self.side - 1) / (sizes - 1).clamp(min=1).double())
        low = at.floor().long()
        high = (low + 1).clamp(max=self.side - 1)
        share = (at - low).float()
        total = torch.zeros(len(places), table.shape[1], dtype=torch.float32, device=table.device)
        for rows, by_row in ((low[:, 0], 1 - share[:, 0]), (high[:, 0], share[:, 0])):
            for columns, by_column in ((low[:, 1], 1 - share[:, 1]), (high[:, 1], share[:, 1])):
                taken = kernels.take_rows(table, rows * self.side + columns)
                total = total + taken.float() * (by_row * by_column)[:, None]
        return total.to(table.dtype)


class AxisPositions(NamelessParameter):
    """A learned vector of each column and of each row, which are added."""

    def __init__(self, spec: TowerSpec, axes: AxisTable) -> None:
        assert spec.names.positions is not None
        shape = (2, axes.num_places) if axes.by_axis else (axes.num_places, 2)
        super().__init__(VISION + spec.names.positions, *shape, spec.hidden_size)
        self.by_axis = axes.by_axis

    def load(self, loader: Loader) -> None:
        super().load(loader)
        table = self.take()
        self.columns, self.rows = (each.contiguous() for each in table.unbind(0 if self.by_axis else 1))

    def forward(self, places: Tensor, grids: Sequence[Grid], kernels: Kernels) -> Tensor:  # noqa: ARG002
        """Return the vector of each place, i64[num_patches, 2] -> [num_patches, hidden_size]."""
        found = kernels.take_rows(self.columns, places[:, 1])
        kernels.add(kernels.take_rows(self.rows, places[:, 0]), found)
        return found


def new_positions(spec: TowerSpec) -> PositionTable | AxisPositions | None:
    """Make the table of a tower's positions, if it has one."""
    if spec.axes is not None:
        return AxisPositions(spec, spec.axes)
    return PositionTable(spec) if spec.grid else None
