"""Small random checkpoints, written by transformers, and the output of its own `generate`."""

from __future__ import annotations

import copy
import functools
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers import (
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedTextConfig,
    Gemma4VisionConfig,
    Glm4Config,
    Glm4MoeConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteSWAConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MinistralConfig,
    Mistral3Config,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PixtralVisionConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SiglipVisionConfig,
    SmolLM3Config,
)

from paged import LLMEngine
from paged.device.transfers import Sent

# torch looks up the constructors that obey `with torch.device(...)` at the first such block. That must happen
# before conftest wraps torch.empty, or a model built on the meta device would be allocated.
with torch.device("cpu"):
    torch.empty(0)

# For dtypes without NaN. In a quantized cache the scales are NaN as well.
POISON = {torch.int8: 99}
VOCAB_SIZE = 211  # a prime: no tile or vector divides it
# Rope scaling for contexts longer than max_position_embeddings, shorter than that times the factor.
STRETCHED = ("llama-linear", "llama-dynamic", "llama-yarn")
# Rope with other frequencies for requests beyond the trained context of 64 tokens.
LONG = ("phi3-longrope",)

# head_dim is 16 where hidden_size / num_heads is 12, as a model may choose it freely.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


# Three of eight experts, of a size that no vector divides.
_MOE = {**SHAPE, "num_experts_per_tok": 3}
_SMALL = {"moe_intermediate_size": 20}

# Heads divide hidden_size.
OLD_SHAPE: dict[str, Any] = {
    key: value
    for key, value in {**SHAPE, "hidden_size": 80}.items()
    if key not in ("intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps")
}

# The gated delta rule: two value heads for a key head, and sizes that no vector divides.
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "attention_bias": True,
}


# Mamba-2 of Granite 4, with heads of 16 in two groups.
_GRANITE_MAMBA = {
    "hidden_size": 64,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "shared_intermediate_size": 40,
    "attention_multiplier": 0.1,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}


def _nemotron_h(pattern: str, **options: Any) -> NemotronHConfig:
    shape = {
        name: value for name, value in SHAPE.items() if name not in ("num_hidden_layers", "rms_norm_eps")
    }
    sizes = {
        "layer_norm_epsilon": 1e-4,
        "ssm_state_size": 12,
        "mamba_num_heads": 4,
        "mamba_head_dim": 20,
        "n_groups": 2,
        "chunk_size": 16,
        "time_step_min": 0.5,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "moe_shared_expert_intermediate_size": 24,
        "routed_scaling_factor": 1.5,
    }
    return NemotronHConfig(hybrid_override_pattern=pattern, **{**shape, **sizes, **options})


def _falcon_h1(**options: Any) -> FalconH1Config:
    sizes = {
        "mamba_d_ssm": 48,
        "mamba_n_heads": 4,
        "mamba_d_state": 12,
        "mamba_chunk_size": 16,
        "embedding_multiplier": 5.0,
        "lm_head_multiplier": 0.4,
        "mlp_multipliers": [0.8, 0.6],
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "ssm_multipliers": [0.9, 0.8, 1.2, 1.1, 0.7],
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.6,
        "time_step_limit": (0.3, 1.5),
    }
    return FalconH1Config(**{**SHAPE, **sizes, **options})


def _rope(kind: str, **values: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


def _layer_types(initials: str) -> list[str]:
    kinds = {"s": "sliding_attention", "f": "full_attention", "l": "linear_attention", "c": "conv"}
    return [kinds[initial] for initial in initials]


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "llama-tied-bias": lambda: LlamaConfig(
        **{**SHAPE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "llama-linear": lambda: LlamaConfig(
        **{**SHAPE, "max_position_embeddings": 64}, **_rope("linear", factor=4.0)
    ),
    "llama-dynamic": lambda: LlamaConfig(
        **{**SHAPE, "max_position_embeddings": 64}, **_rope("dynamic", factor=4.0)
    ),
    "llama-llama3": lambda: LlamaConfig(
        **SHAPE,
        **_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=24),
    "ministral": lambda: MinistralConfig(
        **{**SHAPE, "num_hidden_layers": 3},
        sliding_window=24,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "ministral3": lambda: Ministral3Config(
        **SHAPE,
        **_rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=16,
            beta_fast=4.0,
            mscale=1.0,
            mscale_all_dim=0.5,
            llama_4_scaling_beta=0.4,
        ),
    ),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen2-mixed": lambda: Qwen2Config(
        **SHAPE,
        use_sliding_window=True,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3": lambda: Qwen3Config(**{**SHAPE, "tie_word_embeddings": True}),
    "llama-yarn": lambda: LlamaConfig(
        **{**SHAPE, "max_position_embeddings": 256},
        **_rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=8.0),
    ),
    "phi3": lambda: Phi3Config(
        **{**SHAPE, "hidden_size": 64}, sliding_window=24, **_rope("default", partial_rotary_factor=0.75)
    ),
    "phi3-longrope": lambda: Phi3Config(
        **{**SHAPE, "hidden_size": 64, "original_max_position_embeddings": 64},
        **_rope(
            "longrope",
            partial_rotary_factor=0.75,
            short_factor=[1.0, 1.1, 1.3, 2.0, 2.5, 3.0],
            long_factor=[1.5, 2.0, 4.0, 9.0, 20.0, 30.0],
        ),
    ),
    "granite": lambda: GraniteConfig(
        **{**SHAPE, "hidden_size": 64, "tie_word_embeddings": True, "rms_norm_eps": 0.02},
        attention_multiplier=0.1,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=6.0,
        attention_bias=True,
        mlp_bias=True,
    ),
    "granite-swa": lambda: GraniteSWAConfig(
        **{**SHAPE, "hidden_size": 64, "num_hidden_layers": 4},
        attention_multiplier=0.2,
        residual_multiplier=0.5,
        sliding_window=24,
        layer_rope_theta=[1e4, 0, 5e5, 1e4],
    ),
    "olmo2": lambda: Olmo2Config(**{**SHAPE, "hidden_size": 64}, attention_bias=True),
    "olmo3": lambda: Olmo3Config(
        **{**SHAPE, "hidden_size": 64, "num_hidden_layers": 5},
        sliding_window=24,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e4,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 8.0,
            },
        },
    ),
    "gemma2": lambda: Gemma2Config(
        **{**SHAPE, "num_hidden_layers": 3},
        sliding_window=24,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        attention_bias=True,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**SHAPE, "num_hidden_layers": 5, "tie_word_embeddings": True},
        sliding_window=24,
        sliding_window_pattern=3,
        query_pre_attn_scalar=20,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    # As E2B: layers have inputs, the last ones read K and V of others and have wide MLPs.
    "gemma4": lambda: Gemma4TextConfig(
        **{**SHAPE, "num_hidden_layers": 7, "tie_word_embeddings": True, "rms_norm_eps": 0.003},
        layer_types=_layer_types("ssfsfsf"),
        sliding_window=24,
        global_head_dim=40,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=VOCAB_SIZE + 6,
        num_kv_shared_layers=4,
        use_double_wide_mlp=True,
        final_logit_softcapping=3.0,
    ),
    # As 31B: layers with full attention have other heads, and V of what W_k makes.
    "gemma4-keys-as-values": lambda: Gemma4TextConfig(
        **{**SHAPE, "num_hidden_layers": 5},
        layer_types=_layer_types("sfssf"),
        sliding_window=24,
        global_head_dim=40,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        attention_bias=True,
        hidden_size_per_layer_input=0,
        use_bidirectional_attention="vision",
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.55,
                "factor": 2.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
    # As 26B-A4B: experts beside the MLP.
    "gemma4-experts": lambda: Gemma4TextConfig(
        **{**SHAPE, "num_hidden_layers": 3},
        layer_types=_layer_types("sff"),
        sliding_window=24,
        global_head_dim=40,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=24,
    ),
    "gemma4-unified": lambda: Gemma4UnifiedTextConfig(
        **{**SHAPE, "num_hidden_layers": 4, "tie_word_embeddings": True},
        layer_types=_layer_types("sfsf"),
        sliding_window=24,
        global_head_dim=32,
        num_kv_shared_layers=1,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
    ),
    "smollm3": lambda: SmolLM3Config(
        **{**SHAPE, "hidden_size": 64},
        no_rope_layers=[1, 0],
        use_sliding_window=True,
        sliding_window=24,
        attention_bias=True,
        mlp_bias=True,
    ),
    "glm4": lambda: Glm4Config(**SHAPE, attention_bias=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **{**_MOE, "num_hidden_layers": 3}, **_SMALL, num_experts=8, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **{**_MOE, "num_hidden_layers": 3},
        **_SMALL,
        num_experts=6,
        shared_expert_intermediate_size=24,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=24,
    ),
    "olmoe": lambda: OlmoeConfig(
        **{**_MOE, "hidden_size": 64, "intermediate_size": 24}, num_experts=8, attention_bias=True
    ),
    "mixtral": lambda: MixtralConfig(
        **{**_MOE, "intermediate_size": 24}, num_local_experts=6, sliding_window=24
    ),
    "glm4_moe": lambda: Glm4MoeConfig(
        **{**_MOE, "num_hidden_layers": 3},
        **_SMALL,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        use_qk_norm=True,
        attention_bias=True,
        routed_scaling_factor=1.5,
    ),
    "minimax_m2": lambda: MiniMaxM2Config(
        **{**_MOE, "intermediate_size": 24},
        num_local_experts=8,
        **_rope("default", partial_rotary_factor=0.5),
    ),
    "granitemoe": lambda: GraniteMoeConfig(
        **{**_MOE, "hidden_size": 64, "intermediate_size": 24},
        num_local_experts=8,
        attention_multiplier=0.1,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        logits_scaling=6.0,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **{**_MOE, "intermediate_size": 24},
        num_local_experts=8,
        sliding_window=24,
        swiglu_limit=0.7,
        swiglu_alpha=1.3,
        **_rope("yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=8.0, truncate=False),
    ),
    # With a state in the last layer, which released models have not: it must see every token.
    "qwen3_5": lambda: Qwen3_5TextConfig(
        **{**SHAPE, "num_hidden_layers": 4}, **_DELTA, layer_types=_layer_types("lfll")
    ),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(
        **{**_MOE, "num_hidden_layers": 3, "rms_norm_eps": 1e-6},
        **_SMALL,
        **_DELTA,
        num_experts=6,
        shared_expert_intermediate_size=24,
        layer_types=_layer_types("llf"),
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **{**_MOE, "num_hidden_layers": 4, "head_dim": 32, "rms_norm_eps": 1e-6},
        **_SMALL,
        **_DELTA,
        num_experts=6,
        shared_expert_intermediate_size=24,
        norm_topk_prob=False,
        mlp_only_layers=[1],
        partial_rotary_factor=0.25,
    ),
    "lfm2": lambda: Lfm2Config(
        **{**SHAPE, "num_hidden_layers": 3, "tie_word_embeddings": True},
        norm_eps=1e-4,
        block_multiple_of=8,
        conv_bias=True,
        layer_types=_layer_types("cfc"),
    ),
    "lfm2_moe": lambda: Lfm2MoeConfig(
        **{**_MOE, "num_hidden_layers": 4},
        **_SMALL,
        num_experts=6,
        num_dense_layers=2,
        routed_scaling_factor=1.5,
        layer_types=_layer_types("cfcf"),
    ),
    # One part a layer, as its letters say; a time step of at least the usual one, so that some are.
    "nemotron_h": lambda: _nemotron_h("M-*M", use_bias=True, mlp_bias=True),
    "nemotron_h_moe": lambda: _nemotron_h("ME*EM-E", n_group=2, topk_group=1),
    "nemotron_h_moe-latent": lambda: _nemotron_h("M*E", moe_latent_size=24, mamba_num_heads=6, mlp_bias=True),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **{**_MOE, **_GRANITE_MAMBA, "intermediate_size": 24, "num_hidden_layers": 3},
        num_local_experts=6,
        layer_types=_layer_types("lfl"),
        time_step_limit=(0.4, 0.9),
    ),
    "granitemoehybrid-dense": lambda: GraniteMoeHybridConfig(
        **{**SHAPE, **_GRANITE_MAMBA, "num_hidden_layers": 3},
        num_local_experts=0,
        layer_types=_layer_types("llf"),
        position_embedding_type="rope",
    ),
    "granitemoehybrid-attention": lambda: GraniteMoeHybridConfig(
        **{**SHAPE, **_GRANITE_MAMBA},
        num_local_experts=0,
        layer_types=_layer_types("ff"),
        position_embedding_type="rope",
    ),
    "falcon_h1": lambda: _falcon_h1(mamba_rms_norm=False, mamba_d_ssm=40, mamba_n_heads=5),
    "falcon_h1-norm": lambda: _falcon_h1(
        mamba_rms_norm=True, mamba_norm_before_gate=True, mamba_n_groups=2, attention_bias=True, mlp_bias=True
    ),
    "falcon_h1-gate": lambda: _falcon_h1(
        mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_proj_bias=True, projectors_bias=True
    ),
    "gpt2": lambda: GPT2Config(**{**OLD_SHAPE, "tie_word_embeddings": True}, n_inner=72),
    "gpt2-unscaled": lambda: GPT2Config(**OLD_SHAPE, activation_function="gelu", scale_attn_weights=False),
    "gpt_neox": lambda: GPTNeoXConfig(**OLD_SHAPE, intermediate_size=72, rotary_pct=0.6),
    "gpt_neox-serial": lambda: GPTNeoXConfig(
        **{**OLD_SHAPE, "tie_word_embeddings": True},
        intermediate_size=72,
        hidden_act="gelu_fast",
        use_parallel_residual=False,
        attention_bias=False,
        **_rope("linear", factor=2.0, partial_rotary_factor=1.0),
    ),
}


IMAGE = VOCAB_SIZE - 1  # stands for one in the prompts of these
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def _mistral3(text: str) -> PreTrainedConfig:
    vision = PixtralVisionConfig(**_VISION, head_dim=8)
    config = CONFIGS[text]()
    return Mistral3Config(
        text_config=config, vision_config=vision, image_token_index=IMAGE, tie_word_embeddings=False
    )


# Those of CONFIGS that are mixtures of experts. transformers computes them slowly.
MIXTURES = (
    *("qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "glm4_moe", "minimax_m2", "granitemoe", "gpt_oss"),
    *("gemma4-experts", "qwen3_5_moe", "qwen3_next", "lfm2_moe"),
    *("nemotron_h_moe", "nemotron_h_moe-latent", "granitemoehybrid"),
)
# Those whose layers keep states, beside some with attention.
HYBRIDS = (
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe"),
    *("nemotron_h", "nemotron_h_moe", "granitemoehybrid", "falcon_h1"),
)
# transformers computes the whole text again for each token: its cached decodes do not limit time steps.
_WHOLE = ("nemotron_h", "granitemoehybrid", "falcon_h1")


def gemma4_config(text: str, whole: type[PreTrainedConfig], **parts: PreTrainedConfig) -> PreTrainedConfig:
    """Return a config of a whole Gemma 4 around one of CONFIGS."""
    tokens = (
        "image_token_id",
        "boi_token_id",
        "eoi_token_id",
        "audio_token_id",
        "boa_token_id",
        "eoa_token_index",
        "video_token_id",
    )
    config = CONFIGS[text]()
    config.pad_token_id = 0  # which it computes images' tokens with
    return whole(text_config=config, **{name: IMAGE - i for i, name in enumerate(tokens)}, **parts)


_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 1,
}


def _qwen_vl(
    whole: type[PreTrainedConfig], text: str, section: list[int] | None = None, **values: Any
) -> Any:
    """Return the config of a Qwen with a vision part. section: of mrope, where it is no default."""
    config = CONFIGS[text]().to_dict()
    more: dict[str, Any] = {"rope_theta": 1e4}
    if section is not None:
        more = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}}
    config = {key: value for key, value in config.items() if key not in ("model_type", "rope_parameters")}
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    kinds = whole(vision_config=_QWEN_VISION).text_config.model_type
    return whole(
        text_config={**config, **more, "model_type": kinds, **values},
        vision_config=_QWEN_VISION,
        **{name: IMAGE - i for i, name in enumerate(tokens)},
    )


# Models with a vision part, of which only the text part is loaded.
MULTIMODAL_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma3-vision": lambda: Gemma3Config(
        text_config=CONFIGS["gemma3"](),
        vision_config=SiglipVisionConfig(**_VISION),
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=IMAGE - 1,
        eoi_token_index=IMAGE - 2,
    ),
    "gemma4-vision": lambda: gemma4_config(
        "gemma4",
        Gemma4Config,
        vision_config=Gemma4VisionConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=8,
            position_embedding_size=16,
        ),
    ),
    "gemma4-unified-vision": lambda: gemma4_config("gemma4-unified", Gemma4UnifiedConfig),
    "mistral-vision": lambda: _mistral3("mistral"),
    "ministral3-vision": lambda: _mistral3("ministral3"),
    "qwen2_5_vl": lambda: _qwen_vl(
        transformers.Qwen2_5_VLConfig, "qwen2", [4, 2, 2], head_dim=None, hidden_size=64
    ),
    "qwen3_vl": lambda: _qwen_vl(transformers.Qwen3VLConfig, "qwen3", [4, 2, 2]),
    "qwen3_vl_moe": lambda: _qwen_vl(transformers.Qwen3VLMoeConfig, "qwen3_moe", [4, 2, 2]),
    "qwen3_5-vision": lambda: _qwen_vl(transformers.Qwen3_5Config, "qwen3_5"),
    "qwen3_5_moe-vision": lambda: _qwen_vl(transformers.Qwen3_5MoeConfig, "qwen3_5_moe"),
}


def random_model(config: PreTrainedConfig, seed: int = 0) -> Any:
    """Make a float32 model whose every parameter matters.

    transformers' own initialisation has zero biases, unit norms and attention so flat that a wrong window or
    rotation would pass.
    """
    model = _class_for(config).from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or "ln_" in name or name.endswith(("router.scale", "per_expert_scale")):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            else:
                gain = 1.5 if "q_proj" in name or "k_proj" in name else 1.0
                parameter.copy_(noise * gain / math.sqrt(parameter.shape[1]))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.1, generator=generator)
    return model


def _class_for(config: PreTrainedConfig) -> Any:
    has_images = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if has_images else transformers.AutoModelForCausalLM


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="paged-checkpoints-")


@functools.cache
def checkpoint(name: str) -> Path:
    """Return the directory of one of CONFIGS or MULTIMODAL_CONFIGS, written once per session.

    Of the latter config.json does not say that the head is not tied, as on the hub.
    """
    directory, configs = Path(_root().name) / name, CONFIGS | MULTIMODAL_CONFIGS
    random_model(configs[name]()).save_pretrained(directory)
    if name in MULTIMODAL_CONFIGS:
        edit_json(directory / "config.json", tie_word_embeddings=None)
    return directory


def edit_json(file: Path, **values: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) if file.exists() else {}
    content = {k: v for k, v in {**content, **values}.items() if v is not None}
    file.write_text(json.dumps(content))


def ragged_prompts(lengths: Sequence[int], vocab_size: int = VOCAB_SIZE, seed: int = 0) -> list[list[int]]:
    """Return random token ids, one prompt for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


class Reference:
    """transformers itself, eager and in float32, one prompt at a time."""

    dtype = torch.float32

    def __init__(self, directory: Path) -> None:
        model_class = _class_for(transformers.AutoConfig.from_pretrained(directory))
        self.model = model_class.from_pretrained(
            directory, dtype=self.dtype, attn_implementation="eager"
        ).eval()
        # Otherwise generate() would never choose EOS before min_new_tokens.
        self.model.generation_config.eos_token_id = None
        self._known: dict[tuple[tuple[int, ...], int], tuple[list[int], Tensor]] = {}

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], Tensor]:
        """Return the generated tokens and the logits of each: f32[max_tokens, vocab_size]."""
        key = (tuple(prompt), max_tokens)
        if key not in self._known:
            # A fresh model: the dynamic rope of transformers remembers the longest sequence it has seen.
            result = self._generate(copy.deepcopy(self.model), torch.tensor([list(prompt)]), max_tokens)
            tokens = result.sequences[0, len(prompt) :].tolist()
            self._known[key] = tokens, torch.cat(result.logits)
        return self._known[key]

    def _generate(self, model: Any, prompt: Tensor, max_tokens: int) -> Any:
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            output_logits=True,
            use_cache=model.config.model_type not in _WHOLE,
            return_dict_in_generate=True,
        )


class ExactReference(Reference):
    """transformers in float64, also where its code converts to float32."""

    dtype = torch.float64

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.model.set_experts_implementation("eager")  # torch multiplies no groups in float64

    def _generate(self, *args: Any) -> Any:
        wider = {"float32": torch.float64, "float": torch.float64}
        with mock.patch.multiple(torch, **wider), mock.patch.object(Tensor, "float", Tensor.double):
            return super()._generate(*args)


@functools.cache
def reference(name: str) -> Reference:
    """Return transformers on one of CONFIGS. Its generated tokens are cached."""
    return Reference(checkpoint(name))


@functools.cache
def exact_reference(name: str) -> Reference:
    """Return what `reference` returns, in float64."""
    return ExactReference(checkpoint(name))


def new_engine(model: str | Path, **options: Any) -> LLMEngine:
    """Make a poisoned engine: by default float32, on the CPU, without a tokenizer."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "skip_tokenizer_init": True,
        "num_blocks": 512,
    }
    engine = LLMEngine(str(model), **{**defaults, **options})
    poison(engine)
    return engine


def poison(engine: LLMEngine) -> None:
    """Fill all free slots with NaN, and every block that is allocated later."""
    runner, pool = engine.runner, engine.block_manager.pool
    tensors, allocate, move_blocks = runner.kv_cache.tensors.values(), pool.allocate, runner._move_blocks
    # A draft model writes into new blocks before the step that moves blocks, but not if that moves any.
    draft_model, of_draft = runner.draft_model, dict[str, Tensor]().values()
    fresh: list[int] = []
    fresh_for_draft: list[int] = []

    def poison_blocks(tensors: Iterable[Tensor], blocks: list[int]) -> None:
        for tensor in tensors:
            tensor[:, blocks] = POISON.get(tensor.dtype, math.nan)
        blocks.clear()

    def allocate_and_record(n: int) -> Any:
        blocks = allocate(n)
        fresh.extend(blocks or ())
        fresh_for_draft.extend(blocks or ())
        return blocks

    def poison_and_move(out: Sent | None, back: Sent | None, copies: Sent | None) -> None:
        # Blocks that are swapped out may already be allocated again.
        move_blocks(out, None, None)
        poison_blocks(tensors, fresh)
        poison_blocks(of_draft, fresh_for_draft)
        move_blocks(None, back, copies)

    def load_and_keep(path: Path) -> int:
        fresh.clear()
        fresh_for_draft.clear()
        try:
            return load_prefix(path)
        finally:
            fresh.clear()  # these are filled now
            fresh_for_draft.clear()

    def poison_and_propose(*args: Any) -> Any:
        poison_blocks(of_draft, fresh_for_draft)
        return propose(*args)

    if draft_model is not None:
        of_draft = draft_model.kv_cache.tensors.values()
        propose = draft_model.propose
        draft_model.propose = poison_and_propose  # type: ignore[method-assign]
    kept = runner.kv_cache.states
    states = () if kept is None else (*kept.tensors.values(), *kept.run_inputs.values())
    for tensor in (*tensors, *of_draft, *states):
        tensor.fill_(POISON.get(tensor.dtype, math.nan))
    load_prefix = engine.load_prefix
    engine.load_prefix = load_and_keep  # type: ignore[method-assign]
    pool.allocate = allocate_and_record  # type: ignore[method-assign]
    runner._move_blocks = poison_and_move  # type: ignore[method-assign]


def assert_all_free(engine: LLMEngine) -> None:
    """Assert that no request runs, waits or holds a block."""
    engine.scheduler.check()
    assert engine.block_manager.pool.num_used == engine.block_manager.num_pinned
    assert not engine.has_unfinished_requests()
