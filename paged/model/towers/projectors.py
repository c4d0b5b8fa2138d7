"""Projectors: vectors of patches to embeddings of the text model's size."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ...architectures.families.vision import PROJECTOR, VISION
from ...architectures.towers import EmbedSpec, MergeSpec, PoolSpec, StackSpec, VisionSpec
from ...checkpoints.stored import StoredRows
from ...kernels.operations import Kernels
from ..layers.norms import RMSNorm, new_norm
from ..weights.loading import Loadable, Loader
from .linear import NamelessParameter, TowerLinear


class _Projection(NamelessParameter):
    """A product whose weight is stored as [in_features, out_features], without a name of its own."""

    def load(self, loader: Loader) -> None:
        super().load(loader)
        self.form = loader.in_floats.forms.make(self.take().t().contiguous(), "layer")

    def forward(self, x: Tensor) -> Tensor:
        return self.form(x, None)


class Pooler(nn.Module):
    """The projector of Gemma 3: the mean of each square of patches, normalised and multiplied by a matrix."""

    def __init__(self, spec: PoolSpec, size: int, text_size: int, kernels: Kernels) -> None:
        super().__init__()
        self.num_pooled = spec.side**2
        self.norm = new_norm(spec.norm, size, kernels, f"{PROJECTOR}mm_soft_emb_norm")
        self.projection = _Projection(f"{PROJECTOR}mm_input_projection_weight", size, text_size)

    def forward(self, patches: Tensor) -> Tensor:  # [num_patches, size] -> [num_embeddings, text_size]
        return cast(Tensor, self.projection(self.norm(mean_of(patches, self.num_pooled))))


def mean_of(patches: Tensor, count: int) -> Tensor:
    """Return the means of groups of consecutive rows, added in float32 one row after another.

    torch's own sums may add in an order that depends on the number of rows.
    """
    groups = patches.view(-1, count, patches.shape[1])
    total = groups[:, 0].float()
    for k in range(1, count):
        total = total + groups[:, k]
    return (total * (1 / count)).to(patches.dtype)


class _Standard(Loadable):
    """(x - std_bias) * std_scale, in float32."""

    def __init__(self, size: int) -> None:
        super().__init__(StoredRows({VISION.removesuffix("."): size}))
        self.std_bias = nn.Parameter(torch.empty(size), requires_grad=False)
        self.std_scale = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.std_bias.float()) * self.std_scale.float()


class PatchEmbedder(nn.Module):
    """The mean of each square of patches, scaled, normalised and multiplied: Gemma 4's."""

    def __init__(self, spec: EmbedSpec, size: int, text_size: int, kernels: Kernels) -> None:
        super().__init__()
        self.num_pooled = spec.side**2
        self.factor = size**0.5 if spec.is_scaled else 1.0
        self.standard = _Standard(size) if spec.is_standardised else None
        self.norm = RMSNorm(size, spec.norm.eps, kernels, name=None)
        stored = StoredRows({f"{PROJECTOR}embedding_projection": text_size})
        self.projection = TowerLinear(size, stored, bias=False)

    def forward(self, patches: Tensor) -> Tensor:  # [num_patches, size] -> [num_embeddings, text_size]
        made = mean_of(patches, self.num_pooled).float() * self.factor
        if self.standard is not None:
            made = self.standard(made)
        return cast(Tensor, self.projection(self.norm(made.to(patches.dtype))))


class Merger(nn.Module):
    """The projector of Mistral 3: squares of patches, normalised, then merged by a product; two layers."""

    def __init__(self, spec: MergeSpec, size: int, text_size: int, kernels: Kernels) -> None:
        super().__init__()
        self.num_merged = spec.side**2
        self.kernels = kernels
        self.norm = new_norm(spec.norm, size, kernels, f"{PROJECTOR}norm")
        merged = StoredRows({f"{PROJECTOR}patch_merger.merging_layer": size})
        self.merge = TowerLinear(size * self.num_merged, merged, bias=False)
        first = StoredRows({f"{PROJECTOR}linear_1": text_size})
        second = StoredRows({f"{PROJECTOR}linear_2": text_size})
        self.first = TowerLinear(size, first, bias=spec.bias)
        self.second = TowerLinear(text_size, second, bias=spec.bias)

    def forward(self, patches: Tensor) -> Tensor:  # [num_patches, size] -> [num_embeddings, text_size]
        normed: Tensor = self.norm(patches)
        # The merging layer takes the numbers of a square dimension by dimension.
        by_square = normed.view(-1, self.num_merged, normed.shape[1]).transpose(1, 2).flatten(1)
        inner: Tensor = self.first(self.merge(by_square))
        self.kernels.gelu(inner, tanh=False)
        return cast(Tensor, self.second(inner))


class StackedMerger(nn.Module):
    """The projector of Qwen3-VL: squares of patches, normalised and concatenated; two layers.

    name: the name of its tensors.
    is_feature: whether a square is normalised as a whole, instead of patch by patch.
    """

    def __init__(
        self,
        spec: StackSpec,
        name: str,
        size: int,
        text_size: int,
        kernels: Kernels,
        *,
        is_feature: bool = False,
    ) -> None:
        super().__init__()
        whole = size * spec.side**2
        self.whole = whole
        self.is_feature = is_feature
        self.kernels = kernels
        self.norm = new_norm(spec.norm, whole if is_feature else size, kernels, f"{name}.norm")
        self.first = TowerLinear(whole, StoredRows({f"{name}.linear_fc1": whole}), bias=True)
        self.second = TowerLinear(whole, StoredRows({f"{name}.linear_fc2": text_size}), bias=True)

    def forward(self, patches: Tensor) -> Tensor:  # [num_patches, size] -> [num_embeddings, text_size]
        if self.is_feature:
            normed: Tensor = self.norm(patches.view(-1, self.whole))
        else:
            normed = self.norm(patches).view(-1, self.whole)
        inner: Tensor = self.first(normed)
        self.kernels.gelu(inner, tanh=False)
        return cast(Tensor, self.second(inner))


Projector = PatchEmbedder | Merger | Pooler | StackedMerger


def new_projector(vision: VisionSpec, text_size: int, kernels: Kernels) -> Projector:
    """Make the projector that a tower's embeddings come from."""
    spec = vision.projector
    size = vision.tower.hidden_size
    if isinstance(spec, StackSpec):
        return StackedMerger(spec, f"{VISION}merger", size, text_size, kernels)
    if isinstance(spec, MergeSpec):
        return Merger(spec, size, text_size, kernels)
    if isinstance(spec, EmbedSpec):
        return PatchEmbedder(spec, size, text_size, kernels)
    return Pooler(spec, size, text_size, kernels)
