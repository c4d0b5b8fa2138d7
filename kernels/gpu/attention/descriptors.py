"""Descriptors of K and V, by which the tensor memory accelerator (TMA) loads a tile in one instruction."""

import weakref

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .config import AttentionConfig

# Registers of a thread, so that 3 blocks of 4 warps fit an SM, 2 if quantised. Without a limit ptxas takes
# more, and spills.
_REGISTERS, _REGISTERS_QUANTIZED = 168, 208


# By the address of a Python object, which must still be the cache that the reference is to.
_described: dict[tuple[int, tuple[int, ...]], tuple[weakref.ref[Tensor], TensorDescriptor]] = {}


def register_limit(cache_dtype: torch.dtype) -> int:
    """Return the limit of registers per thread for a decode that loads by descriptors."""
    return _REGISTERS if cache_dtype.itemsize == 2 else _REGISTERS_QUANTIZED


def describe(cache: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """Return the tensor descriptor of a layer's keys or values. It is made once and lives as long as they do.

    box: the shape of a tile of one KV head. Descriptors are passed by value, also to a CUDA graph.
    """
    key = id(cache), box
    reference, described = _described.get(key, (None, None))
    if reference is not None and reference() is cache and _is_of(described, cache):
        return described
    # Of another view, so that it does not keep the cache, whose end takes it out of the table.
    described = TensorDescriptor.from_tensor(cache.detach(), list(box))
    _described[key] = weakref.ref(cache, lambda _: _described.pop(key, None)), described
    return described


def _is_of(described: TensorDescriptor, cache: Tensor) -> bool:
    """Return whether the cache is where it was, and laid out as it was."""
    base = described.base
    same_layout = base.shape == cache.shape and base.stride() == cache.stride()
    return bool(base.data_ptr() == cache.data_ptr() and same_layout)


def loads_by_descriptors(
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,
    config: AttentionConfig,
    dtype: torch.dtype,  # of the query
    target: str,
) -> bool:
    """Return whether a decode loads K and V by tensor descriptors: if TMA can, and the compiled code is
    shorter.

    TMA requires that a box lies in one block, and that addresses and strides are multiples of 16 bytes.
    Values that are a view of the keys are excluded, because they reuse the keys' tile without setting
    anything to zero.

    With a head_dim of 128 or 256, descriptors save a quarter of a tile's instructions in half precision, and
    a tenth in a quantised cache. With a head_dim of 64 they need more registers. With 64 or more rows, as in
    prefill, loads are few among the instructions. These figures are counts, not timings; benchmarks.gpu can
    time both ways, with blocks of 16 and of 64.

    Warp specialisation (of Triton 3.6 and 3.9) is not used. On sm_90 it is ignored with 8 warps and spills
    registers with 4. On sm_100, prefill does not compile with it (TritonGPUHoistTMEMAlloc), and a decode's
    thread block would leave no room for a second one.
    """
    return (
        target in ("sm_90", "sm_100", "sm_103")
        and dtype != torch.float32
        and config.BLOCK_M == 16
        and key_cache.shape == value_cache.shape
        and key_cache.shape[1] % config.TILE == 0
        and key_cache.shape[3] in (128, 256)
        and key_cache.numel() > 0
        and key_cache.data_ptr() != value_cache.data_ptr()
        and all(map(_is_aligned, (key_cache, value_cache)))
    )


def _is_aligned(cache: Tensor) -> bool:
    places = (cache.data_ptr(), *(stride * cache.itemsize for stride in cache.stride()[:-1]))
    return cache[0].is_contiguous() and all(place % 16 == 0 for place in places)
