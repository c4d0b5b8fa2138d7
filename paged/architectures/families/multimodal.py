"""Architectures with a vision or audio part, of which only the text model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import check_int, shown
from ..config import TensorNames
from .reading import CEILINGS, Config
from .table import ARCHITECTURES


class TextPart(NamedTuple):
    """A text model inside another architecture.

    architecture: a key of ARCHITECTURES.
    sizes: defaults for keys that text_config may omit and the text model's own config.json may not.
    """

    architecture: str
    sizes: Config


class Multimodal(NamedTuple):
    """One entry of MULTIMODAL: an architecture around a native text model.

    text: the text models by model_type of text_config; the first where it has none.
    names: how the tensors of the checkpoint are called.
    placeholders: keys of config.json with tokens that stand for images, audio or video, and their defaults.
    """

    model_type: str
    text: Mapping[str, TextPart]
    names: TensorNames
    placeholders: Mapping[str, int | None]
    models: str  # which this is, for people


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
MULTIMODAL = {
    "Gemma3ForConditionalGeneration": Multimodal(
        "gemma3",
        {"gemma3_text": TextPart("Gemma3ForCausalLM", _sizes(262208, 2304, 9216, 26, 8))},
        _LLAVA,
        {"image_token_index": 262144, "boi_token_index": 255999, "eoi_token_index": 256000},
        "Gemma 3 4B, 12B and 27B (text)",
    ),
    "Gemma4ForConditionalGeneration": Multimodal(
        "gemma4",
        {"gemma4_text": TextPart("Gemma4ForCausalLM", _sizes(262144, 2304, 9216, 30, 8))},
        _GEMMA4,
        _GEMMA4_TOKENS,
        "Gemma 4 E2B, E4B and 31B (text)",
    ),
    "Gemma4UnifiedForConditionalGeneration": Multimodal(
        "gemma4_unified",
        {"gemma4_unified_text": TextPart("Gemma4UnifiedForCausalLM", _sizes(262144, 2304, 9216, 30, 8))},
        _GEMMA4,
        _GEMMA4_TOKENS,
        "Gemma 4 12B (text)",
    ),
    "Mistral3ForConditionalGeneration": Multimodal(
        "mistral3",
        {
            "mistral": TextPart("MistralForCausalLM", _sizes(32000, 4096, 14336, 32, 32)),
            "ministral3": TextPart("Ministral3ForCausalLM", _sizes(131072, 4096, 14336, 34, 32)),
        },
        _LLAVA,
        {"image_token_index": 10},
        "Mistral Small 3.1 and 3.2, Ministral 3 (text)",
    ),
}
NATIVE: Mapping[str, Any] = {**ARCHITECTURES, **MULTIMODAL}  # each has model_type and models


def text_of(known: Multimodal, hf: Config) -> Config:
    """Return the config.json that the text model alone would have.

    Whether the head is tied is read from the outer config, as transformers does; text_config's value is
    ignored.
    """
    given = hf.get("text_config")
    if not isinstance(given, dict):
        raise CheckpointError(f"must be an object, got {shown(given)}")
    kind = given.get("model_type", next(iter(known.text)))
    if kind not in list(known.text):  # a list, as any JSON value may come, hashable or not
        raise UnsupportedModelError(
            f"model_type {shown(kind)} is not supported; supported are {', '.join(known.text)}"
        )
    part = known.text[kind]
    dtypes = [config.get(key) for config in (hf, given) for key in ("dtype", "torch_dtype")]
    whole = {
        "architectures": [part.architecture],
        "model_type": kind,
        "tie_word_embeddings": hf.get("tie_word_embeddings", True),
        "dtype": next(filter(None, dtypes), None),
    }
    return {**part.sizes, **given, **whole}


def placeholders_of(known: Multimodal, hf: Config) -> tuple[tuple[int, str], ...]:
    """Return the tokens that stand for images, audio or video, with their keys in config.json."""
    found = {}
    for key, default in known.placeholders.items():
        other = key.replace("_index", "_id")  # transformers knows both names
        name = other if hf.get(other) is not None else key
        token_id = hf.get(name, default)
        if token_id is not None:
            found[check_int(CheckpointError, name, token_id, 0, CEILINGS["vocab_size"])] = name
    return tuple(found.items())
