"""Llama: how it reads config.json."""

from __future__ import annotations

from ..config import ModelConfig
from .reading import Config, Family, flag, read_attention, read_feed_forward, read_model, repeat

LLAMA = {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False}


def _llama(hf: Config) -> ModelConfig:
    bias = flag(hf, "attention_bias")
    attention = read_attention(hf, qkv_bias=bias, output_bias=bias)
    mlp = read_feed_forward(hf, bias=flag(hf, "mlp_bias"))
    return read_model(hf, repeat(hf, attention, mlp))


families = {
    "LlamaForCausalLM": Family(LLAMA, _llama),
}
