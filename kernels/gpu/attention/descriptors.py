"""K and V by descriptors: a tile in one instruction of the tensor memory accelerator (TMA)."""

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .config import AttentionConfig

# Of a thread: 3 blocks of 4 warps fit an SM, 2 if quantised. Left alone ptxas would go for more, and spill.
_REGISTERS, _REGISTERS_QUANTIZED = 168, 208


def describe_caches(
    key_cache: Tensor, value_cache: Tensor, config: AttentionConfig, dtype: torch.dtype, target: str
) -> dict[str, Any]:
    """Descriptors of both caches for one decode, boxes of a tile of one KV head; None: by pointers.

    Nothing is kept: a launch has what it is told by value, and so has a CUDA graph.
    """
    if not loads_by_descriptors(key_cache, value_cache, config, dtype, target):
        return {"key_desc": None, "value_desc": None}
    box = [1, config.TILE, 1, key_cache.shape[3]]
    return {
        "key_desc": TensorDescriptor.from_tensor(key_cache, box),
        "value_desc": TensorDescriptor.from_tensor(value_cache, box),
        "maxnreg": _REGISTERS if key_cache.dtype.itemsize == 2 else _REGISTERS_QUANTIZED,
    }


def loads_by_descriptors(
    key_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache: Tensor,
    config: AttentionConfig,
    dtype: torch.dtype,  # of the query
    target: str,
) -> bool:
    """Whether a decode loads K and V by descriptors: where TMA can, and compiled code gains by it.

    A box lies in one block, and addresses and strides are multiples of 16 bytes. Values that are a view of
    keys are the tile that was loaded as keys, where nothing was zeroed.

    A head_dim of 128 or 256 takes a quarter fewer instructions for a tile of half precision, a tenth fewer
    for a quantised one. A head_dim of 64 takes more registers; 64 rows and more, as in prefill, have too few
    loads among their instructions. Counted, not timed: on hardware benchmarks.gpu has both, as blocks of 16
    and of 64.

    Warp specialisation stays out, with Triton 3.6 and 3.9: on sm_90 it is left away with 8 warps and spills
    with 4; on sm_100 prefill does not compile (TritonGPUHoistTMEMAlloc), and a decode's block leaves no room
    for a second one.
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
    return cache.is_contiguous() and all(place % 16 == 0 for place in places)
