"""Layers that differ: each has a type, which gives it a window and a rotary embedding."""

from __future__ import annotations

from typing import Any

from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import shown
from ..spec import RopeConfig
from .reading import Config, read_rope, size, window_of


def layer_types_of(
    hf: Config,
    default: tuple[str, ...] = (),
    kinds: tuple[str, ...] = ("full_attention", "sliding_attention"),
) -> tuple[str, ...]:
    """Return layer_types: a layer type from `kinds` for each layer.

    default: the types to use if config.json has null.
    """
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
    """Return layer types with full attention in every interval-th layer, and sliding windows in the others.

    interval: a number, or the key of config.json that holds it.
    """
    step = size(hf, interval) if isinstance(interval, str) else interval
    kinds = ("full", "sliding")
    num_layers = size(hf, "num_hidden_layers")
    return tuple(f"{kinds[bool((layer + 1) % step)]}_attention" for layer in range(num_layers))


def windows_of(layer_types: tuple[str, ...], window: int | None) -> tuple[int | None, ...]:
    """Return the sliding window of each layer; None for layers with full attention."""
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def ropes_by_type(hf: Config, rope_theta: float, local_theta: float) -> dict[str, RopeConfig]:
    """Read the rotary embedding of layers with full attention and of layers with a sliding window.

    transformers 5 writes both into rope_parameters. Older checkpoints describe only the embedding of full
    attention; layers with a window then use an unscaled one. rope_theta and local_theta are the default bases
    of full attention and of layers with a window.
    """
    given = hf.get("rope_parameters") or {}
    own = {"full_attention": hf.get("rope_scaling") or {}, "sliding_attention": {}}
    for name, value in {"rope_parameters": given, "rope_scaling": own["full_attention"]}.items():
        if not isinstance(value, dict):
            raise CheckpointError(f"{name} must be an object, got {shown(value)}")
    bases = {"full_attention": hf.get("rope_theta") or rope_theta, "sliding_attention": local_theta}
    if unknown := [key for key in given if key not in own]:
        raise UnsupportedModelError(
            f"rope_parameters must be of full_attention and sliding_attention, got {shown(unknown[0])}"
        )
    for kind, values in given.items():
        if not isinstance(values, dict | None):
            raise CheckpointError(f"rope_parameters of {kind} must be an object, got {shown(values)}")
    ropes = {
        kind: read_rope({**hf, "rope_theta": bases[kind]}, {**(given.get(kind) or {}), **scaling})
        for kind, scaling in own.items()
    }
    trained = {rope.original_max_position_embeddings for rope in ropes.values() if rope.type == "longrope"}
    if len(trained) > 1:
        raise UnsupportedModelError(
            f"longrope with two values of original_max_position_embeddings ({min(trained)} and "
            f"{max(trained)}) is not supported"
        )
    if "dynamic" in [rope.type for rope in ropes.values()]:
        raise UnsupportedModelError("rope type 'dynamic' is not supported for one type of layer alone")
    return ropes


def by_layer_type(hf: Config, layer_types: tuple[str, ...], ropes: dict[str, RopeConfig]) -> dict[str, Any]:
    """Return arguments for `repeat`: `rope` of full attention, `ropes` and `windows` of all layers."""
    return {
        "rope": ropes["full_attention"],
        "ropes": tuple(ropes[kind] for kind in layer_types),
        "windows": windows_of(layer_types, window_of(hf)),
    }
