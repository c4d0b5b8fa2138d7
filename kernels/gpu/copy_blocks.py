"""Copies of whole blocks of the cache, in all layers at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..arguments import check_copy_blocks
from ..checks import check_contiguous
from .target import check_launchable

_CHUNK = 2048
# Copied as integers: no value is rounded, and NaN payloads stay.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@triton.jit(do_not_specialize_on_alignment=["pairs_ptr"])  # a view at any offset
def _copy_blocks_kernel(
    cache_ptr,
    pairs_ptr,
    stride_plane: tl.constexpr,
    stride_block: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copy CHUNK elements of one block in one plane."""
    pair, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    source, target = tl.load(pairs_ptr + 2 * pair), tl.load(pairs_ptr + 2 * pair + 1)
    offs = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    mask = offs < SIZE
    cache_ptr += plane * stride_plane
    # [CHUNK]
    elements = tl.load(cache_ptr + source * stride_block + offs, mask=mask)
    tl.store(cache_ptr + target * stride_block + offs, elements, mask=mask)


def copy_blocks(
    cache: Tensor,  # [num_planes, num_blocks, block_size, num_kv_heads, head_dim], written in place
    pairs: Tensor,  # i64[num_pairs, 2], (from, to)
) -> None:
    """Set cache[:, to] = cache[:, from] for all pairs at once, bit for bit.

    This is the copy in copy-on-write (PagedAttention, Kwon et al. 2023). No block may be both a source and a
    target, nor a target twice. Raises ValueError for a shape, dtype or stride that does not fit, and in debug
    mode (see `checks`) for pairs that break these rules or lie outside the cache.
    """
    check_copy_blocks(cache, pairs)
    check_launchable("cache", cache)
    if not cache[:1, :1].is_contiguous():
        raise ValueError(f"cache must be contiguous within a block, got strides {cache.stride()}")
    check_contiguous("pairs", pairs)
    num_pairs, num_planes, size = len(pairs), len(cache), cache.shape[2:].numel()
    if num_pairs == 0:
        return
    bits = cache.view(_BITS[cache.element_size()])
    _copy_blocks_kernel[(num_pairs, num_planes, triton.cdiv(size, _CHUNK))](
        cache_ptr=bits,
        pairs_ptr=pairs,
        stride_plane=cache.stride(0),
        stride_block=cache.stride(1),
        SIZE=size,
        CHUNK=_CHUNK,
        num_warps=4,
    )
