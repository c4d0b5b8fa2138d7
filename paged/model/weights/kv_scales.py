"""Scales of K and V that a checkpoint was calibrated with, for a cache in fp8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ...architectures.config import LAYERS, ModelConfig
from ...base.errors import CheckpointError
from ...checkpoints.stored import FLOATS, Sources, StoredTensor
from .loading import KVScales

# By what they end in, within a layer's self_attn: one for both, and those of each.
_OF_BOTH = ("kv_scale", "attn.kv_scale", "qkv_proj.kv_scale")
_OF_EACH = (
    "{0}_scale",
    "attn.{0}_scale",
    "{0}_proj.{0}_scale",
    "{0}_proj.output_scale",
    "qkv_proj.{0}_scale",
)


class FoundScales(NamedTuple):
    """A checkpoint's scales of K and V by layer, and the names of the tensors that hold them."""

    by_layer: Mapping[int, KVScales]
    names: frozenset[str]


def read_kv_scales(sources: Sources, config: ModelConfig, device: torch.device) -> FoundScales:
    """Read the scales for K and V in the cache, for all layers with K and V of their own.

    Raises CheckpointError, which names file and tensor, if a scale is not a positive number, if there is
    neither one scale nor one per head, or if several tensors of a layer differ.
    """
    found: dict[int, KVScales] = {}
    names: set[str] = set()
    for layer in (layer for group in config.layer_groups for layer in group.layers):
        num_heads = config.kv_shapes[layer].num_kv_heads
        scales = []
        for part in ("k", "v"):
            endings = (*(each.format(part) for each in _OF_EACH), *_OF_BOTH)
            own = [name for each in endings if (name := f"{LAYERS}{layer}.self_attn.{each}") in sources]
            names.update(own)
            read = [_read(sources[name], num_heads) for name in own]
            for name, other in zip(own[1:], read[1:], strict=True):
                if not torch.equal(other, read[0]):
                    one = sources[own[0]]
                    raise CheckpointError(f"{one.path}: {one.name} differs from {sources[name].name}")
            scales.append(read[0].to(device) if read else None)
        if any(scale is not None for scale in scales):
            found[layer] = KVScales(*scales)
    return FoundScales(found, frozenset(names))


def _read(tensor: StoredTensor, num_heads: int) -> Tensor:
    """Read a scale for all heads, or one for each, as f32[num_heads]."""
    if sum(size != 1 for size in tensor.shape) > 1 or tensor.num_bytes not in (
        tensor.dtype.itemsize,
        num_heads * tensor.dtype.itemsize,
    ):
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} has shape {tensor.shape}, but must have one number, or one for "
            f"each of {num_heads} KV heads"
        )
    if tensor.dtype not in FLOATS:
        supported = ", ".join(map(str, FLOATS))
        raise CheckpointError(f"{tensor.path}: {tensor.name} is {tensor.dtype}; supported are {supported}")
    if not tensor.has_data:  # nor will the model compute anything
        return torch.ones(num_heads)
    values = tensor.read().flatten().float()
    # Below the smallest normal number kernels would divide by 0.
    wrong = (~values.isfinite() | (values < torch.finfo(torch.float32).tiny)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise CheckpointError(
            f"{tensor.path}: {tensor.name} is {float(values[place]):g} at [{place}], but must be finite and "
            "greater than 0"
        )
    return values.expand(num_heads).contiguous()
