"""The attention kernels: online softmax over tiles of paged K and V, for prefill chunks and for decodes.

One source; what a model does not use (WINDOW, SOFTCAP, ALIBI, SINKS, TREE, QUANTIZED, ...) is a constexpr
that is off, and leaves nothing in the binary.
"""

import triton
import triton.language as tl

from .split_kv import first_key_tile, split_tokens


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
def _query_range(cu_seqlens_q_ptr, seq, AGAIN: tl.constexpr):
    """The first of a sequence's new tokens among those of all sequences, and how many they are.

    AGAIN: behind the loops over keys, to find the rows' places a second time. As volatile it is not taken for
    the same as before, whose rows would have to stay in registers all the while. Done where that spares a
    spill or lets more programs run at once: prefill of half precision up to a width of 128, float32 decode.
    """
    query_start = tl.load(cu_seqlens_q_ptr + seq, volatile=AGAIN)
    return query_start, tl.load(cu_seqlens_q_ptr + seq + 1, volatile=AGAIN) - query_start


@triton.jit
def _load_tile(ptr, offs, mask_t, offs_d, DIM: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """[TILE, BLOCK_D] of a cache; zero where it may not be read."""
    offs = offs[:, None] + offs_d[None, :]
    if MASKED:
        if DIM == BLOCK_D:
            return tl.load(ptr + offs, mask=mask_t[:, None], other=0.0)
        return tl.load(ptr + offs, mask=mask_t[:, None] & (offs_d < DIM)[None, :], other=0.0)
    if DIM == BLOCK_D:
        return tl.load(ptr + offs)
    return tl.load(ptr + offs, mask=(offs_d < DIM)[None, :], other=0.0)


@triton.jit
def _load_row(ptr, offs, mask_t, MASKED: tl.constexpr):
    """[TILE] of a block table or of scales; zero where it may not be read."""
    if MASKED:
        return tl.load(ptr + offs, mask=mask_t, other=0)
    return tl.load(ptr + offs)


@triton.jit
def _attend(
    acc,  # [BLOCK_M, BLOCK_V]
    row_max,  # [BLOCK_M], in units of 1 / exp_scale powers of two
    row_sum,  # [BLOCK_M]
    query,  # [BLOCK_M, BLOCK_D]
    query_rest,  # [BLOCK_M, BLOCK_R], the dimensions from BLOCK_D on
    query_pos,  # [BLOCK_M]
    slope,  # [BLOCK_M], ALIBI
    tree,  # i64[BLOCK_M], TREE
    context_len,  # keys before the sequence's new tokens, TREE
    key_ptr,
    value_ptr,
    key_scale_ptr,
    value_scale_ptr,
    table_ptr,
    start,
    end,
    key_low,
    key_high,
    score_scale,
    exp_scale,
    softcap,
    stride_key_block: tl.constexpr,
    stride_key_slot: tl.constexpr,
    stride_value_block: tl.constexpr,
    stride_value_slot: tl.constexpr,
    stride_scale_block: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    TREE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr,
    MASKED: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Online softmax over the key tiles [start, end); MASKED where not every row sees every key."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_V)
    for tile in range(start, end, TILE):
        offs_t = tile + tl.arange(0, TILE)
        # A slot outside [key_low, key_high) may hold another sequence's NaN, and 0 * NaN is NaN.
        mask_t = (offs_t >= key_low) & (offs_t < key_high) if MASKED else offs_t >= 0
        if BLOCK_SIZE % TILE == 0:  # one block holds the whole tile
            block = tl.load(table_ptr + tile // BLOCK_SIZE).to(tl.int64)
        else:
            block = _load_row(table_ptr, offs_t // BLOCK_SIZE, mask_t, MASKED).to(tl.int64)
        slot = offs_t % BLOCK_SIZE
        offs_key = block * stride_key_block + slot * stride_key_slot
        key = _load_tile(key_ptr, offs_key, mask_t, offs_d, min(HEAD_DIM, BLOCK_D), BLOCK_D, MASKED)
        # [BLOCK_M, TILE]
        scores = tl.dot(query, tl.trans(key.to(DOT_DTYPE)), input_precision="ieee")
        if BLOCK_R > 0:
            offs_r = tl.arange(0, BLOCK_R)
            rest = _load_tile(
                key_ptr + BLOCK_D, offs_key, mask_t, offs_r, HEAD_DIM - BLOCK_D, BLOCK_R, MASKED
            )
            scores = tl.dot(query_rest, tl.trans(rest.to(DOT_DTYPE)), scores, input_precision="ieee")
        if VALUE_IN_KEY:
            value = key
        else:
            offs_value = block * stride_value_block + slot * stride_value_slot
            value = _load_tile(value_ptr, offs_value, mask_t, offs_v, VALUE_DIM, BLOCK_V, MASKED)
        if QUANTIZED:
            offs_scale = block * stride_scale_block + slot
            scores = scores * _load_row(key_scale_ptr, offs_scale, mask_t, MASKED)[None, :]
        if SOFTCAP:  # softcap tanh(x / softcap), by exp: it needs no library
            capped = 2.0 / (1.0 + tl.exp2(scores * (score_scale / softcap * 2.885390081777927)))  # 2 log2(e)
            scores = softcap - softcap * capped
        if ALIBI:
            if not SOFTCAP:
                scores = scores * score_scale
            scores += slope[:, None] * (offs_t[None, :] - query_pos[:, None]).to(tl.float32)
        if MASKED:
            seen = mask_t[None, :]
            if TREE:
                new = offs_t - context_len
                bit = (tree[:, None] >> tl.minimum(tl.maximum(new, 0), 63)[None, :].to(tl.int64)) & 1
                seen = seen & ((new < 0)[None, :] | (bit == 1))
            elif CAUSAL:
                seen = seen & (offs_t[None, :] <= query_pos[:, None])
            if WINDOW > 0:
                seen = seen & (offs_t[None, :] > query_pos[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no maximum to subtract.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.exp2(scores * exp_scale - (shift * exp_scale)[:, None])
        rescale = tl.exp2((row_max - shift) * exp_scale)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None]
        if QUANTIZED:
            weights = weights * _load_row(value_scale_ptr, offs_scale, mask_t, MASKED)[None, :]
        acc = tl.dot(weights.to(DOT_DTYPE), value.to(DOT_DTYPE), acc, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _attend_rows(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scale_ptr,
    value_scale_ptr,
    sinks_ptr,
    alibi_ptr,
    tree_ptr,
    table_ptr,
    kv_head,
    head,  # [BLOCK_M]
    token,  # i64[BLOCK_M]
    mask_row,  # [BLOCK_M]
    query_pos,  # [BLOCK_M]
    first_pos,  # of the first row
    last_pos,
    context_len,
    start,
    end,
    key_low,
    key_high,
    with_sinks,
    score_scale,
    exp_scale,
    softcap,
    stride_query_token: tl.constexpr,
    stride_query_head: tl.constexpr,
    stride_key_block: tl.constexpr,
    stride_key_slot: tl.constexpr,
    stride_key_head: tl.constexpr,
    stride_value_block: tl.constexpr,
    stride_value_slot: tl.constexpr,
    stride_value_head: tl.constexpr,
    stride_scale_block: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    TREE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Rows of queries over the keys [start, end): acc [BLOCK_M, BLOCK_V] not normalised, row_max, row_sum."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_query = (token * stride_query_token + head * stride_query_head)[:, None]
    mask_query = mask_row[:, None] & (offs_d < HEAD_DIM)[None, :]
    query = tl.load(query_ptr + offs_query + offs_d[None, :], mask=mask_query, other=0.0).to(DOT_DTYPE)
    query_rest = query
    if BLOCK_R > 0:
        offs_r = BLOCK_D + tl.arange(0, BLOCK_R)
        mask_rest = mask_row[:, None] & (offs_r < HEAD_DIM)[None, :]
        query_rest = tl.load(query_ptr + offs_query + offs_r[None, :], mask=mask_rest, other=0.0).to(
            DOT_DTYPE
        )
    slope = tl.zeros([BLOCK_M], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    tree = token
    if ALIBI:
        slope = tl.load(alibi_ptr + head, mask=mask_row, other=0.0)
    if TREE:
        tree = tl.load(tree_ptr + token, mask=mask_row, other=0)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SINKS:  # noqa: SIM102  (decided by the compiler, unlike the next)
        if with_sinks:
            # A key of its own that has no value; exp_scale takes it to powers of two.
            row_max = tl.load(sinks_ptr + head, mask=mask_row, other=0.0) * (1.4426950408889634 / exp_scale)
            row_sum = row_sum + 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    key_ptr = key_cache_ptr + kv_head.to(tl.int64) * stride_key_head
    value_ptr = value_cache_ptr + kv_head.to(tl.int64) * stride_value_head
    if QUANTIZED:
        key_scale_ptr += kv_head * BLOCK_SIZE
        value_scale_ptr += kv_head * BLOCK_SIZE
    # Every row sees every key of the tiles in [full_start, full_end).
    if TREE:
        full_keys = context_len
    elif CAUSAL:
        full_keys = first_pos + 1
    else:
        full_keys = key_high
    full_end = tl.minimum(full_keys // TILE * TILE, end)
    full_start = start
    if WINDOW > 0:
        full_start = tl.maximum(tl.cdiv(tl.maximum(last_pos - WINDOW + 1, 0), TILE) * TILE, start)
    # A loop for each part: before the full tiles (with a window only), the full ones, those behind them.
    for part in tl.static_range(0 if WINDOW > 0 else 1, 3):
        low = start if part == 0 else full_start if part == 1 else tl.maximum(full_start, full_end)
        high = tl.minimum(full_start, end) if part == 0 else full_end if part == 1 else end
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, query, query_rest, query_pos, slope, tree, context_len,
            key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, table_ptr,
            low, high, key_low, key_high, score_scale, exp_scale, softcap,
            stride_key_block, stride_key_slot, stride_value_block, stride_value_slot, stride_scale_block,
            BLOCK_SIZE, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_R, BLOCK_V, TILE,
            WINDOW, CAUSAL, SOFTCAP, ALIBI, TREE, QUANTIZED, VALUE_IN_KEY, part != 1, DOT_DTYPE,
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit(
    do_not_specialize=["num_seqs", "stride_table"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "cu_seqlens_q_ptr", "tree_ptr"],
)
def prefill_kernel(
    query_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    value_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, VALUE_DIM]
    key_scale_ptr,  # f32[num_blocks, num_kv_heads, BLOCK_SIZE], QUANTIZED
    value_scale_ptr,
    out_ptr,  # [num_tokens, num_heads, VALUE_DIM]
    sinks_ptr,  # f32[num_heads], SINKS
    alibi_ptr,  # f32[num_heads], ALIBI
    tree_ptr,  # i64[num_tokens], TREE
    block_tables_ptr,
    seq_lens_ptr,
    cu_seqlens_q_ptr,
    num_seqs,
    stride_table,
    score_scale,
    exp_scale,
    softcap,
    stride_query_token: tl.constexpr,
    stride_query_head: tl.constexpr,
    stride_key_block: tl.constexpr,
    stride_key_slot: tl.constexpr,
    stride_key_head: tl.constexpr,
    stride_value_block: tl.constexpr,
    stride_value_slot: tl.constexpr,
    stride_value_head: tl.constexpr,
    stride_scale_block: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    DECODE_Q: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    TREE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """One program: BLOCK_G heads of one KV head for one Q-block of a sequence that is not a decode."""
    # Later blocks see more keys: they go first, so that the short ones fill the end of the launch.
    q_block = tl.num_programs(0) - 1 - tl.program_id(0)
    seq = _find_sequence(cu_seqlens_q_ptr, q_block, num_seqs, BLOCK_Q)
    query_start, query_len = _query_range(cu_seqlens_q_ptr, seq, False)
    first_token = (q_block - query_start // BLOCK_Q - seq) * BLOCK_Q
    if query_len <= DECODE_Q or first_token >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)

    # Rows are query tokens times heads of the group.
    row = tl.arange(0, BLOCK_M)
    kv_head = tl.program_id(1) // tl.cdiv(GROUP, BLOCK_G)
    member = tl.program_id(1) % tl.cdiv(GROUP, BLOCK_G) * BLOCK_G + row % BLOCK_G
    head = kv_head * GROUP + member
    offs_q = first_token + row // BLOCK_G
    mask_row = (row < BLOCK_Q * BLOCK_G) & (offs_q < query_len) & (member < GROUP)
    token = (query_start + offs_q).to(tl.int64)
    context_len = seq_len - query_len
    first_pos = context_len + first_token
    last_pos = tl.minimum(first_pos + BLOCK_Q, seq_len) - 1
    # Keys [key_low, key_high) are read; the tiles from `start` cover them.
    key_high = last_pos + 1 if CAUSAL and not TREE else seq_len
    key_low = tl.maximum(first_pos - WINDOW + 1, 0) if WINDOW > 0 else 0
    acc, _, row_sum = _attend_rows(
        query_ptr, key_cache_ptr, value_cache_ptr, key_scale_ptr, value_scale_ptr, sinks_ptr, alibi_ptr,
        tree_ptr, block_tables_ptr + seq.to(tl.int64) * stride_table, kv_head, head, token, mask_row,
        context_len + offs_q, first_pos, last_pos, context_len,
        first_key_tile(first_pos, WINDOW, TILE), key_high, key_low, key_high, True,
        score_scale, exp_scale, softcap, stride_query_token, stride_query_head,
        stride_key_block, stride_key_slot, stride_key_head,
        stride_value_block, stride_value_slot, stride_value_head, stride_scale_block,
        BLOCK_SIZE, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_R, BLOCK_V, BLOCK_M, TILE,
        WINDOW, CAUSAL, SOFTCAP, ALIBI, SINKS, TREE, QUANTIZED, VALUE_IN_KEY, DOT_DTYPE,
    )  # fmt: skip
    if tl.float32 != DOT_DTYPE and BLOCK_V <= 128:
        query_start, query_len = _query_range(cu_seqlens_q_ptr, seq, True)
        offs_q = (q_block - query_start // BLOCK_Q - seq) * BLOCK_Q + row // BLOCK_G
        mask_row = (row < BLOCK_Q * BLOCK_G) & (offs_q < query_len) & (member < GROUP)
        token = (query_start + offs_q).to(tl.int64)
    offs_v = tl.arange(0, BLOCK_V)
    mask_out = mask_row[:, None] & (offs_v < VALUE_DIM)[None, :]
    offs_out = ((token * NUM_HEADS + head) * VALUE_DIM)[:, None] + offs_v[None, :]
    # What is no row may have seen nothing.
    out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(out_ptr + offs_out, out.to(out_ptr.dtype.element_ty), mask=mask_out)


@triton.jit(
    do_not_specialize=["num_seqs", "stride_table", "min_split", "shared_splits", "partial_q"],
    do_not_specialize_on_alignment=[
        "block_tables_ptr",
        "seq_lens_ptr",
        "cu_seqlens_q_ptr",
        "tree_ptr",
        "work_ptr",
        "first_item_ptr",
    ],
)
def decode_kernel(
    query_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_scale_ptr,
    value_scale_ptr,
    out_ptr,
    sinks_ptr,
    alibi_ptr,
    tree_ptr,
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
    min_split,
    shared_splits,  # SHARED
    stride_table,
    score_scale,
    exp_scale,
    softcap,
    stride_query_token: tl.constexpr,
    stride_query_head: tl.constexpr,
    stride_key_block: tl.constexpr,
    stride_key_slot: tl.constexpr,
    stride_key_head: tl.constexpr,
    stride_value_block: tl.constexpr,
    stride_value_slot: tl.constexpr,
    stride_value_head: tl.constexpr,
    stride_scale_block: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SHARED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SINKS: tl.constexpr,
    TREE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    VALUE_IN_KEY: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """Work through splits of decodes; a fixed number of programs takes what the list holds.

    A piece of work is BLOCK_G heads of one KV head on one split: of one sequence, or (SHARED) of the prefix
    that BLOCK_Q sequences of one new token each have in common.
    """
    NUM_HEAD_BLOCKS: tl.constexpr = NUM_HEADS // GROUP * tl.cdiv(GROUP, BLOCK_G)
    row = tl.arange(0, BLOCK_M)
    offs_v = tl.arange(0, BLOCK_V)
    if SHARED:
        num_work = tl.cdiv(num_seqs, BLOCK_Q) * shared_splits
    else:
        num_work = tl.load(first_item_ptr + num_seqs + 1)
    for work in range(tl.program_id(0), num_work * NUM_HEAD_BLOCKS, tl.num_programs(0)):
        head_block = work % NUM_HEAD_BLOCKS
        kv_head = head_block // tl.cdiv(GROUP, BLOCK_G)
        member = head_block % tl.cdiv(GROUP, BLOCK_G) * BLOCK_G + row % BLOCK_G
        head = kv_head * GROUP + member
        mask_row = (row < BLOCK_Q * BLOCK_G) & (member < GROUP)
        if SHARED:
            split = work // NUM_HEAD_BLOCKS % shared_splits
            first_seq = work // NUM_HEAD_BLOCKS // shared_splits * BLOCK_Q
            seq = first_seq + row // BLOCK_G
            offs_q = row * 0
            mask_row = mask_row & (seq < num_seqs)
            token = seq.to(tl.int64)
            query_pos = tl.load(seq_lens_ptr + seq, mask=mask_row, other=1) - 1
            start = split * min_split
            end = start + min_split
            # All of them see all of it.
            first_pos = end
            last_pos = end
            context_len = end
            key_low = 0
            own_splits = shared_splits + 1
        else:
            first_seq = tl.load(work_ptr + 2 * (work // NUM_HEAD_BLOCKS))
            split = tl.load(work_ptr + 2 * (work // NUM_HEAD_BLOCKS) + 1)
            offs_q = row // BLOCK_G
            query_start, query_len = _query_range(cu_seqlens_q_ptr, first_seq, False)
            last_pos = tl.load(seq_lens_ptr + first_seq) - 1
            mask_row = mask_row & (offs_q < query_len)
            token = (query_start + offs_q).to(tl.int64)
            context_len = last_pos + 1 - query_len
            first_pos = context_len
            query_pos = context_len + offs_q
            key_low = tl.maximum(first_pos - WINDOW + 1, 0) if WINDOW > 0 else 0
            start = first_key_tile(first_pos, WINDOW, TILE)
            num_keys = last_pos + 1 - start
            step = tl.maximum(split_tokens(num_keys, SPLIT, MAX_SPLITS), min_split)
            own_splits = tl.cdiv(num_keys, step)
            start += split * step
            end = tl.minimum(start + step, last_pos + 1)
        acc, row_max, row_sum = _attend_rows(
            query_ptr, key_cache_ptr, value_cache_ptr, key_scale_ptr, value_scale_ptr, sinks_ptr, alibi_ptr,
            tree_ptr, block_tables_ptr + first_seq.to(tl.int64) * stride_table, kv_head, head, token,
            mask_row, query_pos, first_pos, last_pos, context_len, start, end, key_low, end, split == 0,
            score_scale, exp_scale, softcap, stride_query_token, stride_query_head,
            stride_key_block, stride_key_slot, stride_key_head,
            stride_value_block, stride_value_slot, stride_value_head, stride_scale_block,
            BLOCK_SIZE, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_R, BLOCK_V, BLOCK_M, TILE,
            WINDOW, CAUSAL, SOFTCAP, ALIBI, SINKS, TREE, QUANTIZED, VALUE_IN_KEY, DOT_DTYPE,
        )  # fmt: skip
        if SHARED:
            item = tl.load(first_item_ptr + seq, mask=mask_row, other=0) + split
        else:
            item = tl.load(first_item_ptr + first_seq) + split
            if tl.float32 == DOT_DTYPE:
                query_start, query_len = _query_range(cu_seqlens_q_ptr, first_seq, True)
                mask_row = (row < BLOCK_Q * BLOCK_G) & (member < GROUP) & (offs_q < query_len)
                token = (query_start + offs_q).to(tl.int64)
        # No row, or all of them, leave as a partial result.
        mask_partial = mask_row & (row < tl.where(own_splits > 1, BLOCK_M, 0))
        place = (item.to(tl.int64) * partial_q + offs_q) * NUM_HEADS + head
        mask_v = (offs_v < VALUE_DIM)[None, :]
        offs_partial = place[:, None] * VALUE_DIM + offs_v[None, :]
        tl.store(partial_ptr + offs_partial, acc, mask=mask_partial[:, None] & mask_v)
        tl.store(partial_max_ptr + place, row_max * exp_scale, mask=mask_partial)
        tl.store(partial_sum_ptr + place, row_sum, mask=mask_partial)
        if not SHARED:
            mask_row = mask_row & ~mask_partial
            mask_out = mask_row[:, None] & mask_v
            offs_out = ((token * NUM_HEADS + head) * VALUE_DIM)[:, None] + offs_v[None, :]
            out = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
            tl.store(out_ptr + offs_out, out.to(out_ptr.dtype.element_ty), mask=mask_out)
