"""Mistral: how it reads config.json."""

from __future__ import annotations

from dataclasses import replace

from ...base.errors import CheckpointError
from ...base.validation import check_number
from ..config import ModelConfig
from .layer_types import layer_types_of, windows_of
from .reading import (
    MAX_FACTOR,
    Config,
    Family,
    own_rope,
    read_attention,
    read_feed_forward,
    read_model,
    read_rope,
    repeat,
    size,
    window_of,
)

_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
_MINISTRAL3 = {
    "max_position_embeddings": 262144,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
    "llama_4_scaling_beta": 0.1,
}


def _mistral(hf: Config) -> ModelConfig:
    return read_model(hf, repeat(hf, read_attention(hf), read_feed_forward(hf), windows=_mistral_windows(hf)))


def _mistral_windows(hf: Config) -> tuple[int | None, ...]:
    """Give every layer the window, unless layer_types says which have it, as in Ministral 8B."""
    layer_types = layer_types_of(hf, ("sliding_attention",) * size(hf, "num_hidden_layers"))
    return windows_of(layer_types, window_of(hf))


def _ministral3(hf: Config) -> ModelConfig:
    own = own_rope(hf) or _MINISTRAL3_ROPE
    rope = read_rope(hf, own)
    beta = "llama_4_scaling_beta"
    if own.get(beta) is not None:
        rope = replace(rope, query_scaling_beta=check_number(CheckpointError, beta, own[beta], 0, MAX_FACTOR))
    attention = read_attention(hf, rope=rope, window=window_of(hf))
    return read_model(hf, repeat(hf, attention, read_feed_forward(hf)))


families = {
    "MistralForCausalLM": Family(_MISTRAL, _mistral),
    "MinistralForCausalLM": Family(_MISTRAL, _mistral),
    "Ministral3ForCausalLM": Family(_MINISTRAL3, _ministral3),
}
