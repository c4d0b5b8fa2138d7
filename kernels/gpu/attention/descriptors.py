"""Descriptors of K and V, by which the tensor memory accelerator (TMA) loads a tile in one instruction."""

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .config import AttentionConfig

# Registers of a thread, so that 3 blocks of 4 warps fit an SM, 2 if quantised. Without a limit ptxas takes
# more, and spills.
_REGISTERS, _REGISTERS_QUANTIZED = 168, 208


def describe_caches(
    key_cache: Tensor, value_cache: Tensor, config: AttentionConfig, dtype: torch.dtype, target: str
) -> dict[str, Any]:
    """Return the arguments by which a decode loads the caches: descriptors, or None to load by pointers.

    A box is a tile of one KV head. Descriptors are passed by value, also to a CUDA graph: nothing is kept.
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
    """Return whether a decode loads K and V by descriptors: where TMA can, and the compiled code is shorter.

    A box lies in one block, and addresses and strides are multiples of 16 bytes. Values that are a view of
    the keys are excluded: they reuse the keys' tile, in which nothing is set to zero.

    With a head_dim of 128 or 256 a tile takes a quarter fewer instructions in half precision, a tenth fewer
    quantised. With 64 it takes more registers; with 64 rows and more, as in prefill, loads are few among the
    instructions. These are counts, not timings: benchmarks.gpu times both, as blocks of 16 and of 64.

    Warp specialisation is not used (Triton 3.6 and 3.9): on sm_90 it is ignored with 8 warps and spills with
    4; on sm_100 prefill does not compile (TritonGPUHoistTMEMAlloc), and a decode's block leaves no room for
    a second one.
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
