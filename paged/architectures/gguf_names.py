"""The names of a GGUF file's tensors, by what `general.architecture` is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from .config import ExpertStack, ModelConfig, TensorNames
from .spec import ExpertsSpec, LayerSpec

_PREFIXES = (
    ("blk.", "model.layers."),
    ("token_embd.", "model.embed_tokens."),
    ("position_embd.", "model.embed_positions."),
    ("output_norm.", "model.norm."),
    ("token_embd_norm.", "model.norm."),  # LFM2's
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
    states: tuple[tuple[str, str], ...] = (),
    shared: str = "shared_expert",
) -> TensorNames:
    """Return the names of a family with experts.

    gate, up, down: what projections of experts are called in the checkpoint. states: of layers that keep one.
    shared: the expert of all tokens.
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
    names = _names(states, _ATTENTION, norms, _MLP, router, parts)
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


_DELTA = (
    ("attn_qkv.", "linear_attn.in_proj_qkv."),
    ("attn_gate.", "linear_attn.in_proj_z."),
    ("ssm_alpha.", "linear_attn.in_proj_a."),
    ("ssm_beta.", "linear_attn.in_proj_b."),
    ("ssm_ba.", "linear_attn.in_proj_ba."),
    ("ssm_conv1d.", "linear_attn.conv1d."),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    ("ssm_norm.", "linear_attn.norm."),
    ("ssm_out.", "linear_attn.out_proj."),
    ("ssm_a", "linear_attn.A"),  # behind those that begin so
)
_MAMBA = (
    ("ssm_in.", "mamba.in_proj."),
    ("ssm_conv1d.", "mamba.conv1d."),
    ("ssm_dt.bias", "mamba.dt_bias"),
    ("ssm_norm.", "mamba.norm."),
    ("ssm_out.", "mamba.out_proj."),
    ("ssm_a", "mamba.A"),
    ("ssm_d", "mamba.D"),
)
_SHORT_CONV = (
    ("shortconv.conv.", "conv.conv."),
    ("shortconv.in_proj.", "conv.in_proj."),
    ("shortconv.out_proj.", "conv.out_proj."),
)
_LFM2_NORMS = (("attn_norm.", "operator_norm."), ("ffn_norm.", "ffn_norm."))
_QWEN35_MOE = _with_experts(norms=_BEFORE_BOTH, states=_DELTA)
_NEMOTRON_H = _with_experts(
    norms=(("attn_norm.", "norm."),),
    states=_MAMBA,
    router=(
        ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
        ("ffn_gate_inp.", "mlp.gate."),
        ("ffn_latent_down.", "mlp.fc1_latent_proj."),
        ("ffn_latent_up.", "mlp.fc2_latent_proj."),
    ),
    shared="shared_experts",
)


class Converted(NamedTuple):
    """How llama.cpp's converter changes the tensors of a family.

    interleaved: the rows of each head of Q and K alternate between its first and its second half.
    qkv_by_part: Q of all heads comes first, then K, then V. In transformers' checkpoint, Q, K and V of each
        head follow each other.
    norms_plus_one: 1 is added to the weights of norms, except gated norms.
    tiled_values: value heads of the delta rule are ordered by their number within a key head: first the first
        value head of each key head, then the second ones. In transformers' checkpoint, the value heads of a
        key head follow each other.
    gates_by_key_head: among the input projections of the delta rule, only those of the gates are stored by
        key head.
    """

    names: TensorNames
    interleaved: bool = False
    qkv_by_part: bool = False
    norms_plus_one: bool = False
    tiled_values: bool = False
    gates_by_key_head: bool = False


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
    "qwen35": Converted(
        _names(_DELTA, _ATTENTION, _BEFORE_BOTH, _MLP), norms_plus_one=True, tiled_values=True
    ),
    "qwen35moe": Converted(_QWEN35_MOE, norms_plus_one=True, tiled_values=True),
    "qwen3next": Converted(_QWEN35_MOE, norms_plus_one=True, gates_by_key_head=True),
    "lfm2": Converted(_names(_SHORT_CONV, _ATTENTION, _LFM2_NORMS, _MLP)),
    "lfm2moe": Converted(_with_experts("w1", "w3", "w2", norms=_LFM2_NORMS, states=_SHORT_CONV)),
    "nemotron_h": Converted(_NEMOTRON_H, interleaved=True),
    "nemotron_h_moe": Converted(_NEMOTRON_H, interleaved=True),
    "granitehybrid": Converted(_with_experts(states=_MAMBA, shared="shared_experts"), interleaved=True),
    "falcon-h1": Converted(
        # llama.cpp writes one of the norms without .weight.
        _names(_MAMBA, _ATTENTION, (_BEFORE[0], ("ffn_norm", "pre_ff_layernorm.weight")), _MLP)
    ),
    "gpt2": Converted(_LLAMA),
    "gptneox": Converted(_LLAMA, qkv_by_part=True),
}


def with_gguf_names(config: ModelConfig, architecture: str, num_further_layers: int = 0) -> ModelConfig:
    """Return the config with the tensor names of a GGUF file. GGUF files store no tensor transposed.

    num_further_layers: the number of layers behind the last layer of the model, which are skipped.
    """
    converted = CONVERTED[architecture]
    names = converted.names
    further = (f"model.layers.{config.num_layers + i}." for i in range(num_further_layers))
    skipped = tuple(map(names.in_checkpoint, (*config.tensor_names.skipped_prefixes, *further)))
    layers = tuple(_as_converted(layer, converted) for layer in config.layers)
    return replace(
        config,
        tensor_names=replace(names, skipped_prefixes=skipped),
        transposed_weights=False,
        layers=layers,
    )


def _as_converted(layer: LayerSpec, converted: Converted) -> LayerSpec:
    """Return a layer as a GGUF file stores it."""
    state, part = layer.state, layer.feed_forward
    if state is not None and state.kind != "conv":
        state = replace(state, has_rates=True, stored="by_part")
        if converted.gates_by_key_head:
            state = replace(state, stored="gates_by_key_head")
    if isinstance(part, ExpertsSpec):
        shared = part.shared and replace(part.shared, fused=False)
        part = replace(part, interleaved=False, shared=shared)
    elif part is not None and part.fused and _FUSED_MLP[0] not in converted.names.parts:
        part = replace(part, fused=False)
    return replace(layer, state=state, feed_forward=part)
