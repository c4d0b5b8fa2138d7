"""The product of x and a weight in codes: what programs compute."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .numbers import e4m3_numbers, numbers_of


class CodedShape(NamedTuple):
    """The shape of a coded weight, as constants of a specialisation."""

    NUM_OUTPUTS: int
    NUM_INPUTS: int
    NUM_GROUPS: int
    GROUP: int  # inputs
    GROUP_SUBS: int  # so many SUB of inputs, from a multiple of as many on, are of one group
    UNIT_TILES: int  # tiles of inputs whose factors share a unit
    NUM_TILES: int
    SPLIT_TILES: int


class Product(NamedTuple):
    """What a program computes, as constants of a specialisation."""

    BLOCK_N: int  # outputs
    BLOCK_M: int  # rows of x
    NUM_SPLITS: int  # whose sums it adds
    PARTIAL: bool  # it writes its sum in float32 for `add_splits_kernel`
    DOT_DTYPE: tl.dtype


class Coded(NamedTuple):
    """Where a program reads codes and factors, and for which outputs."""

    words_ptr: Any
    scale_ptr: Any
    scale_unit_ptr: Any
    zero_ptr: Any
    offset_ptr: Any
    offset_unit_ptr: Any
    outputs: Any  # [BLOCK_N]
    mask: Any  # [BLOCK_N]


@triton.jit
def load_words(coded, tile, shape: tl.constexpr, kind: tl.constexpr):
    """Load the words of a tile of inputs, which are contiguous in memory."""
    offs = (tl.cast(tile, tl.int64) * shape.NUM_OUTPUTS + coded.outputs)[:, None] * kind.SUB
    # [BLOCK_N, SUB]
    return tl.load(
        coded.words_ptr + offs + tl.arange(0, kind.SUB)[None, :], mask=coded.mask[:, None], other=0
    )


@triton.jit
def load_unit(ptr, coded, tile, shape: tl.constexpr):
    """Load the units of a tile's factors in float32; None if factors have no units."""
    if ptr is None:
        unit = None
    else:
        offs = coded.outputs
        if shape.UNIT_TILES < shape.NUM_TILES:
            offs += tile // shape.UNIT_TILES * shape.NUM_OUTPUTS
        unit = tl.load(ptr + offs, mask=coded.mask, other=0.0).to(tl.float32)
    return unit


@triton.jit
def _converted(factor, unit, is_e4m3: tl.constexpr, kind: tl.constexpr):
    """Return factors in float32, times their unit if there is one."""
    if is_e4m3:
        factor = e4m3_numbers(factor.to(tl.int32), kind.HAS_E4M3)
    factor = factor.to(tl.float32)
    if unit is not None:
        factor *= unit
    return factor


@triton.jit
def load_factors(ptr, unit, is_e4m3: tl.constexpr, coded, tile, shape: tl.constexpr, kind: tl.constexpr):
    """Load the factors of a tile of inputs in float32, one per GROUP_SUBS; None if there are no factors.

    All factors are loaded before the first is used, so that the loads overlap.
    """
    PER_WORD: tl.constexpr = kind.PER_WORD  # Triton 3.6 takes no fields for a range
    GROUP_SUBS: tl.constexpr = shape.GROUP_SUBS
    if ptr is None:
        factors = None
    else:
        loaded = ()
        for i in tl.static_range(0, PER_WORD, GROUP_SUBS):
            offs = coded.outputs
            if shape.NUM_GROUPS > 1:  # else the compiler moves the load before the loop
                # Inputs that pad the last tile have the factors of the last group.
                group = tl.minimum((tile * PER_WORD + i) * kind.SUB // shape.GROUP, shape.NUM_GROUPS - 1)
                offs += group * shape.NUM_OUTPUTS
            loaded += (tl.load(ptr + offs, mask=coded.mask, other=0),)  # type: ignore[assignment]
        factors = ()
        for i in tl.static_range(PER_WORD // GROUP_SUBS):
            factors += (_converted(loaded[i], unit, is_e4m3, kind),)  # type: ignore[assignment]
    return factors


@triton.jit
def weights_of(words, i: tl.constexpr, scales, zeros, offsets, shape: tl.constexpr, kind: tl.constexpr):
    """Return the weights of the i-th code in each word, in float32."""
    numbers = numbers_of(words, i, kind)
    if zeros is not None:
        numbers -= zeros[i // shape.GROUP_SUBS][:, None]
    weights = numbers * scales[i // shape.GROUP_SUBS][:, None]
    if offsets is not None:
        # The product is exact: a fused multiply-add rounds no differently.
        weights += offsets[i // shape.GROUP_SUBS][:, None]
    return weights


@triton.jit
def multiply_tile(
    acc, x_ptr, mask_x, coded, tile, shape: tl.constexpr, kind: tl.constexpr, product: tl.constexpr
):
    """Add the product of one tile of inputs to acc."""
    PER_WORD: tl.constexpr = kind.PER_WORD
    SUB: tl.constexpr = kind.SUB
    words = load_words(coded, tile, shape, kind)
    scale_unit = load_unit(coded.scale_unit_ptr, coded, tile, shape)
    offset_unit = load_unit(coded.offset_unit_ptr, coded, tile, shape)
    scales = load_factors(coded.scale_ptr, scale_unit, kind.E4M3_SCALES, coded, tile, shape, kind)
    zeros = load_factors(coded.zero_ptr, None, False, coded, tile, shape, kind)
    offsets = load_factors(coded.offset_ptr, offset_unit, False, coded, tile, shape, kind)
    for i in tl.static_range(PER_WORD):
        weights = weights_of(words, i, scales, zeros, offsets, shape, kind)
        offs_k = (tile * PER_WORD + i) * SUB + tl.arange(0, SUB)
        mask = mask_x
        if shape.NUM_INPUTS % (PER_WORD * SUB) != 0:
            mask = mask_x & (offs_k < shape.NUM_INPUTS)[:, None]
        # [SUB, BLOCK_M]
        x = tl.load(x_ptr + offs_k[:, None], mask=mask, other=0.0)
        weights = weights.to(x.dtype).to(product.DOT_DTYPE)
        acc = tl.dot(weights, x.to(product.DOT_DTYPE), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def coded_linear_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    scale_unit_ptr,
    zero_ptr,
    offset_ptr,
    offset_unit_ptr,
    bias_ptr,
    out_ptr,  # [num_rows, NUM_OUTPUTS]; if PARTIAL f32[num_splits, num_rows, NUM_OUTPUTS]
    num_rows,
    stride_x: tl.constexpr,
    shape: tl.constexpr,
    kind: tl.constexpr,
    product: tl.constexpr,
):
    BLOCK_N: tl.constexpr = product.BLOCK_N  # Triton 3.6 takes no field as the size of a tl.zeros
    BLOCK_M: tl.constexpr = product.BLOCK_M
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = outputs < shape.NUM_OUTPUTS
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = (rows < num_rows)[None, :]
    first_split = tl.program_id(2)
    coded = Coded(
        words_ptr, scale_ptr, scale_unit_ptr, zero_ptr, offset_ptr, offset_unit_ptr, outputs, mask_n
    )
    x_ptr += rows[None, :] * stride_x
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for split in range(first_split, first_split + product.NUM_SPLITS):
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        start = split * shape.SPLIT_TILES
        for tile in range(start, tl.minimum(start + shape.SPLIT_TILES, shape.NUM_TILES)):
            acc = multiply_tile(acc, x_ptr, mask_m, coded, tile, shape, kind, product)
        total += acc
    out_ptr += rows[None, :] * shape.NUM_OUTPUTS + outputs[:, None]
    if product.PARTIAL:
        out_ptr += first_split.to(tl.int64) * num_rows * shape.NUM_OUTPUTS
    elif bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr, total.to(out_ptr.dtype.element_ty), mask=mask_m & mask_n[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def add_splits_kernel(
    partial_ptr,  # f32[NUM_SPLITS, num_rows, NUM_OUTPUTS]
    bias_ptr,
    out_ptr,  # [num_rows, NUM_OUTPUTS]
    num_rows,
    NUM_OUTPUTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = outputs < NUM_OUTPUTS
    partial_ptr += row * NUM_OUTPUTS + outputs
    stride = tl.cast(num_rows, tl.int64) * NUM_OUTPUTS
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(partial_ptr + split * stride, mask=mask, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * NUM_OUTPUTS + outputs, total.to(out_ptr.dtype.element_ty), mask=mask)
