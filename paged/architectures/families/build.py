"""Build a ModelConfig out of a config.json: its layers, alike or each with values of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import check_number, shown
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
from .reading import Config, factor, flag, head_dim_of, size
from .rope import read_rope

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

    defaults: for keys of config.json, beside COMMON.
    read: reduces config.json, with its defaults, to a ModelConfig.
    keys: what the family's config.json calls keys of Llama's; None: the family has no such key.
    """

    defaults: Config
    read: Callable[[Config], ModelConfig]
    keys: Mapping[str, str | None] = {}


def read_attention(hf: Config, **fields: Any) -> AttentionSpec:
    """Read the attention of layers that are alike. fields: of AttentionSpec, in place of what is read."""
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
    """Read the feed-forward part of layers that are alike. fields: of FeedForwardSpec."""
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

    fields: of LayerSpec.
    """
    num_layers = size(hf, "num_hidden_layers")
    windows = windows or [attention.window] * num_layers
    ropes = ropes or [attention.rope] * num_layers
    return tuple(
        LayerSpec(attention=replace(attention, window=window, rope=rope), feed_forward=feed_forward, **fields)
        for window, rope in zip(windows, ropes, strict=True)
    )


def read_model(hf: Config, layers: tuple[LayerSpec, ...], **fields: Any) -> ModelConfig:
    """Read what is around the layers. fields: of ModelConfig, in place of what is read.

    rope, by default that of the first layer, decides the longest context.
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
            f"{read['architecture']} without a layer of attention is not supported: of {len(layers)} layers "
            "all keep states"
        )
    config = ModelConfig(layers=layers, **read | fields)
    if config.residual_norm.eps > 1:
        raise CheckpointError(
            f"rms_norm_eps {config.norm.eps:g} must be at most the square of residual_multiplier "
            f"{config.residual_multiplier:g}"
        )
    return config


def granite_fields(hf: Config) -> dict[str, Any]:
    """Return the fields of ModelConfig that all Granites share."""
    return {
        "embedding_multiplier": factor(hf, "embedding_multiplier"),
        "residual_multiplier": factor(hf, "residual_multiplier"),
        "logits_divisor": factor(hf, "logits_scaling"),
        "exceeds_float16": True,  # as the residual is stored divided by its multiplier
    }


def read_norm(hf: Config, **fields: Any) -> NormSpec:
    """Read eps. fields: of NormSpec."""
    eps = check_number(CheckpointError, "rms_norm_eps", hf["rms_norm_eps"], 0, 1, above=True)
    return NormSpec(eps, **fields)


def _dtype(hf: Config) -> str:
    given = hf.get("dtype") or hf.get("torch_dtype") or "float32"
    name = given.removeprefix("torch.") if isinstance(given, str) else None
    if name not in CHECKPOINT_DTYPES:
        supported = ", ".join(CHECKPOINT_DTYPES)
        raise UnsupportedModelError(f"dtype {shown(given)} is not supported; supported are {supported}")
    return "float32" if name == "float64" else name  # nothing here computes in float64
