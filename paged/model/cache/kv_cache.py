"""KVCache: the tensors that hold the blocks, on the device and on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...architectures.config import ModelConfig
from ...architectures.spec import KVShape
from ...kernels.checks import QUANTIZED_DTYPES
from .layout import CacheLayout, Place

if TYPE_CHECKING:
    from ...kernels.operations import Kernels
    from .states import StateCache

DRAFT = "draft_"  # begins the names of a draft model's tensors


class LayerCache(NamedTuple):
    """One layer's part of the KV cache."""

    key: Tensor  # [num_blocks, block_size, num_kv_heads, key_dim]
    value: Tensor  # [num_blocks, block_size, num_kv_heads, value_dim], maybe a view of key
    key_scales: Tensor | None  # f32[num_blocks, num_kv_heads, block_size]; None: not quantised
    value_scales: Tensor | None  # like key_scales


class KVCache:
    """The cache of K and V in blocks. Memory is not initialised: a slot is written before it is read.

    A block holds block_size tokens for the layers of one group; every block fits every group, see
    `CacheLayout`. group_of[layer] is the layer's group, which selects the block table. A layer that reads the
    K and V of another layer has that layer's group and cache.

    tensors: "kv" and, if the cache is quantised, "scales_H" for each number H of KV heads: [num_planes,
        num_blocks, numbers of a block]. Moving a block means moving it in all tensors.
    host: the same tensors for blocks in host memory.
    draft: the cache of a draft model in the same blocks. Moving a block moves this part too.
    states: the recurrent states of layers that have them instead of K and V; None if the model has no such
        layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
        *,
        layout: CacheLayout | None = None,
        draft: KVCache | None = None,
        states: StateCache | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self.draft = draft
        self.states = states
        layout = CacheLayout.of(config, block_size) if layout is None else layout
        self.num_groups = len(layout.groups)
        sizes = {"kv": (*layout.planes, dtype)}
        if dtype in QUANTIZED_DTYPES:
            sizes |= {
                f"scales_{heads}": (num_planes, heads * block_size, torch.float32)
                for heads, num_planes in layout.scale_planes.items()
            }
        pinned = device.type == "cuda" and num_host_blocks > 0
        self.tensors = dict[str, Tensor]()
        self.host = dict[str, Tensor]()
        for name, (num_planes, size, kind) in sizes.items():
            self.tensors[name] = torch.empty((num_planes, num_blocks, size), dtype=kind, device=device)
            self.host[name] = torch.empty((num_planes, num_host_blocks, size), dtype=kind, pin_memory=pinned)
        caches: dict[int, LayerCache] = {}
        groups = {layer: number for number, group in enumerate(layout.groups) for layer in group.layers}
        for layers in layout.layers:
            for index, layer in enumerate(layers):
                caches[layer] = self._view(layout.shapes[layer], layout.places[layer], index)
        sources = config.kv_sources.items()
        self.group_of = {layer: groups[source] for layer, source in sources}
        self._layers = {layer: caches[source] for layer, source in sources if source in caches}

    def _view(self, shape: KVShape, places: list[Place], index: int) -> LayerCache:
        """Return views of one layer's part. index: of the layer in its group."""
        dims = (shape.key_dim,) if shape.value_in_key else (shape.key_dim, shape.value_dim)
        parts = []
        for dim, (plane, offset) in zip(dims, places, strict=True):
            numbers = self.tensors["kv"][plane]
            rest = (shape.num_kv_heads * dim, dim, 1)
            parts.append(
                numbers.as_strided(
                    (self.num_blocks, self.block_size, shape.num_kv_heads, dim),
                    (numbers.stride(0), *rest),
                    numbers.storage_offset() + offset,
                )
            )
        key = parts[0]
        value = parts[0][..., : shape.value_dim] if shape.value_in_key else parts[1]
        scales = self.tensors.get(f"scales_{shape.num_kv_heads}")
        if scales is None:
            return LayerCache(key, value, None, None)
        own = scales[2 * index : 2 * index + 2].view(2, self.num_blocks, shape.num_kv_heads, self.block_size)
        return LayerCache(key, value, own[0], own[0 if shape.value_in_key else 1])

    def layer(self, index: int) -> LayerCache:
        """Return one layer's part of the cache."""
        return self._layers[index]

    def copy_blocks(
        self,
        pairs: Tensor,  # i64[num_pairs, 2], (from, to), on the device
        kernels: Kernels,
    ) -> None:
        """Copy blocks in all layers. No block may be both source and target."""
        for tensor, _ in self._pairs():
            kernels.copy_blocks(_planes(tensor), pairs)

    def swap_out(
        self,
        pairs: Tensor,  # i64[num_pairs, 2], (block, host block), on the device
        kernels: Kernels,
    ) -> None:
        """Copy blocks to host memory."""
        for tensor, host in self._pairs():
            kernels.copy_blocks(_planes(tensor), pairs, _planes(host))

    def swap_in(
        self,
        pairs: Tensor,  # i64[num_pairs, 2], (host block, block), on the device
        kernels: Kernels,
    ) -> None:
        """Copy blocks from host memory."""
        for tensor, host in self._pairs():
            kernels.copy_blocks(_planes(host), pairs, _planes(tensor))

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every tensor and its counterpart on the host, the draft model's tensors last."""
        yield from zip(self.tensors.values(), self.host.values(), strict=True)
        if self.draft is not None:
            yield from self.draft._pairs()

    @property
    def all_tensors(self) -> dict[str, Tensor]:
        """The tensors of this cache and, under other names, of the draft model's cache."""
        of_draft = {} if self.draft is None else self.draft.tensors
        return self.tensors | {DRAFT + name: tensor for name, tensor in of_draft.items()}

    @property
    def num_bytes(self) -> int:
        """The size of all blocks on the device, in bytes."""
        return sum(tensor.nbytes for tensor, _ in self._pairs())

    def describe(self) -> str:
        """Describe blocks, tokens and bytes of the cache in one line."""
        tokens = f"{self.num_blocks * self.block_size // self.num_groups:,} tokens"
        if self.num_groups > 1:  # windows free the blocks that fall out of them
            tokens = f"at least {tokens} in {self.num_groups} layer groups"
        text = (
            f"KV cache: {self.num_blocks:,} blocks of {self.block_size} = {tokens}, "
            f"{self.num_bytes / 2**20:,.1f} MiB"
        )
        return text + (f", {self.num_host_blocks:,} on the host" if self.num_host_blocks else "")


def _planes(tensor: Tensor) -> Tensor:
    """View [num_planes, num_blocks, size] as `copy_blocks` takes it, with five dimensions."""
    return tensor[..., None, None]
