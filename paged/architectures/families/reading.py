"""Read and check a config.json: its values, its rotary embedding, its layers, alike or each with its own.

Every error is a CheckpointError that names key and value. The rotary embedding is read in its old form and in
that of transformers 5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import check_bool, check_int, check_number, shown
from ..config import ModelConfig
from ..spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    KVShape,
    LayerSpec,
    NormNames,
    NormSpec,
    RopeConfig,
)
from .rope_numbers import rope_number

Config = Mapping[str, Any]
# Bounds on what a damaged or hostile config.json can make us allocate or loop over.
CEILINGS = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 256,
    "max_position_embeddings": 2**27,
    "sliding_window": 2**27,
    "max_window_layers": 1024,
    "original_max_position_embeddings": 2**27,
    "query_pre_attn_scalar": 2**20,
    "sliding_window_pattern": 1024,
    "no_rope_layer_interval": 1024,
    "global_head_dim": 512,
    "num_global_key_value_heads": 1024,
    "hidden_size_per_layer_input": 2**17,
    "vocab_size_per_layer_input": 2**24,
    "num_experts": 4096,
    "num_local_experts": 4096,
    "n_routed_experts": 4096,
    "n_shared_experts": 64,
    "num_experts_per_tok": 256,
    "top_k_experts": 256,
    "moe_intermediate_size": 2**20,
    "shared_expert_intermediate_size": 2**20,
    "decoder_sparse_step": 1024,
    "linear_conv_kernel_dim": 8,
    "linear_key_head_dim": 256,
    "linear_value_head_dim": 1024,
    "linear_num_key_heads": 1024,
    "linear_num_value_heads": 1024,
    "full_attention_interval": 1024,
    "conv_L_cache": 8,
    "block_multiple_of": 2**16,
    "ssm_state_size": 1024,
    "mamba_num_heads": 4096,
    "mamba_head_dim": 1024,
    "n_groups": 4096,
    "conv_kernel": 8,
    "moe_shared_expert_intermediate_size": 2**20,
    "moe_latent_size": 2**17,
    "mamba_n_heads": 4096,
    "mamba_d_head": 1024,
    "mamba_n_groups": 4096,
    "mamba_d_state": 1024,
    "mamba_d_conv": 8,
    "mamba_d_ssm": 2**20,
    "mamba_expand": 64,
    "shared_intermediate_size": 2**20,
    "n_group": 4096,
    "topk_group": 4096,
    "num_nextn_predict_layers": 16,
}
# What transformers calls each activation; those of one entry are the same formula.
ACTIVATIONS = {
    "silu": ("silu",),
    "gelu": ("gelu", "gelu_python"),
    "clamped_swiglu": ("silu",),  # of gpt-oss
    "gelu_tanh": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast"),
    "relu_squared": ("relu2",),
}
# of multipliers and divisors
MIN_FACTOR = 1e-6
MAX_FACTOR = 1e6
MAX_SOFTCAP = 1e3  # kernels compute to a few roundings of the cap: here about 1e-4


def size(hf: Config, name: str) -> int:
    """Return the value of a key: an integer from 1 to the key's maximum."""
    return check_int(CheckpointError, name, hf[name], 1, CEILINGS[name])


def flag(hf: Config, name: str) -> bool:
    """Return the value of a key: True or False."""
    return check_bool(CheckpointError, name, hf[name])


def factor(hf: Config, name: str, most: float = MAX_FACTOR) -> float:
    """Return the value of a key: a positive number by which float32 can be multiplied and divided."""
    value = check_number(CheckpointError, name, hf[name], 0, most, above=True)
    return check_number(CheckpointError, name, value, MIN_FACTOR)


def softcap_of(hf: Config, name: str) -> float | None:
    """Return the softcap of scores or logits; None if the value is null."""
    return None if hf[name] is None else factor(hf, name, MAX_SOFTCAP)


def activation_of(hf: Config, name: str, supported: tuple[str, ...]) -> str:
    """Return the activation that config.json names, which must be one of the supported ones."""
    names = {theirs: ours for ours in supported for theirs in ACTIVATIONS[ours]}
    if hf[name] not in [*names]:  # a list, as any JSON value may come, hashable or not
        raise UnsupportedModelError(f"{name} {shown(hf[name])} is not supported; only {', '.join(names)}")
    return names[hf[name]]


def head_dim_of(hf: Config) -> int:
    """Return the head dimension; the default is hidden_size / num_attention_heads."""
    if hf["head_dim"] is None:
        return size(hf, "hidden_size") // size(hf, "num_attention_heads")
    return size(hf, "head_dim")


def window_of(hf: Config) -> int | None:
    """Return the sliding window in tokens; None if the value is null."""
    return None if hf["sliding_window"] is None else size(hf, "sliding_window")


# Beyond these no rotary embedding makes sense, and float32 overflows.
MAX_ROPE_THETA = 1e12
# The keys that each type of rope scaling requires.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")


def own_rope(hf: Config) -> dict[str, Any]:
    """Return rope_parameters; older checkpoints call it rope_scaling."""
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    own = hf.get(name) or {}
    if not isinstance(own, dict):
        raise CheckpointError(f"{name} must be an object, got {shown(own)}")
    return own


def read_rope(
    hf: Config, own: dict[str, Any] | None = None, *, partial: bool = False, interleaved: bool = False
) -> RopeConfig:
    """Read a rotary embedding.

    own: the parameters of the embedding, by default from `own_rope`.
    partial: whether the family may rotate only a part of each head.
    """
    own = own_rope(hf) if own is None else own
    if nested := [key for key, value in own.items() if isinstance(value, dict)]:
        raise UnsupportedModelError(f"rope_parameters for each type of layer ({nested[0]}) are not supported")
    outer = {key: hf[key] for key in ("rope_theta", "partial_rotary_factor") if hf.get(key) is not None}
    rope = {"rope_theta": 10000.0, **outer, **{k: v for k, v in own.items() if v is not None}}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "mrope":  # of Qwen-VL: in text its three positions of a token are one
        kind = "default"
    if kind not in list(ROPE_TYPES):  # a list, as any JSON value may come, hashable or not
        raise UnsupportedModelError(
            f"rope_type {shown(kind)} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    if missing := [key for key in ROPE_TYPES[kind] if key not in rope]:
        raise CheckpointError(f"rope_type {kind!r} needs {', '.join(missing)}")
    more: dict[str, Any] = {}
    if kind == "proportional":
        part = rope.pop("partial_rotary_factor", 1.0)
        more["rotated_part"] = check_number(CheckpointError, "partial_rotary_factor", part, 0, 1)
    rotary_dim = _rotary_dim(hf, rope, partial)
    optional = {"yarn": NUMBERS, "proportional": ("factor",)}
    needed = [*ROPE_TYPES[kind], *optional.get(kind, ())]
    values = {key: rope_number(rope, key) for key in NUMBERS if key in needed and key in rope}
    if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise CheckpointError(
            f"high_freq_factor {values['high_freq_factor']:g} must be more than low_freq_factor "
            f"{values['low_freq_factor']:g}"
        )
    if values.get("factor", 1.0) < 1:
        raise CheckpointError(f"factor of rope must be at least 1, got {values['factor']:g}")
    trained = "original_max_position_embeddings"
    most = size(hf, "max_position_embeddings")
    known = size(rope, trained) if rope.get(trained) else most
    if kind == "yarn":
        from .scaled_ropes import yarn

        more = yarn(rope, values)
    elif kind == "longrope":
        from .scaled_ropes import longrope

        known = size(hf, trained) if hf.get(trained) else known
        more = longrope(rope, known, most, rotary_dim or head_dim_of(hf))
    theta = rope_number(rope, "rope_theta", MAX_ROPE_THETA)
    if kind == "yarn" and theta <= 1:
        raise CheckpointError(f"rope_theta must be above 1 for yarn rope, got {theta:g}")
    shape = {"rotary_dim": rotary_dim, "interleaved": interleaved, trained: known}
    return RopeConfig(kind, theta, **{**values, **more, **shape})


def _rotary_dim(hf: Config, rope: Config, partial: bool) -> int | None:
    """Return how many dimensions of a head are rotated; None: all."""
    fraction = rope.get("partial_rotary_factor", 1.0)
    if fraction == 1.0:
        return None
    if not partial:
        raise UnsupportedModelError("partial_rotary_factor other than 1.0 is not supported")
    check_number(CheckpointError, "partial_rotary_factor", fraction, 0, 1, above=True)
    head_dim = head_dim_of(hf)
    rotary_dim = int(head_dim * fraction)
    if rotary_dim < 4 or rotary_dim % 2:
        raise CheckpointError(
            f"partial_rotary_factor {fraction} rotates {rotary_dim} of {head_dim} dimensions of a head; "
            f"it must be an even number of at least 4"
        )
    return rotary_dim


CHECKPOINT_DTYPES = ("float64", "float32", "float16", "bfloat16")
# Where Gemma 2 and its successors normalise: what goes into each sublayer, and what comes out.
AROUND_SUBLAYERS = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


class Family(NamedTuple):
    """How the models of one architecture read config.json.

    defaults: default values for keys of config.json, in addition to COMMON.
    read: turns config.json, with its defaults, into a ModelConfig.
    keys: the family's own names for Llama's keys of config.json; None if the family lacks the key.
    """

    defaults: Config
    read: Callable[[Config], ModelConfig]
    keys: Mapping[str, str | None] = {}


def read_attention(hf: Config, **fields: Any) -> AttentionSpec:
    """Read the attention of a model in which all layers have the same attention.

    fields: fields of AttentionSpec that override config.json.
    """
    num_heads = size(hf, "num_attention_heads")
    num_kv_heads = num_heads if hf["num_key_value_heads"] is None else size(hf, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {num_heads} do not divide among num_key_value_heads {num_kv_heads}"
        )
    head_dim = head_dim_of(hf)
    rope = fields.pop("rope", None) or read_rope(hf)
    least = 4 if rope.type == "dynamic" else 2  # dynamic rope divides by head_dim - 2
    if head_dim % 2 or head_dim < least:
        raise CheckpointError(
            f"head_dim must be even and at least {least} for {rope.type} rope, got {head_dim}"
        )
    read = {
        "num_heads": num_heads,
        "kv": KVShape(num_kv_heads, head_dim, head_dim),
        "rope": rope,
        "scale": head_dim**-0.5,
    }
    return AttentionSpec(**read | fields)


def read_feed_forward(hf: Config, **fields: Any) -> FeedForwardSpec:
    """Read the feed-forward part of a model in which all layers have the same one.

    fields: fields of FeedForwardSpec that override config.json.
    """
    inner = fields.pop("size", None) or size(hf, "intermediate_size")
    return FeedForwardSpec(size=inner, **fields)


def repeat(
    hf: Config,
    attention: AttentionSpec,
    feed_forward: FeedForwardSpec | ExpertsSpec,
    *,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[RopeConfig] | None = None,
    **fields: Any,
) -> tuple[LayerSpec, ...]:
    """Return num_hidden_layers layers that differ in windows and rotary embeddings only.

    fields: further fields of LayerSpec.
    """
    num_layers = size(hf, "num_hidden_layers")
    windows = windows or [attention.window] * num_layers
    ropes = ropes or [attention.rope] * num_layers
    return tuple(
        LayerSpec(attention=replace(attention, window=window, rope=rope), feed_forward=feed_forward, **fields)
        for window, rope in zip(windows, ropes, strict=True)
    )


def read_model(hf: Config, layers: tuple[LayerSpec, ...], **fields: Any) -> ModelConfig:
    """Read everything but the layers: embedding, final norm and head.

    fields: fields of ModelConfig that override config.json. The field `rope`, by default the first layer's,
        determines the longest context.
    """
    names = hf["architectures"]
    read = {
        "architecture": names[0] if isinstance(names, list) else names,
        "vocab_size": size(hf, "vocab_size"),
        "hidden_size": size(hf, "hidden_size"),
        "norm": read_norm(hf),
        "max_position_embeddings": size(hf, "max_position_embeddings"),
        "rope": next((each.attention.rope for each in layers if each.attention is not None), None),
        "tie_word_embeddings": flag(hf, "tie_word_embeddings"),
        "dtype": _dtype(hf),
    }
    if read["rope"] is None:
        raise UnsupportedModelError(
            f"{read['architecture']} without a layer of attention is not supported, and none of its "
            f"{len(layers)} layers has it"
        )
    config = ModelConfig(layers=layers, **read | fields)
    if config.residual_norm.eps > 1:
        raise CheckpointError(
            f"rms_norm_eps {config.norm.eps:g} must be at most the square of residual_multiplier "
            f"{config.residual_multiplier:g}"
        )
    return config


def read_norm(hf: Config, **fields: Any) -> NormSpec:
    """Read the norm, whose eps comes from config.json.

    fields: further fields of NormSpec.
    """
    eps = check_number(CheckpointError, "rms_norm_eps", hf["rms_norm_eps"], 0, 1, above=True)
    return NormSpec(eps, **fields)


def _dtype(hf: Config) -> str:
    given = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    name = given.removeprefix("torch.") if isinstance(given, str) else None
    if name not in CHECKPOINT_DTYPES:
        supported = ", ".join(CHECKPOINT_DTYPES)
        raise UnsupportedModelError(f"dtype {shown(given)} is not supported; supported are {supported}")
    return "float32" if name == "float64" else name  # nothing here computes in float64
