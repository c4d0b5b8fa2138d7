"""QK norm, rotary embeddings, and the store of K and V into the cache."""

import torch
from torch import Tensor

from ...checked import checked
from ...reference import quantize


@checked
def rotary_store_kv(
    qkv: Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: query, key and value heads
    cos: Tensor,  # f32[num_tokens, head_dim // 2]
    sin: Tensor,  # f32[num_tokens, head_dim // 2]
    key_cache: Tensor | None,  # [num_blocks, block_size, num_kv_heads, head_dim], written in place
    value_cache: Tensor | None,  # like key_cache, written in place
    slot_mapping: Tensor | None,  # i64[num_tokens]
    *,
    query_norm_weight: Tensor | None = None,  # [head_dim]; both or neither, where K is rotated
    key_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
    key_scales: Tensor | None = None,  # f32[num_blocks, num_kv_heads, block_size], of a quantised cache
    value_scales: Tensor | None = None,
    fixed_key_scales: Tensor | None = None,  # f32[num_kv_heads]; None: the scale follows from each head
    fixed_value_scales: Tensor | None = None,
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """Apply QK norm and rotary embeddings, and store K and V; see `reference.rotary_store_kv`."""
    num_kv_heads = 0 if key_cache is None else key_cache.shape[2]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    # Query and key heads go together: half the calls, which take most of the time of a decode.
    heads, value = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
    query: Tensor = heads[:, :num_heads]
    half1, half2 = heads.chunk(2, dim=-1)
    if query_norm_weight is not None:
        x32 = heads.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True).add_(eps))
        numbers = (query_norm_weight, num_heads), (key_norm_weight, num_kv_heads)
        weight = torch.cat([weight.expand(n, -1) for weight, n in numbers if weight is not None])
        x1, x2 = _weighted(x32 * scale, weight, qkv.dtype, unit_offset).float().chunk(2, dim=-1)
    else:
        x1 = half1.float()
        x2 = half2.float()
    cos = cos[:, None]
    sin = sin[:, None]
    rotated1 = (x1 * cos).sub_(x2 * sin)
    rotated2 = (x2 * cos).add_(x1 * sin)
    half1.copy_(rotated1)
    half2.copy_(rotated2)
    if key_cache is not None and value_cache is not None and slot_mapping is not None:
        _store(heads[:, num_heads:], key_cache, slot_mapping, key_scales, fixed_key_scales)
        _store(value, value_cache, slot_mapping, value_scales, fixed_value_scales)
    return query


def _weighted(x32: Tensor, weight: Tensor, dtype: torch.dtype, unit_offset: bool) -> Tensor:
    return (x32 * (1 + weight.float())).to(dtype) if unit_offset else x32.to(dtype) * weight


def _store(x: Tensor, cache: Tensor, slots: Tensor, scales: Tensor | None, fixed: Tensor | None) -> None:
    """Store K or V, [num_tokens, num_kv_heads, head_dim], in their slots, quantised if there are scales."""
    block_size = cache.shape[1]
    if scales is None:
        x = x.to(cache.dtype)
    else:
        x, scale = quantize(x, cache.dtype, fixed)
        scales[slots // block_size, :, slots % block_size] = scale
        # index_copy_ takes no fp8 on a CPU
        x = x.view(torch.int8)
        cache = cache.view(torch.int8)
    if cache.stride(0) == block_size * cache.stride(1):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, x)
    else:
        cache[slots // block_size, slots % block_size] = x
