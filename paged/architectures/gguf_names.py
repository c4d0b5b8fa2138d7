"""The names of a GGUF file's tensors, by what `general.architecture` is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from .config import ExpertStack, ModelConfig, TensorNames
from .spec import ExpertsSpec

_PREFIXES = (
    ("blk.", "model.layers."),
    ("token_embd.", "model.embed_tokens."),
    ("position_embd.", "model.embed_positions."),
    ("output_norm.", "model.norm."),
    ("output.", "lm_head."),
    ("per_layer_token_embd.", "model.embed_tokens_per_layer."),
    ("per_layer_model_proj.", "model.per_layer_model_projection."),
    ("per_layer_proj_norm.", "model.per_layer_projection_norm."),
)
_ATTENTION = (
    ("attn_q.", "self_attn.q_proj."),
    ("attn_k.", "self_attn.k_proj."),
    ("attn_v.", "self_attn.v_proj."),
    ("attn_qkv.", "self_attn.qkv_proj."),
    ("attn_output.", "self_attn.o_proj."),
    ("attn_q_norm.", "self_attn.q_norm."),
    ("attn_k_norm.", "self_attn.k_norm."),
)
_MLP = (
    ("ffn_gate.", "mlp.gate_proj."),
    ("ffn_up.", "mlp.up_proj."),
    ("ffn_down.", "mlp.down_proj."),
)
_FUSED_MLP = (("ffn_up.", "mlp.gate_up_proj."), ("ffn_down.", "mlp.down_proj."))
_BEFORE = (("attn_norm.", "input_layernorm."), ("ffn_norm.", "post_attention_layernorm."))
_ROUTER = (("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"), ("ffn_gate_inp.", "mlp.gate."))
_AFTER = (
    ("post_attention_norm.", "post_attention_layernorm."),
    ("post_ffw_norm.", "post_feedforward_layernorm."),
)
_AROUND = (("attn_norm.", "input_layernorm."), *_AFTER, ("ffn_norm.", "pre_feedforward_layernorm."))
_BEFORE_BOTH = (("attn_norm.", "input_layernorm."), _AFTER[0])  # as in _BEFORE, under another name
_GLM4_NORMS = (
    ("attn_norm.", "input_layernorm."),
    ("post_attention_norm.", "post_self_attn_layernorm."),
    ("ffn_norm.", "post_attention_layernorm."),
    ("post_ffw_norm.", "post_mlp_layernorm."),
)


def _names(*parts: tuple[tuple[str, str], ...]) -> TensorNames:
    """Return the names of a family."""
    return TensorNames(
        prefixes=_PREFIXES,
        parts=tuple(pair for each in parts for pair in each),
        ignored_suffixes=(),
    )


def _with_experts(
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
    *,
    norms: tuple[tuple[str, str], ...] = _BEFORE,
    router: tuple[tuple[str, str], ...] = _ROUTER,
    shared: str = "shared_expert",
) -> TensorNames:
    """Return the names of a family with experts.

    gate, up, down: what projections of experts are called in the checkpoint. shared: the expert of all
    tokens.
    """
    parts = (
        ("ffn_gate_exps.", f"mlp.experts.{gate}."),
        ("ffn_up_exps.", f"mlp.experts.{up}."),
        ("ffn_down_exps.", f"mlp.experts.{down}."),
        ("ffn_gate_up_exps.", "mlp.experts.gate_up_proj."),
        ("ffn_gate_inp_shexp.", "mlp.shared_expert_gate."),
        ("ffn_gate_shexp.", f"mlp.{shared}.gate_proj."),
        ("ffn_up_shexp.", f"mlp.{shared}.up_proj."),
        ("ffn_down_shexp.", f"mlp.{shared}.down_proj."),
    )
    single = (
        ExpertStack(f"mlp.experts.{name}.{kind}", (f"{name}.{kind}",))
        for name in (gate, up, down)
        for kind in ("weight", "bias")
    )
    both = ExpertStack("mlp.experts.gate_up_proj.weight", (f"{gate}.weight", f"{up}.weight"))
    names = _names(_ATTENTION, norms, _MLP, router, parts)
    return replace(names, stacks=(*single, both), only_stacks=True)


_LLAMA = _names(_ATTENTION, _BEFORE, _MLP)
_QWEN_MOE = _with_experts()
_GPT_OSS = _with_experts(
    norms=_BEFORE_BOTH,
    router=(("ffn_gate_inp.", "mlp.router."), ("attn_sinks.weight", "self_attn.sinks")),
)
_GEMMA4 = _with_experts(
    norms=(
        *_AROUND,
        ("pre_ffw_norm_2.", "pre_feedforward_layernorm_2."),
        ("post_ffw_norm_1.", "post_feedforward_layernorm_1."),
        ("post_ffw_norm_2.", "post_feedforward_layernorm_2."),
        ("layer_output_scale.weight", "layer_scalar"),
        ("inp_gate.", "per_layer_input_gate."),
        ("proj.", "per_layer_projection."),
        ("post_norm.", "post_per_layer_input_norm."),
    ),
    router=(
        ("ffn_gate_inp.scale", "mlp.router_norm.weight"),
        ("ffn_down_exps.scale", "mlp.router.per_expert_scale"),
        ("ffn_gate_inp.", "mlp.router."),
    ),
)


class Converted(NamedTuple):
    """How llama.cpp's converter changes the tensors of a family.

    interleaved: the rows of each head of Q and K alternate between its first and its second half.
    qkv_by_part: Q of all heads comes first, then K, then V. In transformers' checkpoint, Q, K and V of each
        head follow each other.
    norms_plus_one: 1 is added to the weights of norms.
    """

    names: TensorNames
    interleaved: bool = False
    qkv_by_part: bool = False
    norms_plus_one: bool = False


CONVERTED: Mapping[str, Converted] = {
    "llama": Converted(_with_experts("w1", "w3", "w2"), interleaved=True),
    "qwen2": Converted(_LLAMA),
    "qwen3": Converted(_LLAMA),
    "qwen2vl": Converted(_LLAMA),
    "qwen3vl": Converted(_LLAMA),
    "qwen3vlmoe": Converted(_QWEN_MOE),
    "qwen2moe": Converted(_QWEN_MOE),
    "qwen3moe": Converted(_QWEN_MOE),
    "olmoe": Converted(_QWEN_MOE),
    "gpt-oss": Converted(_GPT_OSS),
    "glm4moe": Converted(_with_experts(norms=_BEFORE_BOTH, shared="shared_experts")),
    "minimax-m2": Converted(_with_experts("w1", "w3", "w2")),
    "granitemoe": Converted(_QWEN_MOE, interleaved=True),
    "phi3": Converted(_names(_ATTENTION, _BEFORE, _FUSED_MLP)),
    "granite": Converted(_LLAMA, interleaved=True),
    "olmo2": Converted(_names(_ATTENTION, _AFTER, _MLP)),
    "smollm3": Converted(_LLAMA, interleaved=True),
    "glm4": Converted(_names(_ATTENTION, _GLM4_NORMS, _FUSED_MLP)),
    "gemma2": Converted(_names(_ATTENTION, _AROUND, _MLP), norms_plus_one=True),
    "gemma3": Converted(_names(_ATTENTION, _AROUND, _MLP), norms_plus_one=True),
    "gemma4": Converted(_GEMMA4),
    "gpt2": Converted(_LLAMA),
    "gptneox": Converted(_LLAMA, qkv_by_part=True),
}


def with_gguf_names(config: ModelConfig, architecture: str) -> ModelConfig:
    """Return the config with the tensor names of a GGUF file. GGUF files store no tensor transposed."""
    names = CONVERTED[architecture].names
    skipped = tuple(map(names.in_checkpoint, config.tensor_names.skipped_prefixes))
    layers = tuple(
        replace(layer, feed_forward=replace(layer.feed_forward, interleaved=False))
        if isinstance(layer.feed_forward, ExpertsSpec)
        else layer
        for layer in config.layers
    )
    return replace(
        config,
        tensor_names=replace(names, skipped_prefixes=skipped),
        transposed_weights=False,
        layers=layers,
    )
