"""Read and check the values of a config.json. Every error is a CheckpointError that names key and value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import check_bool, check_int, check_number, shown

Config = Mapping[str, Any]
# Bounds on what a damaged or hostile config.json can make us allocate or loop over.
CEILINGS = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 256,
    "max_position_embeddings": 2**27,
    "sliding_window": 2**27,
    "max_window_layers": 1024,
    "original_max_position_embeddings": 2**27,
    "query_pre_attn_scalar": 2**20,
    "sliding_window_pattern": 1024,
    "no_rope_layer_interval": 1024,
    "global_head_dim": 512,
    "num_global_key_value_heads": 1024,
    "hidden_size_per_layer_input": 2**17,
    "vocab_size_per_layer_input": 2**24,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "n_routed_experts": 4096,
    "n_shared_experts": 64,
    "num_experts_per_tok": 256,
    "top_k_experts": 256,
    "moe_intermediate_size": 2**20,
    "shared_expert_intermediate_size": 2**20,
    "decoder_sparse_step": 1024,
    "linear_conv_kernel_dim": 8,
    "linear_key_head_dim": 256,
    "linear_value_head_dim": 1024,
    "linear_num_key_heads": 1024,
    "linear_num_value_heads": 1024,
    "full_attention_interval": 1024,
    "conv_L_cache": 8,
    "block_multiple_of": 2**16,
    "n_group": 4096,
    "topk_group": 4096,
    "num_nextn_predict_layers": 16,
}
# What transformers calls each activation; those of one entry are the same formula.
ACTIVATIONS = {
    "silu": ("silu",),
    "gelu": ("gelu", "gelu_python"),
    "clamped_swiglu": ("silu",),  # of gpt-oss
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
}
# of multipliers and divisors
MIN_FACTOR = 1e-6
MAX_FACTOR = 1e6
MAX_SOFTCAP = 1e3  # kernels compute to a few roundings of the cap: here about 1e-4


def size(hf: Config, name: str) -> int:
    """Return a whole number from 1 to its ceiling."""
    return check_int(CheckpointError, name, hf[name], 1, CEILINGS[name])


def flag(hf: Config, name: str) -> bool:
    """Return True or False."""
    return check_bool(CheckpointError, name, hf[name])


def factor(hf: Config, name: str, most: float = MAX_FACTOR) -> float:
    """Return a positive number that float32 can multiply and divide by."""
    value = check_number(CheckpointError, name, hf[name], 0, most, above=True)
    return check_number(CheckpointError, name, value, MIN_FACTOR)


def softcap_of(hf: Config, name: str) -> float | None:
    """Return the softcap of scores or logits, which null turns off."""
    return None if hf[name] is None else factor(hf, name, MAX_SOFTCAP)


def activation_of(hf: Config, name: str, supported: tuple[str, ...]) -> str:
    """Return which of the supported activations config.json names."""
    names = {theirs: ours for ours in supported for theirs in ACTIVATIONS[ours]}
    if hf[name] not in [*names]:  # a list, as any JSON value may come, hashable or not
        raise UnsupportedModelError(f"{name} {shown(hf[name])} is not supported; only {', '.join(names)}")
    return names[hf[name]]


def head_dim_of(hf: Config) -> int:
    """Return the head dimension, by default hidden_size / num_attention_heads."""
    if hf["head_dim"] is None:
        return size(hf, "hidden_size") // size(hf, "num_attention_heads")
    return size(hf, "head_dim")


def window_of(hf: Config) -> int | None:
    """Return the sliding window, which null turns off."""
    return None if hf["sliding_window"] is None else size(hf, "sliding_window")


def layer_types_of(
    hf: Config,
    default: tuple[str, ...] = (),
    kinds: tuple[str, ...] = ("full_attention", "sliding_attention"),
) -> tuple[str, ...]:
    """Return layer_types: for each layer one of the kinds. default: where it is null."""
    if hf["layer_types"] is None and default:
        return default
    num_layers = size(hf, "num_hidden_layers")
    layer_types = hf["layer_types"]
    if not isinstance(layer_types, list):
        raise CheckpointError(f"layer_types must be a list of {num_layers} types, got {shown(layer_types)}")
    if len(layer_types) != num_layers:
        raise CheckpointError(
            f"layer_types must have one type for each of the {num_layers} layers (num_hidden_layers), "
            f"got {len(layer_types)}: {shown(layer_types)}"
        )
    for layer, kind in enumerate(layer_types):
        if kind not in kinds:
            raise UnsupportedModelError(
                f"layer_types[{layer}] is {shown(kind)}; supported are {' and '.join(kinds)}"
            )
    return tuple(layer_types)


def full_every(interval: int | str, hf: Config) -> tuple[str, ...]:
    """Return layer types with full attention in every interval-th layer, and windows in the others.

    interval: or the key of config.json that has it.
    """
    step = size(hf, interval) if isinstance(interval, str) else interval
    kinds = ("full", "sliding")
    num_layers = size(hf, "num_hidden_layers")
    return tuple(f"{kinds[bool((layer + 1) % step)]}_attention" for layer in range(num_layers))


def windows_of(layer_types: tuple[str, ...], window: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer; None where attention is full."""
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
