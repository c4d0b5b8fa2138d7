"""Copies of whole blocks of the cache, in all layers at once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..checked import checked_as
from ..checks import check_contiguous
from .launch import BoundLaunch, Launches, combination
from .target import check_launchable

_CHUNK = 2048
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # no value is rounded, and NaN payloads stay


@triton.jit(do_not_specialize_on_alignment=["pairs_ptr"])  # a view at any offset
def _copy_blocks_kernel(
    source_ptr,
    target_ptr,
    pairs_ptr,
    source_stride_plane: tl.constexpr,
    source_stride_block: tl.constexpr,
    target_stride_plane: tl.constexpr,
    target_stride_block: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copy CHUNK elements of one block in one plane."""
    pair, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    source, target = tl.load(pairs_ptr + 2 * pair), tl.load(pairs_ptr + 2 * pair + 1)
    offs = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    mask = offs < SIZE
    source_ptr += plane * source_stride_plane + source * source_stride_block
    target_ptr += plane * target_stride_plane + target * target_stride_block
    # [CHUNK]
    tl.store(target_ptr + offs, tl.load(source_ptr + offs, mask=mask), mask=mask)


def copy_blocks(
    cache: Tensor,  # [num_planes, num_blocks, block_size, num_kv_heads, head_dim], written in place
    pairs: Tensor,  # i64[num_pairs, 2], (from, to)
    target: Tensor | None = None,  # another cache of such blocks, written in place of this one
) -> None:
    """Set cache[:, to] = cache[:, from] for all pairs at once, bit for bit. With `target`, write to target[:,
    to].

    Within one cache this is the copy of copy-on-write (PagedAttention, Kwon et al. 2023); no block may be
    both a source and a target, or a target twice. Between two caches it swaps; one of them may be pinned host
    memory, which the GPU accesses over its link. The launch is ordered by the stream, and the host does not
    wait.

    Raises ValueError for a shape, dtype or stride that does not fit and for host memory that is not pinned;
    in debug mode (see `checks`) also for pairs that break these rules or lie outside the caches.
    """
    where = None if target is None else (_is_pinned(cache), _is_pinned(target))
    launch, bits = _launches.find(combination((cache, pairs, target), where), cache, pairs, target)
    if launch is not None:
        launch(cache.view(bits), (cache if target is None else target).view(bits), pairs)


def _is_pinned(tensor: Tensor) -> bool:
    """Return whether this is host memory that a GPU can address, False if it is no tensor."""
    return isinstance(tensor, Tensor) and tensor.is_cpu and tensor.is_pinned()


@checked_as("copy_blocks")
def _bind(cache: Tensor, pairs: Tensor, target: Tensor | None) -> tuple[BoundLaunch | None, torch.dtype]:
    """Check the arguments. Return the launch, if there are pairs, and the dtype of copies."""
    to = cache if target is None else target
    for name, tensor in (("cache", cache), ("target", to)):
        check_launchable(name, tensor, or_pinned=target is not None)
        if not tensor[:1, :1].is_contiguous():
            raise ValueError(f"{name} must be contiguous within a block, got strides {tensor.stride()}")
    check_launchable("pairs", pairs)
    check_contiguous("pairs", pairs)
    num_pairs = len(pairs)
    num_planes = len(cache)
    size = cache.shape[2:].numel()
    bits = _BITS[cache.element_size()]
    if num_pairs == 0:
        return None, bits
    launch = BoundLaunch(
        _copy_blocks_kernel,
        (num_pairs, num_planes, triton.cdiv(size, _CHUNK)),
        source_stride_plane=cache.stride(0),
        source_stride_block=cache.stride(1),
        target_stride_plane=to.stride(0),
        target_stride_block=to.stride(1),
        SIZE=size,
        CHUNK=_CHUNK,
        num_warps=4,
    )
    return launch, bits


_launches = Launches(_bind)
