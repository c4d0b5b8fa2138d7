"""What is between the QKV projection and attention, in one pass: QK norm, rotary, K and V into the cache."""

import triton
import triton.language as tl
from torch import Tensor

from ...checked import checked_as
from ...checks import QUANTIZED_DTYPES, check_last_dim_contiguous, check_span
from ...seats import NO_SLOT
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable, check_target, current_target
from .norms import weighted

# Pairs (x1, x2) of a program: 16 bytes a thread for two warps. Each thread must own its pairs, see `_bind`.
_TILE = 1024
_NO_SLOT = tl.constexpr(NO_SLOT)


@triton.jit
def _normalise(
    x1,  # f32[BLOCK_HEADS, BLOCK_HALF]
    x2,
    is_query,  # [BLOCK_HEADS]
    is_key,
    query_weight_ptr,
    key_weight_ptr,
    eps,
    offs_d,  # [1, BLOCK_HALF]
    mask_d,
    dtype: tl.constexpr,
    HALF: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """Apply an RMS norm to every head, rounded to `dtype` as in `rms_norm`."""
    # [BLOCK_HEADS, BLOCK_HALF]
    mask_query, mask_key = is_query[:, None] & mask_d, is_key[:, None] & mask_d
    query_weight1 = tl.load(query_weight_ptr + offs_d, mask=mask_query, other=0.0)
    query_weight2 = tl.load(query_weight_ptr + HALF + offs_d, mask=mask_query, other=0.0)
    weight1 = tl.load(key_weight_ptr + offs_d, mask=mask_key, other=0.0)
    weight2 = tl.load(key_weight_ptr + HALF + offs_d, mask=mask_key, other=0.0)
    weight1 = tl.where(is_query[:, None], query_weight1, weight1)
    weight2 = tl.where(is_query[:, None], query_weight2, weight2)
    inverse = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1) / (2 * HALF) + eps)[:, None]
    x1 = weighted(x1 * inverse, weight1, dtype, UNIT_OFFSET)
    x2 = weighted(x2 * inverse, weight2, dtype, UNIT_OFFSET)
    return x1.to(dtype).to(tl.float32), x2.to(dtype).to(tl.float32)


@triton.jit
def _store_kv(
    head_ptr,  # [BLOCK_HEADS, BLOCK_HALF], where the first halves go
    scale_ptr,  # [BLOCK_HEADS], or None
    fixed_ptr,  # [BLOCK_HEADS], where to read the scales; None: they follow from the heads
    x1,
    x2,
    mask_head,
    mask_d,
    HALF: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Write heads of K or V into the cache, quantised if it has scales."""
    if scale_ptr is not None:
        x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
        # NaN if a value is NaN or infinite, else 0: the scale shows it.
        nan = tl.sum(x1 * 0.0 + x2 * 0.0, axis=1)
        if fixed_ptr is not None:
            scale = tl.load(fixed_ptr, mask=mask_head, other=1.0)
            x1, x2 = tl.div_rn(x1, scale[:, None]), tl.div_rn(x2, scale[:, None])
            x1 = tl.minimum(tl.maximum(x1, -LARGEST), LARGEST)
            x2 = tl.minimum(tl.maximum(x2, -LARGEST), LARGEST)
        else:
            largest = tl.maximum(tl.max(tl.abs(x1), axis=1), tl.max(tl.abs(x2), axis=1))
            scale = largest / LARGEST
            inverse = (LARGEST / tl.where(largest > 0.0, largest, 1.0))[:, None]
            x1, x2 = x1 * inverse, x2 * inverse
        if head_ptr.dtype.element_ty == tl.int8:
            x1, x2 = tl.floor(x1 + 0.5), tl.floor(x2 + 0.5)
        tl.store(scale_ptr, scale + nan, mask=mask_head)
    mask = mask_head[:, None] & mask_d
    tl.store(head_ptr, x1.to(head_ptr.dtype.element_ty), mask=mask)
    tl.store(head_ptr + HALF, x2.to(head_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slot_mapping_ptr"])  # a view at any offset
def _rotary_store_kv_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    key_cache_ptr,  # None, like those of V and of slots, where there are query heads only
    value_cache_ptr,
    key_scale_ptr,  # None where the cache is not quantised
    value_scale_ptr,
    fixed_key_ptr,  # None where scales follow from the heads
    fixed_value_ptr,
    slot_mapping_ptr,
    query_weight_ptr,  # None where there is no norm
    key_weight_ptr,
    eps,
    stride_qkv_token: tl.constexpr,
    stride_qkv_head: tl.constexpr,
    stride_cos: tl.constexpr,
    stride_sin: tl.constexpr,
    stride_cache_block: tl.constexpr,
    stride_cache_slot: tl.constexpr,
    stride_cache_head: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    LARGEST: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
):
    """Process BLOCK_HEADS of one token's heads: query, key and value heads alike."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    offs_d = tl.arange(0, BLOCK_HALF)[None, :]
    mask_d = offs_d < HALF
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    if slot_mapping_ptr is not None:
        slot = tl.load(slot_mapping_ptr + token)
    qkv_ptr += token * stride_qkv_token
    offs = head[:, None] * stride_qkv_head + offs_d
    mask = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & mask_d
    # [BLOCK_HEADS, BLOCK_HALF], cos and sin too: loading them for every head takes 16 bytes a thread from L1,
    # loading them once would take 4 bytes a thread and a way through shared memory.
    x1 = tl.load(qkv_ptr + offs, mask=mask, other=0.0)
    x2 = tl.load(qkv_ptr + offs + HALF, mask=mask, other=0.0)
    mask = (head < NUM_HEADS + NUM_KV_HEADS)[:, None] & mask_d
    cos = tl.load(cos_ptr + token * stride_cos + offs_d, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + token * stride_sin + offs_d, mask=mask, other=0.0)
    value1, value2 = x1, x2

    dtype = qkv_ptr.dtype.element_ty
    x1, x2 = x1.to(tl.float32), x2.to(tl.float32)
    if query_weight_ptr is not None:
        x1, x2 = _normalise(
            x1, x2, is_query, is_key, query_weight_ptr, key_weight_ptr, eps, offs_d, mask_d, dtype, HALF,
            UNIT_OFFSET,
        )  # fmt: skip
    x1, x2 = (x1 * cos - x2 * sin).to(dtype), (x2 * cos + x1 * sin).to(dtype)

    # All stores come last: a store waits for its value, and so would every instruction after it.
    mask = is_query[:, None] & mask_d
    tl.store(qkv_ptr + offs, x1, mask=mask)
    tl.store(qkv_ptr + offs + HALF, x2, mask=mask)
    if key_cache_ptr is not None:
        is_stored = slot + head * 0 != _NO_SLOT  # masks are vectors
        is_key = is_key & is_stored
        is_value = is_value & is_stored
        kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
        offs_cache = slot // BLOCK_SIZE * stride_cache_block + slot % BLOCK_SIZE * stride_cache_slot
        offs_cache += kv_head[:, None] * stride_cache_head + offs_d
        if key_scale_ptr is not None:
            offs_scale = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
            key_scale_ptr += offs_scale
            value_scale_ptr += offs_scale
        if fixed_key_ptr is not None:
            fixed_key_ptr += kv_head
        if fixed_value_ptr is not None:
            fixed_value_ptr += kv_head
        key_ptr = key_cache_ptr + offs_cache
        value_ptr = value_cache_ptr + offs_cache
        _store_kv(key_ptr, key_scale_ptr, fixed_key_ptr, x1, x2, is_key, mask_d, HALF, LARGEST)
        _store_kv(
            value_ptr, value_scale_ptr, fixed_value_ptr, value1, value2, is_value, mask_d, HALF, LARGEST
        )


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
    key_scales: Tensor | None = None,  # f32[num_blocks, num_kv_heads, block_size], written in place
    value_scales: Tensor | None = None,  # like key_scales, of an fp8 or int8 cache
    fixed_key_scales: Tensor | None = None,  # f32[num_kv_heads], or None
    fixed_value_scales: Tensor | None = None,  # like fixed_key_scales
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """Normalise and rotate query and key. Store key and value in their slots, and return the query.

    Three operations follow each other: an RMS norm of every head, if weights are given (Henry et al. 2020, as
    in Qwen3); the rotary embedding in neox order (Su et al. 2021); and cache[slot // block_size, slot %
    block_size] = new token (Kwon et al. 2023). They compute in float32 and round to qkv's dtype where HF
    rounds: before and after the norm's weight, and after the rotation. With unit_offset, the norm is Gemma
    3's, see `rms_norm`.

    The query is rotated in place and returned as a view of qkv, which is still in the L2 cache. The key heads
    of qkv are undefined afterwards. Without caches, qkv has query heads only, and key_norm_weight is None.

    Two tokens must not share a slot. A token in slot NO_SLOT (-1) is not stored; it is padding, allowed only
    for callers that guarantee their arguments. A quantised cache stores every head divided by its own scale,
    which is its largest absolute value over the largest value of the dtype (int8 rounds to nearest, halves
    up); or divided by a fixed scale and clamped to the range of the dtype. A plain cache has qkv's dtype, or
    float16 or bfloat16 if qkv is float32.

    Raises ValueError for a shape, dtype, stride or device that does not fit, and in debug mode (see `checks`)
    for a slot outside the cache or named twice.
    """
    tensors = qkv, cos, sin, key_cache, value_cache, slot_mapping
    weights = (query_norm_weight, key_norm_weight)
    scales = (key_scales, value_scales)
    fixed = fixed_key_scales, fixed_value_scales
    key = combination((*tensors, *weights, *scales, *fixed), eps, unit_offset)
    launch, num_heads = _launches.find(key, *tensors, *weights, eps, unit_offset, *scales, *fixed)
    for name, keys, values in (("cache", key_cache, value_cache), ("scales", *scales)):
        if keys is not None and values is not None and keys.data_ptr() == values.data_ptr() and keys.numel():
            raise ValueError(f"key_{name} and value_{name} are both written, and must not be the same memory")
    if key_cache is None:
        weights = query_norm_weight, query_norm_weight  # the kernel has both or neither
    launch(qkv, cos, sin, key_cache, value_cache, *scales, *fixed, slot_mapping, *weights)
    return qkv[:, :num_heads]


@checked_as("rotary_store_kv")
def _bind(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    slot_mapping: Tensor | None,
    query_norm_weight: Tensor | None,
    key_norm_weight: Tensor | None,
    eps: float,
    unit_offset: bool,
    key_scales: Tensor | None,  # noqa: ARG001  (checked)
    value_scales: Tensor | None,  # noqa: ARG001
    fixed_key_scales: Tensor | None,  # noqa: ARG001
    fixed_value_scales: Tensor | None,  # noqa: ARG001
) -> tuple[BoundLaunch, int]:
    """Check the arguments. Return the launch, and the number of query heads."""
    check_launchable("qkv", qkv)
    num_tokens, num_all_heads, head_dim = qkv.shape
    block_size = 1
    num_kv_heads = 0
    cache_dtype = qkv.dtype
    strides: tuple[int, ...] = (0, 0, 0)
    tensors = {
        "qkv": qkv,
        "cos": cos,
        "sin": sin,
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slot_mapping": slot_mapping,
        "query_norm_weight": query_norm_weight,
        "key_norm_weight": key_norm_weight,
    }
    for name, tensor in tensors.items():
        if tensor is not None:
            check_last_dim_contiguous(name, tensor)
    check_span("qkv", qkv)
    if key_cache is not None and value_cache is not None:
        check_span("key_cache", key_cache)
        check_span("value_cache", value_cache)
        if value_cache.stride() != key_cache.stride():
            raise ValueError(
                f"value_cache must have key_cache's strides {key_cache.stride()}, got {value_cache.stride()}"
            )
        _, block_size, num_kv_heads, _ = key_cache.shape
        strides = key_cache.stride()[:3]
        cache_dtype = key_cache.dtype
    check_target(cache_dtype, current_target())
    num_heads = num_all_heads - 2 * num_kv_heads
    half = head_dim // 2
    # Whatever the model, two warps move a tile 16 bytes a thread, on AMD too. In a smaller one two threads
    # would own a pair, and one could read a query that the other had already written.
    block_half = triton.next_power_of_2(half)
    block_heads = max(1, _TILE // block_half)
    launch = BoundLaunch(
        _rotary_store_kv_kernel,
        (num_tokens, triton.cdiv(num_all_heads, block_heads)),
        eps=float(eps),  # an int would be another specialisation
        stride_qkv_token=qkv.stride(0),
        stride_qkv_head=qkv.stride(1),
        stride_cos=cos.stride(0),
        stride_sin=sin.stride(0),
        stride_cache_block=strides[0],
        stride_cache_slot=strides[1],
        stride_cache_head=strides[2],
        BLOCK_SIZE=block_size,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=half,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        LARGEST=QUANTIZED_DTYPES.get(cache_dtype, 1.0),
        UNIT_OFFSET=unit_offset,
        num_warps=2,
    )
    return launch, num_heads


_launches = Launches(_bind)
