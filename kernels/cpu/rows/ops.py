"""The operations between products, for a CPU: one pass over the rows, where torch makes one an operator.

What is not laid out as the kernels read it is left to `torch_ops`, which says what does not fit together.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...checks import KERNEL_DTYPES, QUANTIZED_DTYPES, check_eps
from ...plain import ops as torch_ops
from ..attention.paged_attention import KINDS
from ..launch.tasks import Task, is_plain
from ..simd.memory import LINE, get_float, load, set_float, set_long, store
from ..simd.numbers import FLOAT16, FLOAT32
from ..simd.vectors import (
    LANES,
    VECTOR_BYTES,
    function,
    greater,
    splat,
    total,
    where_greater,
    where_nan,
)
from .row_ops import RowOps, of_bfloat, of_float, of_half, store_kv_as

UNIT_NUMBERS = 16384  # of a unit of rows: work for a few microseconds
# Rows that are whole pages apart share few sets of a core's first cache, where a product reads many of them
# side by side: more than so many that have been normalised lie a line further apart.
PAGE_BYTES, FEW_ROWS = 4096, 64

RMS_NORM = Task(
    (
        "x", "weight", "residual", "out", "kind", "unit_offset", "num_rows", "size", "x_stride",
        "out_stride", "rows_per_unit",
    ),
    ("eps",),
)  # fmt: skip
SILU_AND_MUL = Task(("x", "out", "kind", "num_rows", "size", "x_stride", "rows_per_unit"))
ROTARY_STORE_KV = Task(
    (
        "qkv", "cos", "sin", "key_cache", "value_cache", "slot_mapping", "query_norm", "key_norm",
        "key_scales", "value_scales",
        "kind", "cache_kind", "unit_offset",
        "num_rows", "num_heads", "num_kv_heads", "head_dim", "block_size",
        "qkv_token_stride", "qkv_head_stride",
        "key_block_stride", "key_token_stride", "key_head_stride",
        "value_block_stride", "value_token_stride", "value_head_stride", "rows_per_unit",
    ),
    ("eps",),
)  # fmt: skip
GREEDY = Task(("logits", "tokens", "highest", "num_rows", "size", "stride"))


def _of_kind(name: str) -> Any:
    """The operation of that name on a row of the record's kind."""
    of_floats, of_halves, of_bfloats = (getattr(ops, name) for ops in (of_float, of_half, of_bfloat))

    @function
    def operate(args, row):
        if args.kind == FLOAT32:
            of_floats(args, row)
        elif args.kind == FLOAT16:
            of_halves(args, row)
        else:
            of_bfloats(args, row)

    return operate


_rms_norm, _silu_and_mul, _rotary, _store_kv = map(_of_kind, RowOps._fields)


@GREEDY.each_unit
def _greedy(args, row, scratch):
    """The highest number of a row and the first place that it is at; NaN and 0 if there is one."""
    x, size = args.logits + row * args.stride, args.size
    top, nan = splat(np.float32(-np.inf)), splat(np.float32(0.0))
    block = splat(np.float32(0.0))  # of LANES numbers, where the highest of each lane is; exact up to 2^24
    for i in range(size // LANES):
        number = load(x + i * LANES * 4)
        block = where_greater(number, top, splat(np.float32(i)), block)
        top, nan = greater(number, top), where_nan(number, nan)
    store(scratch, top)
    store(scratch + VECTOR_BYTES, block)
    best, place = get_float(scratch), np.int64(get_float(scratch + VECTOR_BYTES)) * LANES
    for lane in range(1, LANES):
        number = get_float(scratch + 4 * lane)
        at = np.int64(get_float(scratch + VECTOR_BYTES + 4 * lane)) * LANES + lane
        if number > best or (number == best and at < place):
            best, place = number, at
    spoilt = total(nan)
    for i in range(size // LANES * LANES, size):
        number = get_float(x + 4 * i)
        spoilt += number if number != number else np.float32(0.0)
        if number > best:
            best, place = number, np.int64(i)
    set_float(args.highest + 4 * row, best if spoilt == spoilt else spoilt)
    set_long(args.tokens + 8 * row, place if spoilt == spoilt else 0)


@function
def _rows_of(args, unit):
    first = unit * args.rows_per_unit
    return range(first, min(first + args.rows_per_unit, args.num_rows))


@RMS_NORM.each_unit
def _rms_norm_unit(args, unit):
    for row in _rows_of(args, unit):
        _rms_norm(args, row)


@SILU_AND_MUL.each_unit
def _silu_and_mul_unit(args, unit):
    for row in _rows_of(args, unit):
        _silu_and_mul(args, row)


@ROTARY_STORE_KV.each_unit
def _rotary_store_kv_unit(args, unit):
    for row in _rows_of(args, unit):
        _rotary(args, row)
        if args.kind == args.cache_kind:
            _store_kv(args, row)
        else:
            store_kv_as(args, row)


def _units(num_rows: int, size: int) -> tuple[int, int]:
    """How many units of how many rows."""
    rows = max(1, UNIT_NUMBERS // max(1, size))
    return -(-num_rows // rows), rows


def _has_its_scales(cache: Tensor, scales: Tensor | None) -> bool:
    """Whether a plain cache has none, and a quantised one a number for each token and head."""
    if scales is None:
        return cache.dtype in KERNEL_DTYPES
    num_blocks, block_size, num_kv_heads, _ = cache.shape
    shape = num_blocks, num_kv_heads, block_size
    return (
        cache.dtype in QUANTIZED_DTYPES
        and scales.shape == shape
        and is_plain(scales, torch.float32, scales.numel())
    )


def rms_norm(
    x: Tensor,  # [..., size]
    weight: Tensor,  # [size]
    eps: float,
    residual: Tensor | None = None,  # like x, updated in place
    *,
    unit_offset: bool = False,
) -> Tensor:  # [..., size]
    """weight * x / sqrt(mean(x²) + eps), after residual += x where one is given; see `reference.rms_norm`.

    More than FEW_ROWS rows of whole pages do not lie one behind the other.
    """
    size = weight.shape[0]
    dtype = x.dtype
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    check_eps(eps)
    regular = (
        dtype in KERNEL_DTYPES
        and x.is_cpu
        and rows.shape[1] == size
        and rows.stride(1) == 1
        and is_plain(weight, dtype, size)
        and (residual is None or (residual.shape == x.shape and is_plain(residual, dtype, x.numel())))
    )
    if not regular:
        return torch_ops.rms_norm(x, weight, eps, residual, unit_offset=unit_offset)
    num_rows = rows.shape[0]
    width = size
    if x.dim() == 2 and num_rows > FEW_ROWS and size * x.itemsize % PAGE_BYTES == 0:
        width += LINE // x.itemsize
    out = x.new_empty(num_rows, width)[:, :size].view(x.shape)
    num_units, per_unit = _units(num_rows, size)
    RMS_NORM.run(
        num_units,
        rows.data_ptr(),
        weight.data_ptr(),
        0 if residual is None else residual.data_ptr(),
        out.data_ptr(),
        KINDS[x.dtype],
        unit_offset,
        num_rows,
        size,
        rows.stride(0) * x.itemsize,
        width * x.itemsize,
        per_unit,
        eps,
    )
    return out


def silu_and_mul(x: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    """silu(gate) * up, where x is gate and up side by side; see `reference.silu_and_mul`."""
    num_rows, size = x.shape[0], x.shape[1] // 2
    regular = x.is_cpu and x.shape[1] % 2 == 0 and x.stride(1) == 1 and x.dtype in KERNEL_DTYPES
    if not regular:
        return torch_ops.silu_and_mul(x)
    out = x.new_empty(num_rows, size)
    num_units, per_unit = _units(num_rows, 2 * size)
    SILU_AND_MUL.run(
        num_units,
        x.data_ptr(),
        out.data_ptr(),
        KINDS[x.dtype],
        num_rows,
        size,
        x.stride(0) * x.itemsize,
        per_unit,
    )
    return out


def rotary_store_kv(
    qkv: Tensor,  # [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: query, key and value heads
    cos: Tensor,  # f32[num_tokens, head_dim // 2]
    sin: Tensor,  # f32[num_tokens, head_dim // 2]
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], written in place
    value_cache: Tensor,  # like key_cache, written in place
    slot_mapping: Tensor,  # i64[num_tokens]
    *,
    query_norm_weight: Tensor | None = None,  # [head_dim]; both or neither
    key_norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    unit_offset: bool = False,
    key_scales: Tensor | None = None,  # f32[num_blocks, num_kv_heads, block_size], of a quantised cache
    value_scales: Tensor | None = None,
) -> Tensor:  # [num_tokens, num_heads, head_dim]
    """QK norm, rotary, K and V into their slots; see `reference.rotary_store_kv`."""
    num_tokens, num_rows, head_dim = qkv.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    num_heads = num_rows - 2 * num_kv_heads
    dtype, angles = qkv.dtype, num_tokens * (head_dim // 2)
    check_eps(eps)
    regular = (
        dtype in KERNEL_DTYPES
        and block_size > 0
        and qkv.is_cpu
        and key_cache.is_cpu
        and value_cache.is_cpu
        and key_cache.dtype == value_cache.dtype
        and _has_its_scales(key_cache, key_scales)
        and _has_its_scales(value_cache, value_scales)
        and qkv.stride(2) == key_cache.stride(3) == value_cache.stride(3) == 1
        and head_dim == key_cache.shape[3]
        and key_cache.shape == value_cache.shape
        and is_plain(cos, torch.float32, angles)
        and is_plain(sin, torch.float32, angles)
        and is_plain(slot_mapping, torch.int64, num_tokens)
        and (query_norm_weight is None) == (key_norm_weight is None)
        and (query_norm_weight is None or is_plain(query_norm_weight, dtype, head_dim))
        and (key_norm_weight is None or is_plain(key_norm_weight, dtype, head_dim))
    )
    if head_dim % 2 or not regular:
        return torch_ops.rotary_store_kv(
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
        )
    num_units, per_unit = _units(num_tokens, num_rows * head_dim)
    ROTARY_STORE_KV.run(
        num_units,
        *(x.data_ptr() for x in (qkv, cos, sin, key_cache, value_cache, slot_mapping)),
        *(
            0 if x is None else x.data_ptr()
            for x in (query_norm_weight, key_norm_weight, key_scales, value_scales)
        ),
        *(
            KINDS[qkv.dtype],
            KINDS[key_cache.dtype],
            unit_offset,
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
        ),
        *(stride * qkv.itemsize for stride in qkv.stride()[:2]),
        *(stride * key_cache.itemsize for stride in key_cache.stride()[:3]),
        *(stride * value_cache.itemsize for stride in value_cache.stride()[:3]),
        per_unit,
        eps,
    )
    return qkv[:, :num_heads]


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the highest of each row: i64[n] and f32[n]; see `reference.greedy`."""
    num_rows, size = logits.shape
    if logits.stride(1) != 1 or logits.dtype != torch.float32:
        return torch_ops.greedy(logits)
    tokens, highest = logits.new_empty(num_rows, dtype=torch.int64), logits.new_empty(num_rows)
    GREEDY.run(
        num_rows,
        logits.data_ptr(),
        tokens.data_ptr(),
        highest.data_ptr(),
        num_rows,
        size,
        logits.stride(0) * 4,
        scratch_size=2 * VECTOR_BYTES,
    )
    return tokens, highest
