"""Make the config.json that a GGUF file's model had before llama.cpp converted it.

What the metadata lack is what llama.cpp has in its code for a family. A key of the metadata that is not
understood is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...architectures.gguf_names import CONVERTED
from ...architectures.gguf_paths import (
    BITS_KEYS,
    FURTHER_KEY,
    GGUF_KEY,
    GGUF_POOLINGS,
    POOLING_KEY,
    ROPE_FACTORS,
)
from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import shown
from .gguf_file import Gguf, GgufTensor
from .metadata import Metadata

# The number of layers of Gemma 2 27B and Gemma 3 27B, whose queries are scaled by the width of a head that
# hidden_size would make.
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}
_NO_ROPE_INTERVAL = 4  # of SmolLM3
_LOCAL_THETA = 10000.0  # of Gemma 3 and 4
# Of all Llama 3.1, 3.2 and 3.3.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Architectures whose models llama.cpp gives a head of their own in any case.
_UNTIED = ("olmo2", "gptneox")
# The numbers of llama.cpp for weights of experts: a softmax over all of them, sigmoids, and a softmax over a
# token's own.
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3
_UNROTATED = 1e29  # Gemma 4's files have 1e30 for dimensions that are not rotated
_QUANTIZATION_VERSION = 2  # of blocks, since May 2023
_DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """The GGUF metadata and tensors for a config. A source records which rope factors were read."""

    metadata: Metadata
    tensors: Mapping[str, GgufTensor]
    _read: set[str] = field(default_factory=set, init=False)

    def tensor(self, name: str) -> GgufTensor:
        """Return a tensor that every model must have. Raises CheckpointError if it is missing."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.metadata.path}: {name} is missing")
        return self.tensors[name]

    def factors(self, name: str, count: int) -> list[float] | None:
        """Return the `count` rope factors in a tensor; None if it is absent. Raises CheckpointError."""
        self._read.add(name)
        if name not in self.tensors:
            return None
        tensor = self.tensors[name]
        if tensor.shape != [count] or tensor.dtype != torch.float32:
            raise CheckpointError(
                f"{tensor.path}: {name} is {tensor.type.name} of shape {tensor.shape}, but must be F32 of "
                f"shape [{count}], half the dimensions that are rotated"
            )
        values: list[float] = tensor.read().tolist()
        for place, value in enumerate(values):
            if not 0 < value < math.inf:
                raise CheckpointError(
                    f"{tensor.path}: {name} is {value:g} at [{place}], but must be finite and above 0"
                )
        return values

    def require_all_read(self) -> None:
        """Raise UnsupportedModelError for rope factors in the file that were not read."""
        self.metadata.require_all_read()
        if unread := {*ROPE_FACTORS} & self.tensors.keys() - self._read:
            raise UnsupportedModelError(
                f"{self.metadata.path}: {min(unread)} is not supported in a model of architecture "
                f"{self.metadata.architecture}"
            )


def make_config(gguf: Gguf, metadata: Metadata) -> dict[str, Any]:
    """Return the contents of a config.json for a GGUF file, with the key gguf_architecture.

    Raises UnsupportedModelError for an architecture or a value that is not implemented, and CheckpointError
    for missing values.
    """
    name = metadata.architecture
    _require_model(metadata)
    if name not in _FAMILIES:
        raise UnsupportedModelError(
            f"{metadata.path}: general.architecture {name!r} is not supported; supported are "
            f"{', '.join(_FAMILIES)}"
        )
    _require_known_blocks(metadata, gguf.tensors)
    source = ConfigSource(metadata, gguf.tensors)
    model_type, architecture, read = _FAMILIES[name]
    hf = {"architectures": [architecture], "model_type": model_type, GGUF_KEY: name}
    hf |= read(source)
    hf["tie_word_embeddings"] = "output.weight" not in gguf.tensors
    if hf["tie_word_embeddings"] and name in _UNTIED:
        raise CheckpointError(
            f"{metadata.path}: output.weight is missing; models of architecture {name} do not use the "
            "embedding as head"
        )
    hf["dtype"] = _dtype(gguf.tensors)
    hf |= _bits(gguf.tensors)
    if not metadata.flag("attention.causal", True):
        raise UnsupportedModelError(f"{metadata.path}: {name}.attention.causal false is not supported")
    hf |= _pooling(metadata)
    source.require_all_read()
    return hf


def require_family(metadata: Metadata, architecture: str) -> None:
    """Raise CheckpointError unless an adapter is for models of an architecture of transformers.

    The rows of its matrices might have another order.
    """
    name = metadata.architecture
    if name not in _FAMILIES:
        raise UnsupportedModelError(f"{metadata.path}: general.architecture {name!r} is not supported")
    _, wanted, _ = _FAMILIES[name]
    # An architecture without a name of its own in llama.cpp, as Mistral's, shares that of another.
    if architecture != wanted and architecture in [known for _, known, _ in _FAMILIES.values()]:
        raise CheckpointError(
            f"{metadata.path}: the adapter is for models of {wanted}, and this one is of {architecture}"
        )


def _pooling(metadata: Metadata) -> dict[str, int]:
    """Return what the file says of how embeddings are made, if anything."""
    number = metadata.integer("pooling_type", None)
    if number is not None and number not in GGUF_POOLINGS:
        known = ", ".join(f"{key} ({name})" for key, name in GGUF_POOLINGS.items())
        raise CheckpointError(
            f"{metadata.path}: {metadata.architecture}.pooling_type must be one of {known}, got {number}"
        )
    return {} if number is None else {POOLING_KEY: number}


def _require_model(metadata: Metadata) -> None:
    """Raise UnsupportedModelError for a file of another kind: an adapter, a part for images, a matrix."""
    kind = metadata.text("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(
            f"{metadata.path}: general.type is {shown(kind)}, but only files of the type 'model' are loaded; "
            "give the file of the model"
        )


def _require_known_blocks(metadata: Metadata, tensors: Mapping[str, GgufTensor]) -> None:
    """Raise UnsupportedModelError for blocks in another version; without one, they are in today's."""
    version = metadata.integer("general.quantization_version", _QUANTIZATION_VERSION)
    if version != _QUANTIZATION_VERSION and any(tensor.type.in_blocks for tensor in tensors.values()):
        raise UnsupportedModelError(
            f"{metadata.path}: general.quantization_version {shown(version)} is not supported; "
            f"{_QUANTIZATION_VERSION} is: quantise the model again"
        )


def _bits(tensors: Mapping[str, GgufTensor]) -> dict[str, float]:
    """Return the bits of a weight, on average, of the layers and of embedding and head; of floats nothing."""
    if not any(tensor.type.in_blocks for tensor in tensors.values()):
        return {}
    found = {}
    tables = ("token_embd.", "output.", "position_embd.")
    for key, prefixes in zip(BITS_KEYS, (("blk.",), tables), strict=True):
        weights = [t for name, t in tensors.items() if name.startswith(prefixes) and len(t.shape) > 1]
        if weights:
            found[key] = 8 * sum(t.num_bytes for t in weights) / sum(t.num_values for t in weights)
    return found


def _dtype(tensors: Mapping[str, GgufTensor]) -> str:
    """Return the dtype of most weights; bfloat16 if most are codes."""
    counts = dict.fromkeys(_DTYPES.values(), 0)
    for tensor in tensors.values():
        if tensor.type.in_blocks:
            return "bfloat16"
        if len(tensor.shape) > 1:
            counts[_DTYPES[tensor.type.name]] += math.prod(tensor.shape)
    return max(counts, key=lambda name: counts[name])


def _sizes(source: ConfigSource) -> dict[str, Any]:
    """Read what all families have, of layers that are alike."""
    metadata = source.metadata
    hf = _outer_sizes(source)
    return hf | {
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_key_value_heads": metadata.integer("attention.head_count_kv", hf["num_attention_heads"]),
        "head_dim": head_dim_of(metadata),
    }


def _sizes_by_layer(source: ConfigSource) -> dict[str, Any]:
    """Read what `_sizes` does where layers differ: layers without attention have 0 KV heads in the file.

    Layers that predict further tokens, which are counted in block_count, are skipped.
    """
    metadata = source.metadata
    hf = _outer_sizes(source)
    num_further = metadata.integer("nextn_predict_layers", 0)
    if not 0 <= num_further < hf["num_hidden_layers"]:
        raise CheckpointError(
            f"{metadata.path}: nextn_predict_layers {num_further} contradicts block_count "
            f"{hf['num_hidden_layers']}"
        )
    kv_heads = {*metadata.integers("attention.head_count_kv", hf["num_hidden_layers"])} - {0}
    inner = {*metadata.integers("feed_forward_length", hf["num_hidden_layers"])} - {0}
    for key, found in (("attention.head_count_kv", kv_heads), ("feed_forward_length", inner)):
        if len(found) > 1:
            raise UnsupportedModelError(
                f"{metadata.path}: {key} {shown(sorted(found))} differs by layer, which is not supported"
            )
    return hf | {
        "num_hidden_layers": hf["num_hidden_layers"] - num_further,
        FURTHER_KEY: num_further,
        "intermediate_size": max(inner, default=1),
        "num_key_value_heads": max(kv_heads, default=hf["num_attention_heads"]),
        "head_dim": head_dim_of(metadata),
    }


def _layers_by_tensor(source: ConfigSource, num_layers: int, kinds: Mapping[str, str]) -> list[str]:
    """Return what each layer is, by the first of these tensors that it has."""
    found = []
    for layer in range(num_layers):
        kind = next((kind for name, kind in kinds.items() if f"blk.{layer}.{name}" in source.tensors), None)
        if kind is None:
            raise CheckpointError(
                f"{source.metadata.path}: layer {layer} has none of {', '.join(kinds)}, which tell what it is"
            )
        found.append(kind)
    return found


def _outer_sizes(source: ConfigSource) -> dict[str, Any]:
    """Read the sizes that no layer has of its own."""
    metadata = source.metadata
    num_layers = metadata.integer("block_count")
    if not 1 <= num_layers <= len(source.tensors):
        raise CheckpointError(
            f"{metadata.path}: block_count {num_layers} contradicts the {len(source.tensors)} tensors"
        )
    return {
        "vocab_size": source.tensor("token_embd.weight").shape[0],
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": metadata.integer("attention.head_count"),
        "max_position_embeddings": metadata.integer("context_length"),
    }


def head_dim_of(metadata: Metadata, of: str = "") -> int:
    """Return the head dimension. Raises CheckpointError if the dimensions of keys and values differ.

    of: a suffix of the metadata keys: "_swa" for layers with a sliding window, if their heads have another
        size.
    """
    num_heads = metadata.integer("attention.head_count")
    hidden_size = metadata.integer("embedding_length")
    if num_heads < 1 or hidden_size < num_heads:
        raise CheckpointError(
            f"{metadata.path}: attention.head_count {num_heads} does not fit embedding_length {hidden_size}"
        )
    key: int = metadata.integer(f"attention.key_length{of}", hidden_size // num_heads)
    value = metadata.integer(f"attention.value_length{of}", key)
    if key != value:
        raise UnsupportedModelError(
            f"{metadata.path}: attention.value_length{of} {value} other than key_length{of} {key} is not "
            "supported"
        )
    if key < 1:
        raise CheckpointError(f"{metadata.path}: attention.key_length{of} must be at least 1, got {key}")
    return key


def _decoder(source: ConfigSource) -> dict[str, Any]:
    """Read what the families after Llama have in common."""
    hf = _sizes(source)
    hf["rms_norm_eps"] = source.metadata.number("attention.layer_norm_rms_epsilon")
    hf["rope_parameters"] = _rope(source, hf)
    return hf


# Rotary embeddings


def _rope(source: ConfigSource, hf: Mapping[str, Any]) -> dict[str, Any]:
    metadata = source.metadata
    head_dim = hf["head_dim"]
    rotary_dim = metadata.integer("rope.dimension_count", head_dim)
    rope = {"rope_theta": metadata.number("rope.freq_base", 10000.0), **_scaling(metadata)}
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    factors = source.factors("rope_freqs.weight", rotary_dim // 2)
    if factors is None or set(factors) == {1.0}:
        return rope
    if rope["rope_type"] != "default":
        raise CheckpointError(
            f"{metadata.path}: rope_freqs.weight contradicts {metadata.architecture}.rope.scaling.type "
            f"{rope['rope_type']!r}"
        )
    return rope | _frequencies(factors, rope["rope_theta"], rotary_dim, hf["max_position_embeddings"])


def _scaling(metadata: Metadata) -> dict[str, Any]:
    kind = metadata.text("rope.scaling.type", "none")
    if kind == "none" or (kind == "longrope" and metadata.architecture == "phi3"):  # whose reader goes on
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{metadata.path}: rope.scaling.type {kind!r} is not supported; supported are none, linear and "
            "yarn, and longrope of phi3"
        )
    scaling = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        trained = metadata.integer("rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = trained
        for ours, theirs in _YARN.items():
            value = metadata.number(f"rope.scaling.{theirs}", None)
            if value is not None:
                scaling[ours] = value
        if metadata.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
            raise UnsupportedModelError(f"{metadata.path}: rope.scaling.yarn_ext_factor is not supported")
    return scaling


_YARN = {
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def _frequencies(factors: list[float], theta: float, rotary_dim: int, longest: int) -> dict[str, Any]:
    """Return the rope whose wavelengths are multiplied by these factors: Llama 3's, or of any other kind."""
    found = torch.tensor(factors, dtype=torch.float64)
    if torch.allclose(found, _llama3_factors(theta, rotary_dim, factors[-1]), rtol=1e-6, atol=0):
        return {"rope_type": "llama3", "factor": factors[-1], **_LLAMA3}
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": longest,
    }


def _llama3_factors(theta: float, rotary_dim: int, factor: float) -> torch.Tensor:
    low, high, trained = _LLAMA3.values()
    powers = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    turns = trained / (2 * math.pi * theta**powers)  # within the trained context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


# Families


def _biased(source: ConfigSource) -> dict[str, Any]:
    """Read what Llama, Granite and SmolLM3 share."""
    hf = _decoder(source)
    hf["attention_bias"] = "blk.0.attn_q.bias" in source.tensors
    hf["mlp_bias"] = "blk.0.ffn_gate.bias" in source.tensors
    return hf


def _llama(source: ConfigSource) -> dict[str, Any]:
    window = source.metadata.integer("attention.sliding_window", 0)
    if source.metadata.integer("expert_count", 0):
        return _decoder(source) | {
            **_experts(source, renormalised=True),
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "sliding_window": window or None,
        }
    hf = _biased(source)
    if window:
        hf |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return hf


def _qwen2(source: ConfigSource) -> dict[str, Any]:
    return _decoder(source) | {"use_sliding_window": False}


def _qwen3(source: ConfigSource) -> dict[str, Any]:
    return _qwen2(source) | {"attention_bias": "blk.0.attn_q.bias" in source.tensors}


def _of_vision(read: Callable[[ConfigSource], dict[str, Any]]) -> Callable[[ConfigSource], dict[str, Any]]:
    """Return what reads the text part of a Qwen-VL, whose three positions of a token are one in text."""

    def with_vision(source: ConfigSource) -> dict[str, Any]:
        source.metadata.numbers("rope.dimension_sections", "bBhHiIlLqQ", None)
        source.metadata.integer("n_deepstack_layers", 0)
        return read(source)

    return with_vision


def _experts(source: ConfigSource, *, renormalised: bool, scores: int = _SOFTMAX) -> dict[str, Any]:
    """Read what mixtures of experts share.

    renormalised: whether llama.cpp divides the weights of a token's experts by their sum in such models.
    scores: the number of the function that makes weights of logits, as in `expert_gating_func`.

    Raises UnsupportedModelError for another routing.
    """
    metadata = source.metadata
    for key, given, known in (
        ("expert_gating_func", metadata.integer("expert_gating_func", scores), scores),
        ("expert_weights_norm", metadata.flag("expert_weights_norm", renormalised), renormalised),
    ):
        if given != known:
            name = f"{metadata.architecture}.{key}"
            raise UnsupportedModelError(f"{metadata.path}: {name} {given} is not supported; {known} is")
    return {
        "num_local_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "norm_topk_prob": renormalised,
    }


def _olmoe(source: ConfigSource) -> dict[str, Any]:
    bias = "blk.0.attn_q.bias" in source.tensors
    return _decoder(source) | _experts(source, renormalised=False) | {"attention_bias": bias}


def _qwen3moe(source: ConfigSource) -> dict[str, Any]:
    hf = _qwen3(source) | _experts(source, renormalised=True)
    hf["moe_intermediate_size"] = source.metadata.integer("expert_feed_forward_length")
    return hf


def _qwen2moe(source: ConfigSource) -> dict[str, Any]:
    hf = _qwen2(source) | _experts(source, renormalised=False)
    hf["qkv_bias"] = "blk.0.attn_q.bias" in source.tensors
    hf["moe_intermediate_size"] = source.metadata.integer("expert_feed_forward_length")
    hf["shared_expert_intermediate_size"] = source.metadata.integer("expert_shared_feed_forward_length")
    return hf


def _gpt_oss(source: ConfigSource) -> dict[str, Any]:
    """Read gpt-oss, whose YaRN does not round its bounds to whole dimensions; llama.cpp rounds them."""
    hf = _decoder(source) | _experts(source, renormalised=False, scores=_SOFTMAX_OF_CHOSEN)
    hf["intermediate_size"] = source.metadata.integer("expert_feed_forward_length")
    hf["attention_bias"] = "blk.0.attn_q.bias" in source.tensors
    hf["sliding_window"] = source.metadata.integer("attention.sliding_window")
    hf["layer_types"] = _layer_types(source, 2, hf["num_hidden_layers"])
    if hf["rope_parameters"]["rope_type"] == "yarn":
        hf["rope_parameters"]["truncate"] = False
    return hf


def _glm4moe(source: ConfigSource) -> dict[str, Any]:
    """Read GLM-4.5, whose block_count includes layers that predict further tokens."""
    metadata = source.metadata
    renormalised = metadata.flag("expert_weights_norm", False)
    hf = _glm4(source) | _experts(source, renormalised=renormalised, scores=_SIGMOID)
    num_extra = metadata.integer("nextn_predict_layers", 0)
    return hf | {
        "num_hidden_layers": hf["num_hidden_layers"] - num_extra,
        "num_nextn_predict_layers": num_extra,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in source.tensors,
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "n_shared_experts": metadata.integer("expert_shared_count"),
        "first_k_dense_replace": metadata.integer("leading_dense_block_count", 0),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


def _minimax_m2(source: ConfigSource) -> dict[str, Any]:
    hf = _decoder(source) | _experts(source, renormalised=True, scores=_SIGMOID)
    hf["intermediate_size"] = source.metadata.integer("expert_feed_forward_length")
    return hf


def _phi3(source: ConfigSource) -> dict[str, Any]:
    hf = _decoder(source)
    metadata = source.metadata
    hf["sliding_window"] = metadata.integer("attention.sliding_window") or None
    trained = metadata.integer("rope.scaling.original_context_length")
    hf["original_max_position_embeddings"] = trained
    attention_factor = metadata.number("rope.scaling.attn_factor", None)
    count = metadata.integer("rope.dimension_count", hf["head_dim"]) // 2
    long = source.factors("rope_factors_long.weight", count)
    short = source.factors("rope_factors_short.weight", count)
    kind = metadata.text("rope.scaling.type", "none")
    if long is None and short is None and attention_factor is None and kind != "longrope":
        return hf
    if long is None or short is None or attention_factor is None:
        raise CheckpointError(
            f"{metadata.path}: rope_factors_long.weight, rope_factors_short.weight and "
            "phi3.rope.scaling.attn_factor go together"
        )
    if hf["rope_parameters"]["rope_type"] != "default":
        raise UnsupportedModelError(
            f"{metadata.path}: rope_factors_long.weight beside {kind} scaling is not supported"
        )
    hf["rope_parameters"] |= {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention_factor,
        "original_max_position_embeddings": trained,
    }
    return hf


def _granite(source: ConfigSource) -> dict[str, Any]:
    return _biased(source) | _multipliers(source)


def _multipliers(source: ConfigSource) -> dict[str, Any]:
    """Read the multipliers of all Granites."""
    multipliers = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {ours: source.metadata.number(theirs) for ours, theirs in multipliers.items()}


def _granitemoe(source: ConfigSource) -> dict[str, Any]:
    # The softmax of all experts over the sum of a token's own is that of its own.
    return _granite(source) | _experts(source, renormalised=True)


def _olmo2(source: ConfigSource) -> dict[str, Any]:
    hf = _decoder(source) | {"attention_bias": "blk.0.attn_q.bias" in source.tensors}
    window = source.metadata.integer("attention.sliding_window", 0)
    layer_types = _layer_types(source, 4, hf["num_hidden_layers"])
    if not window:
        return hf
    rope = hf["rope_parameters"]
    local_theta = source.metadata.number("rope.freq_base_swa", rope["rope_theta"])
    local = {"rope_type": "default", "rope_theta": local_theta}
    return hf | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": layer_types,
        "rope_parameters": {"full_attention": rope, "sliding_attention": local},
    }


def _layer_types(source: ConfigSource, every: int, num_layers: int) -> list[str]:
    """Return which layers have a window: all but every n-th, or those with true.

    every: n, where the metadata does not say.
    """
    is_local = source.metadata.layers("attention.sliding_window_pattern")
    if is_local is None:
        is_local = every
    if isinstance(is_local, int):
        if is_local < 1:
            raise CheckpointError(
                f"{source.metadata.path}: attention.sliding_window_pattern must be at least 1, got {is_local}"
            )
        is_local = [bool((layer + 1) % is_local) for layer in range(num_layers)]
    if len(is_local) != num_layers:
        raise CheckpointError(
            f"{source.metadata.path}: attention.sliding_window_pattern has {len(is_local)} values for "
            f"{num_layers} layers"
        )
    return ["sliding_attention" if local else "full_attention" for local in is_local]


def _smollm3(source: ConfigSource) -> dict[str, Any]:
    return _biased(source) | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "use_sliding_window": False,
        "no_rope_layer_interval": _NO_ROPE_INTERVAL,
    }


def _glm4(source: ConfigSource) -> dict[str, Any]:
    hf = _decoder(source) | {"attention_bias": "blk.0.attn_q.bias" in source.tensors}
    hf["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return hf


def _gemma2(source: ConfigSource) -> dict[str, Any]:
    return _gemma(source, every=2) | {
        "attn_logit_softcapping": source.metadata.number("attn_logit_softcapping"),
        "final_logit_softcapping": source.metadata.number("final_logit_softcapping"),
    }


def _gemma3(source: ConfigSource) -> dict[str, Any]:
    hf = _gemma(source, every=6)
    local_theta = source.metadata.number("rope.freq_base_swa", _LOCAL_THETA)
    local = {"rope_type": "default", "rope_theta": local_theta}
    hf["rope_parameters"] = {"full_attention": hf["rope_parameters"], "sliding_attention": local}
    hf["final_logit_softcapping"] = source.metadata.number("final_logit_softcapping", None)
    return hf


def _gemma4(source: ConfigSource) -> dict[str, Any]:
    """Read Gemma 4, whose layers with full attention have heads of their own."""
    metadata = source.metadata
    hf = _outer_sizes(source)
    num_layers = hf["num_hidden_layers"]
    layer_types = _layer_types(source, 6, num_layers)
    full = [layer for layer, kind in enumerate(layer_types) if kind == "full_attention"]
    kv_heads = metadata.integers("attention.head_count_kv", num_layers)
    width = head_dim_of(metadata)
    own_width = head_dim_of(metadata, "_swa")
    num_shared = metadata.integer("attention.shared_kv_layers", 0)
    inner = metadata.integers("feed_forward_length", num_layers)
    is_wide = inner[-1] == 2 * inner[0]
    num_wide = num_shared if is_wide else 0
    if inner != [inner[0]] * (num_layers - num_wide) + [2 * inner[0]] * num_wide:
        raise UnsupportedModelError(
            f"{metadata.path}: feed_forward_length {shown(inner)} is not supported; twice the first in the "
            f"{num_shared} layers that share K and V is"
        )
    hf |= {
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": inner[0],
        "use_double_wide_mlp": is_wide,
        "num_key_value_heads": kv_heads[0],
        "head_dim": own_width,
        "per_layer_config": {
            str(layer): {"head_dim": width if layer in full else own_width, "num_key_value_heads": heads}
            for layer, heads in enumerate(kv_heads)
        },
        "num_kv_shared_layers": num_shared,
        "layer_types": layer_types,
        "sliding_window": metadata.integer("attention.sliding_window"),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", None),
        "attention_bias": "blk.0.attn_q.bias" in source.tensors,
        "attention_k_eq_v": bool(full) and f"blk.{full[0]}.attn_v.weight" not in source.tensors,
        "hidden_size_per_layer_input": metadata.integer("embedding_length_per_layer_input", 0),
        "rope_parameters": _gemma4_ropes(source, width, own_width),
    }
    if hf["hidden_size_per_layer_input"]:
        hf["vocab_size_per_layer_input"] = source.tensor("per_layer_token_embd.weight").shape[0]
    if metadata.integer("expert_count", 0):
        experts = _experts(source, renormalised=True)
        hf |= {
            "enable_moe_block": True,
            "num_experts": experts["num_local_experts"],
            "top_k_experts": experts["num_experts_per_tok"],
            "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        }
    return hf


def _gemma4_ropes(source: ConfigSource, width: int, own_width: int) -> dict[str, Any]:
    """Read the rotary embeddings of layers with full attention, and of those with a window.

    width, own_width: the widths of their heads, which are rotated as a whole.
    """
    metadata = source.metadata
    for key, dims in (("rope.dimension_count", width), ("rope.dimension_count_swa", own_width)):
        if (given := metadata.integer(key, dims)) != dims:
            raise UnsupportedModelError(f"{metadata.path}: {key} {given} is not supported; {dims} is")
    factors = source.factors("rope_freqs.weight", width // 2) or [1.0] * (width // 2)
    num_rotated = factors.count(1.0)
    if any(factor < _UNROTATED for factor in factors[num_rotated:]):
        raise UnsupportedModelError(
            f"{metadata.path}: rope_freqs.weight {shown(factors)} is not supported; ones and then 1e30 are"
        )
    return {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": metadata.number("rope.freq_base"),
            "partial_rotary_factor": num_rotated / (width // 2),
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": metadata.number("rope.freq_base_swa", _LOCAL_THETA),
        },
    }


def _gemma(source: ConfigSource, every: int) -> dict[str, Any]:
    """Read what Gemma 2 and 3 share. every: the layers without a window, where the metadata does not say."""
    hf = _decoder(source)
    num_layers = hf["num_hidden_layers"]
    width = hf["head_dim"]
    if num_layers == _GEMMA_27B[source.metadata.architecture]:
        width = hf["hidden_size"] // hf["num_attention_heads"]
    return hf | {
        "sliding_window": source.metadata.integer("attention.sliding_window"),
        "layer_types": _layer_types(source, every, num_layers),
        "query_pre_attn_scalar": width,
    }


def _gpt2(source: ConfigSource) -> dict[str, Any]:
    sizes = _sizes(source)
    return {
        "vocab_size": sizes["vocab_size"],
        "n_embd": sizes["hidden_size"],
        "n_layer": sizes["num_hidden_layers"],
        "n_head": sizes["num_attention_heads"],
        "n_inner": sizes["intermediate_size"],
        "n_positions": sizes["max_position_embeddings"],
        "layer_norm_epsilon": source.metadata.number("attention.layer_norm_epsilon"),
    }


def _gptneox(source: ConfigSource) -> dict[str, Any]:
    hf = _sizes(source)
    hf["rope_parameters"] = _rope(source, hf)
    hf["layer_norm_eps"] = source.metadata.number("attention.layer_norm_epsilon")
    hf["use_parallel_residual"] = source.metadata.flag("use_parallel_residual")
    hf["attention_bias"] = "blk.0.attn_qkv.bias" in source.tensors
    return hf


def _delta(source: ConfigSource) -> dict[str, Any]:
    """Read Qwen3.5 and Qwen3-Next. Their layers with attention have W_q."""
    metadata = source.metadata
    hf = _sizes_by_layer(source)
    hf["rms_norm_eps"] = metadata.number("attention.layer_norm_rms_epsilon")
    hf["rope_parameters"] = _rope(source, hf)
    metadata.numbers("rope.dimension_sections", "bBhHiIlLqQ", None)
    metadata.integer("full_attention_interval", 0)
    num_heads = metadata.integer("ssm.time_step_rank")
    kinds = {"attn_q.weight": "full_attention", "ssm_out.weight": "linear_attention"}
    return hf | {
        "attention_bias": any(name.endswith("attn_q.bias") for name in source.tensors),
        "layer_types": _layers_by_tensor(source, hf["num_hidden_layers"], kinds),
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_value_head_dim": metadata.integer("ssm.inner_size") // max(1, num_heads),
    }


def _delta_moe(source: ConfigSource) -> dict[str, Any]:
    """Read the mixtures among them. A layer without experts has W_gate."""
    metadata = source.metadata
    hf = _delta(source) | _experts(source, renormalised=True)
    layers = range(hf["num_hidden_layers"])
    return hf | {
        "num_experts": hf["num_local_experts"],
        "mlp_only_layers": [i for i in layers if f"blk.{i}.ffn_gate.weight" in source.tensors],
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
    }


def _lfm2(source: ConfigSource) -> dict[str, Any]:
    metadata = source.metadata
    hf = _sizes_by_layer(source)
    hf["norm_eps"] = metadata.number("attention.layer_norm_rms_epsilon")
    hf["rope_parameters"] = _rope(source, hf)
    kinds = {"attn_q.weight": "full_attention", "shortconv.conv.weight": "conv"}
    return hf | {
        "layer_types": _layers_by_tensor(source, hf["num_hidden_layers"], kinds),
        "conv_L_cache": metadata.integer("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in source.tensors),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2moe(source: ConfigSource) -> dict[str, Any]:
    metadata = source.metadata
    hf = _lfm2(source) | _experts(source, renormalised=True, scores=_SIGMOID)
    return hf | {
        "num_experts": hf["num_local_experts"],
        "num_dense_layers": metadata.integer("leading_dense_block_count", 0),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "use_expert_bias": any(name.endswith("exp_probs_b.bias") for name in source.tensors),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


def _mamba_sizes(source: ConfigSource) -> tuple[int, int, int, int, int]:
    """Return the width of the convolution, the numbers of heads and groups, and the sizes of a head and of
    its state.
    """
    metadata = source.metadata
    num_heads = metadata.integer("ssm.time_step_rank")
    inner = metadata.integer("ssm.inner_size")
    if num_heads < 1 or inner % num_heads:
        raise CheckpointError(
            f"{metadata.path}: ssm.inner_size {inner} does not divide among ssm.time_step_rank {num_heads}"
        )
    width, groups = metadata.integer("ssm.conv_kernel"), metadata.integer("ssm.group_count")
    return width, num_heads, groups, inner // num_heads, metadata.integer("ssm.state_size")


def _has(source: ConfigSource, end: str) -> bool:
    """Return whether a layer has this tensor."""
    return any(name.startswith("blk.") and name.endswith(f".{end}") for name in source.tensors)


def _nemotron_h(source: ConfigSource) -> dict[str, Any]:
    """Read Nemotron-H, each of whose layers is one part. llama.cpp limits no time steps."""
    metadata = source.metadata
    hf = _sizes_by_layer(source)
    # Nothing is rotated, whatever the metadata say.
    metadata.integer("rope.dimension_count", 0)
    metadata.number("rope.freq_base", 0.0)
    width, num_heads, num_groups, head_dim, state_dim = _mamba_sizes(source)
    kinds = {
        "ssm_in.weight": "linear_attention",
        "attn_q.weight": "full_attention",
        "ffn_up_exps.weight": "moe",
        "ffn_up.weight": "mlp",
    }
    eps = metadata.number("attention.layer_norm_rms_epsilon", None)
    hf |= {
        "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon") if eps is None else eps,
        "layers_block_type": _layers_by_tensor(source, hf["num_hidden_layers"], kinds),
        "conv_kernel": width,
        "mamba_num_heads": num_heads,
        "n_groups": num_groups,
        "mamba_head_dim": head_dim,
        "ssm_state_size": state_dim,
        "use_bias": _has(source, "ssm_in.bias"),
        "use_conv_bias": _has(source, "ssm_conv1d.bias"),
        "attention_bias": _has(source, "attn_q.bias"),
        "mlp_bias": _has(source, "ffn_up.bias") or _has(source, "ffn_up_shexp.bias"),
    }
    if not metadata.integer("expert_count", 0):
        return hf
    renormalised = metadata.flag("expert_weights_norm", True)
    experts = _experts(source, renormalised=renormalised, scores=_SIGMOID)
    dense = [t.shape[0] for name, t in source.tensors.items() if name.endswith(".ffn_up.weight")]
    return hf | {
        "intermediate_size": max(dense, default=hf["intermediate_size"]),
        "n_routed_experts": experts["num_local_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "norm_topk_prob": renormalised,
        "n_shared_experts": metadata.integer("expert_shared_count", 1),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.integer("moe_latent_size", None),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
    }


def _of_mamba(source: ConfigSource) -> dict[str, Any]:
    """Read the states of Granite 4 and Falcon-H1."""
    width, num_heads, num_groups, head_dim, state_dim = _mamba_sizes(source)
    return {
        "mamba_d_conv": width,
        "mamba_n_heads": num_heads,
        "mamba_n_groups": num_groups,
        "mamba_d_head": head_dim,
        "mamba_d_state": state_dim,
        "mamba_conv_bias": _has(source, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(source, "ssm_in.bias"),
        "attention_bias": _has(source, "attn_q.bias"),
    }


def _granitehybrid(source: ConfigSource) -> dict[str, Any]:
    """Read Granite 4, whose states have as many numbers as mamba_expand times the hidden size."""
    metadata = source.metadata
    hf = _sizes_by_layer(source)
    hf["rms_norm_eps"] = metadata.number("attention.layer_norm_rms_epsilon")
    hf["rope_parameters"] = _rope(source, hf)
    kinds = {"attn_q.weight": "attention", "ssm_in.weight": "mamba"}
    inner = metadata.integer("ssm.inner_size")
    if inner % hf["hidden_size"]:
        raise UnsupportedModelError(
            f"{metadata.path}: ssm.inner_size {inner} is not supported; multiples of embedding_length "
            f"{hf['hidden_size']} are"
        )
    hf |= {
        **_of_mamba(source),
        **_multipliers(source),
        "mamba_expand": inner // hf["hidden_size"],
        "layer_types": _layers_by_tensor(source, hf["num_hidden_layers"], kinds),
        "position_embedding_type": "rope" if metadata.flag("rope.scaling.finetuned", False) else "nope",
        "num_local_experts": 0,
    }
    shared = metadata.integer("expert_shared_feed_forward_length", hf["intermediate_size"])
    hf["shared_intermediate_size"] = shared
    if metadata.integer("expert_count", 0):
        hf |= _experts(source, renormalised=True)
    return hf


def _falcon_h1(source: ConfigSource) -> dict[str, Any]:
    """Read Falcon-H1, into whose weights the converter folds all multipliers.

    llama.cpp normalises what the gate has multiplied, and limits no time steps.
    """
    metadata = source.metadata
    hf = _decoder(source) | _of_mamba(source)
    return hf | {
        "mamba_d_ssm": metadata.integer("ssm.inner_size"),
        "mamba_rms_norm": _has(source, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": _has(source, "ssm_out.bias"),
        "mlp_bias": _has(source, "ffn_gate.bias"),
    }


Read = Callable[[ConfigSource], dict[str, Any]]
_FAMILIES: Mapping[str, tuple[str, str, Read]] = {
    "llama": ("llama", "LlamaForCausalLM", _llama),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", _qwen3),
    "qwen2vl": ("qwen2", "Qwen2ForCausalLM", _of_vision(_qwen2)),
    "qwen3vl": ("qwen3", "Qwen3ForCausalLM", _of_vision(_qwen3)),
    "qwen3vlmoe": ("qwen3_moe", "Qwen3MoeForCausalLM", _of_vision(_qwen3moe)),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM", _qwen2moe),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3moe),
    "olmoe": ("olmoe", "OlmoeForCausalLM", _olmoe),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM", _gpt_oss),
    "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM", _glm4moe),
    "minimax-m2": ("minimax_m2", "MiniMaxM2ForCausalLM", _minimax_m2),
    "granitemoe": ("granitemoe", "GraniteMoeForCausalLM", _granitemoe),
    "phi3": ("phi3", "Phi3ForCausalLM", _phi3),
    "granite": ("granite", "GraniteForCausalLM", _granite),
    "olmo2": ("olmo2", "Olmo2ForCausalLM", _olmo2),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM", _smollm3),
    "glm4": ("glm4", "Glm4ForCausalLM", _glm4),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", _gemma2),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM", _gemma3),
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM", _gemma4),
    "qwen35": ("qwen3_5_text", "Qwen3_5ForCausalLM", _delta),
    "qwen35moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _delta_moe),
    "qwen3next": ("qwen3_next", "Qwen3NextForCausalLM", _delta_moe),
    "lfm2": ("lfm2", "Lfm2ForCausalLM", _lfm2),
    "lfm2moe": ("lfm2_moe", "Lfm2MoeForCausalLM", _lfm2moe),
    "nemotron_h": ("nemotron_h", "NemotronHForCausalLM", _nemotron_h),
    "nemotron_h_moe": ("nemotron_h", "NemotronHForCausalLM", _nemotron_h),
    "granitehybrid": ("granitemoehybrid", "GraniteMoeHybridForCausalLM", _granitehybrid),
    "falcon-h1": ("falcon_h1", "FalconH1ForCausalLM", _falcon_h1),
    "gpt2": ("gpt2", "GPT2LMHeadModel", _gpt2),
    "gptneox": ("gpt_neox", "GPTNeoXForCausalLM", _gptneox),
}
assert _FAMILIES.keys() == CONVERTED.keys()
