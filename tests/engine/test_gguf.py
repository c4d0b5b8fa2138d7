"""Models of GGUF files: the greedy tokens of transformers on the numbers in the file, for every family."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from huggingface_hub.errors import HfHubHTTPError
from transformers import (
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2MoeConfig,
    LlamaConfig,
    NemotronHConfig,
    Olmo3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paged import CheckpointError, ConfigError, RequestError, SamplingParams, UnsupportedModelError
from paged.architectures.hf_config import read_config
from paged.checkpoints.gguf.gguf_file import GGML_TYPES, GgufTensor, open_gguf
from paged.checkpoints.model_directory import resolve
from paged.model.layers.rotary import scaled_frequencies
from paged.model.weights.loading import open_tensors
from paged.simulate.cost import layer_bytes, table_bytes
from tests.support.checkpoints import (
    CONFIGS,
    SHAPE,
    ExactReference,
    Reference,
    new_engine,
    ragged_prompts,
    random_model,
)
from tests.support.gguf_files import Stored, Typed, in_type, write_gguf

pytest.importorskip("gguf", reason="the package gguf is not installed")

from tests.support.gguf_models import write_model

# What a GGUF file can say: queries are scaled by the head's width, and every fourth layer has no rope.
OWN: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama-llama3.1": lambda: LlamaConfig(
        **{**SHAPE, "tie_word_embeddings": True, "max_position_embeddings": 16384},
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "gemma2": lambda: Gemma2Config(
        **{**SHAPE, "num_hidden_layers": 3, "tie_word_embeddings": True},
        sliding_window=24,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **{**SHAPE, "num_hidden_layers": 7, "tie_word_embeddings": True},
        sliding_window=24,
        query_pre_attn_scalar=16,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "olmo3": lambda: Olmo3Config(
        **{**SHAPE, "hidden_size": 64, "num_hidden_layers": 5},
        sliding_window=24,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
    "smollm3": lambda: SmolLM3Config(**{**SHAPE, "hidden_size": 64, "num_hidden_layers": 5}),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SHAPE, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=True
    ),
    "gpt_oss": lambda: GptOssConfig(
        **(CONFIGS["gpt_oss"]().to_dict() | {"swiglu_limit": 7.0, "swiglu_alpha": 1.702})
    ),
    "gemma4-keys-as-values": lambda: Gemma4TextConfig(
        **{**SHAPE, "num_hidden_layers": 5},
        layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full")],
        sliding_window=24,
        global_head_dim=40,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
    ),
    # llama.cpp has experts in every layer, divides their weights by the sum, and ties LFM2's head.
    "qwen3_next": lambda: Qwen3NextConfig(
        **(CONFIGS["qwen3_next"]().to_dict() | {"mlp_only_layers": [], "norm_topk_prob": True})
    ),
    "lfm2_moe": lambda: Lfm2MoeConfig(**(CONFIGS["lfm2_moe"]().to_dict() | {"tie_word_embeddings": True})),
    # Nor can a file say how long time steps are.
    "nemotron_h": lambda: NemotronHConfig(**(CONFIGS["nemotron_h"]().to_dict() | {"time_step_min": 0.001})),
    "nemotron_h_moe-latent": lambda: NemotronHConfig(
        **(CONFIGS["nemotron_h_moe-latent"]().to_dict() | {"time_step_min": 0.001})
    ),
    **{
        name: lambda name=name: GraniteMoeHybridConfig(
            **(
                CONFIGS[name]().to_dict()
                | {"time_step_limit": (0.0, math.inf), "position_embedding_type": None}
            )
        )
        for name in ("granitemoehybrid", "granitemoehybrid-dense")
    },
    "falcon_h1-gate": lambda: FalconH1Config(
        **(
            CONFIGS["falcon_h1-gate"]().to_dict()
            | {"time_step_limit": (0.0, math.inf), "mamba_proj_bias": False, "projectors_bias": False}
        )
    ),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SHAPE,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=24,
    ),
}
SAME = [
    *("llama-tied-bias", "llama-linear", "llama-llama3", "llama-yarn", "mistral", "qwen2", "qwen3", "phi3"),
    *("phi3-longrope", "granite", "olmo2", "glm4", "gpt2", "gpt_neox", "olmoe", "mixtral"),
    *("granitemoe", "glm4_moe", "minimax_m2", "gemma4", "gemma4-experts", "qwen3_5", "qwen3_5_moe", "lfm2"),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def greedy(engine: Any, lengths: list[int], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    outputs = engine.generate(ragged_prompts(lengths), params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def assert_same_tokens(model: Any, path: Path, directory: Path, lengths: list[int], max_tokens: int) -> Any:
    """Compare the engine on a file with transformers on the same model, in a ragged batch."""
    model.save_pretrained(directory)
    # The routers and states of transformers in float32 are too far from the exact ones for some prompts.
    expected = (ExactReference if path.stem in STATES else Reference)(directory)
    engine = new_engine(path)
    prompts = ragged_prompts(lengths)
    assert greedy(engine, lengths, max_tokens) == [expected.greedy(each, max_tokens)[0] for each in prompts]
    return engine


@pytest.mark.parametrize("name", [*SAME, *OWN])
def test_family(name, tmp_path):
    """Names, order of rows, norms and config, with windows and rope beyond the trained context."""
    model = random_model((CONFIGS | OWN)[name]())
    path = write_model(tmp_path / f"{name}.gguf", model)
    lengths = [70, 5] if name == "phi3-longrope" else [40, 9, 1]
    assert_same_tokens(model, path, tmp_path / "hf", lengths, 6)


STATES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "lfm2_moe")
MAMBA = (
    "nemotron_h",
    "nemotron_h_moe-latent",
    "granitemoehybrid",
    "granitemoehybrid-dense",
    "falcon_h1-gate",
)


@pytest.mark.parametrize("name", [*STATES, *MAMBA])
def test_tensors_of_states_are_those_of_safetensors(name, tmp_path):
    """Under the same names, in the same order of rows and columns; of decays the rates."""
    model = random_model((CONFIGS | OWN)[name]())
    path = resolve(str(write_model(tmp_path / "model.gguf", model)))
    model.save_pretrained(tmp_path / "hf")
    found: list[dict[str, Any]] = []
    for directory in (path, tmp_path / "hf"):
        names = read_config(directory).tensor_names
        with open_tensors(directory, names) as sources:
            found.append({key: tensor.read().float() for key, tensor in sources.items()})
    ours, theirs = found
    rates = {key: value for key, value in ours.items() if key.endswith(".A")}
    assert bool(rates) == (not name.startswith("lfm2"))
    if name.startswith("falcon"):  # whose file has these multiplied
        theirs["model.embed_tokens.weight"] *= model.config.embedding_multiplier
        theirs["lm_head.weight"] *= model.config.lm_head_multiplier
    for key, value in rates.items():
        assert torch.equal(value, -theirs[f"{key}_log"].exp())
    shared = ours.keys() & theirs.keys()
    assert {key.rpartition(".")[2] for key in theirs.keys() - shared} <= {"A_log", "weight"}
    assert len(shared) > len(theirs) / 2
    for key in shared:
        torch.testing.assert_close(ours[key], theirs[key], atol=3e-7, rtol=3e-7, msg=key)


VISION = {
    "qwen2vl": lambda: Qwen2Config(**SHAPE),
    "qwen3vl": lambda: Qwen3Config(**SHAPE),
    "qwen3vlmoe": OWN["qwen3_moe"],
}


@pytest.mark.parametrize("architecture", VISION)
def test_text_parts_of_qwen_vl(architecture, tmp_path):
    """Their metadata says how the three parts of a position are rotated, which are equal in text."""
    model = random_model(VISION[architecture]())
    more = {f"{architecture}.rope.dimension_sections": [4, 2, 2, 0], f"{architecture}.n_deepstack_layers": 3}
    path = write_model(tmp_path / "model.gguf", model, more=more, architecture=architecture)
    assert_same_tokens(model, path, tmp_path / "hf", [40, 9, 1], 6)


def test_further_layers_of_hybrids_are_skipped(tmp_path):
    """block_count includes the layers that predict further tokens, which are behind the others."""
    model = random_model(CONFIGS["qwen3_5"]())
    path = write_model(tmp_path / "model.gguf", model)
    expected = greedy(new_engine(path), [9], 4)
    more = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    with mock.patch("tests.support.gguf_models.write_gguf", with_a_further_layer):
        write_model(path, model, more=more)
    assert greedy(new_engine(path), [9], 4) == expected
    with pytest.raises(CheckpointError, match=r"nextn_predict_layers 5 contradicts block_count 5"):
        new_engine(write_model(path, model, more={"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 5}))


def with_a_further_layer(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Path:
    more = {
        f"blk.4.{part}": tensors["output_norm.weight"] for part in ("attn_norm.weight", "nextn.enorm.weight")
    }
    return write_gguf(path, metadata, {**tensors, **more})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ssm.time_step_rank": 3}, "linear_num_value_heads 3 do not divide among linear_num_key_heads 2"),
        ({"ssm.conv_kernel": 9}, r"linear_conv_kernel_dim must be from 2 to 8, got 9"),
        ({"ssm.state_size": None}, r"qwen35.ssm.state_size is missing from the metadata"),
    ],
    ids=["heads", "convolution", "absent"],
)
def test_sizes_of_states_that_do_not_fit(change, message, tmp_path):
    model = random_model(CONFIGS["qwen3_5"]())
    more = {f"qwen35.{key}": value for key, value in change.items()}
    with pytest.raises(CheckpointError, match=message):
        new_engine(write_model(tmp_path / "model.gguf", model, more=more))


def test_rates_above_0_are_refused(tmp_path):
    model = random_model(OWN["nemotron_h"]())
    path = tmp_path / "model.gguf"

    def with_a_growing_state(path: Path, metadata: Any, tensors: Mapping[str, Stored]) -> Path:
        rates = torch.full((4, 1), -1.0)
        rates[2] = 0.5
        stored, _ = in_type("F32", rates, torch.Generator())
        return write_gguf(path, metadata, {**tensors, "blk.3.ssm_a": stored})

    with mock.patch("tests.support.gguf_models.write_gguf", with_a_growing_state):
        write_model(path, model)
    message = r"blk.3.ssm_a is 0.5 at \[2\], but must be finite and not above 0"
    with pytest.raises(CheckpointError, match=message):
        new_engine(path)


def delta_of(**sizes: int) -> Callable[[], PreTrainedConfig]:
    """Return what makes a Qwen3.5 of two value heads for each key head."""
    values = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    return lambda: Qwen3_5TextConfig(
        **{**SHAPE, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64},
        **values,
        **sizes,
        layer_types=["linear_attention", "full_attention"],
    )


@pytest.mark.parametrize(("value_dim", "kind"), [(32, "Q8_0"), (128, "Q4_K"), (128, "Q6_K"), (16, "Q4_1")])
def test_columns_of_value_heads_in_codes(value_dim, kind, tmp_path):
    """Groups are moved with their factors; those of half a unit, too; where groups are torn, inputs are."""
    model = random_model(delta_of(linear_value_head_dim=value_dim)())
    path = write_model(tmp_path / "model.gguf", model, lambda name: kind if "blk." in name else "F16")
    engine = assert_same_tokens(model, path, tmp_path / "hf", [33, 2, 9], 4)
    assert (engine.runner.model.obstacle_to_recording is None) == (value_dim > 16)


def q4_k_m(name: str) -> str:
    """Return the types of a Q4_K_M file: some V and last products are finer, as is the head."""
    finer = name.startswith(("output.", "token_embd.", "blk.1.ffn_down", "blk.1.attn_v"))
    return "Q6_K" if finer else "Q4_K"


OTHERS = {
    "attn_q": "Q5_K",
    "attn_k": "Q5_0",
    "attn_v": "Q4_1",
    "attn_output": "IQ4_XS",
    "ffn_gate": "Q4_0",
    "ffn_up": "Q5_1",
    "ffn_down": "IQ4_NL",
}


def others(name: str) -> str:
    if name.startswith("blk."):
        return OTHERS[name.split(".")[2]]
    return "F16" if name == "output.weight" else "BF16"


WIDE = {**SHAPE, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
NARROW = {**SHAPE, "hidden_size": 64, "intermediate_size": 96}
MIXES: dict[str, tuple[dict[str, Any], Callable[[str], str]]] = {
    "Q4_K_M-tied": ({**WIDE, "tie_word_embeddings": True}, q4_k_m),
    "Q4_K_M": (WIDE, q4_k_m),
    "Q8_0": (NARROW, lambda _: "Q8_0"),
    "others": (WIDE, others),
}


@pytest.mark.parametrize("name", MIXES)
def test_quantised(name, tmp_path):
    """Types that differ within a product, rows of Q and K reordered, embeddings looked up in codes."""
    shape, type_of = MIXES[name]
    model = random_model(LlamaConfig(**shape))
    path = write_model(tmp_path / "model.gguf", model, type_of)
    engine = assert_same_tokens(model, path, tmp_path / "hf", [33, 2, 9], 4)
    expected = {"Q4_K_M": "GGUF Q4_K and GGUF Q6_K", "Q8_0": "GGUF Q8_0"}.get(name)
    assert expected is None or expected in str(engine.runner.model.stored_weights)


EXPERTS = Qwen3MoeConfig(
    **NARROW, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
)
# By layer: of each expert gate and up together, and each for itself.
TYPES_OF_EXPERTS = {
    "blk.0.ffn_gate_exps.weight": "Q8_0",
    "blk.0.ffn_up_exps.weight": "Q8_0",
    "blk.0.ffn_down_exps.weight": "Q4_0",
    "blk.1.ffn_gate_exps.weight": "Q4_0",
    "blk.1.ffn_up_exps.weight": "Q8_0",
    "blk.1.ffn_down_exps.weight": "F16",
}


def write_experts(path: Path, model: Any, **more: Any) -> Path:
    types = {f"qwen3moe.{key}": value for key, value in more.items()}
    return write_model(path, model, lambda name: TYPES_OF_EXPERTS.get(name, "F16"), more=types)


def test_quantised_experts(tmp_path):
    """Types that differ by stack, and within the product of gate and up."""
    model = random_model(EXPERTS)
    path = write_experts(tmp_path / "model.gguf", model)
    engine = assert_same_tokens(model, path, tmp_path / "hf", [33, 2, 9], 4)
    assert "GGUF Q8_0 and GGUF Q4_0" in str(engine.runner.model.stored_weights)


KINDS = [kind.name for kind in GGML_TYPES.values() if kind.in_blocks]


def test_experts_of_every_type(tmp_path):
    """Stacks with biases, whose gates and ups are of one type in the first layer, as in gpt-oss' files."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 5, "num_local_experts": 4}
    model = random_model(GptOssConfig(**(OWN["gpt_oss"]().to_dict() | sizes | {"layer_types": None})))
    kinds = iter(["MXFP4"] * 2 + KINDS * 2)
    types = {
        f"blk.{layer}.ffn_{part}_exps.weight": next(kinds)
        for layer in range(5)
        for part in ("gate", "up", "down")
    }
    assert {*types.values()} == {*KINDS}
    path = write_model(tmp_path / "model.gguf", model, lambda name: types.get(name, "F32"))
    assert_same_tokens(model, path, tmp_path / "hf", [9, 3], 2)


def test_experts_that_contradict_the_metadata_are_named(tmp_path):
    """A stack that is missing, or has fewer or more experts or rows; and routing of another kind."""
    path = write_experts(tmp_path / "a.gguf", random_model(EXPERTS))
    metadata, tensors = contents(path)
    up = tensors.pop("blk.0.ffn_up_exps.weight")
    fewer = Stored(up.type, [3, *up.shape[1:]], up.data[: len(up.data) * 3 // 4])
    flat = Stored(up.type, [math.prod(up.shape)], up.data)
    for changed, keys, expected in (
        ({}, {}, r"a\.gguf: blk\.0\.ffn_up_exps\.weight\[0\], .* … are missing"),
        ({"blk.0.ffn_up_exps.weight": fewer}, {}, r"blk\.0\.ffn_up_exps\.weight\[3\] is missing"),
        ({"blk.0.ffn_up_exps.weight": flat}, {}, r"ffn_up_exps\.weight has shape \[\d+\], but must have"),
        ({"blk.0.ffn_up_exps.weight": up}, {"expert_count": 3}, r"exps\.weight\[3\], .* are not part of"),
        (
            {"blk.0.ffn_up_exps.weight": up},
            {"expert_feed_forward_length": 64},
            r"blk\.0\.ffn_gate_exps\.weight\[0\] has shape \[32, 68\], but its metadata makes it \[64, 68\]",
        ),
        ({}, {"expert_used_count": 5}, r"num_experts_per_tok 5 must be at most num_experts 4"),
        ({}, {"expert_gating_func": 2}, r"qwen3moe\.expert_gating_func 2 is not supported; 1 is"),
        ({}, {"expert_weights_norm": False}, r"qwen3moe\.expert_weights_norm False is not supported; True"),
    ):
        own = metadata | {f"qwen3moe.{key}": value for key, value in keys.items()}
        write_gguf(path, own, {**tensors, **changed})
        with pytest.raises((CheckpointError, UnsupportedModelError), match=expected):
            new_engine(path)


def test_rope_of_llama_3_1_is_recognised(tmp_path):
    """The rope that config.json has, to the last bit; other factors are used as they are."""
    for name, kind in {"llama-llama3.1": "llama3", "llama-llama3": "longrope"}.items():
        config = (CONFIGS | OWN)[name]()
        path = write_model(tmp_path / f"{name}.gguf", random_model(config))
        directory = resolve(str(path))
        rope = json.loads((directory / "config.json").read_text())["rope_parameters"]
        assert rope["rope_type"] == kind
        if kind == "llama3":
            assert rope == config.rope_parameters
        own = read_config(directory)
        found = scaled_frequencies(own.rope, config.head_dim)
        expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
        plain = ROPE_INIT_FUNCTIONS["linear"](
            LlamaConfig(
                **SHAPE,
                rope_parameters={
                    "rope_type": "linear",
                    "factor": 1.0,
                    "rope_theta": config.rope_parameters["rope_theta"],
                },
            ),
            device="cpu",
        )[0]
        torch.testing.assert_close(found, expected, rtol=2e-7, atol=0)
        assert not torch.allclose(found, plain)


def numbers_of(values: list[float], shape: Sequence[int] | None = None) -> Stored:
    return Stored("F32", shape or [len(values)], struct.pack(f"<{len(values)}f", *values))


WRONG_FACTORS: dict[str, tuple[str, Stored, str]] = {
    "short": (
        "rope_freqs.weight",
        numbers_of([1.0] * 7),
        "is F32 of shape [7], but must be F32 of shape [8]",
    ),
    "square": ("rope_freqs.weight", numbers_of([1.0] * 8, [2, 4]), "is F32 of shape [2, 4], but must be"),
    "dtype": ("rope_freqs.weight", Stored("F16", [8], bytes(16)), "is F16 of shape [8], but must be F32"),
    "nan": (
        "rope_freqs.weight",
        numbers_of([1.0] * 7 + [math.nan]),
        "is nan at [7], but must be finite and above 0",
    ),
    "zero": ("rope_freqs.weight", numbers_of([1.0, 0.0] * 4), "is 0 at [1], but must be finite and above 0"),
    "infinite": (
        "rope_freqs.weight",
        numbers_of([math.inf] * 8),
        "is inf at [0], but must be finite and above 0",
    ),
    "scaled": ("rope_freqs.weight", numbers_of([2.0] * 8), "contradicts llama.rope.scaling.type 'linear'"),
    "other-name": (
        "rope_freqs.weight2",
        numbers_of([2.0] * 8),
        "rope_freqs.weight2 is not part of the model",
    ),
    "of-a-layer": (
        "blk.0.rope_freqs.weight",
        numbers_of([2.0] * 8),
        "blk.0.rope_freqs.weight is not part of",
    ),
}


@pytest.mark.parametrize("name", WRONG_FACTORS)
def test_wrong_factors_of_rope_are_refused(name, tmp_path):
    tensor, stored, expected = WRONG_FACTORS[name]
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    more = linear if name == "scaled" else {}
    path = write_model(tmp_path / "a.gguf", random_model(LlamaConfig(**NARROW)), more=more)
    metadata, tensors = contents(path)
    write_gguf(path, metadata, {**tensors, tensor: stored})
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        new_engine(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Write a model of one type, as one file."""
    path = tmp_path_factory.mktemp("gguf") / "small-Q8_0.gguf"
    return write_model(path, random_model(LlamaConfig(**NARROW)), lambda _: "Q8_0")


def test_parts_are_one_model(small, tmp_path):
    """Of a directory that has nothing else."""
    expected = greedy(new_engine(small), [9, 3], 4)
    split(small, tmp_path / "parts")
    engine = new_engine(tmp_path / "parts")
    assert greedy(engine, [9, 3], 4) == expected
    assert greedy(new_engine(tmp_path / "parts" / "m-00002-of-00002.gguf"), [9, 3], 4) == expected
    (tmp_path / "parts" / "b.gguf").write_bytes(small.read_bytes())
    with pytest.raises(CheckpointError, match=r"several GGUF files; .* b\.gguf, m-00001-of-00002\.gguf"):
        new_engine(tmp_path / "parts")


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """Return the metadata and tensors of a file."""
    with open_gguf(path) as gguf:
        stored = {
            name: Stored(
                tensor.type.name, dims_of(tensor), tensor.file.read_bytes(tensor.start, tensor.num_bytes)
            )
            for name, tensor in gguf.tensors.items()
        }
        return dict(gguf.metadata), stored


def split(path: Path, directory: Path, suffix: str = ".gguf") -> None:
    directory.mkdir()
    metadata, stored = contents(path)
    names = sorted(stored)
    for i, part in enumerate((names[:7], names[7:])):
        keys = {
            "split.no": Typed(2, i),
            "split.count": Typed(2, 2),
            "split.tensors.count": Typed(5, len(names)),
        }
        own = {**keys, **(metadata if i == 0 else {})}
        write_gguf(directory / f"m-0000{i + 1}-of-00002{suffix}", own, {name: stored[name] for name in part})


def dims_of(tensor: GgufTensor) -> list[int]:
    kind = tensor.type
    row = tensor.shape[-1] // kind.num_bytes * kind.num_inputs if kind.in_blocks else tensor.shape[-1]
    return [*tensor.shape[:-1], row]


def test_capitals(small, tmp_path):
    """Of a file, of parts, and of a file in a directory."""
    (tmp_path / "a").mkdir()
    whole = tmp_path / "a" / "M.GGUF"
    whole.write_bytes(small.read_bytes())
    expected = greedy(new_engine(small), [3], 2)
    assert greedy(new_engine(whole), [3], 2) == expected
    assert resolve(str(whole.parent)) == resolve(str(whole))
    split(small, tmp_path / "parts", ".Gguf")
    assert greedy(new_engine(tmp_path / "parts" / "m-00002-of-00002.Gguf"), [3], 2) == expected
    assert new_engine(small).fingerprint == new_engine(whole).fingerprint
    with pytest.raises(CheckpointError, match=r"^no such directory or GGUF file: .*other\.GGUF"):
        resolve(str(tmp_path / "other.GGUF"))


def test_the_cache(small, tmp_path, monkeypatch):
    """What a cleaner took or damaged is made again; a disk that is full is one error."""
    directory = resolve(str(small))
    sound = {file.name: file.read_bytes() for file in directory.iterdir()}
    for name in (small.name, "config.json", "sha256.json"):
        for damage in (b"", b"{}", b'{"config.json": "0"}', sound[name][:-1] + b" ", None):
            (directory / name).unlink()
            if damage is not None:
                (directory / name).write_bytes(damage)
            assert resolve(str(small)) == directory
            assert {file.name: file.read_bytes() for file in directory.iterdir()} == sound
    assert [each.name for each in directory.parent.iterdir()] == [directory.name]
    assert (directory / small.name).readlink() == small

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(CheckpointError, match=r"cannot be written: No space left on device; XDG_CACHE_HOME"):
        resolve(str(small))


def test_the_cache_keeps_what_was_used_last(small, tmp_path):
    """32 directories, and those of the last day."""
    cache = tmp_path / "cache" / "paged" / "gguf"
    for i in range(40):
        (cache / f"{i:02}").mkdir(parents=True)
        (cache / f"{i:02}" / "config.json").touch()
        os.utime(cache / f"{i:02}", (i, i) if i else None)
    own = resolve(str(small))
    kept = sorted(each.name for each in cache.iterdir())
    assert kept == sorted(["00", own.name, *(f"{i:02}" for i in range(10, 40))])
    os.utime(own, (0, 0))
    assert resolve(str(small)).stat().st_mtime > 0


def test_processes_make_the_same_directory_at_once(small):
    """While another one damages it."""
    with ThreadPoolExecutor(4) as threads:
        for _ in range(10):
            directory = resolve(str(small))
            (directory / "config.json").write_text("")
            found = list(threads.map(lambda _: resolve(str(small)), range(4)))
            assert found == [directory] * 4
            assert json.loads((directory / "config.json").read_text())["model_type"] == "llama"
            assert not list(directory.glob("unfinished*"))


def test_saved_prefixes_belong_to_the_file(small, tmp_path):
    other = tmp_path / small.name
    content = bytearray(small.read_bytes())
    content[-40] ^= 1  # a code of the last tensor
    other.write_bytes(content)
    assert new_engine(small).fingerprint != new_engine(other).fingerprint


def test_options_that_contradict_the_file(small):
    with pytest.raises(ConfigError, match=r"small-Q8_0\.gguf has Q8_0 already; leave it out"):
        new_engine(small, quantization="int8")
    with pytest.raises(CheckpointError, match=r"revision 'main' names a version on the hub, but .* a file"):
        new_engine(small, revision="main")


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": (
        {"general.architecture": "rwkv7"},
        "general.architecture 'rwkv7' is not supported; supp",
    ),
    "missing": ({"llama.context_length": None}, "llama.context_length is missing from the metadata"),
    "type": ({"llama.block_count": "2"}, "block_count must be a whole number, got '2'"),
    "layers": ({"llama.block_count": 2**31}, "block_count 2147483648 contradicts the 21 tensors"),
    "unknown": ({"llama.expert_group_count": 8}, "llama.expert_group_count (8) is not supported"),
    "by-layer": ({"llama.attention.head_count_kv": [1, 2]}, "head_count_kv differs by layer"),
    "longrope": (
        {"llama.rope.scaling.type": "longrope"},
        "rope.scaling.type 'longrope' is not supported; supp",
    ),
    "scaling": ({"llama.rope.scaling.type": "mrope"}, "rope.scaling.type 'mrope' is not supported"),
    "causal": ({"llama.attention.causal": False}, "llama.attention.causal false is not supported"),
    "value": ({"llama.attention.value_length": 8}, "value_length 8 other than key_length 16"),
    "range": (
        {"llama.attention.layer_norm_rms_epsilon": -1.0},
        "the config that its metadata make: rms_norm_eps",
    ),
    "heads": ({"llama.attention.head_count": 0}, "head_count 0 does not fit embedding_length 64"),
    "adapter": ({"general.type": "adapter"}, "general.type is 'adapter', but only files of the type 'model'"),
    "images": ({"general.type": "mmproj", "general.architecture": "clip"}, "general.type is 'mmproj'"),
    "blocks": ({"general.quantization_version": 1}, "general.quantization_version 1 is not supported; 2 is"),
    "new-blocks": ({"general.quantization_version": 3}, "general.quantization_version 3 is not supported"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_make_no_model_are_refused(name, tmp_path):
    changes, expected = CHANGES[name]
    model = random_model(LlamaConfig(**NARROW))
    path = write_model(tmp_path / "a.gguf", model, lambda _: "Q8_0", more=changes)
    with pytest.raises((CheckpointError, UnsupportedModelError)) as info:
        new_engine(path)
    assert expected in str(info.value)
    assert str(path) in str(info.value)


def test_versions_of_blocks_that_are_known(tmp_path):
    """Of floats, none matters."""
    model = random_model(LlamaConfig(**NARROW))
    for kind, version in (("Q8_0", 2), ("Q8_0", None), ("F32", 1)):
        more = {"general.quantization_version": version, "general.type": "model"}
        resolve(str(write_model(tmp_path / "a.gguf", model, lambda _, kind=kind: kind, more=more)))


@pytest.mark.parametrize("name", ["gpt_neox", "olmo2", "llama"])
def test_a_missing_head(name, tmp_path):
    """The embedding is the head where llama.cpp takes it."""
    path = write_model(
        tmp_path / "a.gguf", random_model((CONFIGS | {"llama": lambda: LlamaConfig(**NARROW)})[name]())
    )
    metadata, tensors = contents(path)
    del tensors["output.weight"]
    write_gguf(path, metadata, tensors)
    if name == "llama":
        assert read_config(resolve(str(path))).tie_word_embeddings
        return
    with pytest.raises(CheckpointError, match=r"a\.gguf: output\.weight is missing; models of architecture"):
        resolve(str(path))


def test_bits_of_weights(small, tmp_path):
    """Those of the tensors, for the simulator: 34 bytes for 32 weights, and Q4_K with some Q6_K."""
    config = read_config(resolve(str(small)))
    assert (config.layer_bits, config.table_bits) == (8.5, 8.5)
    model = random_model(LlamaConfig(**WIDE))
    config = read_config(resolve(str(write_model(tmp_path / "a.gguf", model, q4_k_m))))
    assert config.layer_bits is not None
    assert 4.5 < config.layer_bits < 6.5625
    assert config.table_bits == 6.5625
    assert layer_bytes(config) == sum(
        tensor.num_bytes
        for name, tensor in tensors_of(tmp_path / "a.gguf").items()
        if name.startswith("blk.") and len(tensor.shape) == 2
    )
    assert table_bytes(config, 256) == 210
    config = read_config(resolve(str(write_model(tmp_path / "b.gguf", model))))
    assert (config.layer_bits, config.table_bits) == (None, None)


def tensors_of(path: Path) -> Mapping[str, GgufTensor]:
    with open_gguf(path) as gguf:
        return gguf.tensors


def longrope_of_llama() -> LlamaConfig:
    rope = {**CONFIGS["phi3-longrope"]().rope_parameters, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.5] * 8, "long_factor": [2.5] * 8, "partial_rotary_factor": 1.0}
    return LlamaConfig(**SHAPE, rope_parameters={**rope, **factors})


# What another family has, and would be dropped.
FOREIGN: dict[str, tuple[Callable[[], PreTrainedConfig], dict[str, Any], str]] = {
    "granite-window": (
        CONFIGS["granite"],
        {"granite.attention.sliding_window": 24},
        "granite.attention.sliding_window (24) is not supported",
    ),
    "smollm3-window": (
        OWN["smollm3"],
        {"smollm3.attention.sliding_window": 24},
        "smollm3.attention.sliding_window (24) is not supported",
    ),
    "gemma3-pattern": (
        OWN["gemma3"],
        {"gemma3.attention.sliding_window_pattern": 0},
        "attention.sliding_window_pattern must be at least 1, got 0",
    ),
    "phi3-factors": (
        CONFIGS["phi3"],
        {"phi3.rope.scaling.type": "longrope"},
        "rope_factors_long.weight, rope_factors_short.weight and phi3.rope.scaling.attn_factor go together",
    ),
    "llama-factors": (
        longrope_of_llama,
        {},
        "rope_factors_long.weight is not supported in a model of architecture llama",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_a_family_would_drop_is_refused(name, tmp_path):
    config, changes, expected = FOREIGN[name]
    path = write_model(tmp_path / "a.gguf", random_model(config()), more=changes)
    with pytest.raises((CheckpointError, UnsupportedModelError)) as info:
        resolve(str(path))
    assert expected in str(info.value)


def test_tensors_that_contradict_the_metadata_are_named(tmp_path):
    model = random_model(LlamaConfig(**NARROW))
    path = write_model(tmp_path / "a.gguf", model, more={"llama.feed_forward_length": 128})
    with pytest.raises(CheckpointError, match=r"a\.gguf: blk\.0\.ffn_gate\.weight has shape \[96, 64\]"):
        new_engine(path)
    path = write_model(tmp_path / "b.gguf", model, more={"llama.block_count": 3})
    with pytest.raises(CheckpointError, match=r"b\.gguf: blk\.2\.attn_k\.weight, .* missing"):
        new_engine(path)
    path = write_model(tmp_path / "c.gguf", model, more={"llama.block_count": 1})
    with pytest.raises(CheckpointError, match=r"c\.gguf: blk\.1\.attn_k\.weight, .* not part of the model"):
        new_engine(path)


def test_an_unknown_tokenizer_may_be_replaced(tmp_path):
    keys = {"model": "rwkv", "tokens": ["a", "b"], "token_type": [1, 3], "eos_token_id": 1}
    more = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    path = write_model(tmp_path / "a.gguf", random_model(LlamaConfig(**NARROW)), more=more)
    reason = (
        r"a\.gguf: tokenizer\.ggml\.model 'rwkv' is not supported; .* give another tokenizer with tokenizer="
    )
    with pytest.raises(UnsupportedModelError, match=reason):
        new_engine(path, skip_tokenizer_init=False)
    assert new_engine(path).eos_token_ids == {1}
    assert new_engine(path, skip_tokenizer_init=False, tokenizer="demo").tokenizer is not None


@pytest.mark.parametrize("number", [None, 0, 1, 2, 3, 4, 9])
def test_pooling_of_embeddings_is_followed(number, tmp_path):
    more = {"llama.pooling_type": number}
    path = write_model(tmp_path / "a.gguf", random_model(CONFIGS["llama-tied-bias"]()), more=more)
    if number == 9:
        with pytest.raises(CheckpointError, match=r"llama.pooling_type must be one of 0 \(none\), .*got 9"):
            resolve(str(path))
        return
    engine = new_engine(path)
    name = {1: "mean", 2: "cls", None: "last", 3: "last"}.get(number)
    prompts = ragged_prompts([9])
    expected = engine.embed(prompts, use_tqdm=False, pooling=name or "mean")[0].outputs.embedding
    if name is None:
        with pytest.raises(
            RequestError, match=rf"pooling_type {number} \(.*\) of the GGUF file is not supported"
        ):
            engine.embed(prompts, use_tqdm=False)
    else:
        assert engine.embed(prompts, use_tqdm=False)[0].outputs.embedding == expected


def test_sampling_that_no_request_may_have(tmp_path):
    keys = {"model": "rwkv", "tokens": ["a", "b"], "token_type": [1, 3], "eos_token_id": 1}
    more = {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | {"general.sampling.top_p": 2.0}
    path = write_model(tmp_path / "a.gguf", random_model(LlamaConfig(**NARROW)), more=more)
    with pytest.raises(
        CheckpointError, match=r"a\.gguf: general\.sampling: top_p must be above 0 and at most"
    ):
        resolve(str(path))


NAMES = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "x/m-Q8_0-00001-of-00002.gguf", "x/m-Q8_0-00002-of-00002.gguf"]


def test_quantisation_on_the_hub(small, tmp_path, monkeypatch):
    """Parts are fetched together; what there is, is listed."""
    fetched = []
    split(small, tmp_path / "hub")

    def download(_: str, *, allow_patterns: list[str], **__: Any) -> str:
        fetched.extend(allow_patterns)
        (tmp_path / "cache" / "x").mkdir(parents=True)
        for name in allow_patterns:
            part = tmp_path / "hub" / Path(name).name.replace("m-Q8_0", "m")
            (tmp_path / "cache" / name).symlink_to(part)
        return str(tmp_path / "cache")

    siblings = [SimpleNamespace(rfilename=name) for name in [*NAMES, "mmproj-Q8_0.gguf"]]
    monkeypatch.setattr(
        "huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=siblings)
    )
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert (resolve("owner/name:q8_0") / "config.json").exists()
    assert fetched == NAMES[2:]
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(CheckpointError, match=r"has no safetensors, but GGUF files: give owner/name:QUANT"):
        resolve("owner/name")
    for asked in ("Q4_K", "Q5_0", ""):
        with pytest.raises(
            CheckpointError, match=r"^owner/name:\w*: no GGUF file of this quantisation; there are m-Q4"
        ):
            resolve(f"owner/name:{asked}")


def test_a_hub_that_is_not_reached(small, tmp_path, monkeypatch):
    """The file is found in the hub's cache, or one error says what went wrong."""

    def fail(*_: Any, **__: Any) -> Any:
        raise HfHubHTTPError.__bases__[0]("no network")

    commit = tmp_path / "models--owner--name" / "snapshots" / ("a" * 40)
    commit.mkdir(parents=True)
    (commit / "m-Q8_0.gguf").write_bytes(small.read_bytes())
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text(commit.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    assert (resolve("owner/name:Q8_0") / "m-Q8_0.gguf").exists()
    with pytest.raises(CheckpointError, match=r"'owner/other:Q8_0' is neither .*: no network"):
        resolve("owner/other:Q8_0")


@pytest.mark.parametrize("name", ["missing.gguf", "here/missing.gguf"])
def test_missing_files_are_not_sought_on_the_hub(name, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"^no such directory or GGUF file: .*missing\.gguf"):
        resolve(name)
