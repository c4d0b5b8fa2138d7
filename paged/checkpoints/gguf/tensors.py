"""Present the tensors of a GGUF file as in a checkpoint of transformers: the order of rows, norms less 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...architectures.gguf_names import CONVERTED, Converted
from ...base.errors import CheckpointError
from .config import head_dim_of
from .gguf_file import Gguf, GgufTensor
from .metadata import Metadata

# What llama.cpp has as a vector, and transformers as a matrix of one row.
_ONE_ROW = "ffn_gate_inp_shexp.weight"
_ROTATED = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")


def presented(gguf: Gguf) -> dict[str, GgufTensor]:
    """Return the tensors by name. Raises CheckpointError if a tensor's rows do not divide into heads."""
    metadata = Metadata(gguf.files[0].path, gguf.metadata)
    layout = CONVERTED[metadata.architecture]
    orders = _orders(layout, metadata)
    found = {}
    for name, tensor in gguf.tensors.items():
        part = name.split(".", 2)[-1]
        order = orders.get(part)
        if order is not None and tensor.shape[0] % len(order):
            raise CheckpointError(
                f"{tensor.path}: {name} has {tensor.shape[0]} rows, which are no heads of {len(order)}"
            )
        added = int(layout.norms_plus_one and name.endswith("norm.weight"))
        if added and tensor.type.in_blocks:
            raise CheckpointError(f"{tensor.path}: {name} is {tensor.type.name}, but norms are floats")
        is_vector = part == _ONE_ROW and len(tensor.shape) == 1
        shape = [1, *tensor.shape] if is_vector else tensor.shape
        found[name] = replace(tensor, shape=shape, order=order, added=added)
    return found


def _orders(layout: Converted, metadata: Metadata) -> Mapping[str, Tensor]:
    """Return the order of rows of the tensors of a layer that the converter reordered."""
    if layout.interleaved:
        head_dim = head_dim_of(metadata)
        order = torch.arange(head_dim // 2 * 2, device="cpu").view(-1, 2).T.flatten()
        return dict.fromkeys(_ROTATED, order)
    if layout.qkv_by_part:
        num_heads = metadata.integer("attention.head_count")
        head_dim = head_dim_of(metadata)
        rows = torch.arange(3 * num_heads * head_dim, device="cpu")
        order = rows.view(3, num_heads, head_dim).transpose(0, 1).flatten()
        return {"attn_qkv.weight": order, "attn_qkv.bias": order}
    return {}
