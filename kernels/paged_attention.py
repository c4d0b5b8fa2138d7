"""Attention of a ragged batch over paged K and V: prefill chunks and decodes in one call.

A sequence with one new token is a decode: `_attention_kernel` runs on splits of its context and `_merge_kernel`
joins them. Any other goes through `_attention_kernel` in blocks of query tokens. Which of the two, how long a
split is and in what order they are joined depend on the sequence alone, so its result is the same bits in any
batch.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attention_config import MAX_SPLITS, AttentionConfig, choose_config
from .backend import current_target, in_interpreter
from .checks import check_dtype, check_last_dim_contiguous, check_multiple, check_positive, check_shape

_MERGE_CHUNK = 16  # splits joined at once: fixed, since the order of a sum decides its last bit
_TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _context_range(seq_len, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The first key tile a sequence's last token needs."""
    if WINDOW == 0:
        return 0
    return tl.maximum(seq_len - WINDOW, 0) // TILE * TILE


@triton.jit
def _split_tokens(num_keys, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Key tokens of one split: SPLIT, or the multiple of it that makes MAX_SPLITS of them enough."""
    return tl.maximum(tl.cdiv(num_keys, SPLIT * MAX_SPLITS), 1) * SPLIT


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
        block = tl.load(table_ptr + tile // BLOCK_SIZE).to(tl.int64)
        return block * stride_block + (offs_t % BLOCK_SIZE) * stride_slot
    else:
        block = tl.load(table_ptr + offs_t // BLOCK_SIZE, mask=mask_t, other=0).to(tl.int64)
        return block * stride_block + (offs_t % BLOCK_SIZE) * stride_slot


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
    """One pass of online softmax over the key tiles [start, end); MASKED where not every row sees every key."""
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
    stride_out_token: tl.constexpr,
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
    start = key_low // TILE * TILE
    end = key_high
    own_splits = 1
    if SPLIT > 0:
        split = tl.program_id(2)
        split_tokens = _split_tokens(key_high - start, SPLIT, MAX_SPLITS)
        own_splits = tl.cdiv(key_high - start, split_tokens)
        if split >= own_splits:
            return
        start += split * split_tokens
        end = tl.minimum(start + split_tokens, key_high)

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

    if own_splits == 1:
        offs_out = (token * stride_out_token + head * HEAD_DIM)[:, None] + offs_d[None, :]
        out = acc / row_sum[:, None]
        tl.store(out_ptr + offs_out, out.to(out_ptr.dtype.element_ty), mask=mask_query)
    else:
        place = (seq.to(tl.int64) * NUM_HEADS + head) * num_splits + tl.program_id(2)
        tl.store(partial_ptr + place[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=mask_query)
        tl.store(partial_max_ptr + place, row_max * qk_scale, mask=mask_row)
        tl.store(partial_sum_ptr + place, row_sum, mask=mask_row)


@triton.jit(
    do_not_specialize=["num_splits"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "cu_seqlens_q_ptr"],
)
def _merge_kernel(
    partial_ptr,  # f32[num_seqs, num_heads, num_splits, HEAD_DIM]
    partial_max_ptr,  # f32[num_seqs, num_heads, num_splits], in powers of two
    partial_sum_ptr,
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: one head of one decode, out = sum_s 2^(m_s - m) acc_s / sum_s 2^(m_s - m) l_s."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(cu_seqlens_q_ptr + seq)
    query_len = tl.load(cu_seqlens_q_ptr + seq + 1) - token
    seq_len = tl.load(seq_lens_ptr + seq)
    num_keys = seq_len - _context_range(seq_len, WINDOW, TILE)
    own_splits = tl.cdiv(num_keys, _split_tokens(num_keys, SPLIT, MAX_SPLITS))
    if query_len != 1 or own_splits <= 1:
        return
    first = (seq.to(tl.int64) * NUM_HEADS + head) * num_splits
    offs_s = tl.arange(0, MAX_SPLITS)
    maxima = tl.load(partial_max_ptr + first + offs_s, mask=offs_s < own_splits, other=float("-inf"))
    row_max = tl.max(maxima, axis=0)
    offs_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    row_sum = 0.0
    for chunk in range(0, own_splits, CHUNK):
        split = chunk + tl.arange(0, CHUNK)
        mask_s = split < own_splits
        split_max = tl.load(partial_max_ptr + first + split, mask=mask_s, other=float("-inf"))
        split_sum = tl.load(partial_sum_ptr + first + split, mask=mask_s, other=0.0)
        # [CHUNK, BLOCK_D]
        partial = tl.load(
            partial_ptr + (first + split)[:, None] * HEAD_DIM + offs_d[None, :],
            mask=mask_s[:, None] & (offs_d < HEAD_DIM)[None, :],
            other=0.0,
        )
        weight = tl.exp2(split_max - row_max)
        row_sum += tl.sum(weight * split_sum, axis=0)
        acc += tl.sum(weight[:, None] * partial, axis=0)
    offs_out = (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + offs_d
    tl.store(out_ptr + offs_out, (acc / row_sum).to(out_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)
