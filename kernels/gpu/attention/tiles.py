"""Online softmax over tiles of paged K and V: what the kernels of attention_kernel.py do with their rows.

What a model does not use (WINDOW, SOFTCAP, ALIBI, SINKS, TREE, QUANTIZED, ...) is a constexpr that is off,
and leaves nothing in the binary.
"""

import triton
import triton.language as tl


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
def _attend_tiles(
    acc,  # [BLOCK_M, BLOCK_V]
    row_max,  # [BLOCK_M], in units of 1 / exp_scale powers of two
    row_sum,  # [BLOCK_M]
    query,  # [BLOCK_M, BLOCK_D]
    query_rest,  # [BLOCK_M, BLOCK_R], the dimensions from BLOCK_D on
    query_pos,  # [BLOCK_M]
    slope,  # [BLOCK_M], ALIBI
    tree,  # i64[BLOCK_M], TREE
    context_len,  # keys before the sequence's new tokens, TREE
    key_desc,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM] by boxes of a tile, or None: by pointers
    value_desc,
    kv_head,
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
    DOT_DTYPE: tl.constexpr,  # of queries times keys
    WEIGHT_DTYPE: tl.constexpr,  # of weights times values
):
    """Online softmax over the key tiles [start, end); MASKED where not every row sees every key."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_v = tl.arange(0, BLOCK_V)
    # In a pipeline the values that a descriptor's loads leave to be zeroed would take more shared memory.
    for tile in tl.range(start, end, TILE, num_stages=1 if MASKED and key_desc is not None else None):
        offs_t = tile + tl.arange(0, TILE)
        # A slot outside [key_low, key_high) may hold another sequence's NaN, and 0 * NaN is NaN.
        mask_t = (offs_t >= key_low) & (offs_t < key_high) if MASKED else offs_t >= 0
        if BLOCK_SIZE % TILE == 0:  # one block holds the whole tile
            block = tl.load(table_ptr + tile // BLOCK_SIZE).to(tl.int64)
        else:
            block = _load_row(table_ptr, offs_t // BLOCK_SIZE, mask_t, MASKED).to(tl.int64)
        slot = offs_t % BLOCK_SIZE
        offs_key = block * stride_key_block + slot * stride_key_slot
        if key_desc is not None:
            place = [block.to(tl.int32), tile % BLOCK_SIZE, kv_head, 0]
            key = key_desc.load(place).reshape(TILE, BLOCK_D)
        else:
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
        elif value_desc is not None:
            value = value_desc.load(place).reshape(TILE, BLOCK_V)
            if MASKED and value.dtype != tl.int8:
                value = tl.where(mask_t[:, None], value, tl.zeros_like(value))
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
        acc = tl.dot(weights.to(WEIGHT_DTYPE), value.to(WEIGHT_DTYPE), acc, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def attend_rows(
    query_ptr,
    key_desc,
    value_desc,
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
    DOT_DTYPE: tl.constexpr,  # of queries times keys
    WEIGHT_DTYPE: tl.constexpr,  # of weights times values
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
        acc, row_max, row_sum = _attend_tiles(
            acc, row_max, row_sum, query, query_rest, query_pos, slope, tree, context_len,
            key_desc, value_desc, kv_head, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, table_ptr,
            low, high, key_low, key_high, score_scale, exp_scale, softcap,
            stride_key_block, stride_key_slot, stride_value_block, stride_value_slot, stride_scale_block,
            BLOCK_SIZE, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_R, BLOCK_V, TILE,
            WINDOW, CAUSAL, SOFTCAP, ALIBI, TREE, QUANTIZED, VALUE_IN_KEY, part != 1, DOT_DTYPE, WEIGHT_DTYPE,
        )  # fmt: skip
    return acc, row_max, row_sum
