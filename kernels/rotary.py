"""Rotary position embedding, in place on query and key."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .checks import check_dtype, check_last_dim_contiguous, check_multiple, check_shape


@triton.jit
def _rotate_heads(
    x_ptr,
    cos,  # [BLOCK_HALF]
    sin,  # [BLOCK_HALF]
    stride_head: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotate one token's heads."""
    dtype = x_ptr.dtype.element_ty
    offs_d = tl.arange(0, BLOCK_HALF)
    for first in tl.static_range(0, NUM_HEADS, BLOCK_HEADS):
        head = first + tl.arange(0, BLOCK_HEADS)
        mask = (head < NUM_HEADS)[:, None] & (offs_d < HALF)[None, :]
        offs = head[:, None] * stride_head + offs_d[None, :]
        # [BLOCK_HEADS, BLOCK_HALF]
        x1 = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptr + offs + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(x_ptr + offs, (x1 * cos[None, :] - x2 * sin[None, :]).to(dtype), mask=mask)
        tl.store(x_ptr + offs + HALF, (x2 * cos[None, :] + x1 * sin[None, :]).to(dtype), mask=mask)


@triton.jit
def _rotary_kernel(
    query_ptr,
    key_ptr,
    cos_ptr,
    sin_ptr,
    stride_query_token: tl.constexpr,
    stride_query_head: tl.constexpr,
    stride_key_token: tl.constexpr,
    stride_key_head: tl.constexpr,
    stride_cos: tl.constexpr,
    stride_sin: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_KV_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + token * stride_cos + offs_d, mask=offs_d < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * stride_sin + offs_d, mask=offs_d < HALF, other=0.0)
    query_ptr += token * stride_query_token
    key_ptr += token * stride_key_token
    _rotate_heads(query_ptr, cos, sin, stride_query_head, NUM_HEADS, HALF, BLOCK_HEADS, BLOCK_HALF)
    _rotate_heads(key_ptr, cos, sin, stride_key_head, NUM_KV_HEADS, HALF, BLOCK_KV_HEADS, BLOCK_HALF)


def rotary(
    query: Tensor,  # [num_tokens, num_heads, head_dim], in place
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim], in place
    cos: Tensor,  # f32[num_tokens, head_dim // 2]
    sin: Tensor,  # f32[num_tokens, head_dim // 2]
) -> None:
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) on the halves of every head (Su et al. 2021).

    Neox order, HF Llama's `rotate_half`, in float32. Query and key may be views into one tensor. Raises
    ValueError for a shape, dtype or stride that does not fit.
    """
    num_tokens, num_heads, head_dim = query.shape
    check_dtype("query", query)
    check_multiple("head_dim", head_dim, "the two halves", 2)
    check_shape("key", key, (num_tokens, None, head_dim), query.dtype)
    check_shape("cos", cos, (num_tokens, head_dim // 2), torch.float32)
    check_shape("sin", sin, (num_tokens, head_dim // 2), torch.float32)
    for name, tensor in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
        check_last_dim_contiguous(name, tensor)
    num_kv_heads = key.shape[1]
    block_half = triton.next_power_of_2(head_dim // 2)
    max_heads = max(1, 2048 // block_half)
    _rotary_kernel[(num_tokens,)](
        query_ptr=query,
        key_ptr=key,
        cos_ptr=cos,
        sin_ptr=sin,
        stride_query_token=query.stride(0),
        stride_query_head=query.stride(1),
        stride_key_token=key.stride(0),
        stride_key_head=key.stride(1),
        stride_cos=cos.stride(0),
        stride_sin=sin.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_HEADS=min(max_heads, triton.next_power_of_2(num_heads)),
        BLOCK_KV_HEADS=min(max_heads, triton.next_power_of_2(num_kv_heads)),
        BLOCK_HALF=block_half,
        num_warps=4,
    )


def rotary_cost(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, element_size: int
) -> tuple[int, int]:
    """(bytes, flops): every head read and written, cos and sin read once a token; 3 operations a value."""
    values = num_tokens * (num_heads + num_kv_heads) * head_dim
    return 2 * values * element_size + num_tokens * head_dim * 4, 3 * values
