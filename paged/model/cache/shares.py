"""Blocks of the whole model, put together of what its parts hold of them, and divided again.

Saved prefixes hold blocks of the whole model, so that a file loads into any number of parts. A block has the
layers of its group alone: what other groups would have at the same places is of no meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ...architectures.config import ModelConfig
from ..part import ModelPart
from .kv_cache import KVCache
from .layout import CacheLayout

Blocks = Mapping[str, Tensor]  # [num_planes, num_blocks, numbers of a block] by the names of KVCache.tensors


def empty_blocks(
    config: ModelConfig, block_size: int, num_blocks: int, dtype: torch.dtype, part: ModelPart | None = None
) -> KVCache:
    """Return zeroed blocks in host memory, with the cache layout of the whole model or of a part."""
    layout = CacheLayout.of(config, block_size, part)
    cache = KVCache(config, num_blocks, block_size, dtype, torch.device("cpu"), layout=layout)
    for tensor in cache.tensors.values():
        tensor.zero_()
    return cache


def join_blocks(
    config: ModelConfig, block_size: int, groups: Sequence[int], parts: Iterable[tuple[ModelPart, Blocks]]
) -> dict[str, Tensor]:
    """Join the blocks of all parts of a model, each with its own layers and heads, to blocks of the whole
    model.

    groups: the layer group of each block. Memory that belongs to no layer is zero.
    """
    whole: KVCache | None = None
    for part, blocks in parts:
        own = _cache_of(config, block_size, part, blocks)
        if whole is None:
            whole = empty_blocks(config, block_size, len(groups), blocks["kv"].dtype)
        _copy_shared(config, groups, part, own, whole)
    assert whole is not None, "a model has at least one part"
    return whole.tensors


def cut_blocks(
    config: ModelConfig, block_size: int, groups: Sequence[int], part: ModelPart, blocks: Blocks
) -> dict[str, Tensor]:
    """Extract the share of one part from blocks of the whole model.

    groups: the layer group of each block.
    """
    whole = _cache_of(config, block_size, None, blocks)
    own = empty_blocks(config, block_size, len(groups), blocks["kv"].dtype, part)
    _copy_shared(config, groups, part, own, whole, to_part=True)
    return own.tensors


def _cache_of(config: ModelConfig, block_size: int, part: ModelPart | None, blocks: Blocks) -> KVCache:
    numbers = blocks["kv"]
    cache = empty_blocks(config, block_size, numbers.shape[1], numbers.dtype, part)
    for name, tensor in cache.tensors.items():
        tensor.copy_(blocks[name])
    return cache


def _copy_shared(
    config: ModelConfig,
    groups: Sequence[int],
    part: ModelPart,
    own: KVCache,
    whole: KVCache,
    *,
    to_part: bool = False,
) -> None:
    """Copy what a part has of each block to the whole, or back."""
    for number, group in enumerate(config.layer_groups):
        blocks = torch.tensor([i for i, each in enumerate(groups) if each == number], dtype=torch.int64)
        for layer in group.layers if len(blocks) else ():
            if layer not in part.layers:
                continue
            heads = part.shard.kv_heads(config.kv_shapes[layer].num_kv_heads)
            pairs = zip(own.layer(layer), whole.layer(layer), strict=True)
            # The dimension of heads, of key, value, and their scales.
            for (of_part, of_whole), dim in zip(pairs, (2, 2, 1, 1), strict=True):
                if of_part is None or of_whole is None:
                    continue
                of_heads = of_whole.narrow(dim, heads.start, len(heads))
                source, target = (of_heads, of_part) if to_part else (of_part, of_heads)
                target[blocks] = source[blocks]
