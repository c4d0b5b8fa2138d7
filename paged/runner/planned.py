"""The footprint of an engine on this machine, before it is made."""

from __future__ import annotations

from ..architectures.hf_config import read_config
from ..checkpoints.model_directory import resolve_headers
from ..device.devices import resolve_device, resolve_dtype, target_of
from ..options.config import EngineConfig
from .draft_model import naming_draft_model
from .draft_sizes import draft_sizes
from .footprint import Footprint
from .load import new_kernels
from .memory import Memory
from .sizes import Sizes

LEAST_CONTEXT = (
    4096  # tokens of a request for which an engine among others has room, if its model has as many
)
_SHARE = 0.25  # of the memory beside the weights that KV takes by default, where other models come and go
_SEQUENCES = 4  # of full length that it need not exceed


def footprint_here(config: EngineConfig, *, free: int | None = None) -> Footprint:
    """Return the memory that an engine with these options would take on this machine.

    For a hub id, only the config and the headers of the weights are fetched.

    free: the bytes that the engine may use; None takes the free memory.

    Raises ConfigError, CheckpointError or UnsupportedModelError, as an engine does.
    """
    device = resolve_device(config.device)
    directory = resolve_headers(config.model, config.revision)
    model = read_config(directory)
    dtype = resolve_dtype(config.dtype, model.dtype, device, model.exceeds_float16)
    sizes = Sizes(config, model, device.type, dtype, target_of(device))
    speculation = config.speculation
    if speculation is not None and speculation.model is not None:
        with naming_draft_model():
            of_draft = resolve_headers(speculation.model, speculation.revision)
            sizes = Sizes(
                **{name: getattr(sizes, name) for name in ("config", "model", "device", "dtype", "target")},
                draft=draft_sizes(sizes, read_config(of_draft), of_draft),
            )
    memory = Memory.of(device) if free is None else Memory(free, free)
    return Footprint.of(sizes, memory, device, directory, new_kernels(sizes, device, checked=False))


def bounded(footprint: Footprint, memory: int) -> Footprint:
    """Limit the KV cache in a footprint, for an engine that shares `memory` bytes with others.

    Where the options set no size, the engine gets room for a few requests of the longest context. The context
    is shortened so that they take a share of the memory. The result may still be larger than the memory.
    """
    config = footprint.sizes.config
    rest = memory - footprint.weight_bytes - footprint.activation_bytes - footprint.state_bytes
    room = int(max(0, rest) * _SHARE)
    sizes = footprint.sizes
    if config.num_blocks is not None:
        return footprint
    if config.max_model_len is None:
        longest = sizes.new_block_manager(max(1, sizes.blocks_in(room))).longest_fit(sizes.max_model_len)
        least = min(LEAST_CONTEXT, sizes.max_model_len)
        length = max(longest if longest == sizes.max_model_len else longest // 1024 * 1024, least)
        footprint = footprint.with_options(max_model_len=length)
        sizes = footprint.sizes
    one = sizes.new_block_manager(1).most_blocks(sizes.max_model_len)
    wanted = min(_SEQUENCES * one, sizes.max_useful_blocks)
    return footprint.with_options(num_blocks=max(one, min(wanted, sizes.blocks_in(room))))
