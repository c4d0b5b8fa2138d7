"""Split decodes (flash decoding, Dao et al. 2023): the list of splits to work through, and their merge.

Splits and the order of their merge follow from the sequence alone: the result is batch-invariant.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch import BoundLaunch

# Results depend on it in their last bits. A longer context gets longer splits.
MAX_SPLITS = 64
_CHUNK = 16  # splits joined at once: fixed, since the order of a sum decides its last bit


@triton.jit
def first_key_tile(first_pos, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Return the tile of the first key that a query token at position `first_pos` sees."""
    tile = 0
    if WINDOW > 0:
        tile = tl.maximum(first_pos - WINDOW + 1, 0) // TILE * TILE
    return tile


@triton.jit
def split_tokens(num_keys, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Return the keys in one split: the smallest multiple of SPLIT with which MAX_SPLITS splits suffice."""
    return tl.maximum(tl.cdiv(num_keys, SPLIT * MAX_SPLITS), 1) * SPLIT


@triton.jit
def _num_splits(
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    seq,
    mask,
    DECODE_Q: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Return the number of splits of each sequence of `seq`: 0 if it is not a decode."""
    query_len = tl.load(cu_seqlens_q_ptr + seq + 1, mask=mask, other=0)
    query_len -= tl.load(cu_seqlens_q_ptr + seq, mask=mask, other=0)
    seq_len = tl.load(seq_lens_ptr + seq, mask=mask, other=0)
    num_keys = seq_len - first_key_tile(seq_len - query_len, WINDOW, TILE)
    splits = tl.cdiv(num_keys, split_tokens(num_keys, SPLIT, MAX_SPLITS))
    return tl.where(mask & (query_len > 0) & (query_len <= DECODE_Q), splits, 0)


@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "cu_seqlens_q_ptr"],
)
def _plan_kernel(
    work_ptr,  # i32[num_work, 2], (sequence, split)
    first_item_ptr,  # i32[num_seqs + 2]
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    num_seqs,
    DECODE_Q: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: list one sequence's splits after those of the sequences before it; the last one counts."""
    own = tl.program_id(0)
    before = 0
    for chunk in range(0, own, CHUNK):
        seq = chunk + tl.arange(0, CHUNK)
        splits = _num_splits(
            seq_lens_ptr, cu_seqlens_q_ptr, seq, seq < own, DECODE_Q, WINDOW, TILE, SPLIT, MAX_SPLITS
        )
        before += tl.sum(splits, axis=0)
    tl.store(first_item_ptr + own, before)
    if own == num_seqs:
        tl.store(first_item_ptr + own + 1, before)
        return
    splits = _num_splits(
        seq_lens_ptr, cu_seqlens_q_ptr, own, own < num_seqs, DECODE_Q, WINDOW, TILE, SPLIT, MAX_SPLITS
    )
    split = tl.arange(0, MAX_SPLITS)
    place = work_ptr + 2 * (before + split)
    mask = split < splits
    tl.store(place, own + split * 0, mask=mask)
    tl.store(place + 1, split, mask=mask)


class Splits:
    """How decodes are split, with the launch that lists the splits.

    The list is made on the device, so that a CUDA graph has the same launches for all lengths, and one long
    sequence among short ones does not leave SMs idle.

    most_splits: maximum number of splits of a sequence.

    max_keys: the number of keys that the block tables can hold. decode_q: maximum number of query tokens of a
        decode. window: the sliding window; 0 for none.
    """

    __slots__ = ("launch", "most_splits", "num_seqs")

    def __init__(
        self, num_seqs: int, *, max_keys: int, decode_q: int, window: int, tile: int, split: int
    ) -> None:
        if window:
            max_keys = min(max_keys, window + decode_q + tile)
        self.num_seqs = num_seqs
        self.most_splits = min(triton.cdiv(max_keys, split), MAX_SPLITS)
        self.launch = BoundLaunch(
            _plan_kernel,
            (num_seqs + 1,),
            num_seqs=num_seqs,
            DECODE_Q=decode_q,
            WINDOW=window,
            TILE=tile,
            SPLIT=split,
            MAX_SPLITS=MAX_SPLITS,
            CHUNK=256,
            num_warps=4,
        )


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The splits of a batch's decodes, in device memory. Valid for every layer with the same shape."""

    work: Tensor  # i32[most_splits * num_seqs, 2], (sequence, split): filled as far as there is work
    first_item: Tensor  # i32[num_seqs + 2], exclusive prefix sum of the splits, then the number of work items


def plan_decodes(
    seq_lens: Tensor,  # i32[num_seqs]
    cu_seqlens_q: Tensor,  # i32[num_seqs + 1]
    splits: Splits,
) -> DecodePlan:
    """List the splits of all decodes."""
    work = torch.empty(splits.num_seqs * splits.most_splits, 2, dtype=torch.int32, device=seq_lens.device)
    first_item = torch.empty(splits.num_seqs + 2, dtype=torch.int32, device=seq_lens.device)
    splits.launch(work, first_item, seq_lens, cu_seqlens_q)
    return DecodePlan(work, first_item)


@triton.jit(
    do_not_specialize=["partial_q"],
    do_not_specialize_on_alignment=["first_item_ptr", "cu_seqlens_q_ptr"],
)
def _merge_kernel(
    partial_ptr,  # f32[num_items, partial_q, num_heads, VALUE_DIM]
    partial_max_ptr,  # f32[num_items, partial_q, num_heads], in powers of two
    partial_sum_ptr,
    out_ptr,  # [num_tokens, num_heads, VALUE_DIM]
    first_item_ptr,
    cu_seqlens_q_ptr,
    partial_q,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: one head of one query token, sum_s 2^(m_s - m) acc_s / sum_s 2^(m_s - m) l_s."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    offs_q = tl.program_id(2)
    first_item = tl.load(first_item_ptr + seq)
    own_splits = tl.load(first_item_ptr + seq + 1) - first_item
    first_token = tl.load(cu_seqlens_q_ptr + seq)
    if own_splits <= 1 or first_token + offs_q >= tl.load(cu_seqlens_q_ptr + seq + 1):
        return
    place = (first_item.to(tl.int64) * partial_q + offs_q) * NUM_HEADS + head
    stride_split = partial_q * NUM_HEADS
    offs_s = tl.arange(0, MAX_SPLITS)
    maxima_ptr = partial_max_ptr + place + offs_s * stride_split
    maxima = tl.load(maxima_ptr, mask=offs_s < own_splits, other=float("-inf"))
    row_max = tl.max(maxima, axis=0)
    offs_v = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V], tl.float32)
    row_sum = 0.0
    for chunk in range(0, own_splits, CHUNK):
        split = chunk + tl.arange(0, CHUNK)
        mask_s = split < own_splits
        offs = place + split * stride_split
        split_max = tl.load(partial_max_ptr + offs, mask=mask_s, other=float("-inf"))
        split_sum = tl.load(partial_sum_ptr + offs, mask=mask_s, other=0.0)
        mask = mask_s[:, None] & (offs_v < VALUE_DIM)[None, :]
        # [CHUNK, BLOCK_V]
        partial = tl.load(partial_ptr + offs[:, None] * VALUE_DIM + offs_v[None, :], mask=mask, other=0.0)
        weight = tl.exp2(split_max - row_max)
        row_sum += tl.sum(weight * split_sum, axis=0)
        acc += tl.sum(weight[:, None] * partial, axis=0)
    offs_out = ((first_token + offs_q).to(tl.int64) * NUM_HEADS + head) * VALUE_DIM + offs_v
    tl.store(out_ptr + offs_out, (acc / row_sum).to(out_ptr.dtype.element_ty), mask=offs_v < VALUE_DIM)


def merge_launch(num_seqs: int, partial_q: int, num_heads: int, value_dim: int) -> BoundLaunch:
    """Bind the launch that merges the splits of each decode with more than one split and writes the output.

    A row is sum_s(w_s * partial_s) / sum_s(w_s * partial_sum_s) over its splits s, where w_s = 2 **
    (partial_max_s - max_s(partial_max_s)).
    """
    return BoundLaunch(
        _merge_kernel,
        (num_seqs, num_heads, partial_q),
        partial_q=partial_q,
        NUM_HEADS=num_heads,
        VALUE_DIM=value_dim,
        BLOCK_V=triton.next_power_of_2(value_dim),
        MAX_SPLITS=MAX_SPLITS,
        CHUNK=_CHUNK,
        num_warps=4,
    )


def most_partial_bytes(
    num_seqs: int, max_keys: int, num_heads: int, value_dim: int, split: int, decode_q: int = 1
) -> int:
    """Return the maximum size in bytes of the partial results of this many decodes."""
    most_splits = min(triton.cdiv(max_keys, split), MAX_SPLITS)
    values = num_heads * (value_dim + 2) * decode_q
    return 4 * num_seqs * most_splits * values if most_splits > 1 else 0
