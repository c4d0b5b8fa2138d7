"""Qwen3-Next, Qwen3.5 and LFM2, most of whose layers keep a state: how they read config.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import check_int, check_number, shown
from ..config import ModelConfig, TensorNames
from ..spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, NormNames
from ..states import StateSpec
from .layer_types import layer_types_of
from .moe import dense_of_qwen, read_experts, stacks_of
from .reading import (
    CEILINGS,
    Config,
    Family,
    factor,
    flag,
    read_attention,
    read_feed_forward,
    read_model,
    read_norm,
    read_rope,
    size,
)

_QWEN = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}
_QWEN3_5 = {**_QWEN, "num_key_value_heads": 4}
_QWEN3_5_MOE = {
    **_QWEN,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "intermediate_size": 512,  # of no layer
}
_QWEN3_NEXT = {
    **_QWEN3_5_MOE,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
del _QWEN3_NEXT["intermediate_size"]
_QWEN_NAMES = TensorNames(skipped_prefixes=("mtp.", "model.mtp."))
_QWEN_MOE_NAMES = replace(_QWEN_NAMES, stacks=stacks_of())

_LFM2 = {
    "intermediate_size": None,  # or block_ff_dim
    "max_position_embeddings": 128000,
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": None,
}
_LFM2_MOE = {
    "max_position_embeddings": 128000,
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_LFM2_KEYS = {"rms_norm_eps": "norm_eps"}
_LFM2_NAMES = TensorNames(
    prefixes=(
        ("model.embedding_norm.", "model.norm."),
        ("model.", "model."),
        ("lm_head.", "lm_head."),
        ("embedding_norm.", "model.norm."),
        ("", "model."),
    ),
    parts=(
        ("self_attn.q_layernorm.", "self_attn.q_norm."),
        ("self_attn.k_layernorm.", "self_attn.k_norm."),
        ("self_attn.out_proj.", "self_attn.o_proj."),
        ("feed_forward.w1.", "mlp.gate_proj."),
        ("feed_forward.w3.", "mlp.up_proj."),
        ("feed_forward.w2.", "mlp.down_proj."),
        ("feed_forward.expert_bias", "mlp.gate.e_score_correction_bias"),
        ("feed_forward.", "mlp."),
    ),
)
_WS = ("w1", "w3", "w2")
_LFM2_MOE_NAMES = replace(_LFM2_NAMES, stacks=stacks_of(*_WS))
_LFM2_NORMS = NormNames(before_attention="operator_norm", before_mlp="ffn_norm")


def _qwen(hf: Config, feed_forwards: list[FeedForwardSpec | ExpertsSpec], **fields: Any) -> ModelConfig:
    """Read what the hybrids of Qwen have in common. fields: of ModelConfig."""
    for key, supported in (("attn_output_gate", (True,)), ("output_gate_type", ("silu", "swish"))):
        if hf.get(key, supported[0]) not in (*supported, None):
            known = ", ".join(map(str, supported))
            raise UnsupportedModelError(f"{key} {shown(hf[key])} is not supported; only {known}")
    bias = flag(hf, "attention_bias")
    rope = read_rope(hf, partial=True)
    attention = read_attention(hf, rope=rope, qkv_bias=bias, output_bias=bias, qk_norm="head", gate=True)
    step = size(hf, "full_attention_interval")
    default = tuple(
        "full_attention" if (i + 1) % step == 0 else "linear_attention" for i in range(len(feed_forwards))
    )
    kinds = layer_types_of(hf, default, ("full_attention", "linear_attention"))
    layers = _layers(kinds, attention, _delta(hf, fields.pop("stored", "by_part")), feed_forwards)
    return read_model(hf, layers, norm=read_norm(hf, unit_offset=True), **fields)


def _delta(hf: Config, stored: Any) -> StateSpec:
    """Read the state of the gated delta rule."""
    num_heads, num_key_heads = size(hf, "linear_num_value_heads"), size(hf, "linear_num_key_heads")
    if num_heads % num_key_heads:
        raise CheckpointError(
            f"linear_num_value_heads {num_heads} do not divide among linear_num_key_heads {num_key_heads}"
        )
    key_dim, value_dim = size(hf, "linear_key_head_dim"), size(hf, "linear_value_head_dim")
    return StateSpec(
        kind="delta",
        width=_width(hf, "linear_conv_kernel_dim"),
        columns=2 * num_key_heads * key_dim + num_heads * value_dim,
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        stored=stored,
    )


def _width(hf: Config, name: str) -> int:
    """Return how many tokens a convolution sees."""
    return check_int(CheckpointError, name, hf[name], 2, CEILINGS[name])


def _layers(
    kinds: tuple[str, ...],
    attention: AttentionSpec,
    state: StateSpec,
    feed_forwards: list[FeedForwardSpec | ExpertsSpec],
    **fields: Any,
) -> tuple[LayerSpec, ...]:
    """Make layers with attention where a kind is full_attention, and with states elsewhere."""
    return tuple(
        LayerSpec(
            attention=attention if kind == "full_attention" else None,
            state=None if kind == "full_attention" else state,
            feed_forward=feed_forward,
            **fields,
        )
        for kind, feed_forward in zip(kinds, feed_forwards, strict=True)
    )


def _experts_of_qwen(hf: Config, *, renormalise: bool) -> ExpertsSpec:
    return read_experts(
        hf,
        "num_experts",
        "moe_intermediate_size",
        {"renormalise": renormalise},
        shared=FeedForwardSpec(size=size(hf, "shared_expert_intermediate_size")),
        shared_name="shared_expert",
        shared_gate="shared_expert_gate",
    )


def _qwen3_5(hf: Config) -> ModelConfig:
    mlp = read_feed_forward(hf)
    return _qwen(hf, [mlp] * size(hf, "num_hidden_layers"), tensor_names=_QWEN_NAMES)


def _qwen3_5_moe(hf: Config) -> ModelConfig:
    experts = _experts_of_qwen(hf, renormalise=True)
    return _qwen(hf, [experts] * size(hf, "num_hidden_layers"), tensor_names=_QWEN_MOE_NAMES)


def _qwen3_next(hf: Config) -> ModelConfig:
    mlp = read_feed_forward(hf)
    experts = _experts_of_qwen(hf, renormalise=flag(hf, "norm_topk_prob"))
    parts: list[FeedForwardSpec | ExpertsSpec] = [mlp if dense else experts for dense in dense_of_qwen(hf)]
    return _qwen(hf, parts, stored="by_key_head", tensor_names=_QWEN_MOE_NAMES)


def _lfm2_layers(
    hf: Config, feed_forwards: list[FeedForwardSpec | ExpertsSpec], default: tuple[str, ...]
) -> tuple[LayerSpec, ...]:
    attention = read_attention(hf, rope=read_rope({"rope_theta": 1e6, **hf}), qk_norm="head")
    kinds = layer_types_of(hf, default, ("full_attention", "conv"))
    width = _width(hf, "conv_L_cache")
    columns, bias = size(hf, "hidden_size"), flag(hf, "conv_bias")
    state = StateSpec(kind="conv", width=width, columns=columns, bias=bias, conv_bias=bias, output_bias=bias)
    return _layers(kinds, attention, state, feed_forwards, norms=_LFM2_NORMS)


def _lfm2(hf: Config) -> ModelConfig:
    """Read LFM2, whose older checkpoints have keys of their own for what is tied and for the MLP's size."""
    hf = _with_older_keys(hf)
    num_layers = size(hf, "num_hidden_layers")
    with_attention = range(num_layers) if hf["full_attn_idxs"] is None else hf["full_attn_idxs"]
    if not isinstance(with_attention, list | range) or not all(
        type(i) is int and 0 <= i < num_layers for i in with_attention
    ):
        raise CheckpointError(
            f"full_attn_idxs must be numbers of the {num_layers} layers, got {shown(hf['full_attn_idxs'])}"
        )
    default = tuple("full_attention" if i in with_attention else "conv" for i in range(num_layers))
    mlp = read_feed_forward(hf, size=_adjusted_size(hf))
    return read_model(hf, _lfm2_layers(hf, [mlp] * num_layers, default), tensor_names=_LFM2_NAMES)


def _adjusted_size(hf: Config) -> int:
    """Return the inner size of the MLP: two thirds of what config.json says, rounded up to a multiple."""
    inner = size(hf, "intermediate_size")
    if not flag(hf, "block_auto_adjust_ff_dim"):
        return inner
    inner = int(2 * inner / 3)
    if hf["block_ffn_dim_multiplier"] is not None:
        unit = size(hf, "block_multiple_of")
        inner = -(-int(factor(hf, "block_ffn_dim_multiplier") * inner) // unit) * unit
    return check_int(
        CheckpointError, "intermediate_size, as adjusted,", inner, 1, CEILINGS["intermediate_size"]
    )


def _lfm2_moe(hf: Config) -> ModelConfig:
    hf = _with_older_keys(hf)
    num_layers = size(hf, "num_hidden_layers")
    if hf["layer_types"] is None:
        raise CheckpointError("layer_types is missing")
    routing = {
        "score": "sigmoid",
        "renormalise": flag(hf, "norm_topk_prob"),
        "epsilon": 1e-6,
        "scale": check_number(
            CheckpointError, "routed_scaling_factor", hf["routed_scaling_factor"], 0, 1e6, above=True
        ),
    }
    experts = read_experts(
        hf,
        "num_experts",
        "moe_intermediate_size",
        routing,
        correction_bias=flag(hf, "use_expert_bias"),
        parts=_WS,
    )
    mlp = read_feed_forward(hf)
    num_dense = check_int(CheckpointError, "num_dense_layers", hf["num_dense_layers"], 0, num_layers)
    parts: list[FeedForwardSpec | ExpertsSpec] = [mlp] * num_dense + [experts] * (num_layers - num_dense)
    return read_model(hf, _lfm2_layers(hf, parts, ()), tensor_names=_LFM2_MOE_NAMES)


def _with_older_keys(hf: Config) -> Config:
    """Take what older checkpoints say under other keys, as transformers does."""
    names = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    return {**hf, **{ours: hf[theirs] for theirs, ours in names.items() if hf.get(theirs) is not None}}


families = {
    "Qwen3_5ForCausalLM": Family(_QWEN3_5, _qwen3_5),
    "Qwen3_5MoeForCausalLM": Family(_QWEN3_5_MOE, _qwen3_5_moe),
    "Qwen3NextForCausalLM": Family(_QWEN3_NEXT, _qwen3_next),
    "Lfm2ForCausalLM": Family(_LFM2, _lfm2, _LFM2_KEYS),
    "Lfm2MoeForCausalLM": Family(_LFM2_MOE, _lfm2_moe, _LFM2_KEYS),
}
