"""Gemma 2 and 3: how they read config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...base.errors import UnsupportedModelError
from ..config import ModelConfig
from ..spec import AttentionSpec
from .layer_types import by_layer_type, full_every, layer_types_of, ropes_by_type, windows_of
from .reading import (
    AROUND_SUBLAYERS,
    Config,
    Family,
    flag,
    read_attention,
    read_feed_forward,
    read_model,
    read_norm,
    repeat,
    size,
    softcap_of,
    window_of,
)

_GEMMA2 = {
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3 = {
    **_GEMMA2,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "sliding_window_pattern": 6,
}


def _gemma2(hf: Config) -> ModelConfig:
    windows = windows_of(layer_types_of(hf, full_every(2, hf)), window_of(hf))
    attention = replace(read_attention(hf), softcap=softcap_of(hf, "attn_logit_softcapping"))
    return _gemma(hf, attention, windows=windows)


def _gemma3(hf: Config) -> ModelConfig:
    layer_types = layer_types_of(hf, full_every("sliding_window_pattern", hf))
    ropes = ropes_by_type(hf, rope_theta=1e6, local_theta=hf.get("rope_local_base_freq") or 1e4)
    by_layer = by_layer_type(hf, layer_types, ropes)
    rope = by_layer.pop("rope")
    # Norms of Q and K take the place of Gemma 2's softcap of scores: the key for it is checked, and not used.
    softcap_of(hf, "attn_logit_softcapping")
    attention = read_attention(hf, rope=rope, qk_norm="head")
    return replace(_gemma(hf, attention, **by_layer), context_is_scaled=True)


def _gemma(hf: Config, attention: AttentionSpec, **of_layers: Any) -> ModelConfig:
    """Read what Gemma 2 and 3 share. of_layers: the windows and ropes of each layer."""
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention is not supported")
    bias = flag(hf, "attention_bias")
    attention = replace(
        attention,
        qkv_bias=bias,
        output_bias=bias,
        scale=size(hf, "query_pre_attn_scalar") ** -0.5,
    )
    mlp = read_feed_forward(hf, activation="gelu_tanh")
    return read_model(
        hf,
        repeat(hf, attention, mlp, norms=AROUND_SUBLAYERS, **of_layers),
        rope=attention.rope,
        norm=read_norm(hf, unit_offset=True),
        exceeds_float16=True,
        logits_softcap=softcap_of(hf, "final_logit_softcapping"),
        embedding_multiplier=size(hf, "hidden_size") ** 0.5,
    )


families = {
    "Gemma2ForCausalLM": Family(_GEMMA2, _gemma2),
    "Gemma3ForCausalLM": Family(_GEMMA3, _gemma3),
}
