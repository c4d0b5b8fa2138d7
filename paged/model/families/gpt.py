"""GPT-2 and GPT-NeoX: layers from before Llama, with names of their own for tensors and keys."""

from __future__ import annotations

from typing import Any

from ...errors import CheckpointError, UnsupportedModelError
from ...validation import check_number, shown
from ..config import NO_ROPE, ROTARY_BUFFERS, TensorNames
from .reading import Config, activation_of, flag, size
from .rope import MAX_ROPE_THETA, own_rope, read_rope

GPT2 = {"max_position_embeddings": 1024, "tie_word_embeddings": True, "n_inner": None,
        "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}  # fmt: skip
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
GPT_NEOX = {"max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
            "use_parallel_residual": True, "attention_bias": True}  # fmt: skip
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


def _shared(hf: Config) -> dict[str, Any]:
    hidden_size, num_heads = size(hf, "hidden_size"), size(hf, "num_attention_heads")
    if hidden_size % num_heads:
        raise CheckpointError(
            f"hidden_size {hidden_size} does not divide among num_attention_heads {num_heads}"
        )
    return {
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "qk_norm": None,
        "layer_windows": (None,) * size(hf, "num_hidden_layers"),
        "layer_norm": True,
        "activation": activation_of(hf, "hidden_act", ("gelu", "gelu_tanh")),
        "gated_mlp": False,
        "fused_qkv": True,
    }


def gpt2(hf: Config) -> dict[str, Any]:
    """Declare GPT-2."""
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if flag(hf, key):
            raise UnsupportedModelError(f"{key} {shown(hf[key])} is not supported")
    return {
        **_shared(hf),
        "intermediate_size": 4 * size(hf, "hidden_size") if hf["intermediate_size"] is None else None,
        "rope": NO_ROPE,
        "learned_positions": True,
        "attention_scale": None if flag(hf, "scale_attn_weights") else 1.0,
        "transposed_weights": True,
        "tensor_names": _GPT2_NAMES,
    }


def gpt_neox(hf: Config) -> dict[str, Any]:
    """Declare GPT-NeoX."""
    bias = flag(hf, "attention_bias")
    for key, most in {} if own_rope(hf) else {"rotary_emb_base": MAX_ROPE_THETA, "rotary_pct": 1}.items():
        if hf.get(key) is not None:  # under the names of older checkpoints
            check_number(CheckpointError, key, hf[key], 0, most, above=True)
    rope = {"rope_theta": hf.get("rotary_emb_base"), "partial_rotary_factor": hf.get("rotary_pct", 0.25)}
    return {
        **_shared(hf),
        "qkv_bias": bias,
        "output_bias": bias,
        "rope": read_rope({**hf, **rope}, partial=True),
        "parallel_residual": flag(hf, "use_parallel_residual"),
        "qkv_by_head": True,
        "tensor_names": _GPT_NEOX_NAMES,
    }
