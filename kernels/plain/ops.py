"""The operations in plain torch, written for speed on a CPU: what attention_backend="torch" runs."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..arguments import (
    check_add,
    check_copy_blocks,
    check_gelu,
    check_gelu_and_mul,
    check_layer_norm,
    check_logits,
    check_rms_norm,
    check_rms_norm_into,
    check_rotary_store_kv,
    check_scale_and_cap,
    check_scale_rows,
    check_silu_and_mul,
    check_take_rows,
)
from ..attention_options import AttentionOptions, AttentionPlan, check_attention, check_plan
from ..checks import is_trusted


def take_rows(table: Tensor, indices: Tensor, out: Tensor | None = None) -> Tensor:
    """Return rows of a table [n, size] by i64[m]: [m, size], in `out` if given."""
    if not is_trusted():
        check_take_rows(table, indices, out)
    return reference.take_rows(table, indices, out)


def copy_blocks(
    cache: Tensor,  # [num_planes, num_blocks, block_size, num_kv_heads, head_dim], written in place
    pairs: Tensor,  # i64[num_pairs, 2], (from, to)
    target: Tensor | None = None,  # another cache of such blocks, written in place of this one
) -> None:
    """Set target[:, to] = cache[:, from]; no block of a cache is both, and none is a target twice."""
    if not is_trusted():
        check_copy_blocks(cache, pairs, target)
    reference.copy_blocks(cache, pairs, target)


def rms_norm(
    x: Tensor,  # [..., size]
    weight: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
    *,
    unit_offset: bool = False,
) -> Tensor:  # [..., size]
    """Return weight * x / sqrt(mean(x²) + eps), after residual += x if given; see `reference.rms_norm`."""
    if not is_trusted():
        check_rms_norm(x, weight, eps, residual, unit_offset=unit_offset)
    if residual is not None:
        x = residual.add_(x)
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True).add_(eps))
    return _weighted(x32 * scale, weight, x.dtype, unit_offset).contiguous()


def rms_norm_into(
    x: Tensor,  # [num_tokens, size] or [num_tokens, num_heads, size]
    weight: Tensor,  # [size]
    eps: float,
    out: Tensor,  # like x, or x itself; written in place
    *,
    unit_offset: bool = False,
    add: bool = False,
) -> None:
    """Write the norm of x into `out`, or add it; see `reference.rms_norm_into`."""
    if not is_trusted():
        check_rms_norm_into(x, weight, eps, out, unit_offset=unit_offset, add=add)
    reference.rms_norm_into(x, weight, eps, out, unit_offset=unit_offset, add=add)


def layer_norm(
    x: Tensor,  # [num_rows, size]
    weight: Tensor,  # [size]
    bias: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
) -> Tensor:  # [num_rows, size]
    """Return the norm of x, after residual += x if given; see `reference.layer_norm`."""
    if not is_trusted():
        check_layer_norm(x, weight, bias, eps, residual)
    if residual is not None:
        x = residual.add_(x)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _weighted(x32: Tensor, weight: Tensor, dtype: torch.dtype, unit_offset: bool) -> Tensor:
    return (x32 * (1 + weight.float())).to(dtype) if unit_offset else x32.to(dtype) * weight


def silu_and_mul(x: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    """Return silu(gate) * up, where x is gate and up side by side; see `reference.silu_and_mul`."""
    if not is_trusted():
        check_silu_and_mul(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(x: Tensor, up: Tensor | None = None) -> Tensor:  # -> [num_tokens, size]
    """Return gelu(gate) * up, of x or of x and `up`; see `reference.gelu_and_mul`."""
    if not is_trusted():
        check_gelu_and_mul(x, up)
    gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gelu(x: Tensor, *, tanh: bool) -> None:  # [num_rows, size]
    """Apply GELU to x in place; see `reference.gelu`."""
    if not is_trusted():
        check_gelu(x, tanh=tanh)
    x.copy_(F.gelu(x, approximate="tanh" if tanh else "none"))


def add(x: Tensor, out: Tensor) -> None:  # [num_rows, size], both
    """Add x to `out` in place."""
    if not is_trusted():
        check_add(x, out)
    out.add_(x)


def scale_and_cap(x: Tensor, factor: float, softcap: float | None = None) -> None:  # [num_rows, size]
    """Multiply x by a factor in place, and cap the product; see `reference.scale_and_cap`."""
    if not is_trusted():
        check_scale_and_cap(x, factor, softcap)
    reference.scale_and_cap(x, factor, softcap)


def scale_rows(x: Tensor, factors: Tensor) -> None:  # [num_rows, size], f32[num_rows]
    """Multiply each row of x by its factor, in place; see `reference.scale_rows`."""
    if not is_trusted():
        check_scale_rows(x, factors)
    reference.scale_rows(x, factors)


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
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """Apply QK norm and rotary, and store K and V in their slots; see `reference.rotary_store_kv`."""
    if not is_trusted():
        tensors = qkv, cos, sin, key_cache, value_cache, slot_mapping
        weights = query_norm_weight, key_norm_weight
        check_rotary_store_kv(*tensors, *weights, eps, unit_offset, key_scales, value_scales)
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
        _store(heads[:, num_heads:], key_cache, slot_mapping, key_scales)
        _store(value, value_cache, slot_mapping, value_scales)
    return query


def _store(x: Tensor, cache: Tensor, slots: Tensor, scales: Tensor | None) -> None:
    """Store K or V, [num_tokens, num_kv_heads, head_dim], in their slots, quantised if there are scales."""
    block_size = cache.shape[1]
    if scales is None:
        x = x.to(cache.dtype)
    else:
        x, scale = reference.quantize(x, cache.dtype)
        scales[slots // block_size, :, slots % block_size] = scale
        # index_copy_ takes no fp8 on a CPU
        x = x.view(torch.int8)
        cache = cache.view(torch.int8)
    if cache.stride(0) == block_size * cache.stride(1):
        cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, x)
    else:
        cache[slots // block_size, slots % block_size] = x


def plan_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    options: AttentionOptions,
) -> AttentionPlan:
    """Check the inputs, and return an empty plan: nothing is computed ahead of the layers."""
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

    Options other than scale, window and scales, as Gemma 2's softcap, are left to the slower reference.
    """
    if not is_trusted():
        inputs = query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q
        check_attention(*inputs, options, any_layout=True)
        check_plan(plan, AttentionPlan)
    key_scales = options.key_scales
    value_scales = options.value_scales
    scale = float(options.scale)
    sliding_window = options.sliding_window
    special = (options.softcap, options.sinks, options.tree_mask)
    if any(x is not None for x in special) or value_cache.shape != key_cache.shape:
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


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:  # f32[n, vocab_size] -> i64[n], f32[n]
    """Return the first of the highest logits, and that logit; see `reference.greedy`."""
    if not is_trusted():
        check_logits(logits)
    if logits.device.type != "cpu":
        # Of equal values, torch's reduction on a GPU takes the one of the lowest index.
        highest, tokens = logits.max(-1)
        return tokens, highest
    # numpy's argmax is vectorised; torch's is not on a CPU, and takes 7 times as long.
    tokens = torch.from_numpy(logits.detach().numpy().argmax(-1))
    return tokens, logits.gather(1, tokens[:, None])[:, 0]
