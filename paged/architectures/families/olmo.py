"""OLMo 2 and 3: how they read config.json."""

from __future__ import annotations

from typing import Any

from ..config import ModelConfig
from ..spec import NormNames
from .layer_types import by_layer_type, full_every, layer_types_of, ropes_by_type
from .reading import (
    Config,
    Family,
    flag,
    read_attention,
    read_feed_forward,
    read_model,
    repeat,
)

_OLMO2 = {"max_position_embeddings": 2048, "attention_bias": False, "rms_norm_eps": 1e-5}
_OLMO3 = {**_OLMO2, "sliding_window": 4096}


def _olmo2(hf: Config, **of_layers: Any) -> ModelConfig:
    """Read OLMo 2. of_layers: the windows and ropes of each layer, and the rope of full attention."""
    bias = flag(hf, "attention_bias")
    rope = of_layers.pop("rope", None)
    attention = read_attention(hf, rope=rope, qkv_bias=bias, output_bias=bias, qk_norm="projection")
    norms = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    layers = repeat(hf, attention, read_feed_forward(hf), norms=norms, **of_layers)
    return read_model(hf, layers, rope=attention.rope)


def _olmo3(hf: Config) -> ModelConfig:
    layer_types = layer_types_of(hf, full_every(4, hf))
    ropes = ropes_by_type(hf, rope_theta=500000.0, local_theta=500000.0)
    return _olmo2(hf, **by_layer_type(hf, layer_types, ropes))


families = {
    "Olmo2ForCausalLM": Family(_OLMO2, _olmo2),
    "Olmo3ForCausalLM": Family(_OLMO3, _olmo3),
}
