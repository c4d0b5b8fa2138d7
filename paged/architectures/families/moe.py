"""Families that are mixtures of experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import check_int, check_number, shown
from ...kernels.routing import RoutingOptions
from ..config import ExpertStack, ModelConfig, TensorNames
from ..spec import ExpertsSpec, FeedForwardSpec, LayerSpec
from .granite import granite_fields
from .layer_types import full_every, layer_types_of, windows_of
from .reading import (
    CEILINGS,
    Config,
    Family,
    factor,
    flag,
    own_rope,
    read_attention,
    read_feed_forward,
    read_model,
    read_rope,
    repeat,
    size,
    window_of,
)

# Of all layers together: each expert is two modules, which are made before a tensor is looked at.
MOST_EXPERTS = 2**16
# Keys of routers that are not built, and what they stand for.
_NOT_BUILT = {
    "zero_expert_num": "experts that compute nothing",
    "num_hash_layers": "layers whose tokens are routed by a hash",
}

QWEN3_MOE = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
QWEN2_MOE = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 16,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "qkv_bias": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "norm_topk_prob": False,
}
OLMOE = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "clip_qkv": None,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
MIXTRAL = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GLM4_MOE = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "use_qk_norm": False,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}
MINIMAX_M2 = {
    "max_position_embeddings": 196608,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
GRANITE_MOE = {
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
GPT_OSS = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def stacks_of(
    gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[ExpertStack, ...]:
    """Return the expert stacks that transformers 5 saves for projections of these names."""
    return tuple(
        ExpertStack(f"mlp.experts.{name}{last}", tuple(f"{part}.weight{last}" for part in parts))
        for name, parts in (("gate_up_proj", (gate, up)), ("down_proj", (down,)))
        for last in ("", "_scale_inv")
    )


_WS = ("w1", "w3", "w2")
STACK_NAMES = TensorNames(stacks=stacks_of())
MIXTRAL_NAMES = TensorNames(parts=(("block_sparse_moe.", "mlp."),), stacks=stacks_of(*_WS))
MINIMAX_NAMES = TensorNames(
    parts=(
        ("block_sparse_moe.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        ("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        ("block_sparse_moe.", "mlp."),
    ),
    skipped_prefixes=("model.mtp.", "mtp."),
    stacks=stacks_of(*_WS),
)
GRANITE_NAMES = TensorNames(
    parts=(
        ("block_sparse_moe.router.layer.", "mlp.gate."),
        ("block_sparse_moe.router.", "mlp.gate."),  # as transformers 5 names it
        ("block_sparse_moe.input_linear.", "mlp.experts.input_linear."),
        ("block_sparse_moe.output_linear.", "mlp.experts.output_linear."),
        ("block_sparse_moe.experts.", "mlp.experts."),  # the modules of transformers 5, which adapters name
    ),
    stacks=(
        *(
            ExpertStack(f"mlp.experts.{name}.{last}", tuple(f"{part}.{last}" for part in parts))
            for name, parts in (("input_linear", ("gate_proj", "up_proj")), ("output_linear", ("down_proj",)))
            for last in ("weight", "weight_scale", "weight_scale_inv")
        ),
        *stacks_of(),
    ),
    only_stacks=True,
)
GPT_OSS_NAMES = TensorNames(
    stacks=tuple(
        stack
        for part in ("gate_up_proj", "down_proj")
        for stack in (
            ExpertStack(f"mlp.experts.{part}", (f"{part}.weight",)),
            ExpertStack(f"mlp.experts.{part}_bias", (f"{part}.bias",)),
            ExpertStack(f"mlp.experts.{part}_blocks", (f"{part}.weight_packed",), flat=True),
            ExpertStack(f"mlp.experts.{part}_scales", (f"{part}.weight_scale",)),
        )
    ),
    only_stacks=True,
)


def read_experts(
    hf: Config,
    count: str,
    inner: str,
    routing: dict[str, Any],
    *,
    chosen: str = "num_experts_per_tok",
    **fields: Any,
) -> ExpertsSpec:
    """Read the experts of a model in which all layers have the same experts.

    count, inner, chosen: the keys of config.json for the number of experts, an expert's inner size, and the
        number of experts per token.
    routing: fields of RoutingOptions.
    fields: fields of ExpertsSpec that override config.json.
    """
    for key, what in _NOT_BUILT.items():
        if hf.get(key):
            raise UnsupportedModelError(f"{key} {shown(hf[key])} is not supported: {what}")
    num_experts = _number_of_experts(hf, count)
    if (total := num_experts * size(hf, "num_hidden_layers")) > MOST_EXPERTS:
        raise CheckpointError(
            f"{count} {num_experts} of all layers must be at most {MOST_EXPERTS}, got {total}"
        )
    num_chosen = size(hf, chosen)
    if num_chosen > num_experts:
        raise CheckpointError(f"{chosen} {num_chosen} must be at most {count} {num_experts}")
    options = RoutingOptions(num_chosen=num_chosen, **routing)
    _require(hf, "scoring_func", "sigmoid" if options.score == "sigmoid" else "softmax")
    _require(hf, "topk_method", "noaux_tc" if fields.get("correction_bias") else "greedy")
    _check_groups(options, num_experts, count, chosen)
    return ExpertsSpec(num_experts=num_experts, size=size(hf, inner), routing=options, **fields)


def _check_groups(options: RoutingOptions, num_experts: int, count: str, chosen: str) -> None:
    """Raise CheckpointError unless the groups of experts are alike, and those kept have enough for a token.

    count, chosen: the keys of the number of experts, and of the number chosen for a token.
    """
    groups = f"n_group {options.num_groups}"
    kept = f"topk_group {options.num_kept_groups}"
    if num_experts % options.num_groups:
        raise CheckpointError(f"{count} {num_experts} must be a multiple of {groups}")
    if options.num_kept_groups > options.num_groups:
        raise CheckpointError(f"{kept} must be at most {groups}")
    group_size = num_experts // options.num_groups
    if options.group_score == "best_two" and options.num_groups > 1 and group_size < 2:
        raise CheckpointError(f"{groups} must be at most half of {count} {num_experts}")
    if options.num_chosen > (most := options.num_kept_groups * group_size):
        raise CheckpointError(
            f"{chosen} {options.num_chosen} must be at most the {most} experts in {kept} of {groups}"
        )
    options.check(num_experts)


def _number_of_experts(hf: Config, key: str) -> int:
    """Return the number of experts, which transformers 5 writes under another name."""
    for name in {"num_local_experts": hf.get("num_local_experts"), key: hf[key]}:
        if hf.get(name) is not None:
            return check_int(CheckpointError, name, hf[name], 1, CEILINGS[key])
    raise CheckpointError(f"{key} is missing")


def _with_dense(hf: Config, layers: tuple[LayerSpec, ...], dense: list[bool]) -> tuple[LayerSpec, ...]:
    """Give the layers that have no experts an MLP."""
    if not any(dense):
        return layers
    mlp = read_feed_forward(hf)
    return tuple(
        replace(layer, feed_forward=mlp) if is_dense else layer
        for layer, is_dense in zip(layers, dense, strict=True)
    )


def dense_of_qwen(hf: Config) -> list[bool]:
    """Return for each layer whether it is dense, without experts."""
    step = size(hf, "decoder_sparse_step")
    only = [] if hf["mlp_only_layers"] is None else hf["mlp_only_layers"]
    num_layers = size(hf, "num_hidden_layers")
    if not isinstance(only, list) or not all(type(i) is int and 0 <= i < num_layers for i in only):
        raise CheckpointError(f"mlp_only_layers must be numbers of layers, got {shown(only)}")
    return [layer in only or (layer + 1) % step != 0 for layer in range(num_layers)]


def qwen3_moe(hf: Config) -> ModelConfig:
    """Read Qwen3-MoE."""
    bias = flag(hf, "attention_bias")
    window = window_of(hf) if flag(hf, "use_sliding_window") else None
    attention = read_attention(hf, qkv_bias=bias, output_bias=bias, qk_norm="head", window=window)
    routing = {"renormalise": flag(hf, "norm_topk_prob")}
    experts = read_experts(hf, "num_experts", "moe_intermediate_size", routing)
    layers = _with_dense(hf, repeat(hf, attention, experts), dense_of_qwen(hf))
    return read_model(hf, layers, tensor_names=STACK_NAMES)


def qwen2_moe(hf: Config) -> ModelConfig:
    """Read Qwen2-MoE, whose shared expert has a gate."""
    num_layers = size(hf, "num_hidden_layers")
    window = window_of(hf) if flag(hf, "use_sliding_window") else None
    most = check_int(CheckpointError, "max_window_layers", hf["max_window_layers"], 0)
    kinds = tuple(
        "sliding_attention" if window and layer % 2 == 0 and layer < most else "full_attention"
        for layer in range(num_layers)
    )
    attention = read_attention(hf, qkv_bias=flag(hf, "qkv_bias"))
    shared = FeedForwardSpec(size=size(hf, "shared_expert_intermediate_size"))
    routing = {"renormalise": flag(hf, "norm_topk_prob")}
    experts = read_experts(
        hf,
        "num_experts",
        "moe_intermediate_size",
        routing,
        shared=shared,
        shared_name="shared_expert",
        shared_gate="shared_expert_gate",
    )
    layers = repeat(hf, attention, experts, windows=windows_of(layer_types_of(hf, kinds), window))
    return read_model(hf, _with_dense(hf, layers, dense_of_qwen(hf)), tensor_names=STACK_NAMES)


def olmoe(hf: Config) -> ModelConfig:
    """Read OLMoE."""
    if hf["clip_qkv"] is not None:
        raise UnsupportedModelError(f"clip_qkv {shown(hf['clip_qkv'])} is not supported")
    bias = flag(hf, "attention_bias")
    attention = read_attention(hf, qkv_bias=bias, output_bias=bias, qk_norm="projection")
    routing = {"renormalise": flag(hf, "norm_topk_prob")}
    experts = read_experts(hf, "num_experts", "intermediate_size", routing)
    return read_model(hf, repeat(hf, attention, experts), tensor_names=STACK_NAMES)


def mixtral(hf: Config) -> ModelConfig:
    """Read Mixtral."""
    rope = read_rope({"rope_theta": 1e6, **hf})
    attention = read_attention(hf, rope=rope, window=window_of(hf))
    experts = read_experts(hf, "num_local_experts", "intermediate_size", {"renormalise": True}, parts=_WS)
    return read_model(hf, repeat(hf, attention, experts), tensor_names=MIXTRAL_NAMES)


def glm4_moe(hf: Config) -> ModelConfig:
    """Read GLM-4.5 and 4.6. Layers beyond num_hidden_layers predict further tokens and are left out."""
    rope = read_rope({"partial_rotary_factor": 0.5, **hf}, partial=True)
    qk_norm = "head" if flag(hf, "use_qk_norm") else None
    attention = read_attention(hf, rope=rope, qkv_bias=flag(hf, "attention_bias"), qk_norm=qk_norm)
    num_layers = size(hf, "num_hidden_layers")
    num_shared = check_int(
        CheckpointError, "n_shared_experts", hf["n_shared_experts"], 0, CEILINGS["n_shared_experts"]
    )
    shared = None
    if num_shared:
        shared = FeedForwardSpec(size=num_shared * size(hf, "moe_intermediate_size"))
    routing = {
        "score": "sigmoid",
        "num_groups": size(hf, "n_group"),
        "num_kept_groups": size(hf, "topk_group"),
        "group_score": "best_two",
        "renormalise": flag(hf, "norm_topk_prob"),
        "epsilon": 1e-20,
        "scale": factor(hf, "routed_scaling_factor"),
    }
    experts = read_experts(
        hf, "n_routed_experts", "moe_intermediate_size", routing, correction_bias=True, shared=shared
    )
    first = check_int(CheckpointError, "first_k_dense_replace", hf["first_k_dense_replace"], 0, num_layers)
    layers = _with_dense(hf, repeat(hf, attention, experts), [i < first for i in range(num_layers)])
    most = CEILINGS["num_nextn_predict_layers"]
    extra = check_int(CheckpointError, "num_nextn_predict_layers", hf["num_nextn_predict_layers"], 0, most)
    skipped = tuple(f"model.layers.{num_layers + i}." for i in range(extra))
    return read_model(hf, layers, tensor_names=replace(STACK_NAMES, skipped_prefixes=skipped))


def minimax_m2(hf: Config) -> ModelConfig:
    """Read MiniMax-M2. Its config.json says rotary_dim, where transformers has partial_rotary_factor."""
    if hf.get("shared_intermediate_size"):
        given = shown(hf["shared_intermediate_size"])
        raise UnsupportedModelError(f"shared_intermediate_size {given} is not supported; 0 is")
    outer = {"rope_theta": 5e6, **hf}
    if hf.get("rotary_dim") is not None:
        head_dim = size(hf, "head_dim")
        rotated = check_int(CheckpointError, "rotary_dim", hf["rotary_dim"], 2, head_dim)
        outer.setdefault("partial_rotary_factor", rotated / head_dim)
    attention = read_attention(hf, rope=read_rope(outer, partial=True), qk_norm="projection")
    experts = read_experts(
        hf,
        "num_local_experts",
        "intermediate_size",
        {"score": "sigmoid", "renormalise": True},
        correction_bias=True,
        parts=_WS,
    )
    return read_model(hf, repeat(hf, attention, experts), tensor_names=MINIMAX_NAMES)


def granite_moe(hf: Config) -> ModelConfig:
    """Read Granite 3 MoE."""
    bias = flag(hf, "attention_bias")
    scale = factor(hf, "attention_multiplier")
    attention = read_attention(hf, qkv_bias=bias, output_bias=bias, scale=scale)
    experts = read_experts(hf, "num_local_experts", "intermediate_size", {"score": "softmax_of_chosen"})
    layers = repeat(hf, attention, experts)
    return read_model(hf, layers, **granite_fields(hf), tensor_names=GRANITE_NAMES)


def gpt_oss(hf: Config) -> ModelConfig:
    """Read gpt-oss."""
    bias = flag(hf, "attention_bias")
    rope = read_rope({"rope_theta": 150000.0, **hf}, own_rope(hf) or _GPT_OSS_ROPE)
    attention = read_attention(hf, rope=rope, qkv_bias=bias, output_bias=bias, sinks=True)
    limit, alpha = (
        check_number(CheckpointError, key, hf[key], 0, 1e3, above=True)
        for key in ("swiglu_limit", "swiglu_alpha")
    )
    experts = read_experts(
        hf,
        "num_local_experts",
        "intermediate_size",
        {"score": "softmax_of_chosen"},
        activation="clamped_swiglu",
        limit=limit,
        alpha=alpha,
        bias=True,
        router="router",
        router_bias=True,
        interleaved=True,
    )
    windows = windows_of(layer_types_of(hf, full_every(2, hf)), window_of(hf))
    layers = repeat(hf, attention, experts, windows=windows)
    return read_model(hf, layers, rope=rope, exceeds_float16=True, tensor_names=GPT_OSS_NAMES)


# What Gemma 4's checkpoints call the parts of its experts.
GEMMA4_PARTS = (
    ("router.scale", "mlp.router_norm.weight"),
    ("router.per_expert_scale", "mlp.router.per_expert_scale"),
    ("router.proj.", "mlp.router."),
    ("experts.", "mlp.experts."),
)
GEMMA4_STACKS = stacks_of()


def gemma4_experts(hf: Config) -> ExpertsSpec:
    """Read the experts of Gemma 4 26B-A4B."""
    return read_experts(
        hf,
        "num_experts",
        "moe_intermediate_size",
        {"renormalise": True},
        chosen="top_k_experts",
        activation="gelu_tanh",
        router="router",
        router_scale=size(hf, "hidden_size") ** -0.5,
        expert_scales=True,
    )


def _require(hf: Config, key: str, supported: str) -> None:
    """Raise UnsupportedModelError if config.json has another value than the family's."""
    if hf.get(key) not in (None, supported):
        raise UnsupportedModelError(f"{key} {shown(hf[key])} is not supported; {supported!r} is")


families = {
    "Qwen2MoeForCausalLM": Family(QWEN2_MOE, qwen2_moe),
    "Qwen3MoeForCausalLM": Family(QWEN3_MOE, qwen3_moe),
    "MixtralForCausalLM": Family(MIXTRAL, mixtral),
    "OlmoeForCausalLM": Family(OLMOE, olmoe),
    "GptOssForCausalLM": Family(GPT_OSS, gpt_oss),
    "Glm4MoeForCausalLM": Family(GLM4_MOE, glm4_moe),
    "MiniMaxM2ForCausalLM": Family(MINIMAX_M2, minimax_m2),
    "GraniteMoeForCausalLM": Family(GRANITE_MOE, granite_moe),
}
