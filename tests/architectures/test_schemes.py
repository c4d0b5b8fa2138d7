"""quantization_config of public models is read as they are stored, or refused with what is supported."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paged import CheckpointError, UnsupportedModelError
from paged.architectures.config import LLAMA_NAMES
from paged.architectures.families.multimodal import MULTIMODAL
from paged.architectures.hf_config import read_hf
from paged.architectures.schemes import Module, quantization_of

Q_PROJ = "model.layers.0.self_attn.q_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def weights(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """Return the arguments of weights, with those that llm-compressor writes beside them."""
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": bits,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
        **more,
    }


def activations(bits: int, kind: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "dynamic": True, "strategy": "token", "symmetric": True, **more}


def ct(stored: str, own: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": own}
    return {
        "config_groups": {"group_0": group},
        "format": stored,
        "ignore": ["lm_head"],
        "global_compression_ratio": 1.5,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        **more,
    }


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt", "version": "0.37.0"},
        **more,
    }


def auto_round(packing: str, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "data_type": "int",
        "block_name_to_quantize": "model.layers",
        "iters": 200,
        **more,
    }


# What the model is, its quantization_config, and how its attention is stored.
ACCEPTED: list[tuple[str, dict[str, Any], str]] = [
    (
        "Qwen2.5 GPTQ-Int4",
        {**GPTQ, "damp_percent": 0.01, "static_groups": False, "true_sequential": True},
        "GPTQ 4 bits",
    ),
    (
        "Qwen2.5 GPTQ-Int8",
        {**GPTQ, "bits": 8, "model_file_base_name": "model", "model_name_or_path": None},
        "GPTQ 8 bits",
    ),
    ("Llama 2 GPTQ with act-order", {**GPTQ, "desc_act": True, "sym": False}, "GPTQ 4 bits"),
    (
        "Llama 3.1 GPTQ-INT4",
        {**GPTQ, "modules_in_block_to_quantize": None, "use_exllama": True},
        "GPTQ 4 bits",
    ),
    (
        "GPTQModel 2",
        {**GPTQ, "checkpoint_format": "gptq", "lm_head": False, "pack_dtype": "int32", "dynamic": None},
        "GPTQ 4 bits",
    ),
    (
        "Qwen 3.5 GPTQ-Int4",
        {
            **GPTQ,
            "dynamic": {
                "lm_head": {},
                "model.language_model.embed_tokens": {},
                **{f"-:.*{name}.*": {} for name in ("attn", "shared_expert", "mtp", "visual")},
            },
        },
        "floats",
    ),
    (
        "GPTQModel with other sizes for a module",
        {**GPTQ, "dynamic": {"-:.*mlp.*": {}, r"+:.*q_proj": {"bits": 8}, ".*": {"bits": 4}}},
        "GPTQ 8 bits",
    ),
    ("GPTQ version 2", {**GPTQ, "checkpoint_format": "gptq_v2", "group_size": -1}, "GPTQ 4 bits"),
    (
        "Llama 3.1 AWQ-INT4",
        {**AWQ, "backend": "autoawq", "do_fuse": False, "modules_to_not_convert": None},
        "AWQ 4 bits",
    ),
    ("Qwen2.5 AWQ", {**AWQ, "modules_to_not_convert": ["visual"]}, "AWQ 4 bits"),
    ("Qwen3 AutoRound", auto_round("auto_round:auto_gptq", autoround_version="0.6.0"), "AutoRound 4 bits"),
    ("AutoRound in AWQ's layout", auto_round("auto_round:auto_awq", sym=False), "AutoRound 4 bits"),
    (
        "AutoRound of 2024",
        {
            **auto_round("x"),
            "quant_method": "intel/auto-round",
            "packing_format": None,
            "backend": "auto_round:gptq:exllamav2",
        },
        "AutoRound 4 bits",
    ),
    ("AutoRound without g_idx", auto_round("auto_round", sym=False), "AutoRound 4 bits"),
    ("AutoRound for GPTQModel", auto_round("auto_round:gptqmodel"), "AutoRound 4 bits"),
    (
        "AutoRound with a pattern",
        auto_round("auto_round:auto_gptq", extra_config={".*self_attn\\.[qk]_proj.*": {"bits": 8}}),
        "AutoRound 8 bits",
    ),
    (
        "AutoRound with layers in 8 bits",
        auto_round("auto_round:auto_gptq", extra_config={Q_PROJ: {"bits": 8}}),
        "AutoRound 8 bits",
    ),
    (
        "AutoRound with layers in floats",
        auto_round("auto_round:auto_gptq", extra_config={Q_PROJ: {"bits": 16, "data_type": "float"}}),
        "floats",
    ),
    (
        "Llama 3.1 quantized.w4a16",
        ct("pack-quantized", weights(4, "int", "group", group_size=128, actorder="weight")),
        "compressed-tensors 4 bits",
    ),
    (
        "Llama 3.1 quantized.w8a16",
        ct("pack-quantized", weights(8, "int", "channel")),
        "compressed-tensors 8 bits",
    ),
    (
        "Llama 3.1 quantized.w8a8",
        ct("int-quantized", weights(8, "int", "channel"), activations(8, "int")),
        "int8",
    ),
    (
        "Gemma 3 w4a16",
        ct(
            "pack-quantized",
            weights(4, "int", "group", group_size=128),
            ignore=["re:.*lm_head", "re:vision_tower.*"],
        ),
        "compressed-tensors 4 bits",
    ),
    (
        "Llama 3.1 FP8-dynamic",
        ct("float-quantized", weights(8, "float", "channel"), activations(8, "float")),
        "fp8",
    ),
    (
        "Llama 3.1 FP8",
        ct("naive-quantized", weights(8, "float", "tensor"), activations(8, "float", dynamic=False)),
        "fp8",
    ),
    (
        "Qwen3 FP8-BLOCK",
        ct("float-quantized", weights(8, "float", "block", block_structure=[128, 128])),
        "fp8",
    ),
    ("Qwen3 NVFP4", ct("nvfp4-pack-quantized", weights(4, "float", "tensor_group", group_size=16)), "NVFP4"),
    ("Qwen3 MXFP4", ct("mxfp4-pack-quantized", weights(4, "float", "group", group_size=32)), "MXFP4"),
    (
        "Qwen3.8 NVFP4 with attention in FP8",
        ct(
            "mixed-precision",
            {},
            config_groups={
                "group_0": {
                    "format": "float-quantized",
                    "targets": [
                        "re:.*self_attn\\.(q|k|v|o)_proj$",
                        "re:.*layers\\.(5[6-9]|6[0-3])\\.mlp\\..*",
                    ],
                    "weights": weights(8, "float", "channel"),
                },
                "group_1": {
                    "format": "nvfp4-pack-quantized",
                    "targets": ["re:.*mlp\\.(gate|up|down)_proj$"],
                    "weights": weights(4, "float", "tensor_group", group_size=16),
                },
            },
        ),
        "fp8",
    ),
    (
        "Llama 3.1 with fp8 for K and V alone",
        ct("dense", {}, config_groups={}, kv_cache_scheme=weights(8, "float", "tensor")),
        "floats",
    ),
    ("Qwen3 FP8", BLOCKS, "fp8"),
    ("DeepSeek V3", {**BLOCKS, "scale_fmt": "ue8m0"}, "fp8"),
    (
        "Ministral 3 FP8",
        {
            **BLOCKS,
            "weight_block_size": None,
            "activation_scheme": "static",
            "modules_to_not_convert": ["model.vision_tower", "lm_head"],
        },
        "fp8",
    ),
    (
        "Llama 3 FP8 of AutoFP8",
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "fp8",
    ),
    ("nvidia Llama 3.1 FP8", modelopt("FP8", kv_cache_scheme={"num_bits": 8, "type": "float"}), "fp8"),
    ("nvidia Llama 3.1 NVFP4", modelopt("NVFP4", group_size=16), "NVFP4"),
    ("ModelOpt, by channel", modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "fp8"),
    (
        "nvidia mixed",
        modelopt("MIXED_PRECISION", quantized_layers={Q_PROJ: {"quant_algo": "NVFP4", "group_size": 16}}),
        "NVFP4",
    ),
    (
        "nvidia mixed, not quantised there",
        modelopt("MIXED_PRECISION", quantized_layers={"lm_head": {"quant_algo": "FP8"}}),
        "floats",
    ),
]
# And with words of the error.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("GPTQ in 3 bits", {**GPTQ, "bits": 3}, "bits 3 is not supported; supported is 4 and 8"),
    ("GPTQ in 2 bits", {**GPTQ, "bits": 2}, "bits 2 is not supported"),
    (
        "GPTQ repacked for Marlin",
        {**GPTQ, "checkpoint_format": "marlin"},
        "checkpoint_format 'marlin' is not supported; supported is 'gptq' and 'gptq_v2'",
    ),
    (
        "GPTQ repacked for Marlin, older",
        {**GPTQ, "is_marlin_format": True},
        "is_marlin_format True is not supported",
    ),
    (
        "GPTQModel with a rule of 3 bits",
        {**GPTQ, "dynamic": {"-:.*attn.*": {}, "+:.*mlp.*": {"bits": 3}}},
        "dynamic '+:.*mlp.*': bits 3 is not supported; supported is 4 and 8",
    ),
    (
        "Mistral AWQ for gemv",
        {**AWQ, "version": "gemv"},
        "version 'gemv' is not supported; supported is 'gemm'",
    ),
    ("AWQ for gemv_fast", {**AWQ, "version": "GEMV_FAST"}, "version 'GEMV_FAST' is not supported"),
    ("AWQ without zeros", {**AWQ, "zero_point": False}, "zero_point False is not supported"),
    ("AutoRound in 2 bits", auto_round("auto_round:auto_gptq", bits=2), "bits 2 is not supported"),
    (
        "AutoRound in its own layout",
        auto_round("auto_round:exllamav2"),
        "packing_format 'auto_round:exllamav2' is not supported",
    ),
    (
        "AutoRound of activations",
        auto_round("auto_round:auto_gptq", act_bits=8, act_dynamic=True),
        "act_bits 8 is not supported; supported is 16",
    ),
    (
        "AutoRound with rotations",
        auto_round("auto_round:auto_gptq", rotation_config={"algorithm": "hadamard"}),
        "rotation_config {'algorithm': 'hadamard'} is not supported",
    ),
    (
        "AutoRound with layers in 3 bits",
        auto_round("auto_round:auto_gptq", extra_config={Q_PROJ: {"bits": 3}}),
        "self_attn.q_proj': bits 3 is not supported; supported is 4 and 8",
    ),
    (
        "AutoRound of MXFP4",
        auto_round("auto_round:llm_compressor", data_type="mx_fp"),
        "packing_format 'auto_round:llm_compressor'",
    ),
    (
        "Llama 3 w3a16",
        ct("pack-quantized", weights(3, "int", "group", group_size=128)),
        "num_bits 3 is not supported; supported is 4 and 8",
    ),
    (
        "w8a8 ordered by activation",
        ct("int-quantized", weights(8, "int", "group", group_size=128, actorder="group")),
        "actorder 'group' is not supported; supported is 'weight' with format 'int-quantized'",
    ),
    (
        "Sparse Llama 2:4 w4a16",
        ct("marlin-24", weights(4, "int", "group", group_size=128)),
        "format 'marlin-24' is not supported",
    ),
    (
        "Sparse Llama 2:4 FP8",
        ct(
            "float-quantized",
            weights(8, "float", "channel"),
            sparsity_config={"format": "sparse-24-bitmask", "sparsity_structure": "2:4"},
        ),
        "sparsity_config {'format': 'sparse-24-bitmask'",
    ),
    (
        "Llama with rotations",
        ct("pack-quantized", weights(4, "int", "channel"), transform_config={"config_groups": {"R1": {}}}),
        "transform_config",
    ),
    ("fp8 in e5m2", {**BLOCKS, "fmt": "e5m2"}, "fmt 'e5m2' is not supported; supported is 'e4m3'"),
    (
        "nvidia W4A16_AWQ",
        modelopt("W4A16_AWQ"),
        "quant_algo 'W4A16_AWQ' is not supported; supported is 'FP8'",
    ),
    ("nvidia MXFP8", modelopt("MXFP8"), "quant_algo 'MXFP8' is not supported"),
    ("nvidia FP8 in blocks", modelopt("FP8_PB_WO"), "quant_algo 'FP8_PB_WO' is not supported"),
    (
        "NVFP4 in blocks",
        ct("nvfp4-pack-quantized", weights(4, "float", "tensor_block", group_size=16)),
        "strategy 'tensor_block' is not supported",
    ),
    (
        "unsloth bnb-4bit",
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        "quant_method 'bitsandbytes' is not supported; it was made of 'org/base'",
    ),
    (
        "bitsandbytes of 2023",
        {"load_in_8bit": True, "llm_int8_threshold": 6.0},
        "quant_method 'bitsandbytes' is not supported",
    ),
    (
        "HQQ",
        {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}},
        "quant_method 'hqq' is not supported",
    ),
    (
        "EXL2",
        {"quant_method": "exl2", "bits": 4.0, "head_bits": 6, "version": "0.1.5"},
        "quant_method 'exl2' is not supported",
    ),
    ("EXL3", {"quant_method": "exl3", "bits": 3.0}, "quant_method 'exl3' is not supported"),
    ("VPTQ", {"quant_method": "vptq", "config_for_layers": {}}, "quant_method 'vptq' is not supported"),
    (
        "AQLM",
        {"quant_method": "aqlm", "in_group_size": 8, "nbits_per_codebook": 16},
        "quant_method 'aqlm' is not supported",
    ),
    (
        "torchao",
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
        "quant_method 'torchao' is not supported",
    ),
    (
        "Quark",
        {"quant_method": "quark", "export": {}, "global_quant_config": {}},
        "quant_method 'quark' is not supported",
    ),
    (
        "BitNet",
        {"quant_method": "bitnet", "linear_class": "autobitlinear"},
        "quant_method 'bitnet' is not supported",
    ),
    (
        "Llama 3.1 405B FP8",
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        "quant_method 'fbgemm_fp8' is not supported",
    ),
    ("MLX", {"group_size": 64, "bits": 4}, "has no quant_method"),
]


def title_of(config: dict[str, Any], name: str = Q_PROJ, kind: Any = "Linear", **hf: Any) -> str:
    quantization = quantization_of({"quantization_config": config, "_name_or_path": "org/base", **hf})
    assert quantization is not None
    scheme = quantization.rule_of(Module((name,), kind)).scheme
    return "floats" if scheme is None else scheme.title


@pytest.mark.parametrize(("config", "title"), [row[1:] for row in ACCEPTED], ids=[row[0] for row in ACCEPTED])
def test_public_models(config, title):
    assert title_of(config) == title


@pytest.mark.parametrize(("config", "words"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_public_models_that_are_refused(config, words):
    with pytest.raises(UnsupportedModelError) as info:
        title_of(config)
    assert words in str(info.value)
    assert "supported" in str(info.value)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "bits are text": ({**GPTQ, "bits": "4"}, "bits must be an int"),
    "bits are missing": ({"quant_method": "awq"}, "bits must be an int"),
    "a group of 0": ({**GPTQ, "group_size": 0}, "group_size must be from 1 to 1048576"),
    "a group of -2": ({**AWQ, "group_size": -2}, "group_size must be from 1 to 1048576"),
    "a huge group": ({**GPTQ, "group_size": 2**40}, "group_size must be"),
    "modules are text": ({**AWQ, "modules_to_not_convert": "lm_head"}, "must be a list of strings"),
    "a block of one number": ({**BLOCKS, "weight_block_size": [128]}, "must be two numbers"),
    "a block of 0": ({**BLOCKS, "weight_block_size": [128, 0]}, "weight_block_size must be from 1 to"),
    "groups are a list": (ct("pack-quantized", {}, config_groups=[1]), "config_groups must be an object"),
    "int in floats": (ct("float-quantized", weights(8, "int", "channel")), "is of type 'float', got 'int'"),
    "no size of groups": (ct("pack-quantized", weights(4, "int", "group")), "'group_0': group_size must be"),
    "a broken pattern": (ct("pack-quantized", {}, ignore=["re:("]), "'re:(' is no regular expression"),
    "a long pattern": (
        ct("pack-quantized", {}, ignore=[f"re:{'a' * 2000}"]),
        "has 2,000 characters",
    ),
    "repeats of repeats": (
        ct("pack-quantized", {}, ignore=["re:((a{1000}){2,1000}){3}"]),
        "has groups or repeats of a kind that is not supported",
    ),
    "recursion": (ct("pack-quantized", {}, ignore=["re:(?P<a>(?P>a))"]), "has groups or repeats of a kind"),
    "a broken pattern of AutoRound": (
        auto_round("auto_round", extra_config={".*[": {"bits": 8}}),
        "'.*[' is no regular expression",
    ),
    "layers are a list": (modelopt("MIXED_PRECISION", quantized_layers=["x"]), "must be an object"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_named(name):
    config, words = WRONG[name]
    with pytest.raises(CheckpointError) as info:
        title_of(config)
    assert words in str(info.value)
    assert str(info.value).startswith(f"quantization_config of quant_method {config['quant_method']!r}: ")


def test_a_pattern_cannot_take_for_ever(monkeypatch):
    monkeypatch.setattr("paged.architectures.schemes.MATCH_SECONDS", 0.05)
    config = ct("pack-quantized", weights(4, "int", "channel"), ignore=["re:(a|aa)+$"])
    with pytest.raises(CheckpointError, match=r"takes more than 0\.05 s to match a"):
        title_of(config, "a" * 60 + "b")


def test_the_most_specific_target_is_taken():
    """A name before a pattern, a pattern before a class, in any order; what is ignored before all."""
    groups = {
        "a": {"targets": ["Linear"], "weights": weights(4, "int", "channel")},
        "b": {
            "targets": [r"re:.*(?:layers)\.\d{1,3}\.[a-z_]*\.q_proj"],
            "weights": weights(8, "int", "channel"),
        },
        "c": {"targets": [Q_PROJ], "weights": weights(4, "int", "group", group_size=32)},
    }
    config = ct("pack-quantized", {}, config_groups=groups, ignore=["re:.*layers\\.9\\..*", "lm_head"])
    quantization = quantization_of({"quantization_config": config})

    def size(name: str, kind: Any = "Linear") -> Any:
        scheme = quantization.rule_of(Module((name,), kind)).scheme
        return scheme and (scheme.bits, scheme.scale_inputs)

    assert size(Q_PROJ) == (4, 32)
    assert size("model.layers.1.self_attn.q_proj") == (8, None)
    assert size("model.layers.1.self_attn.k_proj") == (4, None)
    assert size("model.layers.9.self_attn.q_proj") is size("lm_head") is None
    assert size("model.embed_tokens", "Embedding") is None


def test_of_two_patterns_the_first_is_taken():
    """The last layers' MLPs are in fp8, those before them in NVFP4."""
    config = {name: config for name, config, _ in ACCEPTED}["Qwen3.8 NVFP4 with attention in FP8"]
    assert title_of(config, "model.layers.60.mlp.up_proj") == "fp8"
    assert title_of(config, "model.layers.6.mlp.up_proj") == "NVFP4"
    assert title_of(config, "lm_head") == "floats"


def test_targets_of_several_groups_are_ordered_as_by_compressed_tensors():
    """A target of two groups is that of the last; of two patterns the first one in the alphabet is taken."""

    def size(*targets: list[str]) -> Any:
        groups = {
            f"group_{i}": {"targets": own, "weights": weights(4, "int", "group", group_size=32 << i)}
            for i, own in enumerate(targets)
        }
        config = ct("pack-quantized", {}, config_groups=groups)
        scheme = quantization_of({"quantization_config": config}).rule_of(Module((Q_PROJ,), "Linear")).scheme
        return scheme and scheme.scale_inputs

    assert size(["Linear"], ["Linear"]) == 64
    assert size(["re:model.*"], ["re:.*q_proj"]) == 64
    assert size(["re:.*q_proj"], ["re:model.*"]) == 32
    assert size(["re:.*q_proj"], [Q_PROJ], ["Linear"]) == 64


def test_names_come_before_patterns_in_autoround():
    """The first of two patterns; a pattern is found anywhere in a name, and not in that of an embedding."""
    own = {
        "layers\\.[01]\\.": {"bits": 8, "group_size": -1},
        ".*q_proj.*": {"bits": 16},
        "model.layers.0.mlp.up_proj": {"group_size": 64},
    }
    config = auto_round("auto_round:gptqmodel", extra_config=own)
    quantization = quantization_of({"quantization_config": config})

    def size(name: str, kind: Any = "Linear") -> Any:
        scheme = quantization.rule_of(Module((name,), kind)).scheme
        return scheme and (scheme.bits, scheme.scale_inputs, scheme.zeros_less_one)

    assert size("model.layers.0.mlp.up_proj") == (4, 64, False)
    assert size("model.layers.0.self_attn.q_proj") == (8, None, False)
    assert size("model.layers.2.self_attn.q_proj") is None
    assert size("model.layers.10.self_attn.k_proj") == (4, 128, False)
    assert size("layers.0.", "Embedding") == (4, 128, False)


def test_rules_call_modules_by_any_of_their_names():
    """As the checkpoint does, or as the classes of transformers do, which a wrapper's prefix divides."""
    names = MULTIMODAL["Gemma3ForConditionalGeneration"].names
    known = set(names.all_in_checkpoint("model.layers.0.mlp.up_proj."))
    assert known == {
        "language_model.model.layers.0.mlp.up_proj.",
        "model.language_model.layers.0.mlp.up_proj.",
    }
    assert list(LLAMA_NAMES.all_in_checkpoint("lm_head.")) == ["lm_head."]


def test_parts_of_a_name_are_whole():
    """What is listed as "gate" is not gate_proj."""
    listed = {**BLOCKS, "modules_to_not_convert": ["gate", "model.layers.1", "visual"]}
    assert title_of(listed, "model.layers.0.mlp.gate_proj") == "fp8"
    assert title_of(listed, "model.layers.10.mlp.gate_proj") == "fp8"
    assert title_of(listed, "model.layers.0.mlp.gate") == "floats"
    assert title_of(listed, "model.layers.1.mlp.gate_proj") == "floats"


def test_a_file_beside_config_json_says_it(tmp_path):
    """Of ModelOpt; what config.json says itself comes first."""

    def title(own: dict[str, Any] | None, sidecar: dict[str, Any]) -> str:
        config = {} if own is None else {"quantization_config": own}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": sidecar}))
        return title_of(read_hf(tmp_path)["quantization_config"])

    layers = {"quantized_layers": {Q_PROJ: {"quant_algo": "FP8"}}}
    assert title(None, {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "group_size": 16}) == "NVFP4"
    assert title(None, {"quant_algo": "FP8", "exclude_modules": ["*self_attn*"]}) == "floats"
    assert title({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, layers) == "fp8"
    assert title({**GPTQ}, {"quant_algo": "FP8"}) == "GPTQ 4 bits"
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: quantization must be an object"):
        title(None, [])  # type: ignore[arg-type]


def test_the_text_part_may_say_it():
    assert title_of({}, text_config={"quantization_config": GPTQ}) == "GPTQ 4 bits"
    with pytest.raises(UnsupportedModelError, match=r"^text_config: .*'hqq'"):
        title_of({}, text_config={"quantization_config": {"quant_method": "hqq"}})
    assert quantization_of({"text_config": 5, "quantization_config": None}) is None
