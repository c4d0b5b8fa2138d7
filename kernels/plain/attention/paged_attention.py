"""Attention over paged K and V, a sequence at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import reference
from ...attention_options import AttentionOptions, AttentionPlan, check_attention, check_plan
from ...checks import is_trusted


def plan_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    options: AttentionOptions,
) -> AttentionPlan:
    """Check the inputs. Return an empty plan, since nothing is computed ahead of the layers."""
    if not is_trusted():
        inputs = query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q
        check_attention(*inputs, options, any_layout=True)
    return AttentionPlan(())


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,  # like key_cache
    block_tables: Tensor,  # i32[num_seqs, max_blocks_per_seq]
    seq_lens: Tensor,  # i32[num_seqs], computed and new tokens
    cu_seqlens_q: Tensor,  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    options: AttentionOptions,
    plan: AttentionPlan | None = None,
) -> Tensor:  # [num_tokens, num_heads, value_dim]
    """Return softmax(scale q kᵀ + causal mask) v over gathered blocks; see `reference.paged_attention`.

    Options other than scale, window and scales, such as Gemma 2's softcap, are left to the slower reference.
    """
    if not is_trusted():
        inputs = query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q
        check_attention(*inputs, options, any_layout=True)
        check_plan(plan, AttentionPlan)
    key_scales = options.key_scales
    value_scales = options.value_scales
    scale = float(options.scale)
    sliding_window = options.sliding_window
    special = any(each is not None for each in (options.softcap, options.sinks, options.last_keys))
    if special or value_cache.shape != key_cache.shape:
        return reference.paged_attention(
            query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q, options, plan
        )
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
        k = _gather(key_cache, key_scales, blocks, query.dtype)[tokens].transpose(0, 1)[:, None]
        v = _gather(value_cache, value_scales, blocks, query.dtype)[tokens].transpose(0, 1)[:, None]
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


def _gather(cache: Tensor, scales: Tensor | None, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return all tokens of these blocks: [num_tokens, num_kv_heads, dim]."""
    # index_select copies whole blocks: 3 times faster here than cache[blocks].
    tokens = cache.index_select(0, blocks).flatten(0, 1)
    if scales is None:
        return tokens.to(dtype)
    scale = scales.index_select(0, blocks).transpose(1, 2).flatten(0, 1)
    return (tokens.float() * scale[..., None]).to(dtype)


def _mask(query_len: int, seq_len: int, low: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """Return which keys [low, seq_len) each of the last tokens sees: bool[query_len, seq_len - low]."""
    query_pos = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    key_pos = torch.arange(low, seq_len, device=device)[None, :]
    seen = key_pos <= query_pos
    return seen if sliding_window is None else seen & (key_pos > query_pos - sliding_window)
