"""Nemotron-H, Granite 4 and Falcon-H1, with states of Mamba-2: how they read config.json."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import check_int, check_number, shown
from ..config import ExpertStack, ModelConfig, TensorNames
from ..gguf_paths import GGUF_KEY
from ..spec import NO_ROPE, AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, NormNames
from ..states import StateSpec
from .granite import granite_fields
from .moe import GRANITE_NAMES, read_experts
from .reading import (
    CEILINGS,
    MAX_FACTOR,
    MIN_FACTOR,
    Config,
    Family,
    activation_of,
    factor,
    flag,
    read_attention,
    read_feed_forward,
    read_model,
    read_rope,
    size,
)

_NEMOTRON_H = {
    "num_hidden_layers": None,  # as many as the pattern has letters
    "intermediate_size": 21504,
    "num_key_value_heads": 8,
    "head_dim": None,  # or attention_head_dim; 128
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "layers_block_type": None,
    "hybrid_override_pattern": None,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "time_step_min": 0.001,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
_NEMOTRON_H_KEYS = {"rms_norm_eps": "layer_norm_epsilon", "hidden_act": "mlp_hidden_act"}
# What transformers takes for older names.
_OLDER_NEMOTRON_H = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
_LETTERS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
_OLDER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
_NEMOTRON_H_NAMES = TensorNames(
    prefixes=(
        *(
            (f"{start}{theirs}", ours)
            for start in ("backbone.", "model.", "")
            for theirs, ours in (
                ("embeddings.", "model.embed_tokens."),
                ("norm_f.", "model.norm."),
                ("layers.", "model.layers."),
            )
        ),
        ("lm_head.", "lm_head."),
    ),
    parts=(
        *((f"mixer.{part}", f"mamba.{part}") for part in ("in_proj.", "conv1d.", "A_log", "D", "dt_bias")),
        *((f"mixer.{part}", f"mamba.{part}") for part in ("norm.", "out_proj.")),
        *((f"mixer.{part}_proj.", f"self_attn.{part}_proj.") for part in "qkvo"),
        ("mixer.", "mlp."),
    ),
    skipped_prefixes=("mtp.",),
    stacks=tuple(
        ExpertStack(f"mlp.experts.{part}{last}", (f"{part}.weight{last}",))
        for part in ("up_proj", "down_proj")
        for last in ("", "_scale_inv")
    ),
)

_GRANITE_HYBRID = {
    "max_position_embeddings": 2048,
    "attention_bias": False,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "position_embedding_type": None,
    "layers_block_type": None,  # the older name of layer_types
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": None,
    "intermediate_size": 11008,
}
_SHARED = (("input_linear.", "gate_up_proj."), ("output_linear.", "down_proj."))
_GRANITE_HYBRID_NAMES = replace(
    GRANITE_NAMES,
    parts=GRANITE_NAMES.parts + tuple((f"shared_mlp.{a}", f"mlp.shared_experts.{b}") for a, b in _SHARED),
)
_GRANITE_DENSE_NAMES = TensorNames(parts=tuple((f"shared_mlp.{a}", f"mlp.{b}") for a, b in _SHARED))

_FALCON_H1 = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "attention_bias": False,
    "mlp_bias": False,
    "projectors_bias": False,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "time_step_limit": None,
    "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "mlp_multipliers": None,
    "key_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "ssm_multipliers": None,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
}
_FALCON_H1_NAMES = TensorNames(
    prefixes=(
        ("model.final_layernorm.", "model.norm."),
        ("model.", "model."),
        ("lm_head.", "lm_head."),
        ("final_layernorm.", "model.norm."),
        ("", "model."),
    ),
    parts=(("feed_forward.", "mlp."),),
)
_FALCON_H1_NORMS = NormNames(before_mlp="pre_ff_layernorm")


def _state(
    width: int, num_heads: int, num_groups: int, state_dim: int, head_dim: int, **fields: Any
) -> StateSpec:
    """Return the state of Mamba-2. fields: further fields of StateSpec."""
    return StateSpec(
        kind="mamba2",
        width=width,
        columns=num_heads * head_dim + 2 * num_groups * state_dim,
        num_heads=num_heads,
        num_key_heads=num_groups,
        key_dim=state_dim,
        value_dim=head_dim,
        **fields,
    )


def _check_groups(num_heads: int, num_groups: int, names: tuple[str, str]) -> None:
    """Raise CheckpointError unless heads divide among groups. names: the keys of both."""
    if num_heads % num_groups:
        raise CheckpointError(f"{names[0]} {num_heads} do not divide among {names[1]} {num_groups}")


def _width(hf: Config, name: str) -> int:
    """Return how many tokens a convolution sees."""
    return check_int(CheckpointError, name, hf[name], 2, CEILINGS[name])


def _nemotron_h(hf: Config) -> ModelConfig:
    """Read Nemotron-H and Nemotron 3, each of whose layers is one part: a letter of the pattern."""
    hf = {**hf, **{ours: hf[theirs] for theirs, ours in _OLDER_NEMOTRON_H.items() if theirs in hf}}
    kinds = _kinds(hf)
    head_dim = hf["head_dim"] or hf.get("attention_head_dim") or 128
    hf = {**hf, "num_hidden_layers": len(kinds), "head_dim": head_dim}
    activation_of(hf, "mamba_hidden_act", ("silu",))
    activation_of(hf, "hidden_act", ("relu_squared",))
    parts: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(kinds):
        parts[kind] = _PARTS[kind](hf)
    layers = []
    for kind in kinds:
        is_mlp = kind in ("moe", "mlp")
        norms = NormNames(None if is_mlp else "norm", None, "norm" if is_mlp else None)
        layers.append(LayerSpec(**{"feed_forward": None, "norms": norms, **parts[kind]}))
    return read_model(hf, tuple(layers), tensor_names=_NEMOTRON_H_NAMES)


def _kinds(hf: Config) -> tuple[str, ...]:
    """Return what each layer of Nemotron-H is, by a list or by the letters of a pattern."""
    for key in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        if (given := hf[key]) is not None:
            break
    else:
        raise CheckpointError("layers_block_type is missing, and so is hybrid_override_pattern")
    if not isinstance(given, list if key != "hybrid_override_pattern" else str) or not given:
        what = "a list of types" if key != "hybrid_override_pattern" else "a string of letters"
        raise CheckpointError(f"{key} must be {what}, got {shown(given)}")
    check_int(CheckpointError, f"the length of {key}", len(given), 1, CEILINGS["num_hidden_layers"])
    if hf["num_hidden_layers"] is not None and size(hf, "num_hidden_layers") != len(given):
        raise CheckpointError(
            f"{key} has {len(given)} layers, but num_hidden_layers is {hf['num_hidden_layers']}"
        )
    known = (
        _LETTERS
        if isinstance(given, str)
        else {**dict(zip(*[_LETTERS.values()] * 2, strict=True)), **_OLDER_KINDS}
    )
    for layer, kind in enumerate(given):
        if kind not in [*known]:  # a list, as any JSON value may come, hashable or not
            raise UnsupportedModelError(f"{key}[{layer}] is {shown(kind)}; supported are {', '.join(known)}")
    return tuple(known[kind] for kind in given)


def _mamba_of_nemotron(hf: Config) -> dict[str, Any]:
    num_heads, num_groups = size(hf, "mamba_num_heads"), size(hf, "n_groups")
    _check_groups(num_heads, num_groups, ("mamba_num_heads", "n_groups"))
    bias = flag(hf, "use_bias")
    # As transformers computes a whole text. Its cached decodes have no least time step.
    least = check_number(CheckpointError, "time_step_min", hf["time_step_min"], 0, 1e3)
    state = _state(
        _width(hf, "conv_kernel"),
        num_heads,
        num_groups,
        size(hf, "ssm_state_size"),
        size(hf, "mamba_head_dim"),
        bias=bias,
        conv_bias=flag(hf, "use_conv_bias"),
        output_bias=bias,
        norm="gate_first",
        limits=(float(least), math.inf),
    )
    return {"state": state}


def _attention_of_nemotron(hf: Config) -> dict[str, Any]:
    # transformers makes no biases, whatever config.json says; a GGUF file may have some.
    bias = flag(hf, "attention_bias") and GGUF_KEY in hf
    return {"attention": read_attention(hf, rope=NO_ROPE, qkv_bias=bias, output_bias=bias)}


def _mlp_of_nemotron(hf: Config) -> dict[str, Any]:
    mlp = read_feed_forward(hf, bias=flag(hf, "mlp_bias"), gated=False, activation="relu_squared")
    return {"feed_forward": mlp}


def _experts_of_nemotron(hf: Config) -> dict[str, Any]:
    if hf["n_shared_experts"] != 1:
        raise UnsupportedModelError(
            f"n_shared_experts {shown(hf['n_shared_experts'])} is not supported; 1 is"
        )
    routing = {
        "score": "sigmoid",
        "num_groups": size(hf, "n_group"),
        "num_kept_groups": size(hf, "topk_group"),
        "group_score": "best_two",
        "renormalise": flag(hf, "norm_topk_prob"),
        "epsilon": 1e-20,
        "scale": factor(hf, "routed_scaling_factor"),
    }
    bias = flag(hf, "mlp_bias")
    inner = size(hf, "moe_shared_expert_intermediate_size")
    shared = FeedForwardSpec(size=inner, bias=bias, gated=False, activation="relu_squared")
    experts = read_experts(
        hf,
        "n_routed_experts",
        "moe_intermediate_size",
        routing,
        activation="relu_squared",
        gated=False,
        latent_size=None if hf["moe_latent_size"] is None else size(hf, "moe_latent_size"),
        latent_bias=bias,
        correction_bias=True,
        parts=("up_proj", "down_proj"),
        shared=shared,
    )
    return {"feed_forward": experts}


_PARTS = {
    "linear_attention": _mamba_of_nemotron,
    "full_attention": _attention_of_nemotron,
    "mlp": _mlp_of_nemotron,
    "moe": _experts_of_nemotron,
}


def _mamba(hf: Config, inner: str | None, **fields: Any) -> StateSpec:
    """Read the state of Granite 4 or Falcon-H1.

    inner: the key of the numbers in all heads; None: mamba_expand says it. fields: further fields of
        StateSpec.
    """
    num_heads, num_groups = size(hf, "mamba_n_heads"), size(hf, "mamba_n_groups")
    _check_groups(num_heads, num_groups, ("mamba_n_heads", "mamba_n_groups"))
    if inner is not None and hf[inner] is not None:
        total = size(hf, inner)
        what = f"{inner} {total}"
    else:
        total = size(hf, "mamba_expand") * size(hf, "hidden_size")
        what = f"mamba_expand {hf['mamba_expand']} times hidden_size {hf['hidden_size']}"
    head_dim = total // num_heads if hf["mamba_d_head"] == "auto" else size(hf, "mamba_d_head")
    if num_heads * head_dim != total:
        raise CheckpointError(f"mamba_n_heads {num_heads} of mamba_d_head {head_dim} are not {what}")
    check_int(CheckpointError, "mamba_d_head", head_dim, 1, CEILINGS["mamba_d_head"])
    bias = flag(hf, "mamba_proj_bias")
    return _state(
        _width(hf, "mamba_d_conv"),
        num_heads,
        num_groups,
        size(hf, "mamba_d_state"),
        head_dim,
        **{
            "bias": bias,
            "output_bias": bias,
            "conv_bias": flag(hf, "mamba_conv_bias"),
            "limits": _limits(hf),
            **fields,
        },
    )


def _limits(hf: Config) -> tuple[float, float]:
    """Return the least and the longest time step."""
    given = hf["time_step_limit"]
    if given is None:
        return 0.0, math.inf
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise CheckpointError(f"time_step_limit must be two numbers, got {shown(given)}")
    least = check_number(CheckpointError, "time_step_limit[0]", given[0], 0, 1e6)
    if given[1] in (math.inf, {"__float__": "Infinity"}):  # as transformers 5 writes it, as JSON has none
        return float(least), math.inf
    return float(least), float(check_number(CheckpointError, "time_step_limit[1]", given[1], least, 1e6))


def _granite_hybrid(hf: Config) -> ModelConfig:
    """Read Granite 4. Those without experts have the shared MLP alone, and some have no states."""
    bias = flag(hf, "attention_bias")
    rope = NO_ROPE
    if hf["position_embedding_type"] == "rope":
        rope = read_rope(hf)
    elif hf["position_embedding_type"] not in (None, "nope"):
        given = shown(hf["position_embedding_type"])
        raise UnsupportedModelError(
            f"position_embedding_type {given} is not supported; 'rope' and 'nope' are"
        )
    scale = factor(hf, "attention_multiplier")
    attention = read_attention(hf, rope=rope, qkv_bias=bias, output_bias=bias, scale=scale)
    kinds = _types_of_granite(hf)
    state = _mamba(hf, None, norm="gate_first") if "linear_attention" in kinds else None
    shared = FeedForwardSpec(size=size(hf, "shared_intermediate_size"), fused=True)
    feed_forward: FeedForwardSpec | ExpertsSpec = shared
    if hf["num_local_experts"] != 0:
        routing = {"score": "softmax_of_chosen"}
        feed_forward = read_experts(hf, "num_local_experts", "intermediate_size", routing, shared=shared)
    layers = tuple(
        LayerSpec(attention=attention, feed_forward=feed_forward)
        if kind == "full_attention"
        else LayerSpec(state=state, feed_forward=feed_forward)
        for kind in kinds
    )
    names = _GRANITE_DENSE_NAMES if feed_forward is shared else _GRANITE_HYBRID_NAMES
    return read_model(hf, layers, **granite_fields(hf), tensor_names=names)


def _types_of_granite(hf: Config) -> tuple[str, ...]:
    """Return layer_types, whose older names are mamba and attention."""
    key = "layers_block_type" if hf["layer_types"] is None else "layer_types"
    num_layers = size(hf, "num_hidden_layers")
    given = hf[key]
    if given is None:
        return ("linear_attention",) * num_layers
    if not isinstance(given, list) or len(given) != num_layers:
        raise CheckpointError(
            f"{key} must have one type for each of the {num_layers} layers (num_hidden_layers), got "
            f"{f'{len(given)}: ' if isinstance(given, list) else ''}{shown(given)}"
        )
    known = {kind: kind for kind in _OLDER_KINDS.values()} | _OLDER_KINDS
    for layer, kind in enumerate(given):
        if kind not in [*known]:
            raise UnsupportedModelError(f"{key}[{layer}] is {shown(kind)}; supported are {', '.join(known)}")
    return tuple(known[kind] for kind in given)


def _falcon_h1(hf: Config) -> ModelConfig:
    """Read Falcon-H1, whose layers have heads of both kinds side by side."""
    bias = flag(hf, "attention_bias")
    norm = "norm_first" if flag(hf, "mamba_norm_before_gate") else "gate_first"
    state = _mamba(
        hf,
        "mamba_d_ssm",
        output_bias=flag(hf, "projectors_bias"),
        norm=norm if flag(hf, "mamba_rms_norm") else None,
    )
    attention = read_attention(hf, qkv_bias=bias, output_bias=bias)
    layer = LayerSpec(
        attention=attention,
        state=state,
        feed_forward=read_feed_forward(hf, bias=flag(hf, "mlp_bias")),
        norms=_FALCON_H1_NORMS,
    )
    return read_model(
        hf,
        (layer,) * size(hf, "num_hidden_layers"),
        embedding_multiplier=_multiplier(hf, "embedding_multiplier"),
        logits_divisor=1 / _multiplier(hf, "lm_head_multiplier"),
        tensor_names=replace(_FALCON_H1_NAMES, factors=_factors_of(hf, attention, state)),
    )


def _multiplier(hf: Config, name: str) -> float:
    return 1.0 if hf[name] is None else factor(hf, name)


def _multipliers(hf: Config, name: str, count: int) -> list[float]:
    """Return this many multipliers, by default 1."""
    given = [1.0] * count if hf[name] is None else hf[name]
    if not isinstance(given, list) or len(given) != count:
        raise CheckpointError(f"{name} must be {count} numbers, got {shown(given)}")
    for number in given:
        check_number(CheckpointError, name, number, MIN_FACTOR, MAX_FACTOR)
    return [float(number) for number in given]


def _factors_of(
    hf: Config, attention: AttentionSpec, state: StateSpec
) -> tuple[tuple[str, tuple[tuple[int, float], ...]], ...]:
    """Return what the tensors of a layer are multiplied by, as of TensorNames.

    A bias is multiplied by what its output is, but not by what its input is.
    """
    hidden, inner = size(hf, "hidden_size"), size(hf, "intermediate_size")
    gate, down = _multipliers(hf, "mlp_multipliers", 2)
    into, key, out_of = (
        _multiplier(hf, f"{part}_multiplier") for part in ("attention_in", "key", "attention_out")
    )
    state_into, state_out_of = (_multiplier(hf, f"ssm_{part}_multiplier") for part in ("in", "out"))
    of_group = state.num_key_heads * state.key_dim
    sizes = state.num_values, state.num_values, of_group, of_group, state.num_heads
    parts = [*zip(sizes, _multipliers(hf, "ssm_multipliers", 5), strict=True)]
    num_queries = attention.num_heads * attention.kv.key_dim
    num_keys = attention.kv.num_kv_heads * attention.kv.key_dim
    # Of each module: what its input is multiplied by, and runs of its outputs.
    modules: dict[str, tuple[float, list[tuple[int, float]]]] = {
        "mamba.in_proj": (state_into, parts),
        "mamba.out_proj": (1.0, [(hidden, state_out_of)]),
        "self_attn.q_proj": (into, [(num_queries, 1.0)]),
        "self_attn.k_proj": (into, [(num_keys, key)]),
        "self_attn.v_proj": (into, [(num_keys, 1.0)]),
        "self_attn.o_proj": (1.0, [(hidden, out_of)]),
        "mlp.gate_proj": (1.0, [(inner, gate)]),
        "mlp.down_proj": (1.0, [(hidden, down)]),
    }
    found = []
    for name, (of_input, runs) in modules.items():
        for part, multiplier in (("weight", of_input), ("bias", 1.0)):
            own = tuple((count, multiplier * number) for count, number in runs)
            if any(number != 1.0 for _, number in own):
                found.append((f"{name}.{part}", own))
    return tuple(found)


families = {
    "NemotronHForCausalLM": Family(_NEMOTRON_H, _nemotron_h, _NEMOTRON_H_KEYS),
    "GraniteMoeHybridForCausalLM": Family(_GRANITE_HYBRID, _granite_hybrid),
    "FalconH1ForCausalLM": Family(_FALCON_H1, _falcon_h1),
}
