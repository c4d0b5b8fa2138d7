"""Join the splits of long decodes (flash decoding, Dao et al. 2023)."""

import triton
import triton.language as tl
from torch import Tensor

from .attention_config import MAX_SPLITS, AttentionConfig

_CHUNK = 16  # splits joined at once: fixed, since the order of a sum decides its last bit


@triton.jit
def first_key_tile(first_pos, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """The tile of the first key a query token at `first_pos` sees."""
    tile = 0
    if WINDOW > 0:
        tile = tl.maximum(first_pos - WINDOW + 1, 0) // TILE * TILE
    return tile


@triton.jit
def split_tokens(num_keys, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Key tokens of one split: SPLIT, or the multiple of it that makes MAX_SPLITS of them enough."""
    return tl.maximum(tl.cdiv(num_keys, SPLIT * MAX_SPLITS), 1) * SPLIT


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
    num_keys = seq_len - first_key_tile(seq_len - 1, WINDOW, TILE)
    own_splits = tl.cdiv(num_keys, split_tokens(num_keys, SPLIT, MAX_SPLITS))
    if query_len != 1 or own_splits <= 1:
        return
    place = (seq.to(tl.int64) * NUM_HEADS + head) * num_splits
    partial_ptr += place * HEAD_DIM
    partial_max_ptr += place
    partial_sum_ptr += place
    offs_s = tl.arange(0, MAX_SPLITS)
    maxima = tl.load(partial_max_ptr + offs_s, mask=offs_s < own_splits, other=float("-inf"))
    row_max = tl.max(maxima, axis=0)
    offs_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([BLOCK_D], tl.float32)
    row_sum = 0.0
    for chunk in range(0, own_splits, CHUNK):
        split = chunk + tl.arange(0, CHUNK)
        mask_s = split < own_splits
        split_max = tl.load(partial_max_ptr + split, mask=mask_s, other=float("-inf"))
        split_sum = tl.load(partial_sum_ptr + split, mask=mask_s, other=0.0)
        offs = split[:, None] * HEAD_DIM + offs_d[None, :]
        mask = mask_s[:, None] & (offs_d < HEAD_DIM)[None, :]
        # [CHUNK, BLOCK_D]
        partial = tl.load(partial_ptr + offs, mask=mask, other=0.0)
        weight = tl.exp2(split_max - row_max)
        row_sum += tl.sum(weight * split_sum, axis=0)
        acc += tl.sum(weight[:, None] * partial, axis=0)
    offs_out = (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + offs_d
    tl.store(out_ptr + offs_out, (acc / row_sum).to(out_ptr.dtype.element_ty), mask=offs_d < HEAD_DIM)


def merge_splits(
    out: Tensor,  # [num_tokens, num_heads, head_dim], the split decodes are written
    partial: Tensor,  # f32[num_seqs, num_heads, num_splits, head_dim], unnormalised
    partial_max: Tensor,  # f32[num_seqs, num_heads, num_splits], of the scores in powers of two
    partial_sum: Tensor,  # f32[num_seqs, num_heads, num_splits]
    seq_lens: Tensor,  # i32[num_seqs]
    cu_seqlens_q: Tensor,  # i32[num_seqs + 1]
    *,
    window: int,  # 0: none
    config: AttentionConfig,
) -> None:
    """out = sum_s 2^(m_s - m) acc_s / sum_s 2^(m_s - m) l_s for every decode of more than one split."""
    num_seqs, num_heads, num_splits, head_dim = partial.shape
    block_dim = triton.next_power_of_2(head_dim)
    _merge_kernel[(num_seqs, num_heads)](
        partial_ptr=partial,
        partial_max_ptr=partial_max,
        partial_sum_ptr=partial_sum,
        out_ptr=out,
        seq_lens_ptr=seq_lens,
        cu_seqlens_q_ptr=cu_seqlens_q,
        num_splits=num_splits,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_dim,
        TILE=config.TILE,
        SPLIT=config.SPLIT,
        MAX_SPLITS=MAX_SPLITS,
        WINDOW=window,
        CHUNK=_CHUNK,
        num_warps=4,
    )
