"""config.json is read as transformers reads it, but without transformers."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paged.architectures.config import DEMO
from paged.architectures.families.table import ARCHITECTURES
from paged.architectures.hf_config import from_hf, read_config
from paged.architectures.spec import KVShape
from paged.base.errors import CheckpointError, MissingModelError, UnsupportedModelError
from paged.text.tokenizer import Tokenizer
from tests.support.checkpoints import CONFIGS, edit_json
from tests.support.specs import value_at

SIZES = {
    "vocab_size": 211,
    "hidden_size": 128,
    "intermediate_size": 80,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
# So large that a quarter of a head is rotated.
OWN_SIZES: dict[str, dict[str, Any]] = {
    "GPTNeoXForCausalLM": {"hidden_size": 512},
    "Glm4MoeForCausalLM": {"hidden_size": 512},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 18},  # which has no default
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M*-E" * 9},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"] * 18},
}
HYBRIDS = (
    *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"),
    *("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
    *("NemotronHForCausalLM", "GraniteMoeHybridForCausalLM", "FalconH1ForCausalLM"),
)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Keys of config.json besides the sizes.
VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "old-names": {"torch_dtype": "bfloat16", "rope_theta": 5e5, "rope_scaling": None, "head_dim": 32},
    "null-in-rope": {"rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": None}},
    "old-linear": {"rope_theta": 2e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "both-names": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 3.0},
        "rope_scaling": {"rope_type": "dynamic", "factor": 3},
        "rope_theta": 7,
    },
    "llama3": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    "llama3-trained-on-less": {
        "rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 512, **LLAMA3}
    },
    "windows": {"use_sliding_window": True, "sliding_window": 100},
    "windows-from-a-layer-on": {"use_sliding_window": True, "max_window_layers": 35},
    "windows-off": {"use_sliding_window": False, "sliding_window": 100, "layer_types": None},
    "windows-none": {"use_sliding_window": True, "sliding_window": None},
    "windows-by-layer": {
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention"] * 18,
    },
    "heads": {"num_key_value_heads": 4, "head_dim": 48, "rms_norm_eps": 1e-5},
    "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
}


# Whose rope_parameters are objects by type of layer, with variants of their own.
BY_LAYER_TYPE = ("Olmo3ForCausalLM", "Gemma3ForCausalLM")
GEMMA4 = ("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM")  # which ignore what is not by layer type
ONE_SCALED_ROPE = ("null-in-rope", "old-linear", "both-names", "llama3", "llama3-trained-on-less")
BY_LAYER_TYPE_VARIANTS: dict[str, dict[str, Any]] = {
    "old": {"rope_theta": 2e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "old-yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 20.0,
            "original_max_position_embeddings": 100,
            "mscale": 0.7,
            "mscale_all_dim": 1.1,
        }
    },
    "both": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
        }
    },
    "one": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 3e5}}},
    "local-base": {"rope_local_base_freq": 2e4, "sliding_window": 7, "sliding_window_pattern": 2},
    "types": {"layer_types": ["full_attention", "sliding_attention"] * 18},
}


@pytest.mark.parametrize("variant", BY_LAYER_TYPE_VARIANTS)
@pytest.mark.parametrize("architecture", BY_LAYER_TYPE)
def test_rope_by_layer_type_is_as_in_transformers(architecture, variant):
    known = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type}
    hf = known | SIZES | BY_LAYER_TYPE_VARIANTS[variant]
    config = from_hf(hf)
    assert config == from_hf(completed(hf))
    assert len(config.ropes) == (
        1 if architecture == "Olmo3ForCausalLM" and variant in ("local-base", "types") else 2
    )


def completed(hf: dict[str, Any]) -> dict[str, Any]:
    """Complete a config.json by transformers' defaults."""
    return AutoConfig.for_model(**copy.deepcopy(hf)).to_dict() | {"architectures": hf["architectures"]}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_config_leaves_out_is_as_in_transformers(architecture, variant):
    known = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type}
    if architecture in GEMMA4 and variant == "old-names":
        pytest.skip("transformers lets rope_scaling replace rope_parameters")
    if architecture in (*BY_LAYER_TYPE, *GEMMA4) and variant in ONE_SCALED_ROPE:
        pytest.skip("transformers ignores or misreads a scaled rope that is not by layer type")
    if architecture in HYBRIDS and "layer_types" in VARIANTS[variant]:
        pytest.skip("their layers have no windows")
    without_rope = ("GPT2LMHeadModel", "NemotronHForCausalLM")
    if architecture in without_rope and any("rope" in key for key in VARIANTS[variant]):
        pytest.skip("these have no rope, and transformers objects")
    hf = known | SIZES | OWN_SIZES.get(architecture, {}) | VARIANTS[variant]
    try:
        whole = completed(hf)
    except StrictDataclassError:  # Phi-3 has but one way to scale its rope, Gemma 4 always a window
        with pytest.raises((UnsupportedModelError, CheckpointError)):
            from_hf(hf)
        return
    assert from_hf(json.loads(json.dumps(hf))) == from_hf(whole)


OWN_KEYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "GPT2LMHeadModel": (
        {
            "vocab_size": 211,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 2,
            "n_positions": 99,
            "n_inner": 50,
            "scale_attn_weights": False,
            "layer_norm_epsilon": 1e-3,
            "activation_function": "gelu",
        },
        {
            "hidden_size": 64,
            "num_layers": 3,
            "num_heads": 2,
            "layer.attention.kv.key_dim": 32,
            "max_context": 99,
            "layer.feed_forward.size": 50,
            "layer.attention.scale": 1.0,
            "norm.eps": 1e-3,
            "layer.feed_forward.activation": "gelu",
        },
    ),
    "GPTNeoXForCausalLM": (
        {
            **SIZES,
            "hidden_size": 512,
            "rotary_pct": 0.5,
            "rotary_emb_base": 500,
            "layer_norm_eps": 1e-3,
            "hidden_act": "gelu_new",
            "use_parallel_residual": False,
            "attention_bias": False,
        },
        {
            "layer.parallel": False,
            "layer.attention.qkv_bias": False,
            "layer.attention.output_bias": False,
            "layer.feed_forward.bias": True,
            "norm.eps": 1e-3,
            "layer.feed_forward.activation": "gelu_tanh",
        },
    ),
}


@pytest.mark.parametrize("architecture", OWN_KEYS)
def test_keys_of_their_own_are_as_in_transformers(architecture):
    values, expected = OWN_KEYS[architecture]
    known = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type}
    hf = known | values
    config = from_hf(hf)
    assert config == from_hf(completed(hf))
    assert {name: value_at(config, name) for name in expected} == expected
    if "rotary_pct" in values:
        assert (config.rope.theta, config.rope.rotary_dim) == (500, 8)


def test_gpt2_has_defaults_where_others_must_say():
    hf = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **SIZES, "num_key_value_heads": 2}
    config = from_hf(hf)
    # As transformers, which knows neither intermediate_size nor num_key_value_heads here.
    layer = config.layers[0]
    assert (layer.feed_forward.size, layer.attention.kv.num_kv_heads) == (512, 32)
    assert (config.learned_positions, config.max_context) == (True, 1024)


@pytest.mark.parametrize("scaling", [{}, {"mscale": 2.0, "mscale_all_dim": 0.5}, {"mscale": 2.0}])
def test_yarn_s_factor_is_that_of_transformers(scaling):
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 128}
    hf = {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", **SIZES}
    hf["rope_parameters"] = rope | scaling
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**copy.deepcopy(hf)), "cpu")
    assert from_hf(hf).rope.attention_factor == pytest.approx(expected, rel=1e-12)


def test_null_kv_heads_are_as_many_as_heads():
    hf = LLAMA | {"num_key_value_heads": None}
    assert from_hf(hf) == from_hf(completed(hf))
    assert from_hf(hf).kv_shapes[0].num_kv_heads == 32


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_transformers_wrote(name, tmp_path):
    config = CONFIGS[name]()
    config.architectures = [n for n, (kind, *_) in ARCHITECTURES.items() if kind == config.model_type]
    config.save_pretrained(tmp_path)
    assert from_hf(json.loads((tmp_path / "config.json").read_text())) == from_hf(config.to_dict())


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"vocab_size": None}, "vocab_size is missing"),
    "flag-is-text": (
        {"tie_word_embeddings": "true"},
        "tie_word_embeddings must be True or False",
    ),
    "flag-is-null": ({"attention_bias": None}, "attention_bias must be True or False, got None"),
    "eps": ({"rms_norm_eps": 0}, "rms_norm_eps must be above 0 and at most 1, got 0"),
    "eps-is-text": (
        {"rms_norm_eps": "1e-6"},
        "rms_norm_eps must be a number, above 0, at most 1, got '1e-6'",
    ),
    "rope-is-a-list": ({"rope_scaling": [1]}, r"rope_scaling must be an object, got \[1\]"),
    "rope-needs-a-factor": ({"rope_scaling": {"type": "linear"}}, "'linear' needs factor"),
    "rope-needs-all": (
        {"rope_scaling": {"type": "llama3", "factor": 8}},
        "low_freq_factor, high",
    ),
    "rope-shrinks": ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "at least 1, got 0.5"),
    "head-dim-too-large": ({"head_dim": 257}, "head_dim must be from 1 to 256, got 257"),
    "yarn-turns": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 2}},
        "beta_fast 1 must be at least beta_slow 2",
    ),
    "longrope-is-short": (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        r"short_factor must be a list of 2 numbers, got \[1.0\]",
    ),
    "longrope-is-negative": (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, -1], "long_factor": [1.0] * 2}},
        "short_factor must be above 0 and at most 10000, got -1",
    ),
    "no-head-dim": ({"hidden_size": 16}, "head_dim must be even and at least 2 for default rope, got 0"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_values_are_named(kind):
    values, message = WRONG[kind]
    with pytest.raises(CheckpointError, match=message):
        from_hf(LLAMA | values)


WRONG_IN: dict[str, tuple[str, dict[str, Any], str]] = {
    "value-heads": (
        "Qwen3_5ForCausalLM",
        {"linear_num_value_heads": 24},
        "linear_num_value_heads 24 do not divide among linear_num_key_heads 16",
    ),
    "wide-convolution": (
        "Qwen3NextForCausalLM",
        {"linear_conv_kernel_dim": 9},
        "linear_conv_kernel_dim must be from 2 to 8, got 9",
    ),
    "narrow-convolution": ("Lfm2ForCausalLM", {"conv_L_cache": 1}, "conv_L_cache must be from 2 to 8, got 1"),
    "few-layer-types": (
        "Qwen3_5ForCausalLM",
        {"layer_types": ["linear_attention"]},
        "layer_types must have one type for each of the 36 layers",
    ),
    "pattern-of-other-layers": (
        "NemotronHForCausalLM",
        {"hybrid_override_pattern": "M*-"},
        "hybrid_override_pattern has 3 layers, but num_hidden_layers is 36",
    ),
    "list-of-other-layers": (
        "NemotronHForCausalLM",
        {"layers_block_type": ["mamba"]},
        "layers_block_type has 1 layers, but num_hidden_layers is 36",
    ),
    "pattern-is-a-number": (
        "NemotronHForCausalLM",
        {"hybrid_override_pattern": 3},
        "hybrid_override_pattern must be a string of letters, got 3",
    ),
    "absent-pattern": (
        "NemotronHForCausalLM",
        {},
        "layers_block_type is missing, and so is hybrid_override_pattern",
    ),
    "heads-of-groups": (
        "NemotronHForCausalLM",
        {"hybrid_override_pattern": "M*" * 18, "n_groups": 3},
        "mamba_num_heads 128 do not divide among n_groups 3",
    ),
    "wide-convolution-of-mamba": (
        "NemotronHForCausalLM",
        {"hybrid_override_pattern": "M*" * 18, "conv_kernel": 9},
        "conv_kernel must be from 2 to 8, got 9",
    ),
    "granite-heads": (
        "GraniteMoeHybridForCausalLM",
        {"layer_types": ["mamba", "attention"] * 18, "mamba_d_head": 3},
        "mamba_n_heads 128 of mamba_d_head 3 are not mamba_expand 2 times hidden_size 128",
    ),
    "granite-few-types": (
        "GraniteMoeHybridForCausalLM",
        {"layer_types": ["mamba"]},
        r"layer_types must have one type for each of the 36 layers \(num_hidden_layers\), got 1",
    ),
    "falcon-heads": (
        "FalconH1ForCausalLM",
        {"mamba_d_ssm": 1000, "mamba_d_head": 8},
        "mamba_n_heads 128 of mamba_d_head 8 are not mamba_d_ssm 1000",
    ),
    "falcon-multipliers": (
        "FalconH1ForCausalLM",
        {"ssm_multipliers": [1.0]},
        r"ssm_multipliers must be 5 numbers, got \[1.0\]",
    ),
    "falcon-limits": (
        "FalconH1ForCausalLM",
        {"time_step_limit": [1.0, 0.5]},
        r"time_step_limit\[1\] must be at least 1 and at most 1e\+06, got 0.5",
    ),
    "absent-layer-types": ("Lfm2MoeForCausalLM", {}, "layer_types is missing"),
    "layers-with-attention": (
        "Lfm2ForCausalLM",
        {"full_attn_idxs": [36]},
        r"full_attn_idxs must be numbers of the 36 layers, got \[36\]",
    ),
    "adjusted-size": (
        "Lfm2ForCausalLM",
        {"block_ffn_dim_multiplier": 1e6},
        "intermediate_size, as adjusted, must be from 1 to 1048576",
    ),
    "gemma3-rope-of-a-type": (
        "Gemma3ForCausalLM",
        {"rope_parameters": {"full_attention": "x"}},
        "rope_parameters of full_attention must be an object, got 'x'",
    ),
    "granite-tiny": (
        "GraniteForCausalLM",
        {"residual_multiplier": 1e-200},
        "residual_multiplier must be at least 1e-06",
    ),
    "yarn-theta": (
        "LlamaForCausalLM",
        {"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        "rope_theta must be above 1 for yarn",
    ),
    "granite-swa-length": (
        "GraniteSWAForCausalLM",
        {"layer_rope_theta": [1e4]},
        r"layer_rope_theta must be \d+ numbers, got \[10000.0\]",
    ),
    "granite": ("GraniteForCausalLM", {"residual_multiplier": 0}, "residual_multiplier must be above 0"),
    "granite-eps": (
        "GraniteForCausalLM",
        {"residual_multiplier": 0.001, "rms_norm_eps": 1e-5},
        "rms_norm_eps 1e-05 must be at most the square of residual_multiplier 0.001",
    ),
    "gemma2": ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be from 1"),
    "gemma2-cap": (
        "Gemma2ForCausalLM",
        {"attn_logit_softcapping": "x"},
        "attn_logit_softcapping must be a number",
    ),
    "gemma2-large-cap": (
        "Gemma2ForCausalLM",
        {"final_logit_softcapping": 1e6},
        "final_logit_softcapping must be above 0 and at most 1000, got 1000000",
    ),
    "gemma3": ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern must be from 1"),
    "gemma3-rope": ("Gemma3ForCausalLM", {"rope_parameters": 3}, "rope_parameters must be an object, got 3"),
    "gemma4-all-shared": (
        "Gemma4ForCausalLM",
        {"num_kv_shared_layers": 36},
        "num_kv_shared_layers must be from 0 to 35, got 36",
    ),
    "gemma4-no-donor": (
        "Gemma4ForCausalLM",
        {"num_kv_shared_layers": 31},
        "num_kv_shared_layers 31 leaves no layer of full_attention whose K and V layer 5 could read",
    ),
    "gemma4-groups": (
        "Gemma4ForCausalLM",
        {"attention_k_eq_v": True, "num_global_key_value_heads": 5},
        "num_attention_heads 32 do not divide among num_global_key_value_heads of layer 5, 5",
    ),
    "gemma4-wide": ("Gemma4ForCausalLM", {"global_head_dim": 514}, "global_head_dim must be from 1 to 512"),
    "gemma4-odd": (
        "Gemma4ForCausalLM",
        {"global_head_dim": 33},
        "global_head_dim of layer 5 must be even, got 33",
    ),
    "gemma4-layer-types": (
        "Gemma4ForCausalLM",
        {"layer_types": ["full_attention"] * 35},
        r"layer_types must have one type for each of the 36 layers \(num_hidden_layers\), got 35: ",
    ),
    "gpt-neox-part": (
        "GPTNeoXForCausalLM",
        {"rotary_pct": 3.0},
        "rotary_pct must be above 0 and at most 1, got 3.0",
    ),
    "gpt-neox-base": (
        "GPTNeoXForCausalLM",
        {"rotary_emb_base": -1},
        "rotary_emb_base must be above 0",
    ),
    "gemma4-layers": (
        "Gemma4ForCausalLM",
        {"per_layer_config": {"36": {"head_dim": 64}}},
        "per_layer_config must be of layers 0 to 35, got '36'",
    ),
    "gemma4-layer": (
        "Gemma4ForCausalLM",
        {"per_layer_config": {"5": [64]}},
        "per_layer_config must be an object of objects",
    ),
    "gemma4-a-layer-s-heads": (
        "Gemma4ForCausalLM",
        {"per_layer_config": {"5": {"head_dim": 0}}},
        "head_dim of layer 5 must be from 2 to 512, got 0",
    ),
    "gemma4-a-reader-s-heads": (
        "Gemma4ForCausalLM",
        {"num_kv_shared_layers": 1, "per_layer_config": {"35": {"head_dim": 64}}},
        "per_layer_config gives layer 35 other heads than layer 29, whose K and V it reads",
    ),
    "gemma4-inputs": (
        "Gemma4ForCausalLM",
        {"vocab_size_per_layer_input": 210},
        "vocab_size_per_layer_input 210 must be at least vocab_size 211",
    ),
    "gemma4-window": ("Gemma4ForCausalLM", {"sliding_window": None}, "sliding_window must be"),
    "gemma4-eps": ("Gemma4ForCausalLM", {"rms_norm_eps": 0.01}, "rms_norm_eps must be above 0 and at most"),
    "gemma4-rope": (
        "Gemma4ForCausalLM",
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2}}},
        "partial_rotary_factor must be at least 0 and at most 1, got 2",
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [1, 2]},
        r"no_rope_layers must be 36 times 0 or 1, got \[1, 2\]",
    ),
    "glm4": (
        "Glm4ForCausalLM",
        {"partial_rotary_factor": 0.01},
        "partial_rotary_factor 0.01 rotates 1 of 128",
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 0}, "n_embd must be from 1 to 131072, got 0"),
    "gpt2-missing": ("GPT2LMHeadModel", {"hidden_size": None}, "n_embd is missing"),
    "gpt2-heads": ("GPT2LMHeadModel", {"n_head": 5}, "n_embd 128 does not divide among n_head 5"),
    "gpt2-inner": (
        "GPT2LMHeadModel",
        {"n_inner": "x"},
        "n_inner must be an int, from 1 to 1048576, got 'x'",
    ),
    "neox-eps": (
        "GPTNeoXForCausalLM",
        {"layer_norm_eps": 0, "hidden_size": 512},
        "layer_norm_eps must be above 0",
    ),
    "glm4-none": ("Glm4ForCausalLM", {"partial_rotary_factor": 0.0}, "partial_rotary_factor must be above 0"),
}


@pytest.mark.parametrize("kind", WRONG_IN)
def test_wrong_values_of_a_family_are_named(kind):
    architecture, values, message = WRONG_IN[kind]
    known = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type}
    with pytest.raises(CheckpointError, match=message):
        from_hf(known | SIZES | values)


@pytest.mark.parametrize("pattern", ["M*", "**", "M-"])
def test_patterns_without_some_part_load(pattern):
    """Without a feed-forward part, too, whose activation config.json names nevertheless."""
    known = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h"}
    config = from_hf(known | SIZES | {"hybrid_override_pattern": "*" + pattern * 17 + "*"})
    assert [len(layer.feed_forwards) for layer in config.layers[1:3]] == [0, int("-" in pattern)]


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "Lfm2ForCausalLM"])
def test_layers_of_unknown_kinds_and_models_without_attention_are_refused(architecture):
    known = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type}
    kind = "conv" if architecture.startswith("Lfm2") else "linear_attention"
    with pytest.raises(UnsupportedModelError, match=r"layer_types\[1\] is 'mamba'; supported are full_att"):
        from_hf(known | SIZES | {"layer_types": [kind, "mamba"] * 18})
    with pytest.raises(UnsupportedModelError, match=f"{architecture} without a layer of attention is not"):
        from_hf(known | SIZES | {"layer_types": [kind] * 36})


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        ("Qwen3_5ForCausalLM", {"attn_output_gate": False}, "attn_output_gate False is not supported; only"),
        ("Qwen3NextForCausalLM", {"output_gate_type": "sigmoid"}, "'sigmoid' is not supported; only silu"),
        (
            "NemotronHForCausalLM",
            {"hybrid_override_pattern": "M*x" * 12},
            r"pattern\[2\] is 'x'; supported are M",
        ),
        (
            "NemotronHForCausalLM",
            {"layers_block_type": ["mamba", "conv"] * 18},
            r"layers_block_type\[1\] is 'conv'; supported are linear_attention",
        ),
        (
            "NemotronHForCausalLM",
            {"hybrid_override_pattern": "M-" * 18},
            "without a layer of attention is not",
        ),
        (
            "NemotronHForCausalLM",
            {"hybrid_override_pattern": "M*" * 18, "mlp_hidden_act": "silu"},
            "'silu' is not",
        ),
        (
            "NemotronHForCausalLM",
            {"hybrid_override_pattern": "E*" * 18, "n_shared_experts": 2},
            "n_shared_experts 2 is not supported; 1 is",
        ),
        (
            "GraniteMoeHybridForCausalLM",
            {},
            "without a layer of attention is not supported, and none of its 36",
        ),
        (
            "GraniteMoeHybridForCausalLM",
            {"layer_types": ["mamba", "conv"] * 18},
            r"layer_types\[1\] is 'conv'; supported are linear_attention",
        ),
        (
            "GraniteMoeHybridForCausalLM",
            {"layer_types": ["attention"] * 36, "position_embedding_type": "alibi"},
            "position_embedding_type 'alibi' is not supported; 'rope' and 'nope' are",
        ),
    ],
)
def test_what_hybrids_do_not_have_is_named(architecture, values, message):
    known = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type}
    with pytest.raises(UnsupportedModelError, match=message):
        from_hf(known | SIZES | values)


@pytest.mark.parametrize(
    "name",
    ["Mamba2ForCausalLM", "MambaForCausalLM", "RwkvForCausalLM", "xLSTMForCausalLM", "JambaForCausalLM"],
)
def test_models_without_attention_are_refused_by_name(name):
    with pytest.raises(UnsupportedModelError, match=f"architecture '{name}' is not supported"):
        from_hf({"architectures": [name], "model_type": "x", **SIZES})


def test_gemma3_s_context_includes_the_scaling():
    hf = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **SIZES}
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert from_hf({**hf, **scaling, "max_position_embeddings": 4096}).max_context == 4096


def test_one_type_of_layer_has_no_dynamic_rope():
    hf = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **SIZES}
    ropes = {"sliding_attention": {"rope_type": "dynamic", "factor": 4.0}}
    with pytest.raises(UnsupportedModelError, match="rope type 'dynamic' is not supported for one type"):
        from_hf({**hf, "rope_parameters": ropes})


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "activation": ({"hidden_act": "gelu", "hidden_activation": "silu"}, "hidden_act 'gelu'"),
    "dtype": ({"dtype": "int8"}, "dtype 'int8' is not supported; supported are float64, float32"),
    "both-ways": ({"is_causal": False}, "is_causal False is not supported: each token attends to itself and"),
    "outer-partial-rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "rope-by-layer": ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
    "rope-type-is-a-list": ({"rope_scaling": {"type": ["linear"]}}, "rope_type .* default, linear"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_unsupported_values_are_named(kind):
    values, message = UNSUPPORTED[kind]
    with pytest.raises(UnsupportedModelError, match=message):
        from_hf(LLAMA | values)


UNSUPPORTED_IN: dict[str, tuple[str, dict[str, Any], str]] = {
    "layers-scaled": (
        "GPT2LMHeadModel",
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx True is not supported",
    ),
    "cross-attention": ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention True"),
    "gpt2-relu": (
        "GPT2LMHeadModel",
        {"activation_function": "relu"},
        "activation_function 'relu' is not supported; only gelu, gelu_python, gelu_pytorch_tanh, gelu_new",
    ),
    "gemma4-both-ways": (
        "Gemma4ForCausalLM",
        {"use_bidirectional_attention": "all"},
        "use_bidirectional_attention 'all' is not supported",
    ),
    "gemma4-layer-s-mlp": (
        "Gemma4ForCausalLM",
        {"per_layer_config": {"5": {"intermediate_size": 8}}},
        "per_layer_config with 'intermediate_size' is not supported; num_key_value_heads and head_dim are",
    ),
    "gemma4-one-rope": (
        "Gemma4ForCausalLM",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling is not supported in Gemma 4",
    ),
    "gemma4-layer-type": (
        "Gemma4ForCausalLM",
        {"layer_types": ["full_attention"] * 35 + ["linear_attention"]},
        r"layer_types\[35\] is 'linear_attention'; supported are full_attention and sliding_attention",
    ),
    "neox-list": ("GPTNeoXForCausalLM", {"hidden_act": ["gelu"]}, r"hidden_act \['gelu'\] is not supported"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED_IN)
def test_unsupported_values_of_a_family_are_named(kind):
    architecture, values, message = UNSUPPORTED_IN[kind]
    known = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture].model_type}
    with pytest.raises(UnsupportedModelError, match=message):
        from_hf(known | SIZES | values)


@pytest.mark.parametrize("is_written_by_layer", [False, True])
def test_what_layers_of_gemma4_read(is_written_by_layer):
    hf = {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        **SIZES,
        "num_hidden_layers": 12,
    }
    hf |= {"head_dim": 48, "global_head_dim": 64, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
    hf |= {"num_kv_shared_layers": 4}
    config = from_hf(json.loads(json.dumps(completed(hf))) if is_written_by_layer else hf)
    sliding, full = KVShape(4, 48, 48), KVShape(2, 64, 64)
    assert (*config.kv_shapes.values(),) == ((sliding,) * 5 + (full,)) * 2
    assert (*config.kv_sources.values(),) == (*range(8), 7, 7, 7, 5)
    assert [i for i, layer in enumerate(config.layers) if layer.attention.keys_as_values] == [5]
    assert config.tensor_names.skipped_prefixes[-4:] == tuple(
        f"model.layers.11.self_attn.{name}." for name in ("k_proj", "v_proj", "k_norm", "v_norm")
    )


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizer", "Qwen2TokenizerFast", None])
@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "mistral",
        "ministral",
        "ministral3",
        "mistral3",
        "qwen2",
        "qwen3",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen2_5_vl",
        "lfm2",
        "lfm2_moe",
        "nemotron_h",
        "granitemoehybrid",
        "falcon_h1",
        "phi3",
        "granite",
        "granite_swa",
        "olmo2",
        "olmo3",
        "smollm3",
        "glm4",
        "gemma4",
        "gemma4_text",
        "gemma4_unified_text",
        "gpt2",
        "gpt_neox",
    ],
)
def test_tokenizer_is_the_one_of_transformers(model_type, kind, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class=kind)
    edit_json(tmp_path / "config.json", model_type=model_type)
    ours, theirs = Tokenizer(tmp_path).hf, AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    text = "def f(x):\n    return ' naïve 日本語'"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.special_tokens_map == theirs.special_tokens_map


@pytest.mark.parametrize("kind", [5, ["LlamaTokenizer"], True])
def test_invalid_tokenizer_class_is_refused(kind, tmp_path):
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((DEMO / name).read_bytes())
    edit_json(tmp_path / "tokenizer_config.json", tokenizer_class=kind)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: tokenizer_class must be the name"):
        Tokenizer(tmp_path)


def test_unreadable_config_is_named(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: is not a regular file"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("names", "instead"),
    [
        (
            ["params.json", "tekken.json"],
            "which is Mistral's own format and is not read: take the same model in",
        ),
        (["params.json", "consolidated.00.pth"], "which is its author's own format and is not read"),
        (["adapter_config.json", "params.json"], "give the model that it is for, and the adapter as --lora"),
        (["a.txt"], None),
    ],
)
def test_what_stands_in_place_of_config_json_is_named(names, instead, tmp_path):
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(MissingModelError) as error:
        read_config(tmp_path)
    said = str(error.value).partition("a model directory has config.json and *.safetensors")[2]
    assert (instead in said) if instead else said == ""


def test_engine_does_not_import_the_compiler_of_torch():
    """It is slow to load, and any import could load it without being noticed."""
    code = """
import sys
from paged import LLMEngine
LLMEngine("demo", num_blocks=64).generate(["def", "class"], use_tqdm=False)
print(*{"torch._dynamo", "torch._inductor", "sympy", "triton"} & set(sys.modules))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == ""


@pytest.mark.parametrize("name", ["LlamaForCasualLM", "Qwen4MoeForCausalLM", "Rwkv5ForCausalLM", "X"])
def test_a_name_that_is_spelt_alike_is_not_proposed(name):
    """It would read as if its weights could be loaded."""
    with pytest.raises(UnsupportedModelError) as error:
        from_hf({"architectures": [name], "model_type": "x"})
    assert (
        str(error.value)
        == f"architecture '{name}' is not supported; `paged models --architectures` lists those that are"
    )
