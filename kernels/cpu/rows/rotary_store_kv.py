"""QK norm, rotary embeddings, and the store of K and V into the cache."""

from torch import Tensor

from ...checked import checked
from ..formats import KINDS
from ..launch.tasks import Task, are_contiguous, cache_strides
from .row_kernels import in_torch, units_of_rows

ROTARY_STORE_KV = Task(
    "rows.rotary_store_kv.rotary_store_kv",
    (
        "qkv", "cos", "sin", "key_cache", "value_cache", "slot_mapping", "query_norm", "key_norm",
        "key_scales", "value_scales", "fixed_key_scales", "fixed_value_scales",
    ),
    (
        "kind", "cache_kind", "unit_offset",
        "num_rows", "num_heads", "num_kv_heads", "head_dim", "block_size",
        "qkv_token_stride", "qkv_head_stride",
        "key_block_stride", "key_token_stride", "key_head_stride",
        "value_block_stride", "value_token_stride", "value_head_stride", "rows_per_unit",
    ),
    ("eps",),
)  # fmt: skip


rotary_store_kv_by_torch = in_torch("rotary_store_kv")


@checked
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
    key_scales: Tensor | None = None,  # f32[num_blocks, num_kv_heads, block_size], of a quantized cache
    value_scales: Tensor | None = None,
    fixed_key_scales: Tensor | None = None,  # f32[num_kv_heads]; None: the scale follows from each head
    fixed_value_scales: Tensor | None = None,
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """Apply QK norm and rotary embeddings, store K and V; see `reference.rotary_store_kv`."""
    num_tokens, num_rows, head_dim = qkv.shape
    block_size = 0
    num_kv_heads = 0
    cache_dtype = qkv.dtype
    regular = qkv.is_cpu and qkv.stride(2) == 1
    regular = regular and are_contiguous(cos, sin, slot_mapping, query_norm_weight, key_norm_weight)
    if key_cache is not None and value_cache is not None:
        block_size, num_kv_heads, _ = key_cache.shape[1:]
        cache_dtype = key_cache.dtype
        regular = regular and key_cache.stride(3) == value_cache.stride(3) == 1
    num_heads = num_rows - 2 * num_kv_heads
    if not regular:
        return rotary_store_kv_by_torch(
            qkv,
            cos,
            sin,
            key_cache,
            value_cache,
            slot_mapping,
            query_norm_weight=query_norm_weight,
            key_norm_weight=key_norm_weight,
            eps=eps,
            unit_offset=unit_offset,
            key_scales=key_scales,
            value_scales=value_scales,
            fixed_key_scales=fixed_key_scales,
            fixed_value_scales=fixed_value_scales,
        )
    num_units, per_unit = units_of_rows(num_tokens, num_rows * head_dim)
    ROTARY_STORE_KV.run(
        num_units,
        qkv=qkv,
        cos=cos,
        sin=sin,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
        query_norm=query_norm_weight,
        key_norm=key_norm_weight,
        key_scales=key_scales,
        value_scales=value_scales,
        fixed_key_scales=fixed_key_scales,
        fixed_value_scales=fixed_value_scales,
        kind=KINDS[qkv.dtype],
        cache_kind=KINDS[cache_dtype],
        unit_offset=unit_offset,
        num_rows=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        qkv_token_stride=qkv.stride(0) * qkv.itemsize,
        qkv_head_stride=qkv.stride(1) * qkv.itemsize,
        **cache_strides("key", key_cache),
        **cache_strides("value", value_cache),
        rows_per_unit=per_unit,
        eps=eps,
    )
    return qkv[:, :num_heads]
