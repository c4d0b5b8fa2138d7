"""Vit: a vision transformer over the patches of several images, ragged as a step's tokens are.

Each image is a sequence whose patches all see each other, by the same attention as text: K and V of a layer
lie in a cache that lives as long as the call. A row's result does not depend on the other images.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from ...architectures.families.vision import VISION
from ...architectures.towers import MergeSpec, StackSpec, TowerSpec, VisionSpec
from ...checkpoints.stored import StoredRows
from ...kernels.attention_options import AttentionOptions, AttentionPlan
from ...kernels.operations import Kernels
from ..layers.norms import LayerNorm, RMSNorm, new_norm
from ..weights.loading import Loadable, Loader
from .linear import TowerLinear
from .projectors import Merger, Pooler, StackedMerger

PATCH_BLOCK = 16  # patches of a block of K and V
MAX_SIDE = 16384  # pixels of an image


class Grid(NamedTuple):
    """The size of an image in patches."""

    rows: int
    columns: int

    @property
    def num_patches(self) -> int:
        """The number of patches."""
        return self.rows * self.columns


class PatchProjection(Loadable):
    """A convolution over patches, whose weights are [hidden_size, channels, size, size], as a product."""

    def __init__(self, spec: TowerSpec) -> None:
        super().__init__(StoredRows({VISION + spec.names.patch: spec.hidden_size}))
        frames = (spec.frames,) if spec.frames > 1 else ()
        shape = spec.hidden_size, spec.num_channels, *frames, spec.patch_size, spec.patch_size
        self.num_channels = spec.num_channels
        self.frames = spec.frames
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        bias = nn.Parameter(torch.empty(spec.hidden_size), requires_grad=False)
        self.bias = bias if spec.patch_bias else None

    def load(self, loader: Loader) -> None:
        super().load(loader)
        self.form = loader.in_floats.forms.make(self.weight.detach().flatten(1), "layer")
        del self.weight
        if self.bias is not None:
            self.form.lay_out(self.bias.detach())

    def forward(
        self, patches: Tensor
    ) -> Tensor:  # [num_patches, patch_numbers] -> [num_patches, hidden_size]
        if self.frames > 1:  # of a channel after each other
            by_channel = patches.view(len(patches), self.num_channels, 1, -1)
            patches = by_channel.expand(-1, -1, self.frames, -1).flatten(1)
        return self.form(patches, self.bias)


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


class _Attended(NamedTuple):
    """What attention of all layers has in common: where K and V lie, and which rows see which keys."""

    cos: Tensor  # f32[num_patches, head_dim // 2]
    sin: Tensor
    slots: Tensor  # i64[num_patches]
    keys: Tensor  # [num_blocks, PATCH_BLOCK, num_heads, head_dim]
    values: Tensor
    tables: Tensor  # i32[num_images, most blocks]
    seq_lens: Tensor  # i32[num_images]
    cu_seqlens: Tensor  # i32[num_images + 1]
    options: AttentionOptions


class TowerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: TowerSpec, layer: int, kernels: Kernels) -> None:
        super().__init__()
        names = spec.names
        prefix = f"{VISION}{names.layers}{layer}."
        self.kernels = kernels
        self.num_heads = spec.num_heads
        self.head_dim = spec.head_dim
        self.activation = spec.activation
        size = spec.hidden_size
        inner = spec.inner_size
        share = 3 * size // len(names.query_key_value)
        stored = {prefix + name: share for name in names.query_key_value}
        self.before_attention = new_norm(spec.norm, size, kernels, prefix + names.before_attention)
        self.qkv = TowerLinear(size, StoredRows(stored), bias=spec.bias)
        self.output = TowerLinear(size, StoredRows({prefix + names.output: size}), bias=spec.bias)
        self.before_mlp = new_norm(spec.norm, size, kernels, prefix + names.before_mlp)
        up = {prefix + name: inner for name in (names.gate, names.up) if name is not None}
        is_gated = spec.gated and spec.activation == "silu"
        role = "gated" if is_gated else "layer"
        self.up = TowerLinear(size, StoredRows(up), bias=spec.bias, role=role)  # type: ignore[arg-type]
        self.down = TowerLinear(inner, StoredRows({prefix + names.down: size}), bias=spec.bias)
        self.is_gated = spec.gated

    def forward(
        self, hidden: Tensor | None, residual: Tensor, attended: _Attended, plan: AttentionPlan | None
    ) -> tuple[Tensor, AttentionPlan]:
        """Run the layer, and update the residual in place.

        Return the output that is not added to the residual yet, and the attention plan for the other layers.
        """
        normed = _add_and_norm(hidden, residual, self.before_attention)
        qkv = self.qkv(normed).view(-1, 3 * self.num_heads, self.head_dim)
        caches = attended.keys, attended.values, attended.slots
        query = self.kernels.rotary_store_kv(qkv, attended.cos, attended.sin, *caches)
        lengths = attended.tables, attended.seq_lens, attended.cu_seqlens
        inputs = query, attended.keys, attended.values, *lengths, attended.options
        plan = self.kernels.plan_attention(*inputs) if plan is None else plan
        out = self.output(self.kernels.paged_attention(*inputs, plan).flatten(1))
        return self._mlp(_add_and_norm(out, residual, self.before_mlp)), plan

    def _mlp(self, normed: Tensor) -> Tensor:
        inner: Tensor = self.up(normed)
        if not self.is_gated:
            self.kernels.gelu(inner, tanh=self.activation == "gelu_tanh")
        elif self.activation == "silu":
            inner = inner if self.up.form.gated else self.kernels.silu_and_mul(inner)
        elif self.activation == "gelu_tanh":
            inner = self.kernels.gelu_and_mul(inner)
        else:
            gate, up = inner.chunk(2, dim=1)
            gate = gate.contiguous()
            self.kernels.gelu(gate, tanh=False)
            inner = gate.mul_(up)
        return cast(Tensor, self.down(inner))


def _add_and_norm(hidden: Tensor | None, residual: Tensor, norm: RMSNorm | LayerNorm) -> Tensor:
    return cast(Tensor, norm(residual) if hidden is None else norm(hidden, residual))


class Vit(nn.Module):
    """A vision tower with its projector. It turns patches of images into embeddings for the text model."""

    def __init__(self, vision: VisionSpec, text_size: int, kernels: Kernels) -> None:
        super().__init__()
        spec = vision.tower
        self.vision = vision
        self.spec = spec
        self.kernels = kernels
        self.side = vision.projector.side
        self._rope_tables: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        self.patches = PatchProjection(spec)
        self.positions = PositionTable(spec) if spec.grid else None
        names = spec.names
        norms = (names.first_norm, names.last_norm)
        first, last = (
            name and new_norm(spec.norm, spec.hidden_size, kernels, VISION + name) for name in norms
        )
        self.first_norm = first or None
        self.last_norm = last or None
        layers = nn.ModuleList(TowerLayer(spec, layer, kernels) for layer in range(spec.num_layers))
        self.layers = cast(Sequence[TowerLayer], layers)
        self.features: dict[int, StackedMerger] = {}
        projector: Merger | Pooler | StackedMerger
        if isinstance(vision.projector, StackSpec):
            own = vision.projector
            projector = StackedMerger(own, f"{VISION}merger", spec.hidden_size, text_size, kernels)
            more = nn.ModuleList(
                StackedMerger(own, name, spec.hidden_size, text_size, kernels, is_feature=True)
                for name in (f"{VISION}deepstack_merger_list.{i}" for i in range(len(own.features)))
            )
            self.feature_projectors = more
            self.features = dict(zip(own.features, cast(Sequence[StackedMerger], more), strict=True))
        elif isinstance(vision.projector, MergeSpec):
            projector = Merger(vision.projector, spec.hidden_size, text_size, kernels)
        else:
            projector = Pooler(vision.projector, spec.hidden_size, text_size, kernels)
        self.projector = projector

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Make the embeddings of images.

        patches: f[num_patches, patch_numbers], the patches of all images one after another. Within an image,
            patches are ordered by the squares that the projector merges; squares, and the patches in a
            square, are ordered row by row.

        Returns [num_embeddings, (1 + num_features) * text_size]: each embedding is followed by its features.
        """
        places = torch.cat([squares(grid, self.side) for grid in grids]).to(patches.device)
        residual: Tensor = self.patches(patches)
        if self.positions is not None:
            self.kernels.add(self.positions(places, grids, self.kernels), residual)
        if self.first_norm is not None:
            residual = self.first_norm(residual)
        attended = self._attended(residual, places, grids)
        hidden = plan = None
        features = list[Tensor]()
        for number, layer in enumerate(self.layers):
            hidden, plan = layer(hidden, residual, attended, plan)
            if number in self.features:
                assert hidden is not None, "a layer leaves its output to be added"
                self.kernels.add(hidden, residual)
                hidden = None
                features.append(self.features[number](residual))
        if self.last_norm is not None:
            residual = _add_and_norm(hidden, residual, self.last_norm)
        elif hidden is not None:
            self.kernels.add(hidden, residual)
        made: Tensor = self.projector(residual)
        return torch.cat([made, *features], dim=1) if features else made

    def _attended(self, residual: Tensor, places: Tensor, grids: Sequence[Grid]) -> _Attended:
        """Return where K and V of the patches go, and that each patch sees its whole image."""
        device = residual.device
        counts = [grid.num_patches for grid in grids]
        needed = [-(-count // PATCH_BLOCK) for count in counts]
        first = [0, *accumulate(needed)]
        slots = [
            torch.arange(start * PATCH_BLOCK, start * PATCH_BLOCK + count, device=device)
            for start, count in zip(first, counts, strict=False)
        ]
        tables = torch.zeros(len(grids), max(needed), dtype=torch.int32, device="cpu")
        for row, start, count in zip(tables, first, needed, strict=False):
            row[:count] = torch.arange(start, start + count, dtype=torch.int32, device="cpu")
        last = torch.tensor(counts, dtype=torch.int32, device="cpu") - 1
        shape = first[-1], PATCH_BLOCK, self.spec.num_heads, self.spec.head_dim
        cos, sin = self._angles(places)
        return _Attended(
            cos=cos,
            sin=sin,
            slots=torch.cat(slots),
            keys=residual.new_empty(shape),
            values=residual.new_empty(shape),
            tables=tables.to(device),
            seq_lens=torch.tensor(counts, dtype=torch.int32, device=device),
            cu_seqlens=torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device),
            options=AttentionOptions(
                scale=self.spec.head_dim**-0.5,
                max_seqlen_q=max(counts),
                min_seqlen_q=min(counts),
                last_keys=last.repeat_interleave(torch.tensor(counts, device="cpu")).to(device),
            ),
        )

    def _angles(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the patches' angles, f32[num_patches, head_dim // 2]."""
        if self.spec.rope is None:
            shape = len(places), self.spec.head_dim // 2
            ones = torch.ones(shape, dtype=torch.float32, device=places.device)
            return ones, torch.zeros_like(ones)
        rows, columns = places.unbind(1)
        cos, sin = (
            torch.cat([by_row.index_select(0, rows), by_column.index_select(0, columns)], dim=1)
            for by_row, by_column in self._tables(places.device)
        )
        return cos, sin

    def _tables(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return cos, and sin, of every row and of every column, f32[places, head_dim // 4] each.

        In a table, as the last bit of a cosine depends on where it lies in a tensor.
        """
        if self._rope_tables is not None:
            return self._rope_tables
        rope = self.spec.rope
        assert rope is not None, "there are no angles"
        dim = self.spec.head_dim
        with torch.device("cpu"):
            places = torch.arange(MAX_SIDE // self.spec.patch_size, dtype=torch.float32)[:, None]
            frequencies = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
            by_row = frequencies[0::2]
            by_column = frequencies[1::2] if rope.is_interleaved else by_row
            angles = places * by_row, places * by_column
        cosines = angles[0].cos().to(device), angles[1].cos().to(device)
        self._rope_tables = cosines, (angles[0].sin().to(device), angles[1].sin().to(device))
        return self._rope_tables


def squares(grid: Grid, side: int) -> Tensor:
    """Return the row and column of each patch, i64[num_patches, 2], square by square."""
    rows = torch.arange(grid.rows, device="cpu").view(-1, 1, side, 1)
    columns = torch.arange(grid.columns, device="cpu").view(1, -1, 1, side)
    shape = grid.rows // side, grid.columns // side, side, side
    return torch.stack([rows.expand(shape).reshape(-1), columns.expand(shape).reshape(-1)], dim=1)
