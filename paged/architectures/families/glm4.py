"""GLM-4: how they read config.json."""

from __future__ import annotations

from ..config import ModelConfig
from ..spec import NormNames
from .reading import (
    Config,
    Family,
    flag,
    read_attention,
    read_feed_forward,
    read_model,
    read_rope,
    repeat,
)

_GLM4 = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
}


def _glm4(hf: Config) -> ModelConfig:
    rope = read_rope({"partial_rotary_factor": 0.5, **hf}, partial=True, interleaved=True)
    attention = read_attention(hf, rope=rope, qkv_bias=flag(hf, "attention_bias"))
    norms = NormNames(
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
    )
    layers = repeat(hf, attention, read_feed_forward(hf, fused=True), norms=norms)
    return read_model(hf, layers, exceeds_float16=True)


families = {
    "Glm4ForCausalLM": Family(_GLM4, _glm4),
}
