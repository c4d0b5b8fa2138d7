"""QK norm, rotary embeddings, and the store of K and V into the cache."""

from typing import Any

import numpy as np

from ...formats import FLOAT32, INT8, ITEM_SIZES
from ...rows.rotary_store_kv import ROTARY_STORE_KV
from ...target import LANES
from ..kernels import each_unit
from ..simd.memory import get_float, get_long, item_size, load_some_as, set_float, some_of, store_some_as
from ..simd.vectors import (
    add,
    divide,
    fma,
    function,
    greater,
    highest,
    multiply,
    splat,
    subtract,
    total,
    where_greater,
)
from .rms_norm import make_normalize
from .row_kernel import by_kind, rows_of_unit


@by_kind
def _rotary_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    load, store = some_of(kind)
    load_float, _ = some_of(FLOAT32)
    normalize = make_normalize(kind)

    @function
    def rotate(head, cos, sin, half):
        for i in range(0, half, LANES):
            first = head + i * size_of
            second = head + (half + i) * size_of
            left = half - i
            x1 = load(first, left)
            x2 = load(second, left)
            c = load_float(cos + 4 * i, left)
            s = load_float(sin + 4 * i, left)
            store(first, subtract(multiply(x1, c), multiply(x2, s)), left)
            store(second, add(multiply(x2, c), multiply(x1, s)), left)

    @function
    def rotary_row(args, row):
        half = args.head_dim // 2
        token = args.qkv + row * args.qkv_token_stride
        cos = args.cos + row * 4 * half
        sin = args.sin + row * 4 * half
        for i in range(args.num_heads + args.num_kv_heads):
            head = token + i * args.qkv_head_stride
            if args.query_norm:
                weight = args.query_norm if i < args.num_heads else args.key_norm
                normalize(head, 0, weight, args.unit_offset, False, head, args.head_dim, args.eps)
            rotate(head, cos, sin, half)

    return rotary_row


def _make_store(store_head: Any) -> Any:
    """Make store_kv(args, row), which stores K and V by store_head(args, head, to, scale, fixed)."""

    @function
    def store_kv(args, row):
        slot = get_long(args.slot_mapping + 8 * row)
        block = slot // args.block_size
        place = slot % args.block_size
        key_to = args.key_cache + block * args.key_block_stride + place * args.key_token_stride
        value_to = args.value_cache + block * args.value_block_stride + place * args.value_token_stride
        for i in range(args.num_kv_heads):
            key = args.qkv + row * args.qkv_token_stride + (args.num_heads + i) * args.qkv_head_stride
            value = key + args.num_kv_heads * args.qkv_head_stride
            to = 4 * ((block * args.num_kv_heads + i) * args.block_size + place)
            key_scale = args.key_scales + to if args.key_scales else 0
            value_scale = args.value_scales + to if args.value_scales else 0
            key_fixed = args.fixed_key_scales + 4 * i if args.fixed_key_scales else 0
            value_fixed = args.fixed_value_scales + 4 * i if args.fixed_value_scales else 0
            store_head(args, key, key_to + i * args.key_head_stride, key_scale, key_fixed)
            store_head(args, value, value_to + i * args.value_head_stride, value_scale, value_fixed)

    return store_kv


@by_kind
def _store_row(kind: int) -> Any:
    size_of = ITEM_SIZES[kind]
    load, store = some_of(kind)

    @function
    def store_head(args, head, to, scale, fixed):  # noqa: ARG001
        for d in range(0, args.head_dim, LANES):
            left = args.head_dim - d
            store(to + d * size_of, load(head + d * size_of, left), left)

    return _make_store(store_head)


@function
def _scale_of(kind, head, dim, cache_kind, scale):
    """Return the factor that makes a head fit into a quantized cache, and write its inverse to `scale`."""
    size = item_size(kind)
    zero = splat(np.float32(0.0))
    top = zero
    nan = zero
    for d in range(0, dim, LANES):
        x = load_some_as(kind, head + d * size, dim - d)
        top = greater(greater(x, subtract(zero, x)), top)
        nan = fma(x, zero, nan)  # NaN if there was NaN or infinity, which top does not show
    largest = highest(top)
    most = np.float32(127.0) if cache_kind == INT8 else np.float32(448.0)
    set_float(scale, largest / most + total(nan))
    return most / (largest if largest > np.float32(0.0) else np.float32(1.0))


@function
def _store_divided(args, head, to, scale, fixed):
    """Store a head divided by the scale at `fixed`, clamped to the range of a quantized cache."""
    dim = args.head_dim
    size = item_size(args.kind)
    cache_size = item_size(args.cache_kind)
    divisor = get_float(fixed)
    zero = splat(np.float32(0.0))
    most = splat(np.float32(127.0) if args.cache_kind == INT8 else np.float32(448.0))
    least = subtract(zero, most)
    nan = zero
    for d in range(0, dim, LANES):
        x = load_some_as(args.kind, head + d * size, dim - d)
        nan = fma(x, zero, nan)
        x = divide(x, splat(divisor))
        x = where_greater(x, most, most, where_greater(least, x, least, x))
        store_some_as(args.cache_kind, to + d * cache_size, x, dim - d)
    set_float(scale, divisor + total(nan))


@function
def _store_head_as(args, head, to, scale, fixed):
    """Store a head in a cache of another kind.

    scale: 0, or where the scale of a quantized head belongs. fixed: 0, or where to read it.
    """
    if fixed:
        _store_divided(args, head, to, scale, fixed)
        return
    kind = args.kind
    cache_kind = args.cache_kind
    dim = args.head_dim
    factor = splat(_scale_of(kind, head, dim, cache_kind, scale) if scale else np.float32(1.0))
    size = item_size(kind)
    cache_size = item_size(cache_kind)
    for d in range(0, dim, LANES):
        x = multiply(load_some_as(kind, head + d * size, dim - d), factor)
        store_some_as(cache_kind, to + d * cache_size, x, dim - d)


_store_row_as = _make_store(_store_head_as)


@each_unit(ROTARY_STORE_KV)
def _rotary_store_kv_unit(args, unit):
    for row in rows_of_unit(args, unit):
        _rotary_row(args, row)
        if not args.key_cache:
            continue
        if args.kind == args.cache_kind:
            _store_row(args, row)
        else:
            _store_row_as(args, row)
