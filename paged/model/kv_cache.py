"""KVCache: the tensors that hold the blocks, on the device and on the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.backend import Kernels
from ..kernels.checks import QUANTIZED_DTYPES
from .config import ModelConfig


class LayerCache(NamedTuple):
    """One layer's part of the cache."""

    key: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value: Tensor  # like key
    key_scales: Tensor | None  # f32[num_blocks, num_kv_heads, block_size]; None: not quantised
    value_scales: Tensor | None  # like key_scales


class KVCache:
    """K and V in blocks. Memory is not initialised: a slot is written before it is read.

    A block holds block_size tokens for the layers of one group. All groups have room for equally many layers,
    so that any block serves any group. group_of[layer] is the layer's group, and selects its block table.

    tensors: "kv" and, if the cache is quantised, "scales": [layers of a group, K and V, num_blocks, ...]
        each. To move a block is to move it in all of them.
    host: the same tensors for blocks in host memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        self.num_blocks, self.block_size, self.num_host_blocks = num_blocks, block_size, num_host_blocks
        groups = config.layer_groups
        shape = (len(groups[0].layers), 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        data = torch.empty(shape, dtype=dtype, device=device)
        scales: Tensor | None = None
        self.tensors = {"kv": data}
        if dtype in QUANTIZED_DTYPES:
            scales_shape = (*shape[:3], config.num_kv_heads, block_size)
            scales = self.tensors["scales"] = torch.empty(scales_shape, dtype=torch.float32, device=device)
        pinned = device.type == "cuda" and num_host_blocks > 0
        self.host = {
            name: torch.empty(
                (*tensor.shape[:2], num_host_blocks, *tensor.shape[3:]), dtype=tensor.dtype, pin_memory=pinned
            )
            for name, tensor in self.tensors.items()
        }
        place = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
        self.group_of = [place[layer][0] for layer in range(config.num_layers)]
        places_of = [place[layer][1] for layer in range(config.num_layers)]
        self._layers = [
            LayerCache(*data[i], *((None, None) if scales is None else scales[i])) for i in places_of
        ]
        self.num_groups = len(groups)

    def layer(self, index: int) -> LayerCache:
        """Return one layer's part."""
        return self._layers[index]

    def copy_blocks(
        self,
        pairs: Tensor,  # i64[num_pairs, 2], (from, to), on the device
        kernels: Kernels,
    ) -> None:
        """Copy blocks in all layers. No block may be both source and target."""
        for tensor in self.tensors.values():
            kernels.copy_blocks(_planes(tensor), pairs)

    def swap_out(
        self,
        pairs: Tensor,  # i64[num_pairs, 2], (block, host block), on the device
        kernels: Kernels,
    ) -> None:
        """Copy blocks to host memory."""
        for name, tensor in self.tensors.items():
            kernels.copy_blocks(_planes(tensor), pairs, _planes(self.host[name]))

    def swap_in(
        self,
        pairs: Tensor,  # i64[num_pairs, 2], (host block, block), on the device
        kernels: Kernels,
    ) -> None:
        """Copy blocks from host memory."""
        for name, tensor in self.tensors.items():
            kernels.copy_blocks(_planes(self.host[name]), pairs, _planes(tensor))

    @property
    def num_bytes(self) -> int:
        """The size of all blocks on the device."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def describe(self) -> str:
        """Return blocks, tokens and bytes of the cache in one line."""
        tokens = f"{self.num_blocks * self.block_size // self.num_groups:,} tokens"
        if self.num_groups > 1:
            tokens += f" of {self.num_groups} layer groups, more where their windows are passed"
        text = (
            f"KV cache: {self.num_blocks:,} blocks of {self.block_size} = {tokens}, "
            f"{self.num_bytes / 2**20:,.1f} MiB"
        )
        return text + (f", {self.num_host_blocks:,} on the host" if self.num_host_blocks else "")


def _planes(tensor: Tensor) -> Tensor:
    """View the cache's K and V, or their scales, as [num_planes, num_blocks, ..., ..., ...]."""
    planes = tensor.flatten(0, 1)
    return planes if planes.dim() == 5 else planes[..., None]
