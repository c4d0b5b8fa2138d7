"""Online softmax over tiles of paged K and V, for the rows of either kernel of `kernel.py`."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Layer(NamedTuple):
    """The properties of a layer that are fixed at compile time. A feature that is off costs nothing."""

    stride_query_token: int
    stride_query_head: int
    stride_key_block: int
    stride_key_slot: int
    stride_key_head: int
    stride_value_block: int
    stride_value_slot: int
    stride_value_head: int
    stride_scale_block: int
    NUM_HEADS: int
    GROUP: int  # query heads of a KV head
    BLOCK_SIZE: int
    HEAD_DIM: int
    VALUE_DIM: int
    BLOCK_D: int  # the largest power of two in HEAD_DIM
    BLOCK_R: int  # the other dimensions, padded to a power of two
    BLOCK_V: int  # VALUE_DIM, padded to a power of two
    WINDOW: int  # 0: none
    SOFTCAP: bool
    SINKS: bool
    LAST_KEYS: bool  # tokens may see later ones
    QUANTIZED: bool
    VALUE_IN_KEY: bool  # values are the first dimensions of the keys
    DOT_DTYPE: tl.dtype  # of queries times keys
    WEIGHT_DTYPE: tl.dtype  # of weights times values


class Cache(NamedTuple):
    """Where a program reads K and V."""

    key_desc: Any  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM] by boxes of a tile, or None: by pointers
    value_desc: Any
    key_ptr: Any
    value_ptr: Any
    key_scale_ptr: Any
    value_scale_ptr: Any
    table_ptr: Any  # the sequence's block table
    kv_head: Any


class Rows(NamedTuple):
    """The query rows of a program: query tokens times heads."""

    head: Any  # [BLOCK_M]
    token: Any  # i64[BLOCK_M]
    mask: Any  # [BLOCK_M]
    query_pos: Any  # [BLOCK_M]
    last_key: Any  # [BLOCK_M], the last position that the row sees


class KeyRange(NamedTuple):
    """The keys that a program reads: keys in [key_low, end), in the tiles that cover [start, end)."""

    start: Any
    end: Any
    key_low: Any
    first_pos: Any  # of the first row
    last_pos: Any


class Scales(NamedTuple):
    """The factors by which scores are multiplied."""

    score_scale: Any
    exp_scale: Any  # from scores to powers of two
    softcap: Any


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
    last_key,  # [BLOCK_M]
    cache,  # Cache
    keys,  # KeyRange
    start,
    end,
    scales,  # Scales
    MASKED: tl.constexpr,
    layer: tl.constexpr,  # Layer
    tiles: tl.constexpr,  # AttentionConfig
):
    """Online softmax over the key tiles [start, end); MASKED where not every row sees every key."""
    offs_d = tl.arange(0, layer.BLOCK_D)
    offs_v = tl.arange(0, layer.BLOCK_V)
    # In a pipeline the values that a descriptor's loads leave to be zeroed would take more shared memory.
    for tile in tl.range(
        start, end, tiles.TILE, num_stages=1 if MASKED and cache.key_desc is not None else None
    ):
        offs_t = tile + tl.arange(0, tiles.TILE)
        # A slot outside [key_low, end) may hold another sequence's NaN, and 0 * NaN is NaN.
        mask_t = (offs_t >= keys.key_low) & (offs_t < keys.end) if MASKED else offs_t >= 0
        if layer.BLOCK_SIZE % tiles.TILE == 0:  # one block holds the whole tile
            block = tl.load(cache.table_ptr + tile // layer.BLOCK_SIZE).to(tl.int64)
        else:
            block = _load_row(cache.table_ptr, offs_t // layer.BLOCK_SIZE, mask_t, MASKED).to(tl.int64)
        slot = offs_t % layer.BLOCK_SIZE
        offs_key = block * layer.stride_key_block + slot * layer.stride_key_slot
        if cache.key_desc is not None:
            place = [block.to(tl.int32), tile % layer.BLOCK_SIZE, cache.kv_head, 0]
            key = cache.key_desc.load(place).reshape(tiles.TILE, layer.BLOCK_D)
        else:
            key = _load_tile(
                cache.key_ptr,
                offs_key,
                mask_t,
                offs_d,
                min(layer.HEAD_DIM, layer.BLOCK_D),
                layer.BLOCK_D,
                MASKED,
            )
        # [BLOCK_M, TILE]
        scores = tl.dot(query, tl.trans(key.to(layer.DOT_DTYPE)), input_precision="ieee")
        if layer.BLOCK_R > 0:
            offs_r = tl.arange(0, layer.BLOCK_R)
            rest = _load_tile(
                cache.key_ptr + layer.BLOCK_D,
                offs_key,
                mask_t,
                offs_r,
                layer.HEAD_DIM - layer.BLOCK_D,
                layer.BLOCK_R,
                MASKED,
            )
            scores = tl.dot(query_rest, tl.trans(rest.to(layer.DOT_DTYPE)), scores, input_precision="ieee")
        if layer.VALUE_IN_KEY:
            value = key
        elif cache.value_desc is not None:
            value = cache.value_desc.load(place).reshape(tiles.TILE, layer.BLOCK_V)
            if MASKED and value.dtype != tl.int8:
                value = tl.where(mask_t[:, None], value, tl.zeros_like(value))
        else:
            offs_value = block * layer.stride_value_block + slot * layer.stride_value_slot
            value = _load_tile(
                cache.value_ptr, offs_value, mask_t, offs_v, layer.VALUE_DIM, layer.BLOCK_V, MASKED
            )
        if layer.QUANTIZED:
            offs_scale = block * layer.stride_scale_block + slot
            scores = scores * _load_row(cache.key_scale_ptr, offs_scale, mask_t, MASKED)[None, :]
        if layer.SOFTCAP:  # softcap tanh(x / softcap), by exp: it needs no library
            capped = 2.0 / (
                1.0 + tl.exp2(scores * (scales.score_scale / scales.softcap * 2.885390081777927))
            )  # 2 log2(e)
            scores = scales.softcap - scales.softcap * capped
        if MASKED:
            seen = mask_t[None, :] & (offs_t[None, :] <= last_key[:, None])
            if layer.WINDOW > 0:
                seen = seen & (offs_t[None, :] > query_pos[:, None] - layer.WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no maximum to subtract.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
        weights = tl.exp2(scores * scales.exp_scale - (shift * scales.exp_scale)[:, None])
        rescale = tl.exp2((row_max - shift) * scales.exp_scale)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        acc = acc * rescale[:, None]
        if layer.QUANTIZED:
            weights = weights * _load_row(cache.value_scale_ptr, offs_scale, mask_t, MASKED)[None, :]
        acc = tl.dot(
            weights.to(layer.WEIGHT_DTYPE), value.to(layer.WEIGHT_DTYPE), acc, input_precision="ieee"
        )
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def attend_rows(
    query_ptr,
    sinks_ptr,
    cache,  # Cache
    rows,  # Rows
    keys,  # KeyRange
    scales,  # Scales
    with_sinks,
    layer: tl.constexpr,  # Layer
    tiles: tl.constexpr,  # AttentionConfig
):
    """Attend from rows of queries. Return unnormalised outputs [BLOCK_M, BLOCK_V], row_max and row_sum."""
    BLOCK_M: tl.constexpr = tiles.BLOCK_M  # Triton 3.6 takes no field as the size of a tl.zeros
    BLOCK_V: tl.constexpr = layer.BLOCK_V
    offs_d = tl.arange(0, layer.BLOCK_D)
    offs_query = (rows.token * layer.stride_query_token + rows.head * layer.stride_query_head)[:, None]
    mask_query = rows.mask[:, None] & (offs_d < layer.HEAD_DIM)[None, :]
    query = tl.load(query_ptr + offs_query + offs_d[None, :], mask=mask_query, other=0.0).to(layer.DOT_DTYPE)
    query_rest = query
    if layer.BLOCK_R > 0:
        offs_r = layer.BLOCK_D + tl.arange(0, layer.BLOCK_R)
        mask_rest = rows.mask[:, None] & (offs_r < layer.HEAD_DIM)[None, :]
        query_rest = tl.load(query_ptr + offs_query + offs_r[None, :], mask=mask_rest, other=0.0).to(
            layer.DOT_DTYPE
        )
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if layer.SINKS:  # noqa: SIM102  (decided by the compiler, unlike the next)
        if with_sinks:
            # A key of its own that has no value; exp_scale takes it to powers of two.
            row_max = tl.load(sinks_ptr + rows.head, mask=rows.mask, other=0.0) * (
                1.4426950408889634 / scales.exp_scale
            )
            row_sum = row_sum + 1.0
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    key_scale_ptr, value_scale_ptr = cache.key_scale_ptr, cache.value_scale_ptr
    if layer.QUANTIZED:
        key_scale_ptr += cache.kv_head * layer.BLOCK_SIZE
        value_scale_ptr += cache.kv_head * layer.BLOCK_SIZE
    cache = Cache(
        cache.key_desc,
        cache.value_desc,
        cache.key_ptr + cache.kv_head.to(tl.int64) * layer.stride_key_head,
        cache.value_ptr + cache.kv_head.to(tl.int64) * layer.stride_value_head,
        key_scale_ptr,
        value_scale_ptr,
        cache.table_ptr,
        cache.kv_head,
    )
    # Every row sees every key of the tiles in [full_start, full_end).
    full_end = tl.minimum((keys.first_pos + 1) // tiles.TILE * tiles.TILE, keys.end)
    full_start = keys.start
    if layer.WINDOW > 0:
        full_start = tl.maximum(
            tl.cdiv(tl.maximum(keys.last_pos - layer.WINDOW + 1, 0), tiles.TILE) * tiles.TILE, keys.start
        )
    # A loop for each part: before the full tiles (with a window only), the full ones, those behind them.
    for part in tl.static_range(0 if layer.WINDOW > 0 else 1, 3):
        low = keys.start if part == 0 else full_start if part == 1 else tl.maximum(full_start, full_end)
        high = tl.minimum(full_start, keys.end) if part == 0 else full_end if part == 1 else keys.end
        acc, row_max, row_sum = _attend_tiles(
            acc, row_max, row_sum, query, query_rest, rows.query_pos, rows.last_key, cache, keys, low, high,
            scales, part != 1, layer, tiles,
        )  # fmt: skip
    return acc, row_max, row_sum
