"""The frequencies of rotary embeddings that are not scaled."""

import torch
from torch import Tensor


def inverse_frequencies(base: Tensor, rotary_dim: int) -> Tensor:  # [..., 1] -> [..., rotary_dim // 2]
    """Compute base^(-2i / rotary_dim); Su et al., RoFormer (2021)."""
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=base.device) / rotary_dim
    return 1.0 / base.float() ** exponent
