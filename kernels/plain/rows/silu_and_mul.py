"""The gated activation silu(gate) * up."""

import torch.nn.functional as F
from torch import Tensor

from ...checked import checked


@checked
def silu_and_mul(x: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    """Return silu(gate) * up, where x is gate and up side by side; see `reference.silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
