"""Architectures with a vision or audio part, and the text model of each; `vision` reads their towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import check_int, shown
from ..config import ModelConfig, TensorNames
from ..spec import ExpertsSpec
from .reading import CEILINGS, Config
from .table import ARCHITECTURES


class TextPart(NamedTuple):
    """A text model inside another architecture.

    architecture: a key of ARCHITECTURES.
    sizes: defaults for keys that text_config may omit. In the text model's own config.json, these keys are
        required.
    """

    architecture: str
    sizes: Config


class Multimodal(NamedTuple):
    """An entry of MULTIMODAL: an architecture that contains a text model which is supported here.

    text: the text models by the model_type in text_config. If text_config has none, the first is taken.
    names: the names of the tensors in the checkpoint.
    placeholders: the keys of config.json that hold token ids which stand for images, audio or video, and
        the default of each key.
    """

    model_type: str
    text: Mapping[str, TextPart]
    names: TensorNames
    placeholders: Mapping[str, int | None]
    models: str  # which this is, for people
    tied: bool = True  # whether the head is tied where config.json does not say
    may_be_flat: bool = False  # older checkpoints have the keys of the text model without text_config
    experts_in_columns: bool = False  # projections of experts may be stored as [in_features, out_features]


def _sizes(vocab: int, hidden: int, intermediate: int, layers: int, heads: int) -> Config:
    """Return the defaults of the keys that a config.json of a text model alone must have."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


# Checkpoints of transformers before version 4.52, and of later ones.
_LLAVA = TensorNames(
    prefixes=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
        ("lm_head.", "lm_head."),
    ),
    skipped_prefixes=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
)
_GEMMA4 = TensorNames(
    prefixes=(("model.language_model.", "model."), ("lm_head.", "lm_head.")),
    skipped_prefixes=(
        "model.vision_tower.",
        "model.vision_embedder.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
    ),
)
_GEMMA4_TOKENS = {
    "image_token_id": 258880,
    "boi_token_id": 255999,
    "eoi_token_id": 258882,
    "audio_token_id": 258881,
    "boa_token_id": 256000,
    "eoa_token_index": 258883,
    "video_token_id": 258884,
}
MULTIMODAL: dict[str, Multimodal] = {
    "Gemma3ForConditionalGeneration": Multimodal(
        "gemma3",
        {"gemma3_text": TextPart("Gemma3ForCausalLM", _sizes(262208, 2304, 9216, 26, 8))},
        _LLAVA,
        {"image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000},
        "Gemma 3 4B, 12B and 27B",
    ),
    "Gemma4ForConditionalGeneration": Multimodal(
        "gemma4",
        {"gemma4_text": TextPart("Gemma4ForCausalLM", _sizes(262144, 2304, 9216, 30, 8))},
        _GEMMA4,
        _GEMMA4_TOKENS,
        "Gemma 4 E2B, E4B and 31B",
    ),
    "Gemma4UnifiedForConditionalGeneration": Multimodal(
        "gemma4_unified",
        {"gemma4_unified_text": TextPart("Gemma4UnifiedForCausalLM", _sizes(262144, 2304, 9216, 30, 8))},
        _GEMMA4,
        _GEMMA4_TOKENS,
        "Gemma 4 12B",
    ),
    "Mistral3ForConditionalGeneration": Multimodal(
        "mistral3",
        {
            "mistral": TextPart("MistralForCausalLM", _sizes(32000, 4096, 14336, 32, 32)),
            "ministral3": TextPart("Ministral3ForCausalLM", _sizes(131072, 4096, 14336, 34, 32)),
        },
        _LLAVA,
        {"image_token_index": 10},
        "Mistral Small 3.1 and 3.2, Ministral 3",
    ),
}
_QWEN = TensorNames(
    prefixes=(("model.language_model.", "model."), ("model.", "model."), ("lm_head.", "lm_head.")),
    skipped_prefixes=("visual.", "model.visual.", "mtp."),
)
_QWEN2_VL_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
_QWEN3_5_TOKENS = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}
_QWEN2_VL_SIZES = {
    **_sizes(152064, 8192, 29568, 80, 64),
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_window_layers": 80,
    "rope_theta": 1e6,
}
_QWEN3_VL_SIZES = {
    **_sizes(151936, 4096, 22016, 32, 32),
    "max_position_embeddings": 128000,
    "rope_theta": 5e5,
    "use_sliding_window": False,
}
_QWEN3_VL_MOE_SIZES = {
    **_sizes(151936, 2048, 5632, 24, 16),
    "max_position_embeddings": 128000,
    "num_key_value_heads": 16,
    "head_dim": None,
    "rope_theta": 5e5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "norm_topk_prob": True,
    "use_sliding_window": False,
}
MULTIMODAL |= {
    "Qwen2VLForConditionalGeneration": Multimodal(
        "qwen2_vl",
        {"qwen2_vl_text": TextPart("Qwen2ForCausalLM", _QWEN2_VL_SIZES)},
        _QWEN,
        _QWEN2_VL_TOKENS,
        "Qwen2-VL (text)",
        tied=False,
        may_be_flat=True,
    ),
    "Qwen2_5_VLForConditionalGeneration": Multimodal(
        "qwen2_5_vl",
        {"qwen2_5_vl_text": TextPart("Qwen2ForCausalLM", _QWEN2_VL_SIZES)},
        _QWEN,
        _QWEN2_VL_TOKENS,
        "Qwen2.5-VL (text)",
        tied=False,
        may_be_flat=True,
    ),
    "Qwen3VLForConditionalGeneration": Multimodal(
        "qwen3_vl",
        {"qwen3_vl_text": TextPart("Qwen3ForCausalLM", _QWEN3_VL_SIZES)},
        _QWEN,
        _QWEN2_VL_TOKENS,
        "Qwen3-VL",
        tied=False,
    ),
    "Qwen3VLMoeForConditionalGeneration": Multimodal(
        "qwen3_vl_moe",
        {"qwen3_vl_moe_text": TextPart("Qwen3MoeForCausalLM", _QWEN3_VL_MOE_SIZES)},
        _QWEN,
        _QWEN2_VL_TOKENS,
        "Qwen3-VL 30B-A3B, 235B-A22B",
        tied=False,
        experts_in_columns=True,
    ),
    "Qwen3_5ForConditionalGeneration": Multimodal(
        "qwen3_5",
        {"qwen3_5_text": TextPart("Qwen3_5ForCausalLM", _sizes(248320, 4096, 12288, 32, 16))},
        _QWEN,
        _QWEN3_5_TOKENS,
        "Qwen 3.5, 3.6 (text)",
        tied=False,
    ),
    "Qwen3_5MoeForConditionalGeneration": Multimodal(
        "qwen3_5_moe",
        {"qwen3_5_moe_text": TextPart("Qwen3_5MoeForCausalLM", _sizes(248320, 2048, 512, 40, 16))},
        _QWEN,
        _QWEN3_5_TOKENS,
        "Qwen 3.5 and 3.6 35B-A3B, 122B-A10B, 397B-A17B (text)",
        tied=False,
    ),
}
NATIVE: Mapping[str, Any] = {**ARCHITECTURES, **MULTIMODAL}  # each has model_type and models


def text_of(known: Multimodal, hf: Config) -> Config:
    """Return the config.json that the text model would have on its own.

    Whether the head is tied is read from the outer config, as in transformers; text_config's value is
    ignored.
    """
    given = hf.get("text_config")
    if given is None and known.may_be_flat:
        given = {**hf, "model_type": next(iter(known.text))}
    if not isinstance(given, dict):
        raise CheckpointError(f"must be an object, got {shown(given)}")
    kind = given.get("model_type", next(iter(known.text)))
    if kind not in list(known.text):  # a list, as any JSON value may come, hashable or not
        raise UnsupportedModelError(
            f"model_type {shown(kind)} is not supported; supported are {', '.join(known.text)}"
        )
    part = known.text[kind]
    dtypes = [config.get(key) for config in (hf, given) for key in ("dtype", "torch_dtype")]
    # transformers reads it of the whole model; older checkpoints of Qwen2-VL have it in text_config.
    tied = hf.get("tie_word_embeddings", known.tied)
    if known.may_be_flat:
        tied = tied or given.get("tie_word_embeddings", False)
    whole = {
        "architectures": [part.architecture],
        "model_type": ARCHITECTURES[part.architecture].model_type,
        "tie_word_embeddings": tied,
        "dtype": next(filter(None, dtypes), None),
    }
    return {**part.sizes, **given, **whole}


def with_experts_in_columns(text: ModelConfig) -> ModelConfig:
    """Return the config of a text model whose stacks of experts may be stored as [in, out]."""
    (inner,) = {
        layer.feed_forward.size for layer in text.layers if isinstance(layer.feed_forward, ExpertsSpec)
    }
    stacks = tuple(
        stack._replace(num_inputs=text.hidden_size if len(stack.parts) == 2 else inner)
        for stack in text.tensor_names.stacks
    )
    return replace(text, tensor_names=replace(text.tensor_names, stacks=stacks))


def placeholders_of(known: Multimodal, hf: Config) -> tuple[tuple[int, str], ...]:
    """Return the tokens that stand for images, audio or video, each with its key in config.json."""
    found = {}
    for key, default in known.placeholders.items():
        other = key.replace("_index", "_id")  # transformers knows both names
        name = other if hf.get(other) is not None else key
        token_id = hf.get(name, default)
        if token_id is not None:
            found[check_int(CheckpointError, name, token_id, 0, CEILINGS["vocab_size"])] = name
    return tuple(found.items())


def names_around(outer: TensorNames, text: TensorNames) -> TensorNames:
    """Return names for a checkpoint around the model `text`, which also skip what `text` skips."""
    skipped = tuple(
        theirs + name[len(ours) :]
        for theirs, ours in outer.prefixes
        for name in text.skipped_prefixes
        if name.startswith(ours)
    )
    parts = outer.parts + text.parts
    stacks = outer.stacks + text.stacks
    return replace(
        outer,
        skipped_prefixes=outer.skipped_prefixes + skipped,
        parts=parts,
        stacks=stacks,
        only_stacks=text.only_stacks,
    )
