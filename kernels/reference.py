"""What every kernel must compute, in plain torch: the oracle the other implementations are tested against.

Loops over sequences, float32 arithmetic (float64 for float64 inputs), results cast to the input's dtype.
"""

import torch
from torch import Tensor


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def rms_norm(
    x: Tensor,  # [..., size]
    weight: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
) -> Tensor:  # [..., size]
    """weight * x / sqrt(mean(x²) + eps), after residual += x where one is given (Zhang & Sennrich 2019).

    The normalised value is rounded to x's dtype before the weight multiplies it, as HF's LlamaRMSNorm does.
    """
    if residual is not None:
        residual.copy_(_upcast(residual) + _upcast(x))
        x = residual
    x32 = _upcast(x)
    normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (normed.to(x.dtype) * weight).contiguous()


def rotary(
    query: Tensor,  # [num_tokens, num_heads, head_dim], in place
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim], in place
    cos: Tensor,  # f32[num_tokens, head_dim // 2]
    sin: Tensor,  # f32[num_tokens, head_dim // 2]
) -> None:
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin) on the halves of every head (Su et al. 2021)."""
    for x in (query, key):
        x1, x2 = _upcast(x).chunk(2, dim=-1)
        c, s = cos[:, None].to(x1.dtype), sin[:, None].to(x1.dtype)
        x.copy_(torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), dim=-1))


def silu_and_mul(x: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    """silu(gate) * up, where x is gate and up side by side (Shazeer 2020)."""
    gate, up = _upcast(x).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


def store_kv(
    key: Tensor,  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor,  # like key
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], written in place
    value_cache: Tensor,  # like key_cache, written in place
    slot_mapping: Tensor,  # i64[num_tokens]
) -> None:
    """cache[slot // block_size, slot % block_size] = new token, for K and V."""
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        key_cache[slot // block_size, slot % block_size] = key[token]
        value_cache[slot // block_size, slot % block_size] = value[token]


def copy_blocks(
    cache: Tensor,  # [num_planes, num_blocks, block_size, num_kv_heads, head_dim], written in place
    pairs: Tensor,  # i64[num_pairs, 2], (from, to)
) -> None:
    """cache[:, to] = cache[:, from]; no block is both, and none is a target twice."""
    # A slice for each pair: 2 to 5 times faster on a CPU than index_copy_ of all, and pairs are few.
    for source, target in pairs.tolist():
        cache[:, target] = cache[:, source]


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
    """softmax(scale q kᵀ + causal mask) v for every sequence's new tokens over its paged K and V.

    New token j of a sequence stands at position seq_len - query_len + j and sees the positions up to its own,
    only the last `sliding_window` of them where one is given (itself included).
    """
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    bounds = cu_seqlens_q.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        start, end = bounds[i], bounds[i + 1]
        if start == end:
            continue
        q = _upcast(query[start:end])  # [query_len, num_heads, head_dim]
        first = seq_len - (end - start)
        # Slots outside the window are not read: their blocks may already be another sequence's.
        low = 0 if sliding_window is None else max(0, first - sliding_window + 1)
        k = _gather(key_cache, block_tables[i], low, seq_len, q.shape[1])
        v = _gather(value_cache, block_tables[i], low, seq_len, q.shape[1])
        query_pos = torch.arange(first, seq_len, device=query.device)[:, None]
        key_pos = torch.arange(low, seq_len, device=query.device)[None, :]
        seen = key_pos <= query_pos
        if sliding_window is not None:
            seen &= key_pos > query_pos - sliding_window
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
    return out


def _gather(cache: Tensor, block_table: Tensor, low: int, high: int, num_heads: int) -> Tensor:
    """The tokens [low, high) of one sequence, one copy per query head: [high - low, num_heads, head_dim]."""
    block_size, num_kv_heads = cache.shape[1], cache.shape[2]
    pos = torch.arange(low, high, device=cache.device)
    tokens = cache[block_table[pos // block_size].long(), pos % block_size]
    return _upcast(tokens).repeat_interleave(num_heads // num_kv_heads, dim=1)
