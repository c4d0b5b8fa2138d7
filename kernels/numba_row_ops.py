"""Norm, activation, rotary and the store into the cache for one row, for a CPU; for each kind of number.

Every function is made for one kind, so that nothing in its loops asks for it.
"""

from typing import Any, NamedTuple

import numpy as np

from .numba_memory import (
    _ITEM_SIZES,
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    get_long,
    item_size,
    set_float,
    some_of,
    store_some_as,
)
from .numba_vectors import (
    LANES,
    add,
    fma,
    function,
    greater,
    highest,
    multiply,
    silu,
    splat,
    subtract,
    total,
)

load_float, _ = some_of(FLOAT32)


class RowOps(NamedTuple):
    """Functions of (args, row); args is the record of the operation of that name in `numba_ops`."""

    rms_norm: Any
    silu_and_mul: Any
    rotary_store_kv: Any


def _normaliser(kind: int) -> Any:
    size_of, (load, store) = _ITEM_SIZES[kind], some_of(kind)

    @function
    def normalise(x, residual, weight, unit_offset, out, size, eps):
        """weight * x / sqrt(mean(x²) + eps), after residual += x where there is one, in its place.

        The quotient is rounded to the kind, then multiplied by weight. unit_offset: it is multiplied by
        1 + weight, and only then rounded.
        """
        squares, one = splat(np.float32(0.0)), splat(np.float32(1.0))
        source = residual if residual else x
        for i in range(0, size, LANES):
            at, left = i * size_of, size - i
            if residual:
                store(residual + at, add(load(residual + at, left), load(x + at, left)), left)
            number = load(source + at, left)
            squares = fma(number, number, squares)
        mean = total(squares) / np.float32(size) + np.float32(eps)
        scale = splat(np.float32(1.0) / np.sqrt(mean))
        for i in range(0, size, LANES):
            at, left = i * size_of, size - i
            own, number = load(weight + at, left), multiply(load(source + at, left), scale)
            if unit_offset:
                own = add(one, own)
            elif kind != FLOAT32:
                store(out + at, number, left)
                number = load(out + at, left)
            store(out + at, multiply(number, own), left)

    return normalise


def _storer(kind: int) -> Any:
    size_of, (load, store) = _ITEM_SIZES[kind], some_of(kind)

    @function
    def scale_of(head, dim, cache_kind, scale):
        """What a head is multiplied by to fit into a quantised cache; its inverse goes to `scale`."""
        zero = splat(np.float32(0.0))
        top, spoilt = zero, zero
        for d in range(0, dim, LANES):
            x = load(head + d * size_of, dim - d)
            top = greater(greater(x, subtract(zero, x)), top)
            spoilt = fma(x, zero, spoilt)  # NaN once there is NaN or infinity, which top does not show
        largest = highest(top)
        most = np.float32(127.0) if cache_kind == INT8 else np.float32(448.0)
        set_float(scale, largest / most + total(spoilt))
        return most / (largest if largest > np.float32(0.0) else np.float32(1.0))

    @function
    def store_head(head, dim, cache_kind, to, scale):
        """K or V of a head into the cache; where there is room for a scale, divided by that."""
        if cache_kind == kind:
            for d in range(0, dim, LANES):
                store(to + d * size_of, load(head + d * size_of, dim - d), dim - d)
            return
        factor = splat(scale_of(head, dim, cache_kind, scale) if scale else np.float32(1.0))
        cache_size = item_size(cache_kind)
        for d in range(0, dim, LANES):
            x = multiply(load(head + d * size_of, dim - d), factor)
            store_some_as(cache_kind, to + d * cache_size, x, dim - d)

    return store_head


def _of_kind(kind: int) -> RowOps:
    size_of, (load, store) = _ITEM_SIZES[kind], some_of(kind)
    normalise, store_head = _normaliser(kind), _storer(kind)

    @function
    def rms_norm(args, row):
        x, row_bytes = args.x + row * args.x_stride, args.size * size_of
        residual = args.residual + row * row_bytes if args.residual else 0
        out = args.out + row * row_bytes
        normalise(x, residual, args.weight, args.unit_offset, out, args.size, args.eps)

    @function
    def silu_and_mul(args, row):
        size = args.size
        gate, out = args.x + row * args.x_stride, args.out + row * size * size_of
        for i in range(0, size, LANES):
            at, left = i * size_of, size - i
            up = load(gate + size * size_of + at, left)
            store(out + at, multiply(silu(load(gate + at, left)), up), left)

    @function
    def rotate(head, cos, sin, half):
        for i in range(0, half, LANES):
            first, second, left = head + i * size_of, head + (half + i) * size_of, half - i
            x1, x2 = load(first, left), load(second, left)
            c, s = load_float(cos + 4 * i, left), load_float(sin + 4 * i, left)
            store(first, subtract(multiply(x1, c), multiply(x2, s)), left)
            store(second, add(multiply(x2, c), multiply(x1, s)), left)

    @function
    def rotary_store_kv(args, row):
        dim, half, cache_kind = args.head_dim, args.head_dim // 2, args.cache_kind
        token, rotated = args.qkv + row * args.qkv_token_stride, args.num_heads + args.num_kv_heads
        cos, sin = args.cos + row * 4 * half, args.sin + row * 4 * half
        for i in range(rotated):
            head = token + i * args.qkv_head_stride
            if args.query_norm:
                weight = args.query_norm if i < args.num_heads else args.key_norm
                normalise(head, 0, weight, args.unit_offset, head, dim, args.eps)
            rotate(head, cos, sin, half)
        slot = get_long(args.slot_mapping + 8 * row)
        block, place = slot // args.block_size, slot % args.block_size
        key_to = args.key_cache + block * args.key_block_stride + place * args.key_token_stride
        value_to = args.value_cache + block * args.value_block_stride + place * args.value_token_stride
        for i in range(args.num_kv_heads):
            key = token + (args.num_heads + i) * args.qkv_head_stride
            value = key + args.num_kv_heads * args.qkv_head_stride
            to = 4 * ((block * args.num_kv_heads + i) * args.block_size + place)
            key_scale = args.key_scales + to if args.key_scales else 0
            value_scale = args.value_scales + to if args.value_scales else 0
            store_head(key, dim, cache_kind, key_to + i * args.key_head_stride, key_scale)
            store_head(value, dim, cache_kind, value_to + i * args.value_head_stride, value_scale)

    return RowOps(rms_norm, silu_and_mul, rotary_store_kv)


of_float, of_half, of_bfloat = map(_of_kind, (FLOAT32, FLOAT16, BFLOAT16))
