"""The memory of a device, and the allocation of the KV cache."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..base.errors import ResourceError
from ..device.host_memory import free_on_cpu
from ..model.cache.kv_cache import KVCache
from .sizes import Sizes


class Memory(NamedTuple):
    """The memory of a device in bytes.

    free: the bytes that neither other processes nor the system use.
    """

    total: int
    free: int

    @classmethod
    def of(cls, device: torch.device, held: int = 0) -> Memory:
        """Measure the memory of a device of this machine.

        held: the bytes on a CPU that this engine already uses. They count as free.
        """
        if device.type == "cpu":
            free = int(free_on_cpu()) + held
            return cls(free, free)
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free + torch.cuda.memory_reserved(device))


def new_kv_cache(sizes: Sizes, device: torch.device, num_blocks: int, num_host_blocks: int = 0) -> KVCache:
    """Allocate a KV cache. Raises ResourceError if memory is short."""
    dtype: torch.dtype = getattr(torch, sizes.kv_dtype)
    common = num_blocks, sizes.block_size, dtype, device, num_host_blocks
    try:
        draft = None
        if sizes.draft is not None:
            own = sizes.draft
            draft = KVCache(own.model, *common, layout=own.layout)
        states = None
        if sizes.state_bytes:
            from .states import new_states

            states = new_states(sizes, device)
        return KVCache(sizes.model, *common, layout=sizes.layout, draft=draft, states=states)
    except RuntimeError as error:  # torch has no narrower one for a CPU
        size = sizes.block_bytes / 2**30
        host = f" with {num_host_blocks * size:,.1f} GiB on the host" if num_host_blocks else ""
        raise ResourceError(
            f"no memory for num_blocks {num_blocks}: {num_blocks * size:,.1f} GiB{host} cannot be "
            f"allocated on {device}; lower it, or leave it out to use what is free"
        ) from error
