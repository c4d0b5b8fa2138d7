"""Whether a tokenizer consists of parts that published tokenizers have, so that its bounds are known.

Every description that is accepted here is also accepted by tokenizer_bounds and tokenizer_growth. These two
analyse the other descriptions, and are imported only then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..checkpoints.tokenizer_patterns import PUBLISHED

Part = Mapping[str, Any]

PIPELINE = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
MOST_PRE_TOKENIZERS = 4
MOST_NAME = 4096  # characters of a token
MOST_NAMES = 2**20  # characters of all added tokens together
MOST_SPECIAL = 16  # tokens that a post-processor adds

_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREFIX = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _SPACE]}
_SPLIT_AT_SPACE = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
_BYTES = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
# Normalizer, pre-tokenizer and decoder of models that SentencePiece trained, as transformers converts them.
_SENTENCEPIECE: tuple[tuple[Part, Part | None, Part], ...] = (
    (_PREFIX, None, {"type": "Sequence", "decoders": [*_BYTES, _STRIP]}),  # Llama 2, Mistral, Phi-3
    (_SPACE, _SPLIT_AT_SPACE, {"type": "Sequence", "decoders": _BYTES}),  # Gemma
)


def parts_of(backend: Any) -> dict[str, Any]:
    """Return the description of a tokenizer of the tokenizers library, without model and added tokens."""
    parts = {name: getattr(backend, name) for name in PIPELINE}
    return {name: None if part is None else json.loads(part.__getstate__()) for name, part in parts.items()}


def is_published(description: Part) -> bool:
    """Return whether a tokenizer, as JSON of the tokenizers library, has published parts and a BPE model."""
    try:
        return has_published_parts(description) and _is_usual_model(description)
    except (KeyError, TypeError, ValueError, AttributeError):
        return False  # the analysis names what it does not understand


def has_published_parts(parts: Part) -> bool:
    """Return whether a published tokenizer has the same parts besides its model."""
    try:
        chain = (parts["normalizer"], parts["pre_tokenizer"], parts["decoder"])
        return (chain in _SENTENCEPIECE or _is_byte_level(*chain)) and _is_template(parts["post_processor"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def _is_byte_level(normalizer: Part | None, pre_tokenizer: Part, decoder: Part) -> bool:
    """Return whether text is split by a published expression and then taken byte by byte, as GPT-2 does."""
    is_sequence = pre_tokenizer["type"] == "Sequence"
    *splits, last = pre_tokenizer["pretokenizers"] if is_sequence else [pre_tokenizer]
    return (
        normalizer in (None, {"type": "NFC"})
        and len(splits) < MOST_PRE_TOKENIZERS
        and all(map(_is_split, splits))
        and last["type"] == decoder["type"] == "ByteLevel"
    )


def _is_split(part: Part) -> bool:
    return part["type"] == "Digits" or (part["type"] == "Split" and part["pattern"].get("Regex") in PUBLISHED)


def _is_template(part: Part | None) -> bool:
    """Return whether a post-processor adds nothing to a text but a few tokens of known ids."""
    if part is None or part["type"] == "ByteLevel":
        return True
    if part["type"] == "Sequence":
        return len(part["processors"]) == 2 and all(
            step["type"] != "Sequence" and _is_template(step) for step in part["processors"]
        )
    known = part["special_tokens"]
    special = [p["SpecialToken"]["id"] for p in (*part["single"], *part["pair"]) if "SpecialToken" in p]
    return (
        part["type"] == "TemplateProcessing"
        and [p["Sequence"]["id"] for p in part["single"] if "Sequence" in p] == ["A"]
        and all(len(token["ids"]) == len(token["tokens"]) for token in known.values())
        and sum(len(known[name]["ids"]) for name in special) <= MOST_SPECIAL
    )


def _is_usual_model(description: Part) -> bool:
    model = description["model"]
    vocab = model["vocab"]
    names = [token["content"] for token in description.get("added_tokens") or ()]
    return (
        model["type"] == "BPE"
        and not model.get("continuing_subword_prefix")
        and (model.get("unk_token") is None or model["unk_token"] in vocab)
        and all(isinstance(name, str) and name for name in names)
        and all("normalized" in token for token in description.get("added_tokens") or ())
        and sum(map(len, names)) <= MOST_NAMES
        and max(map(len, (*vocab, *names)), default=0) <= MOST_NAME
    )
