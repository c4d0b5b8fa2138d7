"""Write the new tokens' K and V into their slots of the cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_dtype, check_last_dim_contiguous, check_shape


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])  # a view at any offset
def _store_kv_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_mapping_ptr,
    stride_key_token: tl.constexpr,
    stride_key_head: tl.constexpr,
    stride_value_token: tl.constexpr,
    stride_value_head: tl.constexpr,
    stride_cache_block: tl.constexpr,
    stride_cache_slot: tl.constexpr,
    stride_cache_head: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    offs_d = tl.arange(0, BLOCK_DIM)
    mask = (head < NUM_KV_HEADS)[:, None] & (offs_d < HEAD_DIM)[None, :]
    slot = tl.load(slot_mapping_ptr + token)
    offs_cache = slot // BLOCK_SIZE * stride_cache_block + slot % BLOCK_SIZE * stride_cache_slot
    offs_cache += head[:, None] * stride_cache_head + offs_d[None, :]
    offs_key = token * stride_key_token + head[:, None] * stride_key_head + offs_d[None, :]
    offs_value = token * stride_value_token + head[:, None] * stride_value_head + offs_d[None, :]
    # [BLOCK_HEADS, BLOCK_DIM]
    tl.store(key_cache_ptr + offs_cache, tl.load(key_ptr + offs_key, mask=mask), mask=mask)
    tl.store(value_cache_ptr + offs_cache, tl.load(value_ptr + offs_value, mask=mask), mask=mask)


def store_kv(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # like key
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], written in place
    value_cache: Tensor,  # like key_cache, written in place
    slot_mapping: Tensor,  # i64[num_tokens]
) -> None:
    """cache[slot // block_size, slot % block_size] = new token, for K and V (Kwon et al. 2023).

    Two tokens must not share a slot. Raises ValueError for a shape, dtype or stride that does not fit; slots
    are not read on the host, so one outside the cache is the caller's fault and not seen.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    block_size = key_cache.shape[1]
    check_dtype("key", key)
    check_shape("value", value, key.shape, key.dtype)
    check_shape("key_cache", key_cache, (None, None, num_kv_heads, head_dim), key.dtype)
    check_shape("value_cache", value_cache, key_cache.shape, key.dtype)
    check_shape("slot_mapping", slot_mapping, (num_tokens,), torch.int64)
    tensors = {"key": key, "value": value, "key_cache": key_cache, "slot_mapping": slot_mapping}
    for name, tensor in tensors.items():
        check_last_dim_contiguous(name, tensor)
    if value_cache.stride() != key_cache.stride():
        raise ValueError(
            f"value_cache must have key_cache's strides {key_cache.stride()}, got {value_cache.stride()}"
        )
    block_dim = triton.next_power_of_2(head_dim)
    block_heads = min(triton.next_power_of_2(num_kv_heads), max(1, 2048 // block_dim))
    _store_kv_kernel[(num_tokens, triton.cdiv(num_kv_heads, block_heads))](
        key_ptr=key,
        value_ptr=value,
        key_cache_ptr=key_cache,
        value_cache_ptr=value_cache,
        slot_mapping_ptr=slot_mapping,
        stride_key_token=key.stride(0),
        stride_key_head=key.stride(1),
        stride_value_token=value.stride(0),
        stride_value_head=value.stride(1),
        stride_cache_block=key_cache.stride(0),
        stride_cache_slot=key_cache.stride(1),
        stride_cache_head=key_cache.stride(2),
        BLOCK_SIZE=block_size,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        num_warps=4,
    )


def store_kv_cost(num_tokens: int, num_kv_heads: int, head_dim: int, element_size: int) -> tuple[int, int]:
    """(bytes, flops): K and V read and written, one slot read for each token."""
    return num_tokens * (4 * num_kv_heads * head_dim * element_size + 8), 0
