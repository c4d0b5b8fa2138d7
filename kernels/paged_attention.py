"""Attention of a ragged batch over paged K and V: prefill chunks and decodes in one call.

A sequence with one new token is a decode: `_attention_kernel` runs on splits of its context, which
merge_splits.py joins. Any other goes through `_attention_kernel` in blocks of query tokens. Which of the two,
how long a split is and in what order they are joined depend on the sequence alone, so its result is the same
bits in any batch.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_config import MAX_SPLITS, AttentionConfig, choose_config
from .backend import current_target, in_interpreter
from .checks import check_dtype, check_last_dim_contiguous, check_multiple, check_positive, check_shape
from .merge_splits import first_key_tile, merge_splits, split_tokens

_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _find_sequence(cu_seqlens_q_ptr, q_block, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence whose first Q-block, cu_seqlens_q[i] // BLOCK_Q + i, is not after q_block."""
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_seqlens_q_ptr + middle) // BLOCK_Q + middle <= q_block:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _slot_offsets(
    table_ptr,
    tile,
    offs_t,
    mask_t,
    stride_block: tl.constexpr,
    stride_slot: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Where in the cache a tile's tokens lie."""
    if BLOCK_SIZE % TILE == 0:  # one block holds the whole tile
        block = tl.load(table_ptr + tile // BLOCK_SIZE)
    else:
        block = tl.load(table_ptr + offs_t // BLOCK_SIZE, mask=mask_t, other=0)
    return block.to(tl.int64) * stride_block + (offs_t % BLOCK_SIZE) * stride_slot


@triton.jit
def _attend(
    acc,  # [BLOCK_M, BLOCK_D]
    row_max,  # [BLOCK_M]
    row_sum,  # [BLOCK_M]
    query,  # [BLOCK_M, BLOCK_D]
    query_pos,  # [BLOCK_M]
    key_ptr,
    value_ptr,
    table_ptr,
    start,
    end,
    key_low,
    key_high,
    qk_scale,
    stride_block: tl.constexpr,
    stride_slot: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Online softmax over the key tiles [start, end); MASKED where not every row sees every key."""
    offs_d = tl.arange(0, BLOCK_D)
    for tile in range(start, end, TILE):
        offs_t = tile + tl.arange(0, TILE)
        # A slot outside [key_low, key_high) may hold another sequence's NaN, and 0 * NaN is NaN.
        mask_t = (offs_t >= key_low) & (offs_t < key_high) if MASKED else offs_t >= 0
        offs = _slot_offsets(table_ptr, tile, offs_t, mask_t, stride_block, stride_slot, BLOCK_SIZE, TILE)
        offs = offs[:, None] + offs_d[None, :]
        # [TILE, BLOCK_D]
        if MASKED or HEAD_DIM != BLOCK_D:
            mask = mask_t[:, None] & (offs_d < HEAD_DIM)[None, :]
            key = tl.load(key_ptr + offs, mask=mask, other=0.0)
            value = tl.load(value_ptr + offs, mask=mask, other=0.0)
        else:
            key = tl.load(key_ptr + offs)
            value = tl.load(value_ptr + offs)
        # [BLOCK_M, TILE]
        scores = tl.dot(query, tl.trans(key.to(DOT_DTYPE)), input_precision="ieee")
        if MASKED:
            seen = offs_t[None, :] <= query_pos[:, None]
            if WINDOW > 0:
                seen = seen & (offs_t[None, :] > query_pos[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no maximum to subtract.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.exp2(scores * qk_scale - (shift * qk_scale)[:, None])
        rescale = tl.exp2((row_max - shift) * qk_scale)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None]
        acc = tl.dot(weights.to(DOT_DTYPE), value.to(DOT_DTYPE), acc, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=["num_seqs", "num_splits", "stride_table"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr"],
)
def _attention_kernel(
    query_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    value_cache_ptr,
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    partial_ptr,  # f32[num_seqs, num_heads, num_splits, HEAD_DIM]: each split's unnormalised output
    partial_max_ptr,  # f32[num_seqs, num_heads, num_splits]
    partial_sum_ptr,
    block_tables_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    num_seqs,
    num_splits,
    stride_table,
    qk_scale,
    stride_query_token: tl.constexpr,
    stride_query_head: tl.constexpr,
    stride_cache_block: tl.constexpr,
    stride_cache_slot: tl.constexpr,
    stride_cache_head: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """One program: one KV head of one Q-block, or (SPLIT) of one split of a decode."""
    kv_head = tl.program_id(1)
    if SPLIT > 0:
        seq = tl.program_id(0)
        first_token = 0
    else:
        # Later blocks see more keys: they go first, so that the short ones fill the end of the launch.
        q_block = tl.num_programs(0) - 1 - tl.program_id(0)
        seq = _find_sequence(cu_seqlens_q_ptr, q_block, num_seqs, BLOCK_Q)
        first_token = (q_block - tl.load(cu_seqlens_q_ptr + seq) // BLOCK_Q - seq) * BLOCK_Q
    query_start = tl.load(cu_seqlens_q_ptr + seq)
    query_len = tl.load(cu_seqlens_q_ptr + seq + 1) - query_start
    if (query_len == 1) != (SPLIT > 0) or first_token >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)

    # Rows are query tokens times the group's heads.
    row = tl.arange(0, BLOCK_M)
    offs_q = first_token + row // GROUP
    head = kv_head * GROUP + row % GROUP
    offs_d = tl.arange(0, BLOCK_D)
    mask_row = (row < BLOCK_Q * GROUP) & (offs_q < query_len)
    mask_query = mask_row[:, None] & (offs_d < HEAD_DIM)[None, :]
    token = (query_start + offs_q).to(tl.int64)
    offs_query = (token * stride_query_token + head * stride_query_head)[:, None] + offs_d[None, :]
    query = tl.load(query_ptr + offs_query, mask=mask_query, other=0.0).to(DOT_DTYPE)
    first_pos = seq_len - query_len + first_token
    last_pos = tl.minimum(first_pos + BLOCK_Q, seq_len) - 1
    query_pos = first_pos + row // GROUP

    # Keys [key_low, key_high) are read; tiles [start, end) cover them.
    key_high = last_pos + 1
    key_low = tl.maximum(first_pos - WINDOW + 1, 0) if WINDOW > 0 else 0
    start = first_key_tile(first_pos, WINDOW, TILE)
    end = key_high
    if SPLIT > 0:
        split = tl.program_id(2)
        step = split_tokens(key_high - start, SPLIT, MAX_SPLITS)
        own_splits = tl.cdiv(key_high - start, step)
        if split >= own_splits:
            return
        start += split * step
        end = tl.minimum(start + step, key_high)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    key_ptr = key_cache_ptr + kv_head.to(tl.int64) * stride_cache_head
    value_ptr = value_cache_ptr + kv_head.to(tl.int64) * stride_cache_head
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table
    # Every row sees every key of the tiles in [full_start, full_end).
    full_end = tl.minimum((first_pos + 1) // TILE * TILE, end)
    full_start = start
    if WINDOW > 0:
        full_start = tl.maximum(tl.cdiv(tl.maximum(last_pos - WINDOW + 1, 0), TILE) * TILE, start)
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, query, query_pos, key_ptr, value_ptr, table_ptr,
            start, tl.minimum(full_start, end), key_low, key_high, qk_scale, stride_cache_block,
            stride_cache_slot, BLOCK_SIZE, HEAD_DIM, BLOCK_D, TILE, WINDOW, True, DOT_DTYPE,
        )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, query, query_pos, key_ptr, value_ptr, table_ptr,
        full_start, full_end, key_low, key_high, qk_scale, stride_cache_block,
        stride_cache_slot, BLOCK_SIZE, HEAD_DIM, BLOCK_D, TILE, WINDOW, False, DOT_DTYPE,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, query, query_pos, key_ptr, value_ptr, table_ptr,
        tl.maximum(full_start, full_end), end, key_low, key_high, qk_scale, stride_cache_block,
        stride_cache_slot, BLOCK_SIZE, HEAD_DIM, BLOCK_D, TILE, WINDOW, True, DOT_DTYPE,
    )  # fmt: skip

    if SPLIT > 0:
        place = (seq.to(tl.int64) * NUM_HEADS + head) * num_splits + tl.program_id(2)
        # No row, or all of them, leave as a partial result.
        mask_partial = row < tl.where(own_splits > 1, BLOCK_Q * GROUP, 0)
        offs_partial = place[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(partial_ptr + offs_partial, acc, mask=mask_query & mask_partial[:, None])
        tl.store(partial_max_ptr + place, row_max * qk_scale, mask=mask_partial)
        tl.store(partial_sum_ptr + place, row_sum, mask=mask_partial)
        mask_query = mask_query & ~mask_partial[:, None]
    offs_out = ((token * NUM_HEADS + head) * HEAD_DIM)[:, None] + offs_d[None, :]
    out = acc / tl.where(mask_row, row_sum, 1.0)[:, None]
    tl.store(out_ptr + offs_out, out.to(out_ptr.dtype.element_ty), mask=mask_query)


def paged_attention(
    query: Tensor,  # [num_tokens, num_heads, head_dim], ragged: all sequences one after another
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,  # like key_cache
    block_tables: Tensor,  # i32[num_seqs, max_blocks_per_seq]
    seq_lens: Tensor,  # i32[num_seqs], computed and new tokens
    cu_seqlens_q: Tensor,  # i32[num_seqs + 1], exclusive prefix sum of the new tokens
    *,
    scale: float,
    max_seqlen_q: int,
    sliding_window: int | None = None,
) -> Tensor:  # [num_tokens, num_heads, head_dim], contiguous
    """Return softmax(scale q kᵀ + causal mask) v for every sequence's new tokens over its paged K and V.

    New token j of a sequence stands at position seq_len - query_len + j and sees the positions up to its own,
    only the last `sliding_window` of them where one is given (itself included, as HF counts). A sequence may
    have no new token. Slots past seq_len, or before the window, are never read; block table entries past the
    last block neither. Rows of `query` past cu_seqlens_q[-1] give undefined rows.

    Online softmax over tiles and split decodes after FlashAttention-2 and flash decoding (Dao 2023), over
    blocks after PagedAttention (Kwon et al. 2023). Raises ValueError for a shape, dtype, stride, scale,
    window or max_seqlen_q that does not fit; the values of the int32 tensors are not read on the host.
    """
    _check(query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q)
    check_positive("scale", scale)
    check_positive("max_seqlen_q", max_seqlen_q)
    if sliding_window is not None:
        check_positive("sliding_window", sliding_window)
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    window = sliding_window or 0
    out = torch.empty(num_tokens, num_heads, head_dim, dtype=query.dtype, device=query.device)
    target = current_target()
    group = num_heads // num_kv_heads
    arguments = {
        "query_ptr": query,
        "key_cache_ptr": key_cache,
        "value_cache_ptr": value_cache,
        "out_ptr": out,
        "block_tables_ptr": block_tables,
        "seq_lens_ptr": seq_lens,
        "cu_seqlens_q_ptr": cu_seqlens_q,
        "num_seqs": seq_lens.shape[0],
        "stride_table": block_tables.stride(0),
        "qk_scale": scale * math.log2(math.e),
        "stride_query_token": query.stride(0),
        "stride_query_head": query.stride(1),
        "stride_cache_block": key_cache.stride(0),
        "stride_cache_slot": key_cache.stride(1),
        "stride_cache_head": key_cache.stride(2),
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "MAX_SPLITS": MAX_SPLITS,
        "WINDOW": window,
        "DOT_DTYPE": tl.float32 if in_interpreter() else _TL_DTYPES[query.dtype],
    }
    # Which of the two serves a sequence is decided on the device, by its own query_len.
    if max_seqlen_q > 1:
        config = choose_config(head_dim, group, query.dtype, decode=False, target=target)
        _launch_prefill(arguments, config)
    config = choose_config(head_dim, group, query.dtype, decode=True, target=target)
    _launch_decode(arguments, block_tables.shape[1] * block_size, config)
    return out


def _launch_prefill(arguments: dict[str, Any], config: AttentionConfig) -> None:
    # sum_i ceil(query_len_i / BLOCK_Q) is at most this, whatever the lengths: no need to know them here.
    num_q_blocks = arguments["query_ptr"].shape[0] // config.BLOCK_Q + arguments["num_seqs"]
    num_kv_heads = arguments["NUM_HEADS"] // arguments["GROUP"]
    _attention_kernel[(num_q_blocks, num_kv_heads)](
        **arguments,
        partial_ptr=None,
        partial_max_ptr=None,
        partial_sum_ptr=None,
        num_splits=1,
        **asdict(config),
    )


def _launch_decode(arguments: dict[str, Any], max_keys: int, config: AttentionConfig) -> None:
    out, num_seqs, window = arguments["out_ptr"], arguments["num_seqs"], arguments["WINDOW"]
    _, num_heads, head_dim = out.shape
    if window:
        max_keys = min(max_keys, window + config.TILE)
    num_splits = min(triton.cdiv(max_keys, config.SPLIT), MAX_SPLITS)
    # A sequence of one split writes its output itself, in every batch.
    places = (num_seqs if num_splits > 1 else 0, num_heads, num_splits)
    partial = torch.empty(*places, head_dim, dtype=torch.float32, device=out.device)
    partial_max = torch.empty(places, dtype=torch.float32, device=out.device)
    partial_sum = torch.empty(places, dtype=torch.float32, device=out.device)
    _attention_kernel[(num_seqs, num_heads // arguments["GROUP"], num_splits)](
        **arguments,
        partial_ptr=partial,
        partial_max_ptr=partial_max,
        partial_sum_ptr=partial_sum,
        num_splits=num_splits,
        **asdict(config),
    )
    if num_splits > 1:
        merge_splits(
            out,
            partial,
            partial_max,
            partial_sum,
            arguments["seq_lens_ptr"],
            arguments["cu_seqlens_q_ptr"],
            window=window,
            config=config,
        )


def _check(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
) -> None:
    check_shape("query", query, (None, None, None))
    check_dtype("query", query)
    check_shape("key_cache", key_cache, (None, None, None, query.shape[2]), query.dtype)
    check_shape("value_cache", value_cache, key_cache.shape, query.dtype)
    check_multiple("num_heads", query.shape[1], "num_kv_heads", key_cache.shape[2])
    num_seqs = seq_lens.shape[0]
    check_shape("seq_lens", seq_lens, (num_seqs,), torch.int32)
    check_shape("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), torch.int32)
    check_shape("block_tables", block_tables, (num_seqs, None), torch.int32)
    tensors = {"query": query, "key_cache": key_cache, "block_tables": block_tables, "seq_lens": seq_lens}
    for name, tensor in {**tensors, "cu_seqlens_q": cu_seqlens_q}.items():
        check_last_dim_contiguous(name, tensor)
    if value_cache.stride() != key_cache.stride():
        raise ValueError(
            f"value_cache must have key_cache's strides {key_cache.stride()}, got {value_cache.stride()}"
        )


def paged_attention_cost(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    element_size: int,
    sliding_window: int | None = None,
) -> tuple[int, int]:
    """(bytes, flops): queries in, outputs out, each visible K and V once; two products a visible pair."""
    values = pairs = 0
    for query_len, seq_len in zip(query_lens, seq_lens, strict=True):
        window = sliding_window or seq_len
        first = seq_len - query_len
        keys = seq_len - max(0, first - window + 1) if query_len else 0
        values += 2 * query_len * num_heads * head_dim + 2 * keys * num_kv_heads * head_dim
        pairs += sum(min(pos + 1, window) for pos in range(first, seq_len))
    return values * element_size, 4 * pairs * num_heads * head_dim
