"""Vit: a vision transformer over the patches of several images, ragged as a step's tokens are.

Each image is a sequence whose patches all see each other, by the same attention as text: K and V of a layer
lie in a cache that lives as long as the run. A row's result does not depend on the other images, nor on how
many layers are computed at once, nor on the number of shards: as in the decoder, a shard computes some of a
layer's outputs, each from all inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...architectures.families.vision import VISION
from ...architectures.towers import StackSpec, TowerSpec, VisionSpec
from ...checkpoints.stored import StoredRows
from ...kernels.attention_options import AttentionOptions, AttentionPlan
from ...kernels.operations import Kernels
from ..exchanges import gather
from ..layers.norms import LayerNorm, RMSNorm, new_norm
from ..part import UNDIVIDED, Shard
from ..weights.forms import Role
from .linear import ClippedLinears, Shares, TowerLinear
from .patches import Grid, PatchProjection, new_positions, squares
from .projectors import StackedMerger, new_projector

PATCH_BLOCK = 16  # patches of a block of K and V
MAX_SIDE = 16384  # pixels of an image


def shard_of_tower(tower: TowerSpec, shard: Shard) -> Shard:
    """Return a process's shard of a tower's layers: all of them, where the shards do not divide its sizes."""
    count = shard.count
    sizes = tower.num_heads, tower.num_kv_heads, tower.hidden_size, tower.inner_size
    return UNDIVIDED if any(size % count for size in sizes) else shard


class _Attended(NamedTuple):
    """What attention of all layers has in common: where K and V lie, and which rows see which keys."""

    cos: Tensor  # f32[num_patches, head_dim // 2]
    sin: Tensor
    slots: Tensor  # i64[num_patches]
    keys: Tensor  # [num_blocks, PATCH_BLOCK, num_kv_heads, head_dim]
    values: Tensor
    tables: Tensor  # i32[num_images, most blocks]
    seq_lens: Tensor  # i32[num_images]
    cu_seqlens: Tensor  # i32[num_images + 1]
    options: AttentionOptions


class TowerAttention(nn.Module):
    """Attention of one layer, in which all patches of an image see each other, for the heads of a shard."""

    def __init__(self, spec: TowerSpec, prefix: str, kernels: Kernels, shard: Shard) -> None:
        super().__init__()
        names = spec.names
        self.spec = spec
        self.shard = shard
        self.num_kv_heads = len(shard.kv_heads(spec.num_kv_heads))
        self.kernels = kernels
        # Not None where dimensions of a head are rotated in other pairs than by the kernels.
        by_halves = spec.rope is not None and spec.rope.by_halves
        order = rotated_by_halves(spec.head_dim) if by_halves else None
        self.qkv = _projections(spec, prefix, order, shard)
        outputs = {prefix + names.output: spec.hidden_size}
        self.output = _linear(spec, spec.num_heads * spec.head_dim, outputs, shard)
        self.options: dict[str, Any] = {}
        self.query_norm = self.key_norm = self.value_norm = None
        if names.query_norm is not None and names.key_norm is not None:
            eps = spec.norm.eps
            self.query_norm = RMSNorm(spec.head_dim, eps, kernels, prefix + names.query_norm, index=order)
            self.key_norm = RMSNorm(spec.head_dim, eps, kernels, prefix + names.key_norm, index=order)
        if spec.value_norm:
            self.value_norm = RMSNorm(spec.head_dim, spec.norm.eps, kernels, name=None)

    def forward(
        self, normed: Tensor, attended: _Attended, plan: AttentionPlan | None
    ) -> tuple[Tensor, AttentionPlan]:
        """Return what attention makes of the patches, and its plan for the other layers."""
        qkv = self.qkv(normed).unflatten(1, (-1, self.spec.head_dim))
        if self.value_norm is not None:
            values = qkv[:, -self.num_kv_heads :]
            self.value_norm.into(values, values)
        options: dict[str, Any] = {}
        if self.query_norm is not None and self.key_norm is not None:
            options = {
                "query_norm_weight": self.query_norm.weight,
                "key_norm_weight": self.key_norm.weight,
                "eps": self.query_norm.eps,
            }
        caches = attended.keys, attended.values, attended.slots
        query = self.kernels.rotary_store_kv(qkv, attended.cos, attended.sin, *caches, **options)
        lengths = attended.tables, attended.seq_lens, attended.cu_seqlens
        inputs = query, attended.keys, attended.values, *lengths, attended.options
        plan = self.kernels.plan_attention(*inputs) if plan is None else plan
        attended_to = self.kernels.paged_attention(*inputs, plan).flatten(1)
        return gather(self.output(gather(attended_to, self.shard)), self.shard), plan


def rotated_by_halves(head_dim: int) -> Tensor:
    """Return the order of a head's dimensions in which the kernels rotate i with i + head_dim // 2, if each
    half of a head is rotated by itself: i64[head_dim].
    """
    return torch.arange(head_dim, device="cpu").view(2, 2, -1).transpose(0, 1).flatten()


def _projections(spec: TowerSpec, prefix: str, order: Tensor | None, shard: Shard) -> nn.Module:
    """Make what projects patches to Q, K and V. order: that of the dimensions in each head of Q and K."""
    names = [prefix + name for name in spec.names.query_key_value]
    dim = spec.head_dim
    sizes = [count * dim for count in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
    kv_heads = shard.kv_heads(spec.num_kv_heads)
    heads = shard.share(spec.num_heads), kv_heads, kv_heads
    own = [range(each.start * dim, each.stop * dim) for each in heads]
    if len(names) == 1:
        assert order is None, "one tensor of all three is in the kernels' order"
        starts = [0, *accumulate(sizes)]
        shares = [
            range(start + each.start, start + each.stop) for start, each in zip(starts, own, strict=False)
        ]
        return _linear(spec, spec.hidden_size, {names[0]: sum(sizes)}, shard, shares=[shares])
    outputs = dict(zip(names, sizes, strict=True))
    return _linear(spec, spec.hidden_size, outputs, shard, order=order, shares=[[each] for each in own])


def _linear(
    spec: TowerSpec,
    in_features: int,
    outputs: dict[str, int],
    shard: Shard,
    *,
    order: Tensor | None = None,
    role: Role = "layer",
    shares: Shares | None = None,
) -> nn.Module:
    """Make one layer of what is stored under several names, for a shard.

    order: that of the dimensions in each head, for all outputs but those of the last name.
    shares: the ranges of outputs that the shard has, under each name; None: equal ranges.
    """
    if shard.is_whole:
        shares = None
    elif shares is None:
        shares = [[shard.share(count)] for count in outputs.values()]
    if spec.is_clipped:
        indices = [None] * len(outputs) if order is None else _in_order(outputs, order)
        return ClippedLinears(in_features, outputs, spec.names.linear, indices, shares, bias=spec.bias)
    stored = {name + spec.names.linear: count for name, count in outputs.items()}
    index = None
    starts = [0, *accumulate(outputs.values())]
    if order is not None:
        own = _in_order(outputs, order)
        index = torch.cat([rows + start for start, rows in zip(starts, own, strict=False)])
    rows_of = StoredRows(stored, index)
    if shares is not None:
        rows_of = rows_of.take(
            *(
                range(start + each.start, start + each.stop)
                for start, ranges in zip(starts, shares, strict=False)
                for each in ranges
            )
        )
    return TowerLinear(in_features, rows_of, bias=spec.bias, role=role)


def _in_order(outputs: dict[str, int], order: Tensor) -> list[Tensor]:
    """Return the order of the outputs under each name."""
    found = []
    for number, count in enumerate(outputs.values(), 1):
        rows = torch.arange(count, device="cpu")
        found.append(rows if number == len(outputs) else rows.view(-1, len(order))[:, order].flatten())
    return found


class TowerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), whose outputs may be normalised, too."""

    def __init__(self, spec: TowerSpec, layer: int, kernels: Kernels, shard: Shard) -> None:
        super().__init__()
        names = spec.names
        prefix = f"{VISION}{names.layers}{layer}."
        self.shard = shard
        self.kernels = kernels
        self.activation = spec.activation
        size = spec.hidden_size
        inner = spec.inner_size
        self.before_attention = new_norm(spec.norm, size, kernels, prefix + names.before_attention)
        self.attention = TowerAttention(spec, prefix, kernels, shard)
        self.before_mlp = new_norm(spec.norm, size, kernels, prefix + names.before_mlp)
        up = {prefix + name: inner for name in (names.gate, names.up) if name is not None}
        gates_itself = spec.gated and spec.activation == "silu"
        self.up = _linear(spec, size, up, shard, role="gated" if gates_itself else "layer")
        self.down = _linear(spec, inner, {prefix + names.down: size}, shard)
        self.is_gated = spec.gated
        self.after_attention, self.after_mlp = (
            None if name is None else RMSNorm(size, spec.norm.eps, kernels, prefix + name)
            for name in (names.after_attention, names.after_mlp)
        )

    def forward(
        self, hidden: Tensor | None, residual: Tensor, attended: _Attended, plan: AttentionPlan | None
    ) -> tuple[Tensor | None, AttentionPlan]:
        """Run the layer, and update the residual in place.

        Return the output that is not added to the residual yet, and the attention plan for the other layers.
        """
        normed = _add_and_norm(hidden, residual, self.before_attention)
        out, plan = self.attention(normed, attended, plan)
        left = _added(out, residual, self.after_attention)
        made = self._mlp(_add_and_norm(left, residual, self.before_mlp))
        return _added(made, residual, self.after_mlp), plan

    def _mlp(self, normed: Tensor) -> Tensor:
        inner: Tensor = self.up(normed)
        if not self.is_gated:
            self.kernels.gelu(inner, tanh=self.activation == "gelu_tanh")
        elif self.activation == "silu":
            form = getattr(self.up, "form", None)
            inner = inner if form is not None and form.gated else self.kernels.silu_and_mul(inner)
        elif self.activation == "gelu_tanh":
            inner = self.kernels.gelu_and_mul(inner)
        else:
            gate, up = inner.chunk(2, dim=1)
            gate = gate.contiguous()
            self.kernels.gelu(gate, tanh=False)
            inner = gate.mul_(up)
        return gather(cast(Tensor, self.down(gather(inner, self.shard))), self.shard)


def _add_and_norm(hidden: Tensor | None, residual: Tensor, norm: RMSNorm | LayerNorm) -> Tensor:
    return cast(Tensor, norm(residual) if hidden is None else norm(hidden, residual))


def _added(out: Tensor, residual: Tensor, norm: RMSNorm | None) -> Tensor | None:
    """Add the norm of an output to the residual; return the output if there is no norm."""
    if norm is None:
        return out
    norm.into(out, residual, add=True)
    return None


@dataclass(slots=True)
class TowerRun:
    """The patches of some images on their way through a tower.

    num_layers: how many layers they are through. hidden: what is left to add to the residual.
    """

    grids: Sequence[Grid]
    residual: Tensor
    attended: _Attended | None
    num_layers: int = 0
    hidden: Tensor | None = None
    plan: AttentionPlan | None = None
    features: list[Tensor] = field(default_factory=list)


class Vit(nn.Module):
    """A vision tower with its projector. It turns patches of images into embeddings for the text model.

    shard: that of the layers; the projection of patches and the projectors are computed by each process.
    """

    def __init__(
        self, vision: VisionSpec, text_size: int, kernels: Kernels, shard: Shard = UNDIVIDED
    ) -> None:
        super().__init__()
        spec = vision.tower
        shard = shard_of_tower(spec, shard)
        self.num_kv_heads = len(shard.kv_heads(spec.num_kv_heads))
        self.vision = vision
        self.spec = spec
        self.kernels = kernels
        self.side = vision.projector.side
        self._rope_tables: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        self.patches = PatchProjection(spec, kernels)
        self.positions = new_positions(spec)
        self.first_norm, self.last_norm = (
            None if name is None else new_norm(spec.norm, spec.hidden_size, kernels, VISION + name)
            for name in (spec.names.first_norm, spec.names.last_norm)
        )
        layers = nn.ModuleList(TowerLayer(spec, layer, kernels, shard) for layer in range(spec.num_layers))
        self.layers = cast(Sequence[TowerLayer], layers)
        self.features: dict[int, StackedMerger] = {}
        if isinstance(vision.projector, StackSpec):
            own = vision.projector
            more = nn.ModuleList(
                StackedMerger(own, name, spec.hidden_size, text_size, kernels, is_feature=True)
                for name in (f"{VISION}deepstack_merger_list.{i}" for i in range(len(own.features)))
            )
            self.feature_projectors = more
            self.features = dict(zip(own.features, cast(Sequence[StackedMerger], more), strict=True))
        self.projector = new_projector(vision, text_size, kernels)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Make the embeddings of images: see `begin` and `finish`."""
        run = self.begin(patches, grids)
        self.advance(run, len(self.layers))
        return self.finish(run)

    def begin(self, patches: Tensor, grids: Sequence[Grid]) -> TowerRun:
        """Return images on their way to the first layer.

        patches: f[num_patches, patch_numbers], the patches of all images one after another. Within an image,
            patches are ordered by the squares that the projector merges; squares, and the patches in a
            square, are ordered row by row.
        """
        places = torch.cat([squares(grid, self.side) for grid in grids]).to(patches.device)
        residual: Tensor = self.patches(patches)
        if self.positions is not None:
            self.kernels.add(self.positions(places, grids, self.kernels), residual)
        if self.first_norm is not None:
            residual = self.first_norm(residual)
        return TowerRun(grids, residual, self._attended(residual, places, grids) if self.layers else None)

    def advance(self, run: TowerRun, num_layers: int) -> None:
        """Take images through at most so many further layers."""
        for number in range(run.num_layers, min(run.num_layers + num_layers, len(self.layers))):
            assert run.attended is not None, "a tower without layers has none to run"
            run.hidden, run.plan = self.layers[number](run.hidden, run.residual, run.attended, run.plan)
            run.num_layers = number + 1
            if number in self.features:
                assert run.hidden is not None, "a layer leaves its output to be added"
                self.kernels.add(run.hidden, run.residual)
                run.hidden = None
                run.features.append(self.features[number](run.residual))

    def finish(self, run: TowerRun) -> Tensor:
        """Return the embeddings of images that are through all layers.

        They are [num_embeddings, (1 + num_features) * text_size]: each is followed by its features.
        """
        assert run.num_layers == len(self.layers), "layers are left"
        residual = run.residual
        if self.last_norm is not None:
            residual = _add_and_norm(run.hidden, residual, self.last_norm)
        elif run.hidden is not None:
            self.kernels.add(run.hidden, residual)
        made: Tensor = self.projector(residual)
        return torch.cat([made, *run.features], dim=1) if run.features else made

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
        shape = first[-1], PATCH_BLOCK, self.num_kv_heads, self.spec.head_dim
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
                scale=self.spec.head_dim**-0.5 if self.spec.scale is None else self.spec.scale,
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
        if self.spec.rope.by_halves:
            cos, sin = (torch.cat(each.chunk(2, dim=1)[::-1], dim=1) for each in (cos, sin))
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
            most = MAX_SIDE // self.spec.patch_size if self.spec.axes is None else self.spec.axes.num_places
            places = torch.arange(most, dtype=torch.float32)[:, None]
            frequencies = 1.0 / rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
            by_row = frequencies[0::2]
            by_column = frequencies[1::2] if rope.is_interleaved else by_row
            angles = places * by_row, places * by_column
        cosines = angles[0].cos().to(device), angles[1].cos().to(device)
        self._rope_tables = cosines, (angles[0].sin().to(device), angles[1].sin().to(device))
        return self._rope_tables
