"""Rows of a weight in codes, for the tokens of an embedding."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...checks import (
    KERNEL_DTYPES,
    check_contiguous,
    check_device,
    check_indices,
    check_shape,
    must_read_contents,
)
from ..launch import BoundLaunch, Launches, combination
from ..target import check_launchable, current_target
from .coded_linear import kind_of, shape_of
from .kernel import Coded, load_factors, load_unit, load_words, weights_of
from .packed import PackedCodes, PackedLayout

_BLOCK = 16  # tiles of inputs: 1 KB of words, 16 bytes for each thread of a warp of 64


@triton.jit
def _coded_rows_kernel(
    indices_ptr,
    words_ptr,
    scale_ptr,
    scale_unit_ptr,
    zero_ptr,
    offset_ptr,
    offset_unit_ptr,
    out_ptr,  # [num_rows, NUM_INPUTS]
    shape: tl.constexpr,
    kind: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tiles < shape.NUM_TILES
    output = tl.load(indices_ptr + row) + tl.zeros_like(tiles)
    coded = Coded(words_ptr, scale_ptr, scale_unit_ptr, zero_ptr, offset_ptr, offset_unit_ptr, output, mask)
    # [BLOCK, SUB]
    words = load_words(coded, tiles, shape, kind)
    scale_unit = load_unit(scale_unit_ptr, coded, tiles, shape)
    offset_unit = load_unit(offset_unit_ptr, coded, tiles, shape)
    scales = load_factors(scale_ptr, scale_unit, kind.E4M3_SCALES, coded, tiles, shape, kind)
    zeros = load_factors(zero_ptr, None, False, coded, tiles, shape, kind)
    offsets = load_factors(offset_ptr, offset_unit, False, coded, tiles, shape, kind)
    out_ptr += row * shape.NUM_INPUTS
    PER_WORD: tl.constexpr = kind.PER_WORD  # Triton 3.6 takes no fields for a range
    SUB: tl.constexpr = kind.SUB
    for i in tl.static_range(PER_WORD):
        weights = weights_of(words, i, scales, zeros, offsets, shape, kind)
        offs_k = ((tiles * PER_WORD + i) * SUB)[:, None] + tl.arange(0, SUB)[None, :]
        tl.store(out_ptr + offs_k, weights.to(out_ptr.dtype.element_ty), mask=offs_k < shape.NUM_INPUTS)


def take_coded_rows(
    weight: PackedCodes,
    indices: Tensor,  # i64[n]
    dtype: torch.dtype,
) -> Tensor:  # [n, num_inputs]
    """Return rows of a weight, decoded in float32 and rounded once to the dtype.

    Raises ValueError for a shape, dtype or device that does not fit.
    """
    key = combination((indices,), weight.layout, dtype)
    launch = _launches.find(key, indices, weight.layout, dtype)
    out = torch.empty(len(indices), weight.layout.num_inputs, dtype=dtype, device=indices.device)
    launch(indices, *weight.tensors, out)
    return out


def _bind(indices: Tensor, layout: PackedLayout, dtype: torch.dtype) -> BoundLaunch:
    """Check the arguments. Return the launch."""
    if dtype not in KERNEL_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, KERNEL_DTYPES))}, got {dtype}")
    check_shape("indices", indices, (None,), torch.int64)
    check_contiguous("indices", indices)
    check_device("indices", indices, layout.device)
    check_launchable("indices", indices)
    if must_read_contents(indices.device):
        check_indices("indices", indices, "the weight's rows", layout.num_outputs)
    target = current_target()
    return BoundLaunch(
        _coded_rows_kernel,
        (len(indices), triton.cdiv(layout.num_tiles, _BLOCK)),
        shape=shape_of(layout, target),
        kind=kind_of(layout, target),
        BLOCK=_BLOCK,
        num_warps=1,
    )


_launches = Launches(_bind)
