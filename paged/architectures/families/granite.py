"""Granite: how they read config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...base.errors import CheckpointError
from ...base.validation import check_number, shown
from ..config import ModelConfig
from ..spec import NO_ROPE
from .layer_types import layer_types_of, windows_of
from .llama import LLAMA
from .reading import (
    MAX_ROPE_THETA,
    Config,
    Family,
    factor,
    flag,
    read_attention,
    read_feed_forward,
    read_model,
    read_rope,
    repeat,
    size,
    window_of,
)

_GRANITE = {
    **LLAMA,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GRANITE_SWA = {
    **_GRANITE,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "sliding_window": 128,
    "layer_rope_theta": None,
}


def granite_fields(hf: Config) -> dict[str, Any]:
    """Return the fields of ModelConfig that all Granite models share."""
    return {
        "embedding_multiplier": factor(hf, "embedding_multiplier"),
        "residual_multiplier": factor(hf, "residual_multiplier"),
        "logits_divisor": factor(hf, "logits_scaling"),
        "exceeds_float16": True,  # as the residual is stored divided by its multiplier
    }


def _granite(hf: Config, **of_layers: Any) -> ModelConfig:
    """Read Granite. of_layers: sinks, and the windows and ropes of each layer."""
    bias = flag(hf, "attention_bias")
    scale = factor(hf, "attention_multiplier")
    sinks = of_layers.pop("sinks", False)
    attention = read_attention(hf, qkv_bias=bias, output_bias=bias, scale=scale, sinks=sinks)
    mlp = read_feed_forward(hf, bias=flag(hf, "mlp_bias"))
    return read_model(
        hf,
        repeat(hf, attention, mlp, **of_layers),
        rope=attention.rope,
        **granite_fields(hf),
    )


def _granite_swa(hf: Config) -> ModelConfig:
    num_layers = size(hf, "num_hidden_layers")
    rope = read_rope(hf)
    thetas = hf["layer_rope_theta"]
    if thetas is None:
        thetas = [rope.theta] * num_layers
    if not isinstance(thetas, list) or len(thetas) != num_layers:
        raise CheckpointError(f"layer_rope_theta must be {num_layers} numbers, got {shown(thetas)}")
    for theta in thetas:
        check_number(CheckpointError, "layer_rope_theta", theta, 0, MAX_ROPE_THETA)
    kinds = tuple("sliding_attention" if layer % 4 else "full_attention" for layer in range(num_layers))
    return _granite(
        hf,
        windows=windows_of(layer_types_of(hf, kinds), window_of(hf)),
        ropes=[replace(rope, theta=float(theta)) if theta else NO_ROPE for theta in thetas],
        sinks=True,
    )


families = {
    "GraniteForCausalLM": Family(_GRANITE, _granite),
    "GraniteSWAForCausalLM": Family(_GRANITE_SWA, _granite_swa),
}
