"""Blocks of the whole model, put together of what its parts hold of them, and divided again.

Saved prefixes hold blocks of the whole model, so that a file loads into any number of parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ..config import ModelConfig
from ..part import ModelPart
from .kv_cache import KVCache
from .layout import CacheLayout

Blocks = Mapping[str, Tensor]  # [num_planes, num_blocks, numbers of a block] by the names of KVCache.tensors


def join_blocks(
    config: ModelConfig, block_size: int, parts: Iterable[tuple[ModelPart, Blocks]]
) -> dict[str, Tensor]:
    """Return blocks of the whole model, of which each part has its layers and heads.

    Space of a block that no layer uses is zero.
    """
    whole: KVCache | None = None
    for part, blocks in parts:
        if whole is None:
            whole = _empty_like(config, block_size, None, blocks)
        own = _empty_like(config, block_size, part, blocks)
        for name, tensor in own.tensors.items():
            tensor.copy_(blocks[name])
        for of_whole, of_part in _shared(config, part, whole, own):
            of_whole.copy_(of_part)
    assert whole is not None, "a model has at least one part"
    return whole.tensors


def cut_blocks(config: ModelConfig, block_size: int, part: ModelPart, blocks: Blocks) -> dict[str, Tensor]:
    """Return what a part holds of blocks of the whole model."""
    whole = _empty_like(config, block_size, None, blocks)
    for name, tensor in whole.tensors.items():
        tensor.copy_(blocks[name])
    own = _empty_like(config, block_size, part, blocks)
    for of_whole, of_part in _shared(config, part, whole, own):
        of_part.copy_(of_whole)
    return own.tensors


def _empty_like(config: ModelConfig, block_size: int, part: ModelPart | None, blocks: Blocks) -> KVCache:
    """Return a cache on the host with as many blocks, of the whole model or of a part."""
    numbers = blocks["kv"]
    layout = CacheLayout.of(config, block_size, part)
    cache = KVCache(config, numbers.shape[1], block_size, numbers.dtype, torch.device("cpu"), layout=layout)
    for tensor in cache.tensors.values():
        tensor.zero_()
    return cache


def _shared(
    config: ModelConfig, part: ModelPart, whole: KVCache, own: KVCache
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the numbers of each layer's heads that both caches have, in the whole and in the part."""
    for layer in part.layers:
        spec = config.layers[layer].attention
        if not spec.has_kv:
            continue
        heads = part.shard.kv_heads(spec.kv.num_kv_heads)
        # The dimension of heads, of key, value, and their scales.
        for of_whole, of_part, dim in zip(whole.layer(layer), own.layer(layer), (2, 2, 1, 1), strict=True):
            if of_whole is not None and of_part is not None:
                yield of_whole.narrow(dim, heads.start, len(heads)), of_part
