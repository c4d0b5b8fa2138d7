"""Phi-3 and 4: how they read config.json."""

from __future__ import annotations

from ...base.errors import UnsupportedModelError
from ..config import ModelConfig
from .reading import (
    Config,
    Family,
    own_rope,
    read_attention,
    read_feed_forward,
    read_model,
    read_rope,
    repeat,
    window_of,
)

_PHI3 = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "original_max_position_embeddings": 4096,
}


def _phi3(hf: Config) -> ModelConfig:
    own = own_rope(hf)
    if own.get("rope_type", own.get("type")) in ("su", "yarn"):  # as older files call it
        own = {**own, "rope_type": "longrope"}
    rope = read_rope(hf, own, partial=True)
    if rope.type not in ("default", "longrope"):
        raise UnsupportedModelError(f"rope type {rope.type!r} is not supported in Phi-3; 'longrope' is")
    attention = read_attention(hf, rope=rope, window=window_of(hf), stored="fused")
    return read_model(hf, repeat(hf, attention, read_feed_forward(hf, fused=True)))


families = {
    "Phi3ForCausalLM": Family(_PHI3, _phi3),
}
