"""The native architectures, and how each reads its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ...base.validation import check_int, check_number, shown
from ...errors import CheckpointError, UnsupportedModelError
from ..config import ModelConfig
from ..spec import NO_ROPE, AttentionSpec, NormNames
from .build import (
    AROUND_SUBLAYERS,
    granite_fields,
    read_attention,
    read_feed_forward,
    read_model,
    read_norm,
    repeat,
)
from .gemma4 import GEMMA4, GEMMA4_UNIFIED, gemma4
from .gpt import GPT2, GPT2_KEYS, GPT_NEOX, GPT_NEOX_KEYS, gpt2, gpt_neox
from .moe import (
    GLM4_MOE,
    GPT_OSS,
    GRANITE_MOE,
    MINIMAX_M2,
    MIXTRAL,
    OLMOE,
    QWEN2_MOE,
    QWEN3_MOE,
    glm4_moe,
    gpt_oss,
    granite_moe,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
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
_MINISTRAL3 = {
    "max_position_embeddings": 262144,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
    "llama_4_scaling_beta": 0.1,
}
_QWEN2 = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_QWEN3 = {**_QWEN2, "head_dim": 128, "attention_bias": False}
_PHI3 = {
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "original_max_position_embeddings": 4096,
}
_GRANITE = {
    **_LLAMA,
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_GRANITE_SWA = {
    **_GRANITE,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "sliding_window": 128,
    "layer_rope_theta": None,
}
_OLMO2 = {"max_position_embeddings": 2048, "attention_bias": False, "rms_norm_eps": 1e-5}
_OLMO3 = {**_OLMO2, "sliding_window": 4096}
_SMOLLM3 = {
    **_LLAMA,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}
_GLM4 = {
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "attention_bias": True,
}
_GEMMA2 = {
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA3 = {
    **_GEMMA2,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "sliding_window_pattern": 6,
}


def _llama(hf: Config) -> ModelConfig:
    bias = flag(hf, "attention_bias")
    attention = read_attention(hf, qkv_bias=bias, output_bias=bias)
    mlp = read_feed_forward(hf, bias=flag(hf, "mlp_bias"))
    return read_model(hf, repeat(hf, attention, mlp))


def _mistral(hf: Config) -> ModelConfig:
    return read_model(hf, repeat(hf, read_attention(hf), read_feed_forward(hf), windows=_mistral_windows(hf)))


def _mistral_windows(hf: Config) -> tuple[int | None, ...]:
    """Give every layer the window, unless layer_types says which have it, as in Ministral 8B."""
    layer_types = layer_types_of(hf, ("sliding_attention",) * size(hf, "num_hidden_layers"))
    return windows_of(layer_types, window_of(hf))


def _ministral3(hf: Config) -> ModelConfig:
    own = own_rope(hf) or _MINISTRAL3_ROPE
    rope = read_rope(hf, own)
    beta = "llama_4_scaling_beta"
    if own.get(beta) is not None:
        rope = replace(rope, query_scaling_beta=check_number(CheckpointError, beta, own[beta], 0, MAX_FACTOR))
    attention = read_attention(hf, rope=rope, window=window_of(hf))
    return read_model(hf, repeat(hf, attention, read_feed_forward(hf)))


def _qwen2(hf: Config) -> ModelConfig:
    attention = read_attention(hf, qkv_bias=True)
    return read_model(hf, repeat(hf, attention, read_feed_forward(hf), windows=_qwen_windows(hf)))


def _qwen3(hf: Config) -> ModelConfig:
    bias = flag(hf, "attention_bias")
    attention = read_attention(hf, qkv_bias=bias, output_bias=bias, qk_norm="head")
    return read_model(hf, repeat(hf, attention, read_feed_forward(hf), windows=_qwen_windows(hf)))


def _qwen_windows(hf: Config) -> tuple[int | None, ...]:
    window = window_of(hf) if flag(hf, "use_sliding_window") else None
    if hf["layer_types"] is None:
        first = check_int(CheckpointError, "max_window_layers", hf["max_window_layers"], 0)
        return tuple(window if layer >= first else None for layer in range(size(hf, "num_hidden_layers")))
    return windows_of(layer_types_of(hf), window)


def _phi3(hf: Config) -> ModelConfig:
    own = own_rope(hf)
    if own.get("rope_type", own.get("type")) in ("su", "yarn"):  # as older files call it
        own = {**own, "rope_type": "longrope"}
    rope = read_rope(hf, own, partial=True)
    if rope.type not in ("default", "longrope"):
        raise UnsupportedModelError(f"rope type {rope.type!r} is not supported in Phi-3; 'longrope' is")
    attention = read_attention(hf, rope=rope, window=window_of(hf), stored="fused")
    return read_model(hf, repeat(hf, attention, read_feed_forward(hf, fused=True)))


def _granite(hf: Config, **of_layers: Any) -> ModelConfig:
    """Read Granite. of_layers: sinks, and the windows and ropes of each layer."""
    bias = flag(hf, "attention_bias")
    scale = factor(hf, "attention_multiplier")
    sinks = of_layers.pop("sinks", False)
    attention = read_attention(hf, qkv_bias=bias, output_bias=bias, scale=scale, sinks=sinks)
    mlp = read_feed_forward(hf, bias=flag(hf, "mlp_bias"))
    return read_model(
        hf,
        repeat(hf, attention, mlp, **of_layers),
        rope=attention.rope,
        **granite_fields(hf),
    )


def _granite_swa(hf: Config) -> ModelConfig:
    num_layers = size(hf, "num_hidden_layers")
    rope = read_rope(hf)
    thetas = hf["layer_rope_theta"]
    if thetas is None:
        thetas = [rope.theta] * num_layers
    if not isinstance(thetas, list) or len(thetas) != num_layers:
        raise CheckpointError(f"layer_rope_theta must be {num_layers} numbers, got {shown(thetas)}")
    for theta in thetas:
        check_number(CheckpointError, "layer_rope_theta", theta, 0, MAX_ROPE_THETA)
    kinds = tuple("sliding_attention" if layer % 4 else "full_attention" for layer in range(num_layers))
    return _granite(
        hf,
        windows=windows_of(layer_types_of(hf, kinds), window_of(hf)),
        ropes=[replace(rope, theta=float(theta)) if theta else NO_ROPE for theta in thetas],
        sinks=True,
    )


def _olmo2(hf: Config, **of_layers: Any) -> ModelConfig:
    """Read OLMo 2. of_layers: the windows and ropes of each layer, and the rope of full attention."""
    bias = flag(hf, "attention_bias")
    rope = of_layers.pop("rope", None)
    attention = read_attention(hf, rope=rope, qkv_bias=bias, output_bias=bias, qk_norm="projection")
    norms = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    layers = repeat(hf, attention, read_feed_forward(hf), norms=norms, **of_layers)
    return read_model(hf, layers, rope=attention.rope)


def _olmo3(hf: Config) -> ModelConfig:
    layer_types = layer_types_of(hf, full_every(4, hf))
    ropes = ropes_by_type(hf, rope_theta=500000.0, local_theta=500000.0)
    return _olmo2(hf, **by_layer_type(hf, layer_types, ropes))


def _smollm3(hf: Config) -> ModelConfig:
    """Read SmolLM3's rotary embeddings, which are off in some layers; only these may have a window."""
    num_layers = size(hf, "num_hidden_layers")
    rope = read_rope({"rope_theta": 2e6, **hf})
    rotates = hf["no_rope_layers"]  # despite its name 1 where a layer rotates
    if rotates is None:
        rotates = [int(kind == "sliding_attention") for kind in full_every("no_rope_layer_interval", hf)]
    if not isinstance(rotates, list) or len(rotates) != num_layers or not all(map(_is_bit, rotates)):
        raise CheckpointError(f"no_rope_layers must be {num_layers} times 0 or 1, got {shown(rotates)}")
    kinds = tuple("full_attention" if rotated else "sliding_attention" for rotated in rotates)
    window = window_of(hf) if flag(hf, "use_sliding_window") else None
    bias = flag(hf, "attention_bias")
    attention = read_attention(hf, rope=rope, qkv_bias=bias, output_bias=bias)
    layers = repeat(
        hf,
        attention,
        read_feed_forward(hf, bias=flag(hf, "mlp_bias")),
        windows=windows_of(layer_types_of(hf, kinds), window),
        ropes=[rope if rotated else NO_ROPE for rotated in rotates],
    )
    return read_model(hf, layers, rope=rope)


def _is_bit(value: Any) -> bool:
    return type(value) is int and value in (0, 1)


def _glm4(hf: Config) -> ModelConfig:
    rope = read_rope({"partial_rotary_factor": 0.5, **hf}, partial=True, interleaved=True)
    attention = read_attention(hf, rope=rope, qkv_bias=flag(hf, "attention_bias"))
    norms = NormNames(
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
    )
    layers = repeat(hf, attention, read_feed_forward(hf, fused=True), norms=norms)
    return read_model(hf, layers, exceeds_float16=True)


def _gemma2(hf: Config) -> ModelConfig:
    windows = windows_of(layer_types_of(hf, full_every(2, hf)), window_of(hf))
    attention = replace(read_attention(hf), softcap=softcap_of(hf, "attn_logit_softcapping"))
    return _gemma(hf, attention, windows=windows)


def _gemma3(hf: Config) -> ModelConfig:
    layer_types = layer_types_of(hf, full_every("sliding_window_pattern", hf))
    ropes = ropes_by_type(hf, rope_theta=1e6, local_theta=hf.get("rope_local_base_freq") or 1e4)
    by_layer = by_layer_type(hf, layer_types, ropes)
    rope = by_layer.pop("rope")
    # Norms of Q and K take the place of Gemma 2's softcap of scores: the key for it is checked, and not used.
    softcap_of(hf, "attn_logit_softcapping")
    attention = read_attention(hf, rope=rope, qk_norm="head")
    return replace(_gemma(hf, attention, **by_layer), context_is_scaled=True)


def _gemma(hf: Config, attention: AttentionSpec, **of_layers: Any) -> ModelConfig:
    """Read what Gemma 2 and 3 share. of_layers: the windows and ropes of each layer."""
    if hf.get("use_bidirectional_attention"):
        raise UnsupportedModelError("use_bidirectional_attention is not supported")
    bias = flag(hf, "attention_bias")
    attention = replace(
        attention,
        qkv_bias=bias,
        output_bias=bias,
        scale=size(hf, "query_pre_attn_scalar") ** -0.5,
    )
    mlp = read_feed_forward(hf, activation="gelu_tanh")
    return read_model(
        hf,
        repeat(hf, attention, mlp, norms=AROUND_SUBLAYERS, **of_layers),
        rope=attention.rope,
        norm=read_norm(hf, unit_offset=True),
        exceeds_float16=True,
        logits_softcap=softcap_of(hf, "final_logit_softcapping"),
        embedding_multiplier=size(hf, "hidden_size") ** 0.5,
    )


class Architecture(NamedTuple):
    """One entry of ARCHITECTURES: a family of models that the one decoder computes.

    read: reduces config.json, with its defaults, to a ModelConfig.
    keys: what the family's config.json calls keys of Llama's; None: the family has no such key.
    """

    model_type: str
    defaults: Config  # for keys of config.json, beside COMMON
    read: Callable[[Config], ModelConfig]
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
    "Qwen2MoeForCausalLM": Architecture("qwen2_moe", QWEN2_MOE, qwen2_moe, "Qwen 1.5 MoE, Qwen 2 MoE"),
    "Qwen3MoeForCausalLM": Architecture("qwen3_moe", QWEN3_MOE, qwen3_moe, "Qwen 3 MoE (30B-A3B, 235B-A22B)"),
    "Qwen3ForCausalLM": Architecture("qwen3", _QWEN3, _qwen3, "Qwen 3"),
    "MixtralForCausalLM": Architecture("mixtral", MIXTRAL, mixtral, "Mixtral 8x7B, 8x22B"),
    "OlmoeForCausalLM": Architecture("olmoe", OLMOE, olmoe, "OLMoE"),
    "GptOssForCausalLM": Architecture("gpt_oss", GPT_OSS, gpt_oss, "gpt-oss 20B, 120B"),
    "Glm4MoeForCausalLM": Architecture("glm4_moe", GLM4_MOE, glm4_moe, "GLM-4.5, GLM-4.6"),
    "MiniMaxM2ForCausalLM": Architecture("minimax_m2", MINIMAX_M2, minimax_m2, "MiniMax-M2"),
    "GraniteMoeForCausalLM": Architecture("granitemoe", GRANITE_MOE, granite_moe, "Granite 3 MoE"),
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
