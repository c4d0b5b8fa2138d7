"""KVCache: the tensors that blocks live in, on the device and on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .kernels.backend import Kernels
from .models.config import ModelConfig

Pairs = Sequence[tuple[int, int]]


class KVCache:
    """K and V in blocks. Its memory is never initialised: nobody reads an unowned slot.

    A block holds block_size tokens in the layers of one group. All groups have as many layers, so that any
    block serves any group; `group_of` says which of a step's block tables a layer goes by.
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
        self.data = torch.empty(shape, dtype=dtype, device=device)
        host_shape = (*shape[:2], num_host_blocks, *shape[3:])
        self.host = torch.empty(
            host_shape, dtype=dtype, pin_memory=device.type == "cuda" and num_host_blocks > 0
        )
        place = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
        self.group_of = [place[layer][0] for layer in range(config.num_layers)]
        places_of = [place[layer][1] for layer in range(config.num_layers)]
        self._layers = [(self.data[i, 0], self.data[i, 1]) for i in places_of]
        self.num_groups = len(groups)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        return self._layers[index]

    def copy_blocks(self, pairs: Pairs, kernels: Kernels) -> None:
        """Copy blocks (from, to) in all layers at once. No block may be both."""
        kernels.copy_blocks(self.data.flatten(0, 1), _as_tensor(pairs, self.data.device))

    def swap_out(self, pairs: Pairs) -> None:
        """Copy blocks to host memory: (block, host block)."""
        source, target = _as_tensor(pairs, torch.device("cpu")).unbind(1)
        self.host[:, :, target] = self.data[:, :, source.to(self.data.device)].to(self.host.device)

    def swap_in(self, pairs: Pairs) -> None:
        """Copy blocks from host memory: (host block, block)."""
        source, target = _as_tensor(pairs, torch.device("cpu")).unbind(1)
        self.data[:, :, target.to(self.data.device)] = self.host[:, :, source].to(self.data.device)

    @property
    def num_bytes(self) -> int:
        """Size of all blocks on the device together."""
        return self.data.numel() * self.data.element_size()

    def describe(self) -> str:
        """The cache in one line: blocks, tokens, bytes."""
        tokens = f"{self.num_blocks * self.block_size // self.num_groups:,} tokens"
        if self.num_groups > 1:
            tokens += f" of {self.num_groups} layer groups, more where their windows are passed"
        text = (
            f"KV cache: {self.num_blocks:,} blocks of {self.block_size} = {tokens}, "
            f"{self.num_bytes / 2**20:,.1f} MiB"
        )
        return text + (f", {self.num_host_blocks:,} on the host" if self.num_host_blocks else "")


def _as_tensor(pairs: Pairs, device: torch.device) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64).to(device)
