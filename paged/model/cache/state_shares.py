"""States of the whole model, put together of what its parts hold of them, and divided again.

Saved prefixes hold states of the whole model, so that a file loads into any number of parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ...architectures.config import ModelConfig
from ..part import ModelPart
from ..state_columns import own_columns
from .states import StateCache, states_of

States = Mapping[str, Tensor]  # [num_layers, num_states, numbers] by the names of StateCache.tensors


def empty_states(
    config: ModelConfig, num_states: int, dtype: torch.dtype, part: ModelPart | None = None
) -> StateCache | None:
    """Return zeroed states on the host, of the whole model or of a part; None if no layer has states."""
    part = ModelPart.whole(config.num_layers) if part is None else part
    if not states_of(config, part):
        return None
    cache = StateCache(config, part, num_states, 0, dtype, torch.device("cpu"))
    for tensor in cache.tensors.values():
        tensor.zero_()
    return cache


def join_states(
    config: ModelConfig, num_states: int, parts: Iterable[tuple[ModelPart, States]], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Join the states of all parts to states of the whole model. Parts without states are skipped."""
    whole = empty_states(config, num_states, dtype)
    assert whole is not None, "the model has states"
    for part, states in parts:
        own = empty_states(config, num_states, dtype, part)
        if own is not None:
            for name, tensor in own.tensors.items():
                tensor.copy_(states[name])
            _copy_shared(config, part, own, whole)
    return whole.tensors


def cut_states(config: ModelConfig, part: ModelPart, states: States, dtype: torch.dtype) -> dict[str, Tensor]:
    """Extract the share of one part from states of the whole model; {} if its layers have no states."""
    num_states = states["last_inputs"].shape[1]
    own = empty_states(config, num_states, dtype, part)
    if own is None:
        return {}
    whole = empty_states(config, num_states, dtype)
    assert whole is not None, "a part of the model has states"
    for name, tensor in whole.tensors.items():
        tensor.copy_(states[name])
    _copy_shared(config, part, own, whole, to_part=True)
    return own.tensors


def _copy_shared(
    config: ModelConfig, part: ModelPart, own: StateCache, whole: StateCache, *, to_part: bool = False
) -> None:
    """Copy what a part has of the states between its own and those of the whole model."""
    for layer in states_of(config, part):
        spec = config.states[layer]
        columns = [index for each in own_columns(spec, part.shard) for index in each]
        heads = part.shard.share(spec.num_heads)
        of_part = own.layer(layer)
        of_whole = whole.layer(layer)
        if to_part:
            of_part.last_inputs.copy_(of_whole.last_inputs[..., columns])
        else:
            of_whole.last_inputs[..., columns] = of_part.last_inputs
        if of_part.matrices is None or of_whole.matrices is None:
            continue
        shared = of_whole.matrices[:, heads.start : heads.stop]
        if to_part:
            of_part.matrices.copy_(shared)
        else:
            shared.copy_(of_part.matrices)
