"""Read the rotary embedding out of a config.json, in its old form and in that of transformers 5."""

from __future__ import annotations

import math
from typing import Any

from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import check_bool, check_number, shown
from ..spec import RopeConfig
from .reading import Config, head_dim_of, size, window_of, windows_of

# Beyond these no rotary embedding makes sense, and float32 overflows.
MAX_ROPE_THETA = 1e12
MAX_ROPE_FACTOR = 1e4
MIN_ROPE_NUMBER = 1e-6
# The keys that each type of rope scaling requires.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "proportional": (),
}
NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")


def own_rope(hf: Config) -> dict[str, Any]:
    """Return rope_parameters, or rope_scaling as older checkpoints call it."""
    name = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    own = hf.get(name) or {}
    if not isinstance(own, dict):
        raise CheckpointError(f"{name} must be an object, got {shown(own)}")
    return own


def read_rope(
    hf: Config, own: dict[str, Any] | None = None, *, partial: bool = False, interleaved: bool = False
) -> RopeConfig:
    """Read a rotary embedding. own: its parameters, by default `own_rope`.

    partial: the family may rotate a part of each head.
    """
    own = own_rope(hf) if own is None else own
    if nested := [key for key, value in own.items() if isinstance(value, dict)]:
        raise UnsupportedModelError(f"rope_parameters for each type of layer ({nested[0]}) are not supported")
    outer = {key: hf[key] for key in ("rope_theta", "partial_rotary_factor") if hf.get(key) is not None}
    rope = {"rope_theta": 10000.0, **outer, **{k: v for k, v in own.items() if v is not None}}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "mrope":  # of Qwen-VL: in text its three positions of a token are one
        kind = "default"
    if kind not in list(ROPE_TYPES):  # a list, as any JSON value may come, hashable or not
        raise UnsupportedModelError(
            f"rope_type {shown(kind)} is not supported; supported are {', '.join(ROPE_TYPES)}"
        )
    if missing := [key for key in ROPE_TYPES[kind] if key not in rope]:
        raise CheckpointError(f"rope_type {kind!r} needs {', '.join(missing)}")
    more: dict[str, Any] = {}
    if kind == "proportional":
        part = rope.pop("partial_rotary_factor", 1.0)
        more["rotated_part"] = check_number(CheckpointError, "partial_rotary_factor", part, 0, 1)
    rotary_dim = _rotary_dim(hf, rope, partial)
    optional = {"yarn": NUMBERS, "proportional": ("factor",)}
    needed = [*ROPE_TYPES[kind], *optional.get(kind, ())]
    values = {key: _number(rope, key) for key in NUMBERS if key in needed and key in rope}
    if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise CheckpointError(
            f"high_freq_factor {values['high_freq_factor']:g} must be more than low_freq_factor "
            f"{values['low_freq_factor']:g}"
        )
    if values.get("factor", 1.0) < 1:
        raise CheckpointError(f"factor of rope must be at least 1, got {values['factor']:g}")
    trained = "original_max_position_embeddings"
    most = size(hf, "max_position_embeddings")
    known = size(rope, trained) if rope.get(trained) else most
    if kind == "yarn":
        more = _yarn(rope, values)
    elif kind == "longrope":
        known = size(hf, trained) if hf.get(trained) else known
        more = _longrope(hf, rope, known, rotary_dim or head_dim_of(hf))
    theta = _number(rope, "rope_theta", MAX_ROPE_THETA)
    if kind == "yarn" and theta <= 1:
        raise CheckpointError(f"rope_theta must be above 1 for yarn rope, got {theta:g}")
    shape = {"rotary_dim": rotary_dim, "interleaved": interleaved, trained: known}
    return RopeConfig(kind, theta, **{**values, **more, **shape})


def ropes_by_type(hf: Config, rope_theta: float, local_theta: float) -> dict[str, RopeConfig]:
    """Read the rotary embeddings of layers with full attention and of those with a window.

    transformers 5 writes both into rope_parameters. Older checkpoints describe the rope of full attention
    only; sliding layers then use an unscaled one. rope_theta, local_theta: where config.json has none.
    """
    given = hf.get("rope_parameters") or {}
    own = {"full_attention": hf.get("rope_scaling") or {}, "sliding_attention": {}}
    for name, value in {"rope_parameters": given, "rope_scaling": own["full_attention"]}.items():
        if not isinstance(value, dict):
            raise CheckpointError(f"{name} must be an object, got {shown(value)}")
    bases = {"full_attention": hf.get("rope_theta") or rope_theta, "sliding_attention": local_theta}
    if unknown := [key for key in given if key not in own]:
        raise UnsupportedModelError(
            f"rope_parameters must be of full_attention and sliding_attention, got {shown(unknown[0])}"
        )
    for kind, values in given.items():
        if not isinstance(values, dict | None):
            raise CheckpointError(f"rope_parameters of {kind} must be an object, got {shown(values)}")
    ropes = {
        kind: read_rope({**hf, "rope_theta": bases[kind]}, {**(given.get(kind) or {}), **scaling})
        for kind, scaling in own.items()
    }
    trained = {rope.original_max_position_embeddings for rope in ropes.values() if rope.type == "longrope"}
    if len(trained) > 1:
        raise UnsupportedModelError(
            f"longrope with two values of original_max_position_embeddings ({min(trained)} and "
            f"{max(trained)}) is not supported"
        )
    if "dynamic" in [rope.type for rope in ropes.values()]:
        raise UnsupportedModelError("rope type 'dynamic' is not supported for one type of layer alone")
    return ropes


def by_layer_type(hf: Config, layer_types: tuple[str, ...], ropes: dict[str, RopeConfig]) -> dict[str, Any]:
    """Return the arguments of `repeat`: `rope`, of full attention, and each layer's `ropes` and `windows`."""
    return {
        "rope": ropes["full_attention"],
        "ropes": tuple(ropes[kind] for kind in layer_types),
        "windows": windows_of(layer_types, window_of(hf)),
    }


def _rotary_dim(hf: Config, rope: Config, partial: bool) -> int | None:
    """Return how many dimensions of a head are rotated; None: all."""
    fraction = rope.get("partial_rotary_factor", 1.0)
    if fraction == 1.0:
        return None
    if not partial:
        raise UnsupportedModelError("partial_rotary_factor other than 1.0 is not supported")
    check_number(CheckpointError, "partial_rotary_factor", fraction, 0, 1, above=True)
    head_dim = head_dim_of(hf)
    rotary_dim = int(head_dim * fraction)
    if rotary_dim < 4 or rotary_dim % 2:
        raise CheckpointError(
            f"partial_rotary_factor {fraction} rotates {rotary_dim} of {head_dim} dimensions of a head; "
            f"it must be an even number of at least 4"
        )
    return rotary_dim


def _yarn(rope: Config, values: dict[str, float]) -> dict[str, Any]:
    """Return yarn's further fields (Peng et al. 2023, and DeepSeek's mscale)."""
    factor = values["factor"]
    scales = [rope.get(key) for key in ("mscale", "mscale_all_dim")]
    found: dict[str, Any] = {"truncate": check_bool(CheckpointError, "truncate", rope.get("truncate", True))}
    if "attention_factor" not in values:
        found["attention_factor"] = _mscale(factor, 1.0)
        if all(scales):
            above, below = (_number(rope, key) for key in ("mscale", "mscale_all_dim"))
            found["attention_factor"] = _mscale(factor, above) / _mscale(factor, below)
    fast = values.get("beta_fast", 32.0)
    slow = values.get("beta_slow", 1.0)
    if fast < slow:
        raise CheckpointError(f"beta_fast {fast:g} must be at least beta_slow {slow:g}")
    return found


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def _longrope(hf: Config, rope: Config, trained: int, rotary_dim: int) -> dict[str, Any]:
    """Return longrope's further fields (Ding et al. 2024)."""
    found: dict[str, Any] = {}
    for key in ("short_factor", "long_factor"):
        values = rope[key]
        if not isinstance(values, list) or len(values) != rotary_dim // 2:
            raise CheckpointError(f"{key} must be a list of {rotary_dim // 2} numbers, got {shown(values)}")
        numbers = [_positive(key, n) for n in values]
        found[f"{key}s"] = tuple(numbers)
    if rope.get("attention_factor") is not None:
        return {**found, "attention_factor": _number(rope, "attention_factor")}
    factor = size(hf, "max_position_embeddings") / trained
    if rope.get("factor") is not None:
        factor = _number(rope, "factor")
    if factor > 1:
        if trained < 2:
            raise CheckpointError(f"original_max_position_embeddings must be at least 2, got {trained}")
        found["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(trained))
    return found


def _number(rope: Config, name: str, most: float = MAX_ROPE_FACTOR) -> float:
    return _positive(name, rope[name], most)


def _positive(name: str, value: Any, most: float = MAX_ROPE_FACTOR) -> float:
    """Return a number whose powers and reciprocals float32 represents."""
    check_number(CheckpointError, name, value, 0, most, above=True)
    return check_number(CheckpointError, name, value, MIN_ROPE_NUMBER)
