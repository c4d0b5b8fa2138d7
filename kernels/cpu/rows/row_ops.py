"""Norm, activation, rotary and the store into the cache for one row, for a CPU; for each kind of number.

Every function is made for one kind, so that nothing in its loops asks for it; but for the store into a cache
of another.
"""

from typing import Any, NamedTuple

import numpy as np

from ..simd.memory import get_long, item_size, load_some_as, set_float, some_of, store_some_as
from ..simd.numbers import BFLOAT16, FLOAT16, FLOAT32, INT8, ITEM_SIZES
from ..simd.vectors import (
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
    """Functions of (args, row); args is the record of the operation in `cpu.rows.ops`."""

    rms_norm: Any
    silu_and_mul: Any
    rotary: Any  # and QK norm
    store_kv: Any  # into a cache of the same kind; `store_kv_as` into any other


def _normaliser(kind: int) -> Any:
    size_of, (load, store) = ITEM_SIZES[kind], some_of(kind)

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


@function
def _scale_of(kind, head, dim, cache_kind, scale):
    """What a head is multiplied by to fit into a quantised cache; its inverse goes to `scale`."""
    size, zero = item_size(kind), splat(np.float32(0.0))
    top, spoilt = zero, zero
    for d in range(0, dim, LANES):
        x = load_some_as(kind, head + d * size, dim - d)
        top = greater(greater(x, subtract(zero, x)), top)
        spoilt = fma(x, zero, spoilt)  # NaN once there is NaN or infinity, which top does not show
    largest = highest(top)
    most = np.float32(127.0) if cache_kind == INT8 else np.float32(448.0)
    set_float(scale, largest / most + total(spoilt))
    return most / (largest if largest > np.float32(0.0) else np.float32(1.0))


def _storer(store_head: Any) -> Any:
    """K and V of a row into the cache, a head at a time: store_head(args, head, to, scale)."""

    @function
    def store_kv(args, row):
        slot = get_long(args.slot_mapping + 8 * row)
        block, place = slot // args.block_size, slot % args.block_size
        key_to = args.key_cache + block * args.key_block_stride + place * args.key_token_stride
        value_to = args.value_cache + block * args.value_block_stride + place * args.value_token_stride
        for i in range(args.num_kv_heads):
            key = args.qkv + row * args.qkv_token_stride + (args.num_heads + i) * args.qkv_head_stride
            value = key + args.num_kv_heads * args.qkv_head_stride
            to = 4 * ((block * args.num_kv_heads + i) * args.block_size + place)
            key_scale = args.key_scales + to if args.key_scales else 0
            value_scale = args.value_scales + to if args.value_scales else 0
            store_head(args, key, key_to + i * args.key_head_stride, key_scale)
            store_head(args, value, value_to + i * args.value_head_stride, value_scale)

    return store_kv


@function
def _store_head_as(args, head, to, scale):
    """Into a cache of another kind; where there is room for a scale, divided by that."""
    kind, cache_kind, dim = args.kind, args.cache_kind, args.head_dim
    factor = splat(_scale_of(kind, head, dim, cache_kind, scale) if scale else np.float32(1.0))
    size, cache_size = item_size(kind), item_size(cache_kind)
    for d in range(0, dim, LANES):
        x = multiply(load_some_as(kind, head + d * size, dim - d), factor)
        store_some_as(cache_kind, to + d * cache_size, x, dim - d)


store_kv_as = _storer(_store_head_as)


def _of_kind(kind: int) -> RowOps:
    size_of, (load, store) = ITEM_SIZES[kind], some_of(kind)
    normalise = _normaliser(kind)

    @function
    def rms_norm(args, row):
        x, row_bytes = args.x + row * args.x_stride, args.size * size_of
        residual = args.residual + row * row_bytes if args.residual else 0
        out = args.out + row * args.out_stride
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
    def rotary(args, row):
        half, token = args.head_dim // 2, args.qkv + row * args.qkv_token_stride
        cos, sin = args.cos + row * 4 * half, args.sin + row * 4 * half
        for i in range(args.num_heads + args.num_kv_heads):
            head = token + i * args.qkv_head_stride
            if args.query_norm:
                weight = args.query_norm if i < args.num_heads else args.key_norm
                normalise(head, 0, weight, args.unit_offset, head, args.head_dim, args.eps)
            rotate(head, cos, sin, half)

    @function
    def store_head(args, head, to, scale):  # noqa: ARG001
        for d in range(0, args.head_dim, LANES):
            left = args.head_dim - d
            store(to + d * size_of, load(head + d * size_of, left), left)

    return RowOps(rms_norm, silu_and_mul, rotary, _storer(store_head))


of_float, of_half, of_bfloat = map(_of_kind, (FLOAT32, FLOAT16, BFLOAT16))
