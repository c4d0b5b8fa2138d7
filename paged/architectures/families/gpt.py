"""GPT-2 and GPT-NeoX: layers from before Llama, with names of their own for tensors and keys."""

from __future__ import annotations

from dataclasses import replace

from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import check_number, shown
from ..config import ROTARY_BUFFERS, ModelConfig, TensorNames
from ..spec import NO_ROPE, FeedForwardSpec
from .reading import (
    MAX_ROPE_THETA,
    Config,
    Family,
    activation_of,
    flag,
    own_rope,
    read_attention,
    read_feed_forward,
    read_model,
    read_norm,
    read_rope,
    repeat,
    size,
)

GPT2 = {
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "n_inner": None,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
GPT2_KEYS = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
    "num_key_value_heads": None,
    "head_dim": None,
}
GPT_NEOX = {
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "use_parallel_residual": True,
    "attention_bias": True,
}
GPT_NEOX_KEYS = {"rms_norm_eps": "layer_norm_eps", "num_key_value_heads": None, "head_dim": None}
# Masks, which old checkpoints contain.
_MASKS = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
_GPT2_PREFIXES = (
    ("wte.", "model.embed_tokens."),
    ("wpe.", "model.embed_positions."),
    ("ln_f.", "model.norm."),
    ("h.", "model.layers."),
)
_GPT2_NAMES = TensorNames(
    prefixes=(
        *(("transformer." + theirs, ours) for theirs, ours in _GPT2_PREFIXES),
        *_GPT2_PREFIXES,  # checkpoints of the model without its head
        ("lm_head.", "lm_head."),
    ),
    parts=(
        ("ln_1.", "input_layernorm."),
        ("ln_2.", "post_attention_layernorm."),
        ("attn.c_attn.", "self_attn.qkv_proj."),
        ("attn.c_proj.", "self_attn.o_proj."),
        ("mlp.c_fc.", "mlp.up_proj."),
        ("mlp.c_proj.", "mlp.down_proj."),
    ),
    ignored_suffixes=_MASKS,
)
_GPT_NEOX_PREFIXES = (
    ("embed_in.", "model.embed_tokens."),
    ("layers.", "model.layers."),
    ("final_layer_norm.", "model.norm."),
)
_GPT_NEOX_NAMES = TensorNames(
    prefixes=(
        *(("gpt_neox." + theirs, ours) for theirs, ours in _GPT_NEOX_PREFIXES),
        *_GPT_NEOX_PREFIXES,  # checkpoints of the model without its head
        ("embed_out.", "lm_head."),
        ("lm_head.", "lm_head."),
    ),
    parts=(
        ("attention.query_key_value.", "self_attn.qkv_proj."),
        ("attention.dense.", "self_attn.o_proj."),
        ("mlp.dense_h_to_4h.", "mlp.up_proj."),
        ("mlp.dense_4h_to_h.", "mlp.down_proj."),
    ),
    ignored_suffixes=(*_MASKS, *ROTARY_BUFFERS),
)


def gpt2(hf: Config) -> ModelConfig:
    """Read GPT-2."""
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if flag(hf, key):
            raise UnsupportedModelError(f"{key} {shown(hf[key])} is not supported")
    _check_heads(hf)
    attention = read_attention(hf, rope=NO_ROPE, qkv_bias=True, output_bias=True, stored="fused")
    if not flag(hf, "scale_attn_weights"):
        attention = replace(attention, scale=1.0)
    inner = 4 * size(hf, "hidden_size") if hf["intermediate_size"] is None else None
    return read_model(
        hf,
        repeat(hf, attention, _plain_mlp(hf, inner)),
        norm=read_norm(hf, subtracts_mean=True),
        learned_positions=True,
        transposed_weights=True,
        tensor_names=_GPT2_NAMES,
    )


def gpt_neox(hf: Config) -> ModelConfig:
    """Read GPT-NeoX."""
    _check_heads(hf)
    mlp = _plain_mlp(hf)
    bias = flag(hf, "attention_bias")
    for key, most in {} if own_rope(hf) else {"rotary_emb_base": MAX_ROPE_THETA, "rotary_pct": 1}.items():
        if hf.get(key) is not None:  # under the names of older checkpoints
            check_number(CheckpointError, key, hf[key], 0, most, above=True)
    outer = {"rope_theta": hf.get("rotary_emb_base"), "partial_rotary_factor": hf.get("rotary_pct", 0.25)}
    rope = read_rope({**hf, **outer}, partial=True)
    attention = read_attention(hf, rope=rope, qkv_bias=bias, output_bias=bias, stored="by_head")
    return read_model(
        hf,
        repeat(hf, attention, mlp, parallel=flag(hf, "use_parallel_residual")),
        norm=read_norm(hf, subtracts_mean=True),
        tensor_names=_GPT_NEOX_NAMES,
    )


def _check_heads(hf: Config) -> None:
    hidden_size = size(hf, "hidden_size")
    num_heads = size(hf, "num_attention_heads")
    if hidden_size % num_heads:
        raise CheckpointError(
            f"hidden_size {hidden_size} does not divide among num_attention_heads {num_heads}"
        )


def _plain_mlp(hf: Config, inner: int | None = None) -> FeedForwardSpec:
    activation = activation_of(hf, "hidden_act", ("gelu", "gelu_tanh"))
    return read_feed_forward(hf, size=inner, activation=activation, gated=False, bias=True)


families = {
    "GPT2LMHeadModel": Family(GPT2, gpt2, GPT2_KEYS),
    "GPTNeoXForCausalLM": Family(GPT_NEOX, gpt_neox, GPT_NEOX_KEYS),
}
