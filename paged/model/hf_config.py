"""Read config.json of a Hugging Face checkpoint: check it, add the defaults, reduce it to a ModelConfig.

transformers' own classes could check and complete it, but importing them imports torch's compiler, which is
slow to load. Their defaults are repeated here, and tests compare the two.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError, UnsupportedModelError
from ..validation import check_bool, check_int, check_number, shown
from .config import ModelConfig, RopeConfig

# Bounds on what a damaged or hostile config.json can make us allocate or loop over.
CEILINGS = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 256,
    "max_position_embeddings": 2**27,
    "sliding_window": 2**27,
    "max_window_layers": 1024,
    "original_max_position_embeddings": 2**27,
}
MAX_JSON_BYTES = 64 * 2**20
# Beyond these no rotary embedding makes sense, and float32 overflows.
MAX_ROPE_THETA = 1e12
MAX_ROPE_FACTOR = 1e4
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
CHECKPOINT_DTYPES = ("float64", "float32", "float16", "bfloat16")
# The keys that each type of rope scaling requires.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}

Config = Mapping[str, Any]


def check_file(file: Path, most: int) -> int:
    """Return the size of a regular file, which links may lead to. Raises CheckpointError.

    most: bytes that it may have.
    """
    try:
        status = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{file}: is not a regular file")
    if status.st_size > most:
        raise CheckpointError(f"{file}: has {status.st_size:,} bytes; at most {most:,} are read")
    return status.st_size


def read_json(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file of a checkpoint, of at most 64 MiB. Raises CheckpointError."""
    if not file.exists():
        raise CheckpointError(f"{file} does not exist; a model directory has config.json and *.safetensors")
    check_file(file, MAX_JSON_BYTES)
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: must hold a JSON object")
    return value


def read_config(directory: Path) -> ModelConfig:
    """Read and check config.json. Raises the errors of `from_hf`, with the name of the file."""
    file = directory / "config.json"
    hf = read_json(file)
    try:
        return from_hf(hf)
    except (UnsupportedModelError, CheckpointError) as error:
        raise type(error)(f"{file}: {error}") from None


def from_hf(hf: Config) -> ModelConfig:
    """Reduce the contents of config.json to a ModelConfig, with transformers' defaults.

    Raises UnsupportedModelError for what is not implemented, and CheckpointError for sizes that are missing
    and values that are out of range, of a wrong type, or contradict each other.
    """
    architecture = require_supported(hf)
    _, defaults, declare = ARCHITECTURES[architecture]
    if missing := [name for name in REQUIRED if hf.get(name) is None]:
        raise CheckpointError(f"{missing[0]} is missing")
    hf = {**_COMMON, **defaults, **hf}
    if hf["hidden_act"] != "silu":
        raise UnsupportedModelError(f"hidden_act {shown(hf['hidden_act'])} is not supported; 'silu' is")
    num_heads, hidden_size = _size(hf, "num_attention_heads"), _size(hf, "hidden_size")
    num_kv_heads = num_heads if hf["num_key_value_heads"] is None else _size(hf, "num_key_value_heads")
    head_dim = hidden_size // num_heads if hf["head_dim"] is None else _size(hf, "head_dim")
    if num_heads % num_kv_heads:
        raise CheckpointError(f"{num_heads} query heads do not divide among {num_kv_heads} KV heads")
    rope, least = _rope(hf), 2
    if rope.type == "dynamic":
        least = 4  # the exponent of its base is head_dim / (head_dim - 2)
    if head_dim % 2 or head_dim < least:
        raise CheckpointError(
            f"head_dim must be even and at least {least} for {rope.type} rope, got {head_dim}"
        )
    return ModelConfig(
        architecture=architecture,
        vocab_size=_size(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(hf, "intermediate_size"),
        num_layers=_size(hf, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=check_number(CheckpointError, "rms_norm_eps", hf["rms_norm_eps"], 0, 1, above=True),
        max_position_embeddings=_size(hf, "max_position_embeddings"),
        rope=rope,
        tie_word_embeddings=_flag(hf, "tie_word_embeddings"),
        dtype=_dtype(hf),
        **declare(hf),
    )


def require_supported(hf: Config) -> str:
    """Return the architecture named in config.json.

    Raises UnsupportedModelError, which lists the supported ones, and CheckpointError.
    """
    names = hf.get("architectures") or ["(none named)"]
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {shown(name)} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    model_type, expected = hf.get("model_type"), ARCHITECTURES[name].model_type
    if model_type != expected:
        raise CheckpointError(f"{name} goes with model_type {expected!r}, got {shown(model_type)}")
    if hf.get("quantization_config"):
        raise UnsupportedModelError("quantized checkpoints (quantization_config) are not supported")
    return name


def _rope(hf: Config) -> RopeConfig:
    # transformers 5 writes rope_parameters; older checkpoints have rope_theta and rope_scaling.
    own = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(own, dict):
        raise CheckpointError(f"rope_parameters must be an object, got {shown(own)}")
    if nested := [key for key, value in own.items() if isinstance(value, dict)]:
        raise UnsupportedModelError(f"rope_parameters for each type of layer ({nested[0]}) are not supported")
    outer = {key: hf[key] for key in ("rope_theta", "partial_rotary_factor") if hf.get(key) is not None}
    rope = {"rope_theta": 10000.0, **outer, **{k: v for k, v in own.items() if v is not None}}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in list(ROPE_TYPES):  # a list, as any JSON value may come, hashable or not
        raise UnsupportedModelError(
            f"rope type {shown(kind)} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError("partial_rotary_factor other than 1.0 is not supported")
    if missing := [key for key in ROPE_TYPES[kind] if key not in rope]:
        raise CheckpointError(f"rope type {kind!r} needs {', '.join(missing)}")
    values = {key: _rope_value(rope, key, MAX_ROPE_FACTOR) for key in ROPE_TYPES[kind]}
    if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise CheckpointError(
            f"high_freq_factor {values['high_freq_factor']:g} must be more than low_freq_factor "
            f"{values['low_freq_factor']:g}"
        )
    if values.get("factor", 1.0) < 1:
        raise CheckpointError(f"factor of rope must be at least 1, got {values['factor']:g}")
    trained = "original_max_position_embeddings"
    known = _size(rope, trained) if rope.get(trained) else _size(hf, "max_position_embeddings")
    theta = _rope_value(rope, "rope_theta", MAX_ROPE_THETA)
    return RopeConfig(kind, theta, **values, original_max_position_embeddings=known)


def _dtype(hf: Config) -> str:
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in CHECKPOINT_DTYPES:
        supported = ", ".join(CHECKPOINT_DTYPES)
        raise UnsupportedModelError(f"dtype {shown(name)} is not supported; supported are {supported}")
    return "float32" if name == "float64" else name  # nothing here computes in float64


def _llama(hf: Config) -> dict[str, Any]:
    bias = _flag(hf, "attention_bias")
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": _flag(hf, "mlp_bias"),
        "qk_norm": False,
        "layer_windows": (None,) * hf["num_hidden_layers"],
    }


def _mistral(hf: Config) -> dict[str, Any]:
    windows = (_window(hf),) * hf["num_hidden_layers"]
    return {**_NO_BIAS, "qk_norm": False, "layer_windows": windows}


def _qwen2(hf: Config) -> dict[str, Any]:
    return {**_NO_BIAS, "qkv_bias": True, "qk_norm": False, "layer_windows": _mixed_windows(hf)}


def _qwen3(hf: Config) -> dict[str, Any]:
    return {**_llama({**hf, "mlp_bias": False}), "qk_norm": True, "layer_windows": _mixed_windows(hf)}


_NO_BIAS = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}


def _window(hf: Config) -> int | None:
    return None if hf["sliding_window"] is None else _size(hf, "sliding_window")


def _mixed_windows(hf: Config) -> tuple[int | None, ...]:
    window = _window(hf) if _flag(hf, "use_sliding_window") else None
    num_layers, layer_types = hf["num_hidden_layers"], hf["layer_types"]
    if layer_types is None:
        first = check_int(CheckpointError, "max_window_layers", hf["max_window_layers"], 0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    kinds = layer_types if isinstance(layer_types, list) else [layer_types]
    if len(kinds) != num_layers or not all(kind in ("full_attention", "sliding_attention") for kind in kinds):
        wanted = f"{num_layers} of full_attention or sliding_attention"
        raise UnsupportedModelError(f"layer_types must be {wanted}, got {shown(layer_types)}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _size(hf: Config, name: str) -> int:
    return check_int(CheckpointError, name, hf[name], 1, CEILINGS[name])


def _flag(hf: Config, name: str) -> bool:
    return check_bool(CheckpointError, name, hf[name])


def _rope_value(rope: Config, name: str, most: float) -> float:
    return check_number(CheckpointError, name, rope[name], 0, most, above=True)


# The defaults of transformers' classes, for keys that config.json leaves out.
_COMMON = {
    "num_key_value_heads": None,  # as many as query heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_LLAMA = {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False}
_MISTRAL = {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096}
_QWEN2 = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_QWEN3 = {**_QWEN2, "head_dim": 128, "attention_bias": False}


class Architecture(NamedTuple):
    """One entry of ARCHITECTURES: a family of models that the one decoder computes."""

    model_type: str
    defaults: Config  # for keys of config.json, beside _COMMON
    declare: Callable[[Config], dict[str, Any]]  # the fields of ModelConfig that the families differ in


# TinyLlama and Llama 1 to 3 are LlamaForCausalLM.
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", _LLAMA, _llama),
    "MistralForCausalLM": Architecture("mistral", _MISTRAL, _mistral),
    "Qwen2ForCausalLM": Architecture("qwen2", _QWEN2, _qwen2),
    "Qwen3ForCausalLM": Architecture("qwen3", _QWEN3, _qwen3),
}
