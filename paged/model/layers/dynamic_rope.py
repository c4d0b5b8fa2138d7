"""The frequencies of dynamic RoPE, which depend on the length of each token's sequence."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from ...architectures.spec import RopeConfig
from .frequencies import inverse_frequencies

Length = TypeVar("Length", Tensor, float)


def dynamic_frequencies(
    rope: RopeConfig,
    rotary_dim: int,
    trained: int,
    lengths: Tensor,  # i64[num_tokens], at least the trained length
) -> Tensor:  # f32[num_tokens, rotary_dim // 2]
    """Compute each token's frequencies from the length of its sequence, as transformers does.

    The length is a property of the token's request (see Batch.rope_lens). Therefore chunked prefill,
    preemption and other requests do not change the result.
    """
    if lengths.is_cuda:
        return inverse_frequencies(dynamic_base(rope, rotary_dim, trained, lengths[:, None]), rotary_dim)
    # On a CPU the last bit of torch's powers depends on where a number lies in a tensor.
    rows = (_dynamic_row(rope, rotary_dim, trained, length) for length in lengths.tolist())
    return torch.stack([*rows])


def dynamic_base(rope: RopeConfig, rotary_dim: int, trained: int, length: Length) -> Length:
    """Return the base of dynamic RoPE for sequences of `length` tokens, at least the trained length."""
    stretch = rope.factor * length / trained - (rope.factor - 1)
    base: Length = rope.theta * stretch ** (rotary_dim / (rotary_dim - 2))
    return base


@lru_cache(maxsize=1024)
def _dynamic_row(rope: RopeConfig, rotary_dim: int, trained: int, length: int) -> Tensor:
    base = dynamic_base(rope, rotary_dim, trained, float(length))
    return inverse_frequencies(torch.tensor([base], dtype=torch.float32), rotary_dim)
