"""The operations in plain torch, written for speed on a CPU: what attention_backend="torch" runs."""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(
    x: Tensor,  # [..., size]
    weight: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
) -> Tensor:  # [..., size]
    """weight * x / sqrt(mean(x²) + eps), after residual += x where one is given; see `reference.rms_norm`."""
    if residual is not None:
        x = residual.add_(x)
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True).add_(eps))
    return ((x32 * scale).to(x.dtype) * weight).contiguous()


def rotary(
    query: Tensor,  # [num_tokens, num_heads, head_dim], in place
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim], in place
    cos: Tensor,  # f32[num_tokens, head_dim // 2]
    sin: Tensor,  # f32[num_tokens, head_dim // 2]
) -> None:
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) on the halves of every head; see `reference.rotary`."""
    cos, sin = cos[:, None], sin[:, None]
    for x in (query, key):
        half1, half2 = x.chunk(2, dim=-1)
        x1, x2 = half1.float(), half2.float()
        rotated1 = x1 * cos - x2 * sin
        half2.copy_(x2 * cos + x1 * sin)
        half1.copy_(rotated1)


def silu_and_mul(x: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    """silu(gate) * up, where x is gate and up side by side; see `reference.silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def store_kv(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # like key
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], written in place
    value_cache: Tensor,  # like key_cache, written in place
    slot_mapping: Tensor,  # i64[num_tokens]
) -> None:
    """cache[slot // block_size, slot % block_size] = new token, for K and V; see `reference.store_kv`."""
    block_size = key_cache.shape[1]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    key_cache[block, offset] = key
    value_cache[block, offset] = value


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,  # like key_cache
    block_tables: Tensor,  # i32[num_seqs, max_blocks_per_seq]
    seq_lens: Tensor,  # i32[num_seqs], computed and new tokens
    cu_seqlens_q: Tensor,  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    *,
    scale: float,
    max_seqlen_q: int,  # noqa: ARG001
    sliding_window: int | None = None,
) -> Tensor:  # like query
    """softmax(scale q kᵀ + causal mask) v over gathered blocks; see `reference.paged_attention`."""
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    bounds = cu_seqlens_q.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        start, end = bounds[i], bounds[i + 1]
        query_len = end - start
        if query_len == 0:
            continue
        low = 0 if sliding_window is None else max(0, seq_len - query_len - sliding_window + 1)
        first_block = low // block_size
        blocks = block_tables[i, first_block : -(-seq_len // block_size)]
        tokens = slice(low - first_block * block_size, seq_len - first_block * block_size)
        # [num_kv_heads, 1, seq_len - low, head_dim]
        # index_select copies whole blocks: 3 times faster here than key_cache[blocks].
        k = key_cache.index_select(0, blocks).flatten(0, 1)[tokens].transpose(0, 1)[:, None]
        v = value_cache.index_select(0, blocks).flatten(0, 1)[tokens].transpose(0, 1)[:, None]
        if query_len == 1:
            # The group as query rows: one pass over K and V, where enable_gqa in bfloat16 is 8 times slower.
            q = query[start].reshape(num_kv_heads, 1, group, head_dim)
            out[start] = F.scaled_dot_product_attention(q, k, v, scale=scale).view(num_heads, head_dim)
            continue
        q = query[start:end].unflatten(1, (num_kv_heads, group)).permute(1, 2, 0, 3)
        mask = None
        if query_len < seq_len or sliding_window is not None:
            mask = _mask(query_len, seq_len, low, sliding_window, query.device)
        attended = F.scaled_dot_product_attention(
            q,
            k.expand(-1, group, -1, -1),
            v.expand(-1, group, -1, -1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
        )  # [num_kv_heads, group, query_len, head_dim]
        out[start:end] = attended.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _mask(query_len: int, seq_len: int, low: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """Which keys [low, seq_len) each of the last tokens sees: bool[query_len, seq_len - low]."""
    query_pos = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    key_pos = torch.arange(low, seq_len, device=device)[None, :]
    seen = key_pos <= query_pos
    return seen if sliding_window is None else seen & (key_pos > query_pos - sliding_window)
