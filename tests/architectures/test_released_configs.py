"""Unusual keys of config.json, by the release that has them.

They are as published or as quoted elsewhere; the sizes, and some numbers, are not those of the release. What
transformers' own classes write is tested in test_hf_config.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest

from paged.architectures.families.table import ARCHITECTURES
from paged.architectures.hf_config import from_hf
from tests.architectures.test_hf_config import SIZES, completed
from tests.support.specs import value_at

SHAPE = {
    **SIZES,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "hidden_size": 1024,
    "num_key_value_heads": 8,
}
SLIDING_BUT_SIXTH = ["sliding_attention"] * 5 + ["full_attention"]
FACTORS = [1.0 + i for i in range(48)]  # for 96 dimensions of a head of 128


class Released(NamedTuple):
    """What is unusual in the config.json of a release, and some of the fields that it makes."""

    architecture: str
    keys: dict[str, Any]
    expected: dict[str, Any]


RELEASED = {
    "Devstral-2-123B": Released(
        "Ministral3ForCausalLM",
        {
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "factor": 64.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.0,
                "original_max_position_embeddings": 4096,
                "llama_4_scaling_beta": 0.0,
                "rope_theta": 1000000.0,
                "rope_type": "yarn",
                "type": "yarn",
            },
        },
        # Of the two scales that cancel elsewhere one is 0, which transformers takes as absent.
        {
            "max_context": 262144,
            "rope.attention_factor": pytest.approx(1 + 0.1 * math.log(64)),
            "rope.beta_fast": 4.0,
            "rope.query_scaling_beta": 0.0,
        },
    ),
    "Ministral-8B-2410": Released(
        "MistralForCausalLM",
        {"head_dim": 128, "rope_theta": 100000000.0, "sliding_window": 32768},
        {"windows": (32768,) * 12, "rope.theta": 1e8},
    ),
    "Mistral-7B-v0.3": Released(
        "MistralForCausalLM",
        {
            "sliding_window": None,
            "is_decoder": False,
            "add_cross_attention": False,
            "max_length": 20,
            "tie_encoder_decoder": False,
            "pruned_heads": {},
            "temperature": 1.0,
            "torch_dtype": "bfloat16",
        },
        {"windows": (None,) * 12, "dtype": "bfloat16"},
    ),
    "Yarn-Mistral-7b-128k": Released(
        "MistralForCausalLM",
        {
            "max_position_embeddings": 32768,
            "max_sequence_length": 131072,
            "sliding_window": 131072,
            "rope_scaling": {
                "factor": 16.0,
                "finetuned": True,
                "original_max_position_embeddings": 8192,
                "type": "yarn",
            },
            "auto_map": {"AutoModelForCausalLM": "modeling_mistral_yarn.MistralForCausalLM"},
        },
        {"max_context": 131072, "rope.type": "yarn", "rope.original_max_position_embeddings": 8192},
    ),
    "Phi-4-mini": Released(
        "Phi3ForCausalLM",
        {
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"long_factor": FACTORS, "short_factor": [1.0] * 48, "type": "longrope"},
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "sliding_window": 262144,
            "tie_word_embeddings": True,
        },
        {
            "max_context": 131072,
            "rope.rotary_dim": 96,
            "rope.long_factors": tuple(FACTORS),
            "rope.attention_factor": pytest.approx(math.sqrt(1 + 5 / 12)),
            "rope.original_max_position_embeddings": 4096,
        },
    ),
    "Olmo-3.1-32B": Released(
        "Olmo3ForCausalLM",
        {
            "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 3,
            "max_position_embeddings": 65536,
            "rope_scaling": {
                "attention_factor": 1.2079441541679836,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "yarn",
            },
            "rope_theta": 500000,
            "sliding_window": 4096,
        },
        {
            "max_context": 65536,
            "rope.attention_factor": 1.2079441541679836,
            "windows": (4096, 4096, 4096, None) * 3,
        },
    ),
    "translategemma-4b": Released(
        "Gemma3ForCausalLM",  # its text_config
        {
            "_sliding_window_pattern": 6,
            "layer_types": SLIDING_BUT_SIXTH * 2,
            "max_position_embeddings": 131072,
            "rope_local_base_freq": 10000.0,
            "rope_parameters": {
                "full_attention": {"factor": 8.0, "rope_type": "linear"},
                "sliding_attention": {"rope_type": "default"},
            },
            "rope_theta": 1000000.0,
            "sliding_window": 1024,
            "use_bidirectional_attention": False,
        },
        {
            "max_context": 131072,
            "rope.theta": 1e6,
            "rope.factor": 8.0,
            "windows": ((1024,) * 5 + (None,)) * 2,
        },
    ),
    "SmolLM3-3B": Released(
        "SmolLM3ForCausalLM",
        {
            "layer_types": ["full_attention"] * 12,
            "max_window_layers": 28,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 3,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "pretraining_tp": 2,
        },
        {"windows": (None,) * 12, "rope.theta": 5e6},
    ),
    "GLM-Z1-9B-0414 with yarn": Released(
        "Glm4ForCausalLM",
        {
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "max_position_embeddings": 32768,
            "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        },
        {"max_context": 131072, "rope.rotary_dim": 64, "rope.type": "yarn"},
    ),
    "granite-swash-2b": Released(
        "GraniteSWAForCausalLM",
        {
            "layer_types": ["full_attention"]
            + ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2
            + ["sliding_attention"] * 3,
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12,
            "residual_multiplier": 0.28,
            "logits_scaling": 10,
            "rope_theta": 10000,
        },
        {"layer.attention.scale": 0.0078125, "windows": (None, 128, 128, 128) * 3},
    ),
    "Qwen2.5-7B-Instruct-1M": Released(
        "Qwen2ForCausalLM",
        {
            "max_position_embeddings": 1010000,
            "rope_theta": 10000000.0,
            "sliding_window": 32768,
            "use_sliding_window": False,
            # Which transformers does not know.
            "dual_chunk_attention_config": {"chunk_size": 262144, "local_size": 8192},
        },
        {"max_context": 1010000, "windows": (None,) * 12},
    ),
    "SmolLM2-135M": Released(
        "LlamaForCausalLM",
        {
            "is_llama_config": True,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        },
        {"rope.theta": 1e5, "rope.interleaved": False},
    ),
    "gpt-neox-20b": Released(
        "GPTNeoXForCausalLM",
        {
            "attention_probs_dropout_prob": 0,
            "hidden_act": "gelu_fast",
            "hidden_dropout_prob": 0,
            "rotary_emb_base": 10000,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
        },
        {"layer.feed_forward.activation": "gelu_tanh", "rope.rotary_dim": 32, "layer.parallel": True},
    ),
    "RedPajama-INCITE-3B": Released(
        "GPTNeoXForCausalLM",
        {"hidden_act": "gelu", "rotary_emb_base": 10000, "rotary_pct": 1.0, "use_parallel_residual": False},
        {"layer.feed_forward.activation": "gelu", "rope.rotary_dim": None, "layer.parallel": False},
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_config_is_read_as_by_transformers(name):
    architecture, keys, expected = RELEASED[name]
    known = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type}
    hf = {**known, **SHAPE, **keys}
    config = from_hf(hf)
    assert config == from_hf(completed(hf))
    for field, value in expected.items():
        assert value_at(config, field) == value, field
