"""Present the tensors of a GGUF file as in a checkpoint of transformers: the order of rows, norms less 1."""

from __future__ import annotations

import math
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
# What transformers has with a dimension of 1 between, behind, or in one dimension.
_CONVOLUTIONS = ("ssm_conv1d.weight", "shortconv.conv.weight")
_FLAT = ("ssm_a", "ssm_d", "ssm_norm.weight")
_ROTATED = ("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")


def presented(gguf: Gguf) -> dict[str, GgufTensor]:
    """Return the tensors by name. Raises CheckpointError if a tensor's rows do not divide into heads."""
    metadata = Metadata(gguf.files[0].path, gguf.metadata)
    layout = CONVERTED[metadata.architecture]
    orders = orders_of(layout, metadata)
    values = orders.get("attn_gate.weight")
    value_columns = None if values is None else tuple(values.argsort().tolist())
    found = {}
    for name, tensor in gguf.tensors.items():
        part = name.split(".", 2)[-1]
        order = orders.get(part)
        if order is not None and tensor.shape[0] % len(order):
            raise CheckpointError(
                f"{tensor.path}: {name} has {tensor.shape[0]} rows, which are no heads of {len(order)}"
            )
        added = int(
            layout.norms_plus_one and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")
        )
        if added and tensor.type.in_blocks:
            raise CheckpointError(f"{tensor.path}: {name} is {tensor.type.name}, but norms are floats")
        columns = value_columns if part == "ssm_out.weight" else None
        found[name] = replace(
            tensor, shape=_shape_of(part, tensor), order=order, added=added, columns=columns
        )
    return found


def _shape_of(part: str, tensor: GgufTensor) -> list[int]:
    """Return the shape that a tensor of a layer has in a checkpoint of transformers."""
    shape = tensor.shape
    if part == _ONE_ROW and len(shape) == 1:
        return [1, *shape]
    if tensor.type.in_blocks:
        return shape
    if part in _CONVOLUTIONS and len(shape) == 2:
        return [shape[0], 1, shape[1]]
    return [math.prod(shape)] if part in _FLAT else shape


def orders_of(layout: Converted, metadata: Metadata) -> Mapping[str, Tensor]:
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
    return _value_orders(metadata) if layout.tiled_values else {}


def _value_orders(metadata: Metadata) -> Mapping[str, Tensor]:
    """Return the orders of rows that have to do with the value heads of the delta rule.

    The file has the first value head of each key head, then the second ones, and so on.
    """
    num_heads = metadata.integer("ssm.time_step_rank")
    num_key_heads = metadata.integer("ssm.group_count")
    inner = metadata.integer("ssm.inner_size")
    if num_key_heads < 1 or num_heads < 1 or num_heads % num_key_heads or inner % num_heads:
        raise CheckpointError(
            f"{metadata.path}: ssm.inner_size {inner}, ssm.time_step_rank {num_heads} and ssm.group_count "
            f"{num_key_heads} do not divide each other"
        )
    if num_heads == num_key_heads:
        return {}
    heads = torch.arange(num_heads, device="cpu").view(-1, num_key_heads).T.flatten()
    values = (
        heads[:, None] * (inner // num_heads) + torch.arange(inner // num_heads, device="cpu")
    ).flatten()
    keys = 2 * num_key_heads * metadata.integer("ssm.state_size")
    mixed = torch.cat([torch.arange(keys, device="cpu"), keys + values])
    of_heads = ("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias")
    return {
        **dict.fromkeys(("attn_qkv.weight", "ssm_conv1d.weight"), mixed),
        "attn_gate.weight": values,
        **dict.fromkeys(of_heads, heads),
    }
