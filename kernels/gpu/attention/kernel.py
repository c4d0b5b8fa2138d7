"""The two attention kernels, for prefill chunks and for decodes: a program's rows, and where results go.

`tiles.attend_rows` does the rest for both.
"""

import triton
import triton.language as tl

from .split_kv import first_key_tile, split_tokens
from .tiles import Cache, KeyRange, Rows, Scales, attend_rows


@triton.jit
def _find_sequence(cu_seqlens_q_ptr, q_block, num_seqs, BLOCK_Q: tl.constexpr):
    """Return the last sequence whose first Q-block, cu_seqlens_q[i] // BLOCK_Q + i, is not after q_block."""
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
def _query_range(cu_seqlens_q_ptr, seq, VOLATILE: tl.constexpr):
    """Return the first of a sequence's new tokens among those of all sequences, and how many there are."""
    query_start = tl.load(cu_seqlens_q_ptr + seq, volatile=VOLATILE)
    return query_start, tl.load(cu_seqlens_q_ptr + seq + 1, volatile=VOLATILE) - query_start


@triton.jit
def _reload_rows(row, cu_seqlens_q_ptr, seq, tiles):
    """Return the row numbers and the sequence's range again, so that nothing else of the rows is kept.

    Called after the loop over keys, which has few registers left. Volatile loads are not merged with those
    before the loop: what follows from them is computed again. If the rows are to be "recomputed", so is what
    follows from the row numbers: two such loads differ by 0, which the compiler does not know.
    """
    query_start, query_len = _query_range(cu_seqlens_q_ptr, seq, True)
    if tiles.ROW_PLACES == "recomputed":
        row ^= query_start ^ _query_range(cu_seqlens_q_ptr, seq, True)[0]
    return row, query_start, query_len


@triton.jit
def _place_rows(row, head_block, first_q, query_start, query_len, layer: tl.constexpr, tiles: tl.constexpr):
    """Return each row's head, place among the sequence's new tokens, token, and whether there is such a row.

    Rows are query tokens, from first_q on, times BLOCK_G heads of a KV head: those of head_block.
    """
    member = head_block % tl.cdiv(layer.GROUP, tiles.BLOCK_G) * tiles.BLOCK_G + row % tiles.BLOCK_G
    head = head_block // tl.cdiv(layer.GROUP, tiles.BLOCK_G) * layer.GROUP + member
    offs_q = first_q + row // tiles.BLOCK_G
    mask_row = (row < tiles.BLOCK_Q * tiles.BLOCK_G) & (offs_q < query_len) & (member < layer.GROUP)
    return head, offs_q, (query_start + offs_q).to(tl.int64), mask_row


@triton.jit
def _last_keys(last_keys_ptr, query_pos, token, mask_row, layer: tl.constexpr):
    """Return the last position that each row sees: by default its own."""
    if layer.LAST_KEYS:
        return tl.load(last_keys_ptr + token, mask=mask_row, other=0)
    return query_pos


@triton.jit
def _store_rows(out_ptr, acc, row_sum, head, token, mask_row, layer: tl.constexpr):
    """Store the outputs of rows, normalised."""
    offs_v = tl.arange(0, layer.BLOCK_V)
    mask_out = mask_row[:, None] & (offs_v < layer.VALUE_DIM)[None, :]
    offs_out = ((token * layer.NUM_HEADS + head) * layer.VALUE_DIM)[:, None] + offs_v[None, :]
    # Rows past the last query token have seen no key.
    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(out_ptr + offs_out, out.to(out_ptr.dtype.element_ty), mask=mask_out)


@triton.jit(
    do_not_specialize=["num_seqs", "stride_table"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr"],
)
def prefill_kernel(
    query_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    value_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, VALUE_DIM]
    key_scale_ptr,  # f32[num_blocks, num_kv_heads, BLOCK_SIZE], QUANTIZED
    value_scale_ptr,
    out_ptr,  # [num_tokens, num_heads, VALUE_DIM]
    sinks_ptr,  # f32[num_heads], SINKS
    last_keys_ptr,  # i32[num_tokens], LAST_KEYS
    block_tables_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    num_seqs,
    stride_table,
    score_scale,
    exp_scale,
    softcap,
    DECODE_Q: tl.constexpr,  # most query tokens of a decode
    layer: tl.constexpr,  # Layer
    tiles: tl.constexpr,  # AttentionConfig
):
    """Attend, per program, from BLOCK_G heads of a KV head in one Q-block of a non-decode sequence."""
    # Later blocks see more keys, so they run first: short ones fill the end of the launch.
    q_block = tl.num_programs(0) - 1 - tl.program_id(0)
    head_block = tl.program_id(1)
    seq = _find_sequence(cu_seqlens_q_ptr, q_block, num_seqs, tiles.BLOCK_Q)
    query_start, query_len = _query_range(cu_seqlens_q_ptr, seq, False)
    first_q = (q_block - query_start // tiles.BLOCK_Q - seq) * tiles.BLOCK_Q
    if query_len <= DECODE_Q or first_q >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    row = tl.arange(0, tiles.BLOCK_M)
    kv_head = head_block // tl.cdiv(layer.GROUP, tiles.BLOCK_G)
    head, offs_q, token, mask_row = _place_rows(
        row, head_block, first_q, query_start, query_len, layer, tiles
    )
    context_len = seq_len - query_len
    first_pos = context_len + first_q
    last_pos = tl.minimum(first_pos + tiles.BLOCK_Q, seq_len) - 1
    start = first_key_tile(first_pos, layer.WINDOW, tiles.TILE)
    key_low = tl.maximum(first_pos - layer.WINDOW + 1, 0) if layer.WINDOW > 0 else 0
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table
    last_key = _last_keys(last_keys_ptr, context_len + offs_q, token, mask_row, layer)
    end = last_pos + 1
    if layer.LAST_KEYS:
        end = tl.maximum(tl.max(last_key) + 1, end)
    acc, _, row_sum = attend_rows(
        query_ptr, sinks_ptr,
        Cache(None, None, key_cache_ptr, value_cache_ptr, key_scale_ptr, value_scale_ptr, table_ptr, kv_head),
        Rows(head, token, mask_row, context_len + offs_q, last_key),
        KeyRange(start, end, key_low, first_pos, last_pos),
        Scales(score_scale, exp_scale, softcap), True, layer, tiles,
    )  # fmt: skip
    if tiles.ROW_PLACES != "kept":
        row, query_start, query_len = _reload_rows(row, cu_seqlens_q_ptr, seq, tiles)
        first_q = (q_block - query_start // tiles.BLOCK_Q - seq) * tiles.BLOCK_Q
        head, offs_q, token, mask_row = _place_rows(
            row, head_block, first_q, query_start, query_len, layer, tiles
        )
    _store_rows(out_ptr, acc, row_sum, head, token, mask_row, layer)


@triton.jit(
    do_not_specialize=["num_seqs", "stride_table", "partial_q", "min_split"],
    do_not_specialize_on_alignment=[
        "block_tables_ptr",
        "seq_lens_ptr",
        "cu_seqlens_q_ptr",
        "work_ptr",
        "first_item_ptr",
    ],
)
def decode_kernel(
    query_ptr,
    key_desc,  # of the caches, None where they are loaded by pointers: see descriptors.py
    value_desc,
    key_cache_ptr,
    value_cache_ptr,
    key_scale_ptr,
    value_scale_ptr,
    out_ptr,
    sinks_ptr,
    last_keys_ptr,
    partial_ptr,  # f32[num_items, partial_q, num_heads, VALUE_DIM]: each split's unnormalised output
    partial_max_ptr,  # f32[num_items, partial_q, num_heads], in powers of two
    partial_sum_ptr,
    work_ptr,  # i32[num_work, 2], (sequence, split); see split_kv
    first_item_ptr,  # i32[num_seqs + 2]
    block_tables_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    num_seqs,
    partial_q,
    min_split,  # SPLIT as a number: see below
    stride_table,
    score_scale,
    exp_scale,
    softcap,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    layer: tl.constexpr,  # Layer
    tiles: tl.constexpr,  # AttentionConfig
):
    """Work through the list of the decodes' splits, with a fixed number of programs.

    A program computes BLOCK_G heads of one KV head for one split at a time.
    """
    NUM_HEAD_BLOCKS: tl.constexpr = layer.NUM_HEADS // layer.GROUP * tl.cdiv(layer.GROUP, tiles.BLOCK_G)
    row = tl.arange(0, tiles.BLOCK_M)
    num_work = tl.load(first_item_ptr + num_seqs + 1)
    for work in range(tl.program_id(0), num_work * NUM_HEAD_BLOCKS, tl.num_programs(0)):
        head_block = work % NUM_HEAD_BLOCKS
        kv_head = head_block // tl.cdiv(layer.GROUP, tiles.BLOCK_G)
        seq = tl.load(work_ptr + 2 * (work // NUM_HEAD_BLOCKS))
        split = tl.load(work_ptr + 2 * (work // NUM_HEAD_BLOCKS) + 1)
        query_start, query_len = _query_range(cu_seqlens_q_ptr, seq, False)
        last_pos = tl.load(seq_lens_ptr + seq) - 1
        head, offs_q, token, mask_row = _place_rows(row, head_block, 0, query_start, query_len, layer, tiles)
        first_pos = last_pos + 1 - query_len
        key_low = tl.maximum(first_pos - layer.WINDOW + 1, 0) if layer.WINDOW > 0 else 0
        start = first_key_tile(first_pos, layer.WINDOW, tiles.TILE)
        num_keys = last_pos + 1 - start
        # No step is less: this hides that it is a multiple of SPLIT. A compiler that knows it makes shorter
        # loops, of more registers, and fewer programs fit an SM.
        step = tl.maximum(split_tokens(num_keys, SPLIT, MAX_SPLITS), min_split)
        num_splits = tl.cdiv(num_keys, step)
        start += split * step
        end = tl.minimum(start + step, last_pos + 1)
        table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_table
        acc, row_max, row_sum = attend_rows(
            query_ptr, sinks_ptr,
            Cache(
                key_desc, value_desc, key_cache_ptr, value_cache_ptr, key_scale_ptr, value_scale_ptr,
                table_ptr, kv_head,
            ),
            Rows(
                head, token, mask_row, first_pos + offs_q,
                _last_keys(last_keys_ptr, first_pos + offs_q, token, mask_row, layer),
            ),
            KeyRange(start, end, key_low, first_pos, last_pos),
            Scales(score_scale, exp_scale, softcap), split == 0, layer, tiles,
        )  # fmt: skip
        if tiles.ROW_PLACES != "kept":
            row, query_start, query_len = _reload_rows(row, cu_seqlens_q_ptr, seq, tiles)
            head, offs_q, token, mask_row = _place_rows(
                row, head_block, 0, query_start, query_len, layer, tiles
            )
        # Either every row is a partial result, or none is.
        mask_partial = mask_row & (row < tl.where(num_splits > 1, tiles.BLOCK_M, 0))
        item = tl.load(first_item_ptr + seq) + split
        place = (item.to(tl.int64) * partial_q + offs_q) * layer.NUM_HEADS + head
        offs_v = tl.arange(0, layer.BLOCK_V)
        mask_v = (offs_v < layer.VALUE_DIM)[None, :]
        offs_partial = place[:, None] * layer.VALUE_DIM + offs_v[None, :]
        tl.store(partial_ptr + offs_partial, acc, mask=mask_partial[:, None] & mask_v)
        tl.store(partial_max_ptr + place, row_max * exp_scale, mask=mask_partial)
        tl.store(partial_sum_ptr + place, row_sum, mask=mask_partial)
        _store_rows(out_ptr, acc, row_sum, head, token, mask_row & ~mask_partial, layer)
