"""The frequencies of scaled rotary embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...architectures.spec import RopeConfig


def scaled(
    frequencies: Tensor, rope: RopeConfig, rotary_dim: int, *, is_long: bool
) -> Tensor:  # f32[rotary_dim // 2], both
    """Return the frequencies of a rope whose type is neither "default" nor "dynamic".

    frequencies: of the default rope; may be overwritten.
    is_long: whether to use longrope's factors for requests beyond the trained context.
    """
    if rope.type == "none":
        return torch.zeros_like(frequencies)
    if rope.type == "proportional":
        frequencies[int(rope.rotated_part * rotary_dim // 2) :] = 0
    if rope.type in ("linear", "proportional"):
        return frequencies / rope.factor
    if rope.type == "longrope":
        factors = rope.long_factors if is_long else rope.short_factors
        return frequencies / torch.tensor(factors, dtype=torch.float32)
    if rope.type == "yarn":
        kept = _yarn_kept(rope, rotary_dim)
        return (1 - kept) * frequencies / rope.factor + kept * frequencies
    assert rope.type == "llama3", f"there is no scaled rope {rope.type}"
    # Llama 3.1: interpolate long wavelengths, keep short ones, blend those between.
    wavelength = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelength
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn_kept(rope: RopeConfig, rotary_dim: int) -> Tensor:
    """Return the share of each frequency that is kept; the rest is interpolated (Peng et al., YaRN, 2023)."""

    def dimension(rotations: float) -> float:
        """Return the dimension whose frequency makes this many rotations within the trained context."""
        wavelength = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low = dimension(rope.beta_fast)
    high = dimension(rope.beta_slow)
    if rope.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    return 1 - ramp.clamp(0.0, 1.0)
