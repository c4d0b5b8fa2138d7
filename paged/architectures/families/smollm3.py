"""SmolLM3: how they read config.json."""

from __future__ import annotations

from typing import Any

from ...base.errors import CheckpointError
from ...base.validation import shown
from ..config import ModelConfig
from ..spec import NO_ROPE
from .layer_types import full_every, layer_types_of, windows_of
from .llama import LLAMA
from .reading import (
    Config,
    Family,
    flag,
    read_attention,
    read_feed_forward,
    read_model,
    read_rope,
    repeat,
    size,
    window_of,
)

_SMOLLM3 = {
    **LLAMA,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}


def _smollm3(hf: Config) -> ModelConfig:
    """Read SmolLM3's rotary embeddings, which are off in some layers; only these may have a window."""
    num_layers = size(hf, "num_hidden_layers")
    rope = read_rope({"rope_theta": 2e6, **hf})
    rotates = hf["no_rope_layers"]  # despite its name 1 where a layer rotates
    if rotates is None:
        rotates = [int(kind == "sliding_attention") for kind in full_every("no_rope_layer_interval", hf)]
    if not isinstance(rotates, list) or len(rotates) != num_layers or not all(map(_is_bit, rotates)):
        raise CheckpointError(f"no_rope_layers must be {num_layers} times 0 or 1, got {shown(rotates)}")
    kinds = tuple("full_attention" if rotated else "sliding_attention" for rotated in rotates)
    window = window_of(hf) if flag(hf, "use_sliding_window") else None
    bias = flag(hf, "attention_bias")
    attention = read_attention(hf, rope=rope, qkv_bias=bias, output_bias=bias)
    layers = repeat(
        hf,
        attention,
        read_feed_forward(hf, bias=flag(hf, "mlp_bias")),
        windows=windows_of(layer_types_of(hf, kinds), window),
        ropes=[rope if rotated else NO_ROPE for rotated in rotates],
    )
    return read_model(hf, layers, rope=rope)


def _is_bit(value: Any) -> bool:
    return type(value) is int and value in (0, 1)


families = {
    "SmolLM3ForCausalLM": Family(_SMOLLM3, _smollm3),
}
