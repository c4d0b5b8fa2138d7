"""ModelConfig: a Hugging Face config, checked and reduced to what the decoder needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, UnsupportedModelError

# A damaged or hostile config must not make us allocate or loop for ever.
CEILINGS = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_layers": 1024,
    "num_heads": 1024,
    "num_kv_heads": 1024,
    "head_dim": 256,
    "max_position_embeddings": 2**27,
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: its base, and how it is stretched beyond the trained context."""

    type: str  # "default", "linear", "dynamic" or "llama3"
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share block tables, because they see the same tokens."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder. The flags are all that sets the supported architectures apart."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]  # each layer's sliding window in tokens, None where it sees all
    dtype: str  # of the checkpoint

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Reduce `PreTrainedConfig.to_dict()`.

        Raises UnsupportedModelError for what is not implemented and CheckpointError for values that
        contradict each other.
        """
        architecture = require_supported(hf)
        if hf.get("hidden_act", "silu") != "silu":
            raise UnsupportedModelError(f"hidden_act {hf['hidden_act']!r} is not supported; 'silu' is")
        config = cls(
            architecture=architecture,
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=hf["num_attention_heads"],
            num_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
            head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
            rms_norm_eps=hf["rms_norm_eps"],
            max_position_embeddings=hf["max_position_embeddings"],
            rope=_rope(hf),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch."),
            **SUPPORTED_ARCHITECTURES[architecture](hf),
        )
        config._check()
        return config

    @property
    def max_context(self) -> int:
        """Longest sequence the positions are made for; dynamic and linear scaling stretch it."""
        if self.rope.type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * self.rope.factor)
        return self.max_position_embeddings

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """The layers by window, in groups of one size, so that all take blocks of one pool.

        The size is that of the smallest set of layers with the same window. Where it does not divide another
        set, that one's last group leaves places empty.
        """
        by_window: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.layer_windows):
            by_window.setdefault(window, []).append(layer)
        size = min(map(len, by_window.values()))
        return tuple(
            LayerGroup(window, tuple(layers[i : i + size]))
            for window, layers in by_window.items()
            for i in range(0, len(layers), size)
        )

    @property
    def num_layer_params(self) -> int:
        """Weights of the layers, without embedding and head. Norms and biases, a percent, are left out."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim  # Q and O, K and V
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def kv_heads_per_slot(self) -> int:
        """Heads of K and V together that one token has in the layers of one group."""
        return 2 * len(self.layer_groups[0].layers) * self.num_kv_heads

    def _check(self) -> None:
        for name, ceiling in CEILINGS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= ceiling:
                raise CheckpointError(f"config.json: {name} must be from 1 to {ceiling}, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: {self.num_heads} query heads do not divide among {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"config.json: head_dim must be even for rotary, got {self.head_dim}")


def require_supported(hf: Mapping[str, Any]) -> str:
    """The architecture named in config.json, before anybody acts on the rest of it.

    Raises UnsupportedModelError, which lists what is supported, and CheckpointError for absurd depths.
    """
    names = hf.get("architectures") or ["(none named)"]
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {name} is not supported; supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    model_type = hf.get("model_type")
    if model_type != MODEL_TYPES[name]:
        raise CheckpointError(f"{name} goes with model_type {MODEL_TYPES[name]!r}, got {model_type!r}")
    if hf.get("quantization_config"):
        raise UnsupportedModelError("quantized checkpoints (quantization_config) are not supported")
    num_layers = hf.get("num_hidden_layers", 1)
    if not isinstance(num_layers, int) or not 1 <= num_layers <= CEILINGS["num_layers"]:
        raise CheckpointError(f"num_hidden_layers must be from 1 to 1024, got {num_layers!r}")
    return name


def _rope(hf: Mapping[str, Any]) -> RopeConfig:
    # transformers 5 writes rope_parameters; older checkpoints have rope_theta and rope_scaling.
    parameters = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ("default", "linear", "dynamic", "llama3"):
        raise UnsupportedModelError(
            f"rope type {kind!r} is not supported; supported are default, linear, dynamic, llama3"
        )
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor other than 1.0 is not supported")
    theta = float(parameters.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    factor = float(parameters.get("factor", 1.0))
    if not (0 < theta < math.inf and 1 <= factor < math.inf):
        raise CheckpointError(f"rope_theta must be above 0 and factor at least 1, got {theta} and {factor}")
    return RopeConfig(
        type=kind,
        theta=theta,
        factor=factor,
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=int(
            parameters.get("original_max_position_embeddings") or hf["max_position_embeddings"]
        ),
    )


def _llama(hf: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias", False))
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "qk_norm": False,
        "layer_windows": (None,) * hf["num_hidden_layers"],
    }


def _mistral(hf: Mapping[str, Any]) -> dict[str, Any]:
    windows = (_window(hf),) * hf["num_hidden_layers"]
    return {**_NO_BIAS, "qk_norm": False, "layer_windows": windows}


def _qwen2(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {**_NO_BIAS, "qkv_bias": True, "qk_norm": False, "layer_windows": _mixed_windows(hf)}


def _qwen3(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {**_llama(hf), "mlp_bias": False, "qk_norm": True, "layer_windows": _mixed_windows(hf)}


_NO_BIAS = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}


def _window(hf: Mapping[str, Any]) -> int | None:
    window: int | None = hf.get("sliding_window")
    if window is not None and window < 1:
        raise CheckpointError(f"sliding_window must be at least 1, got {window}")
    return window


def _mixed_windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    layer_types, num_layers = hf["layer_types"], hf["num_hidden_layers"]
    if len(layer_types) != num_layers or set(layer_types) - {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(
            f"layer_types must be {num_layers} of full_attention or sliding_attention, got {layer_types}"
        )
    return tuple(_window(hf) if kind == "sliding_attention" else None for kind in layer_types)


# What each architecture declares about the one decoder. TinyLlama and Llama 1 to 3 are LlamaForCausalLM.
SUPPORTED_ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
