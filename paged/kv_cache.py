"""KVCache: the tensors that blocks live in, and how many blocks fit."""

from __future__ import annotations

import torch
from torch import Tensor

from .models.config import ModelConfig


class KVCache:
    """K and V of every layer, in blocks. Its memory is never initialised: nobody reads an unowned slot."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (config.num_layers, 2, num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.data = torch.empty(shape, dtype=dtype, device=device)
        self._layers = [(layer[0], layer[1]) for layer in self.data]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._layers[index]

    @property
    def num_bytes(self) -> int:
        """Size of all layers together."""
        return self.data.numel() * self.data.element_size()

    def describe(self) -> str:
        """The cache in one line: blocks, tokens, bytes."""
        return (
            f"KV cache: {self.num_blocks:,} blocks of {self.block_size} = "
            f"{self.num_blocks * self.block_size:,} tokens, {self.num_bytes / 2**20:,.1f} MiB"
        )


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    return config.kv_elements_per_token * block_size * dtype.itemsize
