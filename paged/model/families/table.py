"""The native architectures: how each reads its config.json, and the fields of ModelConfig it declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ...errors import CheckpointError, UnsupportedModelError
from ...validation import check_int, check_number, shown
from ..config import NO_ROPE, NormNames
from .gemma4 import GEMMA4, GEMMA4_UNIFIED, gemma4
from .gpt import GPT2, GPT2_KEYS, GPT_NEOX, GPT_NEOX_KEYS, gpt2, gpt_neox
from .reading import (
    MAX_FACTOR,
    Config,
    factor,
    flag,
    full_every,
    layer_types_of,
    size,
    softcap_of,
    window_of,
    windows_of,
)
from .rope import MAX_ROPE_THETA, by_layer_type, own_rope, read_rope, ropes_by_type

# The defaults of transformers' classes, for keys that config.json leaves out.
COMMON = {
    "num_key_value_heads": None,  # as many as query heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "layer_types": None,
}
_LLAMA = {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False}
_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
_MINISTRAL3 = {"max_position_embeddings": 262144, "num_key_value_heads": 8, "head_dim": 128,
               "rms_norm_eps": 1e-5, "sliding_window": None}  # fmt: skip
_MINISTRAL3_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0,
                    "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
                    "llama_4_scaling_beta": 0.1}  # fmt: skip
_QWEN2 = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3 = {**_QWEN2, "head_dim": 128, "attention_bias": False}
_PHI3 = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None,
         "original_max_position_embeddings": 4096}  # fmt: skip
_GRANITE = {**_LLAMA, "attention_multiplier": 1.0, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
            "logits_scaling": 1.0}  # fmt: skip
_GRANITE_SWA = {**_GRANITE, "max_position_embeddings": 8192, "num_key_value_heads": 4, "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True, "sliding_window": 128, "layer_rope_theta": None}  # fmt: skip
_OLMO2 = {"max_position_embeddings": 2048, "attention_bias": False, "rms_norm_eps": 1e-5}
_OLMO3 = {**_OLMO2, "sliding_window": 4096}
_SMOLLM3 = {**_LLAMA, "max_position_embeddings": 32768, "num_key_value_heads": 4, "tie_word_embeddings": True,
            "use_sliding_window": False, "sliding_window": None, "no_rope_layers": None,
            "no_rope_layer_interval": 4}  # fmt: skip
_GLM4 = {"max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128,
         "rms_norm_eps": 1.5625e-7, "attention_bias": True}  # fmt: skip
_GEMMA2 = {"max_position_embeddings": 8192, "num_key_value_heads": 4, "head_dim": 256,
           "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "attention_bias": False,
           "query_pre_attn_scalar": 256, "sliding_window": 4096, "final_logit_softcapping": 30.0,
           "attn_logit_softcapping": 50.0}  # fmt: skip
_GEMMA3 = {**_GEMMA2, "max_position_embeddings": 131072, "final_logit_softcapping": None,
           "attn_logit_softcapping": None, "sliding_window_pattern": 6}  # fmt: skip
_NO_BIAS = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}


def _llama(hf: Config) -> dict[str, Any]:
    bias = flag(hf, "attention_bias")
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": flag(hf, "mlp_bias"),
        "qk_norm": None,
        "layer_windows": (None,) * size(hf, "num_hidden_layers"),
    }


def _mistral(hf: Config) -> dict[str, Any]:
    """Give every layer the window, unless layer_types says which have it, as in Ministral 8B."""
    layer_types = layer_types_of(hf, ("sliding_attention",) * size(hf, "num_hidden_layers"))
    return {**_NO_BIAS, "qk_norm": None, "layer_windows": windows_of(layer_types, window_of(hf))}


def _ministral3(hf: Config) -> dict[str, Any]:
    own = own_rope(hf) or _MINISTRAL3_ROPE
    rope, beta = read_rope(hf, own), "llama_4_scaling_beta"
    if own.get(beta) is not None:
        rope = replace(rope, query_scaling_beta=check_number(CheckpointError, beta, own[beta], 0, MAX_FACTOR))
    return {**_mistral({**hf, "layer_types": None}), "rope": rope}


def _qwen2(hf: Config) -> dict[str, Any]:
    return {**_NO_BIAS, "qkv_bias": True, "qk_norm": None, "layer_windows": _mixed_windows(hf)}


def _qwen3(hf: Config) -> dict[str, Any]:
    return {**_llama({**hf, "mlp_bias": False}), "qk_norm": "head", "layer_windows": _mixed_windows(hf)}


def _mixed_windows(hf: Config) -> tuple[int | None, ...]:
    window = window_of(hf) if flag(hf, "use_sliding_window") else None
    if hf["layer_types"] is None:
        first = check_int(CheckpointError, "max_window_layers", hf["max_window_layers"], 0)
        return tuple(window if layer >= first else None for layer in range(size(hf, "num_hidden_layers")))
    return windows_of(layer_types_of(hf), window)


def _phi3(hf: Config) -> dict[str, Any]:
    own = own_rope(hf)
    if own.get("rope_type", own.get("type")) in ("su", "yarn"):  # as older files call it
        own = {**own, "rope_type": "longrope"}
    rope = read_rope(hf, own, partial=True)
    if rope.type not in ("default", "longrope"):
        raise UnsupportedModelError(f"rope type {rope.type!r} is not supported in Phi-3; 'longrope' is")
    windows = _mistral({**hf, "layer_types": None})
    return {**windows, "rope": rope, "fused_qkv": True, "fused_gate_up": True}


def _granite(hf: Config) -> dict[str, Any]:
    return {
        **_llama(hf),
        "attention_scale": factor(hf, "attention_multiplier"),
        "embedding_multiplier": factor(hf, "embedding_multiplier"),
        "residual_multiplier": factor(hf, "residual_multiplier"),
        "logits_divisor": factor(hf, "logits_scaling"),
        "exceeds_float16": True,  # as the residual is stored divided by its multiplier
    }


def _granite_swa(hf: Config) -> dict[str, Any]:
    num_layers, rope, thetas = size(hf, "num_hidden_layers"), read_rope(hf), hf["layer_rope_theta"]
    if thetas is None:
        thetas = [rope.theta] * num_layers
    if not isinstance(thetas, list) or len(thetas) != num_layers:
        raise CheckpointError(f"layer_rope_theta must be {num_layers} numbers, got {shown(thetas)}")
    for theta in thetas:
        check_number(CheckpointError, "layer_rope_theta", theta, 0, MAX_ROPE_THETA)
    kinds = tuple("sliding_attention" if layer % 4 else "full_attention" for layer in range(num_layers))
    return {
        **_granite(hf),
        "rope": rope,
        "layer_ropes": tuple(replace(rope, theta=float(theta)) if theta else NO_ROPE for theta in thetas),
        "layer_windows": windows_of(layer_types_of(hf, kinds), window_of(hf)),
        "attention_sinks": True,
    }


def _olmo2(hf: Config) -> dict[str, Any]:
    norms = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    return {**_llama({**hf, "mlp_bias": False}), "qk_norm": "projection", "norms": norms}


def _olmo3(hf: Config) -> dict[str, Any]:
    layer_types = layer_types_of(hf, full_every(4, hf))
    ropes = ropes_by_type(hf, rope_theta=500000.0, local_theta=500000.0)
    return {**_olmo2(hf), **by_layer_type(hf, layer_types, ropes)}


def _smollm3(hf: Config) -> dict[str, Any]:
    """Read SmolLM3's rotary embeddings, which are off in some layers; only these may have a window."""
    num_layers, rope = size(hf, "num_hidden_layers"), read_rope({"rope_theta": 2e6, **hf})
    rotates = hf["no_rope_layers"]  # despite its name 1 where a layer rotates
    if rotates is None:
        rotates = [int(kind == "sliding_attention") for kind in full_every("no_rope_layer_interval", hf)]
    if not isinstance(rotates, list) or len(rotates) != num_layers or not all(map(_is_bit, rotates)):
        raise CheckpointError(f"no_rope_layers must be {num_layers} times 0 or 1, got {shown(rotates)}")
    kinds = tuple("full_attention" if rotated else "sliding_attention" for rotated in rotates)
    window = window_of(hf) if flag(hf, "use_sliding_window") else None
    return {
        **_llama(hf),
        "rope": rope,
        "layer_ropes": tuple(rope if rotated else NO_ROPE for rotated in rotates),
        "layer_windows": windows_of(layer_types_of(hf, kinds), window),
    }


def _is_bit(value: Any) -> bool:
    return type(value) is int and value in (0, 1)


def _glm4(hf: Config) -> dict[str, Any]:
    norms = NormNames(
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
    )
    return {
        **_llama({**hf, "mlp_bias": False}),
        "output_bias": False,
        "norms": norms,
        "exceeds_float16": True,
        "rope": read_rope({"partial_rotary_factor": 0.5, **hf}, partial=True, interleaved=True),
        "fused_gate_up": True,
    }


def _gemma2(hf: Config) -> dict[str, Any]:
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention is not supported")
    layer_types = layer_types_of(hf, full_every(2, hf))
    return {
        **_llama({**hf, "mlp_bias": False}),
        "norms": NormNames(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ),
        "norm_unit_offset": True,
        "exceeds_float16": True,
        "activation": "gelu_tanh",
        "layer_windows": windows_of(layer_types, window_of(hf)),
        "attention_scale": size(hf, "query_pre_attn_scalar") ** -0.5,
        "attention_softcap": softcap_of(hf, "attn_logit_softcapping"),
        "logits_softcap": softcap_of(hf, "final_logit_softcapping"),
        "embedding_multiplier": size(hf, "hidden_size") ** 0.5,
    }


def _gemma3(hf: Config) -> dict[str, Any]:
    layer_types = layer_types_of(hf, full_every("sliding_window_pattern", hf))
    ropes = ropes_by_type(hf, rope_theta=1e6, local_theta=hf.get("rope_local_base_freq") or 1e4)
    return {
        **_gemma2(hf),
        **by_layer_type(hf, layer_types, ropes),
        "qk_norm": "head",
        "context_is_scaled": True,
    }


class Architecture(NamedTuple):
    """One entry of ARCHITECTURES: a family of models that the one decoder computes.

    keys: what the family's config.json calls keys of Llama's; None: the family has no such key.
    """

    model_type: str
    defaults: Config  # for keys of config.json, beside COMMON
    declare: Callable[[Config], dict[str, Any]]  # the fields of ModelConfig that the families differ in
    models: str  # which this is, for people
    keys: Mapping[str, str | None] = {}


ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", _LLAMA, _llama, "Llama 1 to 3, TinyLlama, SmolLM 1 and 2"),
    "MistralForCausalLM": Architecture(
        "mistral", _MISTRAL, _mistral, "Mistral 7B, NeMo and Small 2409 to 2501"
    ),
    "MinistralForCausalLM": Architecture("ministral", _MISTRAL, _mistral, "Ministral 8B 2410"),
    "Ministral3ForCausalLM": Architecture("ministral3", _MINISTRAL3, _ministral3, "Ministral 3 (text alone)"),
    "Qwen2ForCausalLM": Architecture("qwen2", _QWEN2, _qwen2, "Qwen 2, Qwen 2.5"),
    "Qwen3ForCausalLM": Architecture("qwen3", _QWEN3, _qwen3, "Qwen 3"),
    "Phi3ForCausalLM": Architecture("phi3", _PHI3, _phi3, "Phi-3, Phi-3.5, Phi-4, Phi-4-mini"),
    "GraniteForCausalLM": Architecture("granite", _GRANITE, _granite, "Granite 3"),
    "GraniteSWAForCausalLM": Architecture("granite_swa", _GRANITE_SWA, _granite_swa, "Granite Swash"),
    "Olmo2ForCausalLM": Architecture("olmo2", _OLMO2, _olmo2, "OLMo 2"),
    "Olmo3ForCausalLM": Architecture("olmo3", _OLMO3, _olmo3, "OLMo 3"),
    "Gemma2ForCausalLM": Architecture("gemma2", _GEMMA2, _gemma2, "Gemma 2"),
    "Gemma3ForCausalLM": Architecture("gemma3_text", _GEMMA3, _gemma3, "Gemma 3 270M and 1B"),
    "Gemma4ForCausalLM": Architecture("gemma4_text", GEMMA4, gemma4, "Gemma 4 (text alone)"),
    "Gemma4UnifiedForCausalLM": Architecture(
        "gemma4_unified_text", GEMMA4_UNIFIED, gemma4, "Gemma 4 without encoders (text alone)"
    ),
    "SmolLM3ForCausalLM": Architecture("smollm3", _SMOLLM3, _smollm3, "SmolLM3"),
    "Glm4ForCausalLM": Architecture("glm4", _GLM4, _glm4, "GLM-4-0414"),
    "GPT2LMHeadModel": Architecture("gpt2", GPT2, gpt2, "GPT-2, DistilGPT2", GPT2_KEYS),
    "GPTNeoXForCausalLM": Architecture(
        "gpt_neox", GPT_NEOX, gpt_neox, "Pythia, GPT-NeoX-20B, Dolly 2, RedPajama-INCITE", GPT_NEOX_KEYS
    ),
}
