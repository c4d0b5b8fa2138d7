"""Products of rows that are sorted by expert with the weights of their experts: what programs compute."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..linear.kernel import Coded, multiply_tile


class PlainShape(NamedTuple):
    """The shape of an expert's float weight, as constants of a specialisation."""

    NUM_OUTPUTS: int
    NUM_INPUTS: int
    BLOCK_K: int  # inputs of a tl.dot


class Grouping(NamedTuple):
    """The experts, as constants of a specialisation."""

    NUM_EXPERTS: int
    BLOCK_E: int


class Tile(NamedTuple):
    """What a program computes at a time: some outputs of some rows of one expert."""

    expert: Any
    outputs: Any  # [BLOCK_N]
    mask_n: Any
    rows: Any  # [BLOCK_M]
    mask_m: Any


@triton.jit
def _last_tiles(offsets_ptr, num_blocks_n, BLOCK_M: tl.constexpr, grouping: tl.constexpr):
    """Return of each expert the number of tiles up to its last one: [BLOCK_E]."""
    BLOCK_E: tl.constexpr = grouping.BLOCK_E
    expert = tl.arange(0, BLOCK_E)
    mask = expert < grouping.NUM_EXPERTS
    start = tl.load(offsets_ptr + expert, mask=mask, other=0)
    end = tl.load(offsets_ptr + expert + 1, mask=mask, other=0)
    return tl.cumsum(tl.cdiv(end - start, BLOCK_M) * num_blocks_n, axis=0)


@triton.jit
def _tile_of(
    number, last_tiles, offsets_ptr, NUM_OUTPUTS: tl.constexpr, product: tl.constexpr, again: tl.constexpr
):
    """Return a tile by its number. Of an expert, those of the same outputs follow each other.

    again: after the loop over inputs, which has few registers left. Volatile loads are not merged with those
    before the loop: what follows from them is computed again.
    """
    BLOCK_N: tl.constexpr = product.BLOCK_N
    BLOCK_M: tl.constexpr = product.BLOCK_M
    is_before = last_tiles <= number
    expert = tl.sum(is_before.to(tl.int32), axis=0)
    number -= tl.max(tl.where(is_before, last_tiles, 0), axis=0)
    start = tl.load(offsets_ptr + expert, volatile=again)
    end = tl.load(offsets_ptr + expert + 1, volatile=again)
    num_blocks_m = tl.cdiv(end - start, BLOCK_M)
    outputs = number // num_blocks_m * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = start + number % num_blocks_m * BLOCK_M + tl.arange(0, BLOCK_M)
    return Tile(expert.to(tl.int64), outputs, outputs < NUM_OUTPUTS, rows, rows < end)


@triton.jit
def _multiply_plain(x_ptr, weight_ptr, tile, shape: tl.constexpr, product: tl.constexpr):
    """Return the product of a tile's rows of x and a weight in numbers."""
    BLOCK_N: tl.constexpr = product.BLOCK_N
    BLOCK_M: tl.constexpr = product.BLOCK_M
    BLOCK_K: tl.constexpr = shape.BLOCK_K
    NUM_INPUTS: tl.constexpr = shape.NUM_INPUTS
    inputs = tl.arange(0, BLOCK_K)
    x_ptr += inputs[:, None]
    weight_ptr += tile.expert * shape.NUM_OUTPUTS * NUM_INPUTS
    weight_ptr += tile.outputs[:, None] * NUM_INPUTS + inputs[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in range(0, NUM_INPUTS, BLOCK_K):
        mask_n = tile.mask_n[:, None]
        mask_m = tile.mask_m[None, :]
        if NUM_INPUTS % BLOCK_K != 0:
            mask_n = mask_n & (inputs < NUM_INPUTS - start)[None, :]
            mask_m = mask_m & (inputs < NUM_INPUTS - start)[:, None]
        # [BLOCK_N, BLOCK_K]
        weight = tl.load(weight_ptr + start, mask=mask_n, other=0.0)
        # [BLOCK_K, BLOCK_M]
        x = tl.load(x_ptr + start, mask=mask_m, other=0.0)
        acc = tl.dot(weight.to(product.DOT_DTYPE), x.to(product.DOT_DTYPE), acc, input_precision="ieee")
    return acc


@triton.jit
def _multiply_codes(x_ptr, coded, tile, shape: tl.constexpr, kind: tl.constexpr, product: tl.constexpr):
    """Return the product of a tile's rows of x and a weight in codes."""
    BLOCK_N: tl.constexpr = product.BLOCK_N
    BLOCK_M: tl.constexpr = product.BLOCK_M
    NUM_TILES: tl.constexpr = shape.NUM_TILES  # Triton 3.6 takes no fields for a range
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for inputs in range(NUM_TILES):
        acc = multiply_tile(acc, x_ptr, tile.mask_m[None, :], coded, inputs, shape, kind, product)
    return acc


@triton.jit
def _of_expert(ptr, expert, size: tl.constexpr):
    """Return where an expert's part of a tensor begins, or None without one."""
    if ptr is not None:
        ptr += expert * size
    return ptr


@triton.jit
def grouped_linear_kernel(
    x_ptr,
    sources_ptr,  # i64[num_rows], the row of x that each row is; None: that of the same number
    offsets_ptr,  # i32[NUM_EXPERTS + 1], the first row of each expert
    words_ptr,  # of a weight in codes; or [NUM_EXPERTS, NUM_OUTPUTS, NUM_INPUTS] numbers
    scale_ptr,
    scale_unit_ptr,
    zero_ptr,
    offset_ptr,
    offset_unit_ptr,
    bias_ptr,  # [NUM_EXPERTS, NUM_OUTPUTS], or None
    out_ptr,  # [num_rows, NUM_OUTPUTS]
    stride_x: tl.constexpr,
    grouping: tl.constexpr,
    shape: tl.constexpr,
    kind: tl.constexpr,  # None: the weight is in numbers
    product: tl.constexpr,
):
    NUM_OUTPUTS: tl.constexpr = shape.NUM_OUTPUTS
    num_blocks_n: tl.constexpr = (NUM_OUTPUTS + product.BLOCK_N - 1) // product.BLOCK_N
    last_tiles = _last_tiles(offsets_ptr, num_blocks_n, product.BLOCK_M, grouping)
    num_tiles = tl.max(last_tiles, axis=0)
    for number in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile = _tile_of(number, last_tiles, offsets_ptr, NUM_OUTPUTS, product, False)
        if sources_ptr is None:
            sources = tile.rows.to(tl.int64)
        else:
            sources = tl.load(sources_ptr + tile.rows, mask=tile.mask_m, other=0)
        x_rows_ptr = x_ptr + sources[None, :] * stride_x
        if kind is None:
            acc = _multiply_plain(x_rows_ptr, words_ptr, tile, shape, product)
        else:
            NUM_UNITS: tl.constexpr = (shape.NUM_TILES + shape.UNIT_TILES - 1) // shape.UNIT_TILES
            coded = Coded(
                _of_expert(words_ptr, tile.expert, shape.NUM_TILES * NUM_OUTPUTS * kind.SUB),
                _of_expert(scale_ptr, tile.expert, shape.NUM_GROUPS * NUM_OUTPUTS),
                _of_expert(scale_unit_ptr, tile.expert, NUM_UNITS * NUM_OUTPUTS),
                _of_expert(zero_ptr, tile.expert, shape.NUM_GROUPS * NUM_OUTPUTS),
                _of_expert(offset_ptr, tile.expert, shape.NUM_GROUPS * NUM_OUTPUTS),
                _of_expert(offset_unit_ptr, tile.expert, NUM_UNITS * NUM_OUTPUTS),
                tile.outputs,
                tile.mask_n,
            )
            acc = _multiply_codes(x_rows_ptr, coded, tile, shape, kind, product)
        tile = _tile_of(number, last_tiles, offsets_ptr, NUM_OUTPUTS, product, True)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + tile.expert * NUM_OUTPUTS + tile.outputs, mask=tile.mask_n, other=0.0)
            acc += bias.to(tl.float32)[:, None]
        offs = tile.rows.to(tl.int64)[None, :] * NUM_OUTPUTS + tile.outputs[:, None]
        mask = tile.mask_m[None, :] & tile.mask_n[:, None]
        tl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)
