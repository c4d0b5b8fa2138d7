"""Rotary embeddings that are scaled by YaRN or longrope, as rope_parameters describe them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ...base.errors import CheckpointError
from ...base.validation import check_bool, shown
from .rope_numbers import positive, rope_number


def yarn(rope: Mapping[str, Any], values: dict[str, float]) -> dict[str, Any]:
    """Return the fields of RopeConfig that YaRN adds (Peng et al. 2023, and DeepSeek's mscale)."""
    factor = values["factor"]
    scales = [rope.get(key) for key in ("mscale", "mscale_all_dim")]
    found: dict[str, Any] = {"truncate": check_bool(CheckpointError, "truncate", rope.get("truncate", True))}
    if "attention_factor" not in values:
        found["attention_factor"] = _mscale(factor, 1.0)
        if all(scales):
            above, below = (rope_number(rope, key) for key in ("mscale", "mscale_all_dim"))
            found["attention_factor"] = _mscale(factor, above) / _mscale(factor, below)
    fast = values.get("beta_fast", 32.0)
    slow = values.get("beta_slow", 1.0)
    if fast < slow:
        raise CheckpointError(f"beta_fast {fast:g} must be at least beta_slow {slow:g}")
    return found


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0


def longrope(rope: Mapping[str, Any], trained: int, longest: int, rotary_dim: int) -> dict[str, Any]:
    """Return the fields of RopeConfig that longrope adds (Ding et al. 2024).

    trained, longest: the trained context, and the longest one.
    """
    found: dict[str, Any] = {}
    for key in ("short_factor", "long_factor"):
        values = rope[key]
        if not isinstance(values, list) or len(values) != rotary_dim // 2:
            raise CheckpointError(f"{key} must be a list of {rotary_dim // 2} numbers, got {shown(values)}")
        numbers = [positive(key, n) for n in values]
        found[f"{key}s"] = tuple(numbers)
    if rope.get("attention_factor") is not None:
        return {**found, "attention_factor": rope_number(rope, "attention_factor")}
    factor = longest / trained
    if rope.get("factor") is not None:
        factor = rope_number(rope, "factor")
    if factor > 1:
        if trained < 2:
            raise CheckpointError(f"original_max_position_embeddings must be at least 2, got {trained}")
        found["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(trained))
    return found
