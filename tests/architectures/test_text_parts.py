"""What config.json and files say of parts that are not loaded: vision, further layers, code."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from paged.architectures.config import DEMO, TensorNames
from paged.architectures.families.multimodal import MULTIMODAL
from paged.architectures.hf_config import from_hf, read_config
from paged.base.errors import CheckpointError, UnsupportedModelError
from paged.model.weights.loading import open_tensors
from paged.text.tokenizer import Tokenizer
from tests.architectures.test_hf_config import completed
from tests.support.checkpoints import checkpoint, edit_json

GEMMA3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "sliding_window": 1024,
    "model_type": "gemma3_text",
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
}
MINISTRAL3_3B = {
    "model_type": "ministral3",
    "hidden_size": 3072,
    "num_hidden_layers": 26,
    "head_dim": 128,
    "intermediate_size": 9216,
    "tie_word_embeddings": True,
}
QWEN = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16}
# The contents of config.json beside architecture and vision_config, as on the hub.
TEXT_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3-4b": ("Gemma3ForConditionalGeneration", {"text_config": GEMMA3_4B, "torch_dtype": "bfloat16"}),
    "mistral-small": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {
                "hidden_size": 5120,
                "head_dim": 128,
                "sliding_window": None,
                "rope_theta": 1e9,
                "vocab_size": 131072,
                "num_hidden_layers": 40,
            },
            "image_token_index": 10,
        },
    ),
    "qwen2.5-vl": ("Qwen2_5_VLForConditionalGeneration", {"text_config": QWEN, "tie_word_embeddings": True}),
    "qwen2-vl-tied-within": (
        "Qwen2VLForConditionalGeneration",
        {"text_config": {**QWEN, "tie_word_embeddings": True}},
    ),
    "qwen2.5-vl-flat": (
        "Qwen2_5_VLForConditionalGeneration",
        {**QWEN, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vision_config": {}},
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        {"text_config": {"model_type": "qwen3_vl_text", "num_key_value_heads": 8, **QWEN}},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoeForConditionalGeneration",
        {"text_config": {"num_experts": 128, "moe_intermediate_size": 768, **QWEN, "head_dim": 128}},
    ),
    "qwen3.5": (
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": {
                "model_type": "qwen3_5_text",
                "num_hidden_layers": 24,
                "full_attention_interval": 4,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e7,
                    "partial_rotary_factor": 0.25,
                    "mrope_interleaved": True,
                    "mrope_section": [11, 11, 10],
                },
            }
        },
    ),
    "qwen3.5-moe": ("Qwen3_5MoeForConditionalGeneration", {"text_config": {}}),
    "ministral3": ("Mistral3ForConditionalGeneration", {"text_config": MINISTRAL3_3B, "dtype": "bfloat16"}),
    "untied": ("Gemma3ForConditionalGeneration", {"text_config": GEMMA3_4B, "tie_word_embeddings": False}),
    "other-tokens": (
        "Gemma3ForConditionalGeneration",
        {"text_config": GEMMA3_4B, "image_token_id": 7, "boi_token_index": 8, "eoi_token_index": None},
    ),
}


@pytest.mark.parametrize("kind", TEXT_PARTS)
def test_text_parts_have_the_defaults_of_transformers(kind):
    architecture, values = TEXT_PARTS[kind]
    known = MULTIMODAL[architecture]
    hf = {"architectures": [architecture], "model_type": known.model_type, **values}
    config = from_hf(hf)
    assert replace(config, placeholders=()) == replace(from_hf(completed(hf)), placeholders=())
    assert config.architecture == architecture
    found, theirs = {token for token, _ in config.placeholders}, AutoConfig.for_model(**copy.deepcopy(hf))
    names = ("image_token_id", "boi_token_id", "eoi_token_id", "video_token_id")
    names = (*names, "vision_start_token_id", "vision_end_token_id")
    assert found == {getattr(theirs, name, None) for name in names} - {None}


MISTRAL3 = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
WRONG_TEXT_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "text_config: must be an object, got None"),
    "unknown": (
        {"text_config": {"model_type": ["llama"]}},
        r"text_config: model_type \['llama'\] is not supported; supported are mistral, ministral3",
    ),
    "value": ({"text_config": {"head_dim": 257}}, "text_config: head_dim must be from 1 to 256"),
    "quantized": (
        {"text_config": {"quantization_config": {"bits": 4}}},
        "text_config: quantization_config has no",
    ),
    "all-quantized": ({"text_config": {}, "quantization_config": {"bits": 8}}, "has no quant_method"),
    "token": ({"text_config": {}, "image_token_id": "x"}, "image_token_id must be an int"),
    "tied": ({"text_config": {}, "tie_word_embeddings": "x"}, "tie_word_embeddings must be True or False"),
    "beta": (
        {
            "text_config": {
                "model_type": "ministral3",
                "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": -1},
            }
        },
        "llama_4_scaling_beta must be at least 0",
    ),
}


@pytest.mark.parametrize("kind", WRONG_TEXT_PARTS)
def test_wrong_text_parts_are_named(kind):
    values, message = WRONG_TEXT_PARTS[kind]
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        from_hf(MISTRAL3 | values)


def test_layers_that_predict_further_tokens_are_skipped_if_declared():
    directory = checkpoint("qwen2-mixed")
    skipped = TensorNames(skipped_prefixes=("model.layers.1.",))
    with open_tensors(directory, skipped) as some, open_tensors(directory, TensorNames()) as every:
        assert some.keys() == {name for name in every if ".1." not in name}


def test_code_of_a_checkpoint_is_never_run(tmp_path):
    """Where the class is native its code is ignored, and else the model is refused."""
    shutil.copytree(DEMO, tmp_path, dirs_exist_ok=True)
    for name in ("configuration", "modeling", "tokenization"):
        (tmp_path / f"{name}_x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass X: pass")
    code = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    edit_json(tmp_path / "config.json", auto_map=code)
    tokenizer = {"AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"]}
    edit_json(tmp_path / "tokenizer_config.json", auto_map=tokenizer)
    assert read_config(tmp_path) == read_config(DEMO)
    text = "def f(x):"
    assert Tokenizer(tmp_path).encode(text) == Tokenizer(DEMO).encode(text)
    edit_json(tmp_path / "config.json", architectures=["XForCausalLM"], model_type="x")
    refused = r"'XForCausalLM' is not supported, and the checkpoint's own code \(auto_map\) is never"
    with pytest.raises(UnsupportedModelError, match=refused):
        read_config(tmp_path)
    assert not (tmp_path / "ran").exists()
