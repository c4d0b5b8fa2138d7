"""Read the config.json of Gemma 4's text models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import check_int, check_number, shown
from ..config import LayerInputs, ModelConfig, TensorNames
from ..spec import KVShape, LayerSpec
from .layer_types import by_layer_type, full_every, layer_types_of, ropes_by_type
from .moe import GEMMA4_PARTS, GEMMA4_STACKS, gemma4_experts
from .reading import (
    AROUND_SUBLAYERS,
    CEILINGS,
    Config,
    Family,
    flag,
    head_dim_of,
    read_attention,
    read_feed_forward,
    read_model,
    size,
    softcap_of,
)

GEMMA4_UNIFIED = {
    "max_position_embeddings": 262144,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": 1024,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "per_layer_config": None,
}
GEMMA4 = {
    **GEMMA4_UNIFIED,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def gemma4(hf: Config) -> ModelConfig:
    """Read Gemma 4."""
    _refuse(hf)
    # Whatever its type is said to be, transformers gives the last layer full attention.
    layer_types = (*layer_types_of(hf, full_every(6, hf))[:-1], "full_attention")
    shapes = _shapes(hf, layer_types)
    sources = _sources(hf, layer_types, shapes)
    by_layer = by_layer_type(hf, layer_types, _ropes(hf))
    usual = read_attention(
        hf,
        rope=by_layer["rope"],
        scale=1.0,
        qkv_bias=flag(hf, "attention_bias"),
        output_bias=flag(hf, "attention_bias"),
        qk_norm="head",
        value_norm=True,
    )
    inner = size(hf, "intermediate_size")
    is_wide = flag(hf, "use_double_wide_mlp")
    has_no_values = flag(hf, "attention_k_eq_v")
    experts = gemma4_experts(hf) if hf.get("enable_moe_block") and flag(hf, "enable_moe_block") else None
    layers = []
    for layer, kind in enumerate(layer_types):
        source = sources[layer]
        attention = replace(
            usual,
            kv=shapes[layer],
            rope=by_layer["ropes"][layer],
            window=by_layer["windows"][layer],
            source=source,
            keys_as_values=has_no_values and kind == "full_attention" and source is None,
        )
        width = inner * (1 + (is_wide and source is not None))
        mlp = read_feed_forward(hf, size=width, activation="gelu_tanh")
        layers.append(
            LayerSpec(
                attention=attention,
                feed_forward=mlp,
                norms=AROUND_SUBLAYERS,
                scaled=True,
                experts=experts,
            )
        )
    return read_model(
        hf,
        tuple(layers),
        rope=by_layer["rope"],
        layer_inputs=_layer_inputs(hf),
        exceeds_float16=True,
        context_is_scaled=True,
        logits_softcap=softcap_of(hf, "final_logit_softcapping"),
        embedding_multiplier=size(hf, "hidden_size") ** 0.5,
        # Checkpoints have tensors that these layers do not use.
        tensor_names=TensorNames(
            skipped_prefixes=tuple(
                f"model.layers.{layer}.self_attn.{name}."
                for layer, source in enumerate(sources)
                if source is not None
                for name in ("k_proj", "v_proj", "k_norm", "v_norm")
            ),
            parts=() if experts is None else GEMMA4_PARTS,
            stacks=() if experts is None else GEMMA4_STACKS,
            only_stacks=experts is not None,
        ),
    )


def _refuse(hf: Config) -> None:
    """Raise UnsupportedModelError for what the decoder does not compute."""
    if hf["use_bidirectional_attention"] not in (None, "vision"):  # in text "vision" is causal
        raise UnsupportedModelError(
            f"use_bidirectional_attention {shown(hf['use_bidirectional_attention'])} is not supported; "
            "null and 'vision' are"
        )
    size(hf, "sliding_window")  # unlike in other families never null
    if hf.get("rope_scaling"):
        raise UnsupportedModelError("rope_scaling is not supported in Gemma 4; rope_parameters is")


def _ropes(hf: Config) -> Any:
    given = hf.get("rope_parameters") or {}
    if isinstance(given, dict):
        given = {**_ROPES, **given}
    outer = ("rope_theta", "partial_rotary_factor")  # which transformers does not read in Gemma 4
    own = {key: value for key, value in hf.items() if key not in outer}
    return ropes_by_type({**own, "rope_parameters": given}, rope_theta=1e4, local_theta=1e4)


def _shapes(hf: Config, layer_types: tuple[str, ...]) -> tuple[KVShape, ...]:
    """Return the shapes of K and V that each layer reads.

    transformers 5 writes what differs from head_dim and num_key_value_heads into per_layer_config. Other
    checkpoints have keys for the layers with full attention.
    """
    num_heads = size(hf, "num_attention_heads")
    usual = {"num_key_value_heads": size(hf, "num_key_value_heads"), "head_dim": head_dim_of(hf)}
    in_full = {"head_dim": size(hf, "global_head_dim")}
    if flag(hf, "attention_k_eq_v") and hf["num_global_key_value_heads"] is not None:
        in_full["num_key_value_heads"] = size(hf, "num_global_key_value_heads")
    given = hf["per_layer_config"]
    in_file = dict[str, str]()
    if given is None:
        in_file = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
        given = {str(layer): in_full for layer, kind in enumerate(layer_types) if kind == "full_attention"}
    if not isinstance(given, dict) or not all(isinstance(own, dict) for own in given.values()):
        raise CheckpointError(f"per_layer_config must be an object of objects, got {shown(given)}")
    if unknown := {key for own in given.values() for key in own} - set(usual):
        raise UnsupportedModelError(
            f"per_layer_config with {shown(min(unknown))} is not supported; {' and '.join(usual)} are"
        )
    layers = range(len(layer_types))
    names = {str(layer).zfill(width): layer for layer in layers for width in range(5)}  # as in "05"
    if extra := set(given) - set(names):
        raise CheckpointError(
            f"per_layer_config must be of layers 0 to {layers[-1]}, got {shown(min(extra))}"
        )
    by_layer = {names[name]: own for name, own in given.items()}
    shapes = []
    for layer in layers:
        own = by_layer.get(layer, {})
        called = {key: f"{in_file.get(key, key) if key in own else key} of layer {layer}" for key in usual}
        shapes.append(_shape({**usual, **own}, called, num_heads))
    return tuple(shapes)


def _shape(own: Config, called: dict[str, str], num_heads: int) -> KVShape:
    """Return the shape of a layer.

    own: its sizes. called: the names of their keys in errors.
    """
    most = CEILINGS["global_head_dim"]
    head_dim = check_int(CheckpointError, called["head_dim"], own["head_dim"], 2, most)
    name = called["num_key_value_heads"]
    num_kv_heads = check_int(CheckpointError, name, own["num_key_value_heads"], 1, num_heads)
    if head_dim % 2:
        raise CheckpointError(f"{called['head_dim']} must be even, got {head_dim}")
    if num_heads % num_kv_heads:
        raise CheckpointError(f"num_attention_heads {num_heads} do not divide among {name}, {num_kv_heads}")
    return KVShape(num_kv_heads, head_dim, head_dim)


def _sources(hf: Config, layer_types: tuple[str, ...], shapes: tuple[KVShape, ...]) -> tuple[int | None, ...]:
    """For each layer, return the earlier layer whose K and V it reads; None: it has its own.

    The last num_kv_shared_layers read K and V of the last earlier layer of their type.
    """
    num_layers = len(layer_types)
    name = "num_kv_shared_layers"
    num_own = num_layers - check_int(CheckpointError, name, hf[name], 0, num_layers - 1)
    last = {kind: layer for layer, kind in enumerate(layer_types[:num_own])}
    for layer in range(num_own, num_layers):
        kind = layer_types[layer]
        if kind not in last:
            raise CheckpointError(
                f"{name} {num_layers - num_own} leaves no layer of {kind} whose K and V layer {layer} "
                "could read"
            )
        if shapes[layer] != shapes[last[kind]]:
            raise CheckpointError(
                f"per_layer_config gives layer {layer} other heads than layer {last[kind]}, "
                "whose K and V it reads"
            )
    return (*(None,) * num_own, *(last[kind] for kind in layer_types[num_own:]))


def _layer_inputs(hf: Config) -> LayerInputs | None:
    """Return the per-layer embeddings, which the smaller models have."""
    name = "hidden_size_per_layer_input"
    if hf.get(name, 0) in (0, None):
        return None
    inner = size(hf, name)
    vocab_size = size(hf, "vocab_size_per_layer_input")
    if vocab_size < size(hf, "vocab_size"):
        raise CheckpointError(
            f"vocab_size_per_layer_input {vocab_size} must be at least vocab_size {hf['vocab_size']}"
        )
    # PerLayerEmbeddings multiplies eps by hidden_size; the product must be at most 1.
    most = 1 / size(hf, "hidden_size")
    check_number(CheckpointError, "rms_norm_eps", hf["rms_norm_eps"], 0, most, above=True)
    return LayerInputs(inner, vocab_size)


families = {
    "Gemma4ForCausalLM": Family(GEMMA4, gemma4),
    "Gemma4UnifiedForCausalLM": Family(GEMMA4_UNIFIED, gemma4),
}
