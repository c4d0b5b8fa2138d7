"""Qwen 2 and 3: how they read config.json."""

from __future__ import annotations

from ...base.errors import CheckpointError
from ...base.validation import check_int
from ..config import ModelConfig
from .layer_types import layer_types_of, windows_of
from .reading import (
    Config,
    Family,
    flag,
    read_attention,
    read_feed_forward,
    read_model,
    repeat,
    size,
    window_of,
)

_QWEN2 = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3 = {**_QWEN2, "head_dim": 128, "attention_bias": False}


def _qwen2(hf: Config) -> ModelConfig:
    attention = read_attention(hf, qkv_bias=True)
    return read_model(hf, repeat(hf, attention, read_feed_forward(hf), windows=_qwen_windows(hf)))


def _qwen3(hf: Config) -> ModelConfig:
    bias = flag(hf, "attention_bias")
    attention = read_attention(hf, qkv_bias=bias, output_bias=bias, qk_norm="head")
    return read_model(hf, repeat(hf, attention, read_feed_forward(hf), windows=_qwen_windows(hf)))


def _qwen_windows(hf: Config) -> tuple[int | None, ...]:
    window = window_of(hf) if flag(hf, "use_sliding_window") else None
    if hf["layer_types"] is None:
        first = check_int(CheckpointError, "max_window_layers", hf["max_window_layers"], 0)
        return tuple(window if layer >= first else None for layer in range(size(hf, "num_hidden_layers")))
    return windows_of(layer_types_of(hf), window)


families = {
    "Qwen2ForCausalLM": Family(_QWEN2, _qwen2),
    "Qwen3ForCausalLM": Family(_QWEN3, _qwen3),
}
